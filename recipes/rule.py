"""The rule by which every method of a table is tuned, and the seeds it is then reported with.

Tuned: the highest accuracy on the validation set after 100 rounds, mean of seeds 100–102, where a seed that failed
counts with 0, over every learning rate and every value of a knob of the method's own. A method with two knobs has them
chosen in turn: the second with the first's choice, both over all learning rates. A recipe may have other rounds
(`tuning`); then the rows of the last 50 count.
Reported: the ten seeds 0–9 for every row, the test set, the last 50 of 800 rounds.

What was measured is kept in a folder and not measured again. Several processes share a GPU.
"""

import csv
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import otafl
from otafl.papers.fedoag.experiments import SEEDS
from otafl.registry import load_plugin
from otafl.report.markdown import markdown
from otafl.report.statistics import compared, estimate, last_accuracy

TUNING: dict[str, Any] = {
    "experiment.rounds": 100,
    "experiment.eval_every": 100,
    "experiment.seeds": [100, 101, 102],
    "experiment.record": ["server", "validation"],
}
PRECISION = "training.precision"
QUICK: dict[str, Any] = {"experiment.rounds": 20, "experiment.eval_every": 5, "model.hidden": [32]}
Keys = Mapping[str, Any]
Knob = tuple[str, tuple[Any, ...]]
"""A key of the method, and its values."""


class Choice(NamedTuple):
    """What was chosen for a row."""

    keys: dict[str, Any]
    score: float
    """Validation accuracy in percent."""
    edges: tuple[str, ...]
    """Keys whose best value is the first or last of its grid."""


def made(preset: str, keys: Keys, device: str, plugins: Iterable[str], out: Path | None = None) -> otafl.Result:
    """Make a run, or find it."""
    for plugin in plugins:
        load_plugin(plugin)
    result = otafl.run(otafl.load_config(preset, keys), out=out, device=device)
    torch.cuda.empty_cache()  # for the other processes
    return result


def score(preset: str, keys: Keys, device: str, plugins: Iterable[str]) -> float:
    """Validation accuracy in percent of the last 50 rounds, mean over seeds; a seed that failed counts with 0."""
    result = made(preset, keys, device, plugins)
    last = result.rounds > max(0, result.config.experiment.rounds - 50)
    alive = np.array([seed not in result.diverged for seed in result.config.experiment.seeds])
    return float(100 * np.where(alive, result.metrics["validation_accuracy"][:, last].mean(1), 0.0).mean())


def report(preset: str, keys: Keys, device: str, plugins: Iterable[str], out: Path) -> None:
    """Make a reported run, or find it."""
    made(preset, keys, device, plugins, out)


@dataclass
class Bench:
    """Where runs are made and what is known of them."""

    folder: Path
    device: str
    workers: int
    quick: bool
    tuning: Keys = field(default_factory=lambda: TUNING)
    """Seeds and rounds of tuning."""
    seeds: Sequence[int] = tuple(SEEDS)
    """Of reported runs."""
    plugins: tuple[str, ...] = ()
    """Files with methods and data sets of the recipe's own."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of each configuration, by its digest."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for plugin in self.plugins:
            load_plugin(plugin)
        if (store := self.folder / "tuning.csv").exists():
            with store.open(newline="") as file:
                self.scores = {row["digest"]: float(row["validation_accuracy"]) for row in csv.DictReader(file)}
        self.pool = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"))

    def choose(self, preset: str, keys: Keys, rates: Iterable[float], knobs: Iterable[Knob] = ()) -> Choice:
        """Tune a row by the rule; `keys` has the values that knobs have before they are chosen."""
        rates, chosen, best, edges = list(rates), dict(keys), 0.0, {}
        for name, values in list(knobs) or [("", (None,))]:
            places = [{"training.lr": lr} | ({name: value} if name else {}) for value in values for lr in rates]
            found = self.measure(preset, [{**chosen, **place} for place in places])
            place, best = max(zip(places, found, strict=True), key=lambda pair: pair[1])
            chosen |= place
            for key, grid in (("training.lr", rates), (name, list(values))):
                edges[key] = len(grid) > 2 and isinstance(grid[0], float) and chosen.get(key) in (min(grid), max(grid))
        choice = Choice(chosen, best, tuple(key for key, at_edge in edges.items() if at_edge))
        note = f"  (at the edge of its grid: {', '.join(choice.edges)})" if choice.edges else ""
        print(f"{preset}: {choice.keys}  validation {best:.2f} %{note}", flush=True)
        return choice

    def measure(self, preset: str, points: list[dict[str, Any]]) -> list[float]:
        """Validation accuracy of some points, measured where it is not known yet."""
        extra = {**self.tuning, **(QUICK | {"experiment.eval_every": 20} if self.quick else {})}
        points = [{**point, **extra} for point in points]
        digests = [otafl.load_config(preset, point).digest for point in points]
        missing = {d: point for d, point in zip(digests, points, strict=True) if d not in self.scores}
        count = len(missing)
        found = self.pool.map(score, [preset] * count, missing.values(), [self.device] * count, [self.plugins] * count)
        store = self.folder / "tuning.csv"
        head = [] if store.exists() else [("preset", "keys", "digest", "validation_accuracy")]
        with store.open("a", newline="") as file:
            table = csv.writer(file)
            table.writerows(head)
            for (digest, point), value in zip(missing.items(), found, strict=True):
                self.scores[digest] = value
                table.writerow((preset, {key: point[key] for key in point if key not in self.tuning}, digest, value))
                file.flush()
        return [self.scores[digest] for digest in digests]

    def report(self, preset: str, rows: Mapping[str, Keys]) -> dict[str, otafl.Result]:
        """The reported runs of some rows."""
        seeds = list(self.seeds)
        extra = {**QUICK, "experiment.seeds": seeds[:3]} if self.quick else {"experiment.seeds": seeds}
        configs = {label: otafl.load_config(preset, {**keys, **extra}) for label, keys in rows.items()}
        places = {name: self.folder / f"{preset}-{c.algorithm.name}-{c.digest[:8]}" for name, c in configs.items()}
        jobs = {places[label]: {**keys, **extra} for label, keys in rows.items()}  # equal rows are one run
        count = len(jobs)
        each = [preset] * count, jobs.values(), [self.device] * count, [self.plugins] * count, jobs
        list(self.pool.map(report, *each))
        return {label: otafl.run(config, out=places[label], device=self.device) for label, config in configs.items()}


def table(results: Mapping[str, otafl.Result], choices: Mapping[str, Choice], base: str) -> str:
    """Markdown: levels, paired differences to a base, and what the seeds can tell of all of them together."""
    values = {label: last_accuracy(result) for label, result in results.items()}
    found = compared(values, base)
    seeds = len(values[base])
    header = ["method", "chosen", f"test accuracy (%), mean ± std of {seeds} seeds", "95 % interval"]
    header += [f"minus {base}, paired", "p, Holm", "active"]
    lines = []
    for label, result in results.items():
        level = estimate(values[label])
        lost = f" ({len(result.diverged)} of {seeds} seeds failed)" if result.diverged else ""
        pair, p = "–", "–"
        if label in found:
            gap = found[label].gap
            pair = f"{gap.mean:+.2f} ± {gap.half_width:.2f}"
            p = "< 0.001" if found[label].p < 0.001 else f"{found[label].p:.2g}"
        chosen = {key: what for key, what in choices[label].keys.items() if key not in ("algorithm.name", PRECISION)}
        own = ", ".join(f"{key.split('.')[1]} = {what:g}" if isinstance(what, float) else f"{what}"
                        for key, what in chosen.items())  # fmt: skip
        active = f"{result.summary['num_active']:.1f}"
        interval = f"{level.low:.1f} … {level.high:.1f}"
        lines.append((label, own, f"{level}{lost}", interval, pair, p, active))
    return markdown(header, lines)
