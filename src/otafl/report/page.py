"""Makes one HTML file about some runs; it needs no network.

Knows: results, worlds, a page with its script.
Does not know: how results came about.
"""

import contextlib
import csv
import html
import io
import json
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from otafl.disk import content_of
from otafl.errors import ConfigError, RunDirectoryError
from otafl.report.compare import compare
from otafl.report.figures import SPARE_STYLES, STYLES
from otafl.report.runs import Named, differences
from otafl.report.statistics import estimate, final_accuracy, last_accuracy
from otafl.runs.result import Result
from otafl.simulation.build import Simulation
from otafl.world.channel import trajectory

MOST_FRAMES = 200  # of the map
MOST_POINTS = 400  # of a curve
CURVES = (
    ("test_accuracy", "test accuracy (%)", 100.0),
    ("test_loss", "test loss", 1.0),
    ("num_active", "active devices", 1.0),
    ("norm_bound", "norm bound B_t", 1.0),
    ("staleness_mean", "mean staleness (rounds)", 1.0),
    ("snr_db", "receive SNR (dB)", 1.0),
    ("energy_ratio_max", "largest energy over the limit", 1.0),
)


def report(named: Sequence[Named]) -> str:
    """The page about some runs, as text."""
    results = {run.label: run.result for run in named}
    paths = {run.label: str(run.path) for run in named}
    runs = []
    spare = iter(SPARE_STYLES)
    drawn: set[str] = set()
    own, shared = differences([result.config for result in results.values()])
    for (name, result), keys in zip(results.items(), own, strict=True):
        method = result.config.algorithm.name
        style = STYLES.get(method) if method not in drawn else None
        drawn.add(method)
        colour, line = style or next(spare, ("#999999", ":"))
        runs.append(
            {
                "name": name,
                "path": paths[name],
                "colour": colour,
                "dash": {"-": "", "--": "7 4", "-.": "7 3 2 3", ":": "2 3"}[line],
                "keys": {key: _word(value) for key, value in keys.items()},
                "curves": _curves(result),
                "devices": _devices(result, paths[name]),
                "map": _map(result),
                "command": f"otafl run {shlex.quote(paths[name])}/config.toml --out DIR",
                "summary": _summary(result),
            }
        )
    measured = {name: result for name, result in results.items() if "test_accuracy" in result.metrics}
    data = {
        "runs": runs,
        "labels": {name: label for name, label, _ in CURVES},
        "shared": {key: _word(value) for key, value in shared.items()},
        "sentences": list(compare(measured).verdicts) if next(iter(results)) in measured else [],
    }
    page = resources.files("otafl.report").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    title = html.escape(", ".join(results))
    return page.replace("{{title}}", title).replace("{{data}}", text)


def _curves(result: Result) -> dict[str, Any]:
    """Mean and standard deviation over seeds of every column that is shown."""
    keep = np.unique(np.linspace(0, len(result.rounds) - 1, MOST_POINTS).astype(int))
    curves: dict[str, Any] = {"rounds": result.rounds[keep].tolist()}
    for name, _, factor in CURVES:
        if name not in result.metrics or np.isnan(result.metrics[name]).all():
            continue
        values = factor * result.metrics[name][:, keep]
        if name == "test_accuracy":
            values = np.nan_to_num(values)  # a seed that failed counts with 0
        blank = np.asarray(np.isnan(values).all(0))
        safe = np.where(blank, 0.0, values)
        mean = np.nanmean(safe, axis=0)
        count = (~np.isnan(safe)).sum(0)
        std = np.sqrt(np.nansum((safe - mean) ** 2, axis=0) / np.maximum(count - 1, 1))
        curves[name] = {"mean": _numbers(mean, blank), "std": _numbers(std, blank)}
    return curves


def _map(result: Result) -> dict[str, Any]:
    """Positions, who is active and uplink probabilities of the first seed, recomputed from the configuration."""
    import torch

    config = result.config.replace({"experiment.seeds": [result.config.experiment.seeds[0]]})
    parts = (config.cell, config.mobility.spec, config.pathloss.spec, config.fading.spec, config.experiment.rounds)
    world = trajectory(*parts, config.experiment.seeds[0], config.radio.antennas)
    frames = np.unique(np.linspace(0, len(world.positions_m) - 1, MOST_FRAMES).astype(int))
    found: dict[str, Any] = {
        "seed": config.experiment.seeds[0],
        "radius": config.cell.radius_m,
        "frames": frames.tolist(),
        "positions": np.round(world.positions_m[frames], 1).tolist(),
    }
    with contextlib.suppress(ConfigError):  # data given in Python, or a world of which there is no formula
        sim = Simulation(config, torch.device("cpu"))
        if sim._active is not None:
            active = torch.stack([sim._active.at(int(t)).mask[0] for t in frames]).int()
            found["active"] = active.tolist()
        probability = sim.uplink_probability()
        if probability is not None:
            found["probability"] = np.round(probability[frames], 4).tolist()
    return found


def _devices(result: Result, path: str) -> list[dict[str, float]]:
    """Data share, uploads and energy of every seed and device."""
    if not (Path(path) / "devices.csv").exists():  # a result that was never written
        return []
    try:
        text = content_of(Path(path) / "devices.csv").decode()
        table = list(csv.DictReader(io.StringIO(text, newline="")))
    except (OSError, ValueError, csv.Error) as error:
        raise RunDirectoryError(f"{path}: devices.csv cannot be read ({error})") from error
    totals: dict[str, float] = {}
    for row in table:
        totals[row["seed"]] = totals.get(row["seed"], 0.0) + float(row["images"])
    rounds = result.config.experiment.rounds
    return [
        {
            "seed": int(row["seed"]),
            "device": int(row["device"]),
            "share": round(float(row["images"]) / totals[row["seed"]], 5),
            "participation": round(float(row["uploads"]) / rounds, 5),
            "energy": float(row["energy_j"]),
            "silent": rounds - 1 - int(float(row["last_active"] or -1)),
        }
        for row in table
    ]


def _summary(result: Result) -> dict[str, Any]:
    summary = result.summary
    shown: dict[str, Any] = {"status": summary["status"], "time": f"{summary['wall_s']:.1f} s on {summary['device']}"}
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    shown["environment"] = f"{versions}; commit {summary['commit']}" if summary.get("commit") else versions
    if "test_accuracy" in result.metrics:
        value = estimate(last_accuracy(result))
        shown["accuracy"] = f"{value} %"
        if value.num_seeds > 1:
            shown["interval"] = f"{value.low:.2f} … {value.high:.2f} %"
        shown["final"] = f"{estimate(final_accuracy(result))} %"
        shown["averaged"] = summary["averaged_over"]
    shown["seeds"] = ", ".join(map(str, result.config.experiment.seeds))
    shown["active"] = f"{summary['num_active']:.2f}" if "num_active" in summary else "–"
    failed = ", ".join(f"seed {seed} after round {r}" for seed, r in result.diverged.items())
    shown["diverged"] = f"{failed} (counted with 0 %)" if failed else ""
    shown["notes"] = "; ".join(result.notes)
    return shown


def _numbers(values: np.ndarray, blank: np.ndarray) -> list[float | None]:
    return [None if b or not np.isfinite(v) else float(f"{v:.6g}") for v, b in zip(values, blank, strict=True)]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
