"""FedOAG-zero with the same constants everywhere, beside methods tuned once: the tables of its page.

    python recipes/zero.py tune|regimes|worlds [--device cuda] [--workers 8] [--quick]

FedOAG-zero has ν = 2.5, η_0 = 0.5, clip = 4 and warmup = 10 throughout: chosen in worlds that are in no table here, on
seeds 100 to 102. `tune` chooses the constants of the others in the stationary world, on the validation set and the
same seeds, after all 800 rounds: first η_0 and clip together, then η_0 and the method's own knob. They are then kept in
every world; on Fashion-MNIST all have the warm-up, without which those with η_0 of 0.5 and more fail there. `regimes`
and `worlds` report the test set, the last 50 of 800 rounds and seeds 200 to 209, which nothing was chosen on. `worlds`
also has FedOAG-zero with other ν. What was measured is kept in results/zero, and not measured again.
"""

import argparse
import csv
import json
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import otafl
from otafl.registry import load_plugin
from otafl.report.statistics import estimate, last_accuracy, paired_difference
from otafl.world.data import MNIST
from otafl.world.partition import Partition

OUT = Path("results") / "zero"
GBMA = Path(__file__).parents[1] / "examples" / "gbma.py"
SEEDS = list(range(200, 210))
TUNING_SEEDS = [100, 101, 102]
QUICK: dict[str, Any] = {"experiment.rounds": 20, "experiment.eval_every": 5, "model.hidden": [32]}
Keys = Mapping[str, Any]

ZERO: dict[str, Any] = {
    "algorithm.name": "fedoag-zero",
    "algorithm.nu": 2.5,
    "training.lr": 0.5,
    "training.clip": 4.0,
    "training.warmup": 10,
}
ERROR_FREE = {"algorithm.name": "fedavg", "training.lr": 0.5, "training.clip": 4.0, "training.warmup": 10}
SHIPPED = {"algorithm.name": "fedoag-plus", "algorithm.gamma": 2e-10, "training.lr": 0.1}
ADAPTIVE = {**SHIPPED, "algorithm.gamma": "adaptive"}
RATES = (0.1, 0.2, 0.5, 1.0)
CLIPS = (2.0, 4.0, 8.0, float("inf"))
CLIPPED = {
    "algorithm.norms": "clip",
    "algorithm.norm_limit": 5.0,
}  # better than the handshake for these: docs/results.md
RIVALS: dict[str, tuple[dict[str, Any], str, tuple[float, ...]]] = {
    "gbma": ({}, "algorithm.norm_limit", (4.0, 2.0, 8.0, 16.0)),
    "sca": (CLIPPED, "algorithm.omega", (0.1, 0.01, 0.03, 0.3)),
    "opc": ({**CLIPPED, "algorithm.renormalise": True}, "algorithm.norm_limit", (5.0, 2.0, 10.0, 20.0)),
    "fedoag-plus": ({}, "algorithm.gamma", (2e-10, 0.5e-10, 1e-10, 4e-10)),
}
"""The form of each, and its knob: first the value that it has until the knob is chosen."""
LEVELS = (1.25, 1.8, 2.5, 3.5, 5.0)
REGIMES = ("stationary", "nonstationary", "mixed")
FAR = tuple((1500 * ((i + 0.5) / 30) ** 0.5, 0.0) for i in range(30))
"""One device in the middle of each ring; the last five are more than 1,360 m away."""
WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "500 m": ("stationary", {"cell.radius_m": 500.0}),
    "3,000 m": ("stationary", {"cell.radius_m": 3000.0}),
    "−10 dBm": ("stationary", {"radio.tx_power_dbm": -10.0}),
    "+10 dBm": ("stationary", {"radio.tx_power_dbm": 10.0}),
    "100 devices": ("stationary", {"cell.devices": 100}),
    "Rician": ("rician", {}),
    "Nakagami": ("nakagami", {}),
    "correlated": ("correlated", {}),
    "shadowing 8 dB": ("shadowed", {}),
    "urban": ("urban", {}),
    "Dirichlet 0.05": ("stationary", {"data.dirichlet_alpha": 0.05}),
    "a class far away": (
        "stationary",
        {"data.name": "far-class", "cell.placement": "given", "cell.positions_m": FAR},
    ),
    "Fashion-MNIST": (
        "stationary",
        {"data.name": "fashion-mnist", "model.hidden": [256, 128], "training.warmup": 10},
    ),
}


@otafl.register_dataset("far-class")
@dataclass(frozen=True)
class FarClass:
    """MNIST; all images of one class are on the last five devices, which have no other, the rest as usual."""

    label: int = 8
    owning: int = 5

    def load(self, num_devices: int) -> otafl.Dataset:
        """The same for every seed."""
        images, streams = MNIST().load(num_devices), otafl.Streams(0)
        far, near = (np.flatnonzero((images.train.targets == self.label) == held) for held in (True, False))
        owners = np.zeros(len(images.train), dtype=np.int64)
        parts = Partition().split(images.train.targets[near], num_devices - self.owning, 64, streams)
        for device, part in enumerate([near[part] for part in parts] + np.array_split(far, self.owning)):
            owners[part] = device
        return replace(images, owners=owners)


def measured(preset: str, keys: Keys, device: str, out: Path) -> None:
    """Make a run, or find it."""
    load_plugin(str(GBMA))
    otafl.run(otafl.load_config(preset, keys), out=out, device=device)
    torch.cuda.empty_cache()  # for the other processes


class Bench:
    """Makes runs in several processes."""

    def __init__(self, device: str, workers: int, quick: bool) -> None:
        load_plugin(str(GBMA))
        self.device, self.quick = device, quick
        self.folder = OUT / ("quick" if quick else "full")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def results(self, jobs: Mapping[str, tuple[str, Keys]], extra: Keys) -> dict[str, otafl.Result]:
        """The runs of (preset, keys), by label."""
        extra = {"training.precision": "tf32", **extra, **(QUICK if self.quick else {})}
        full = {label: (preset, {**keys, **extra}) for label, (preset, keys) in jobs.items()}
        configs = {label: otafl.load_config(preset, keys) for label, (preset, keys) in full.items()}
        places = {label: self.folder / f"{c.algorithm.name}-{c.digest[:12]}" for label, c in configs.items()}
        waiting = {places[label]: job for label, job in full.items()}
        list(self.pool.map(measured, *zip(*[(p, k, self.device, out) for out, (p, k) in waiting.items()], strict=True)))
        return {label: otafl.read_run(places[label]) for label in jobs}


def validation(result: otafl.Result) -> float:
    """Validation accuracy in percent over the last 50 rounds, mean of seeds; a seed that failed counts with 0."""
    last = result.rounds > result.config.experiment.rounds - 50
    values = np.nan_to_num(result.metrics["validation_accuracy"][:, last])
    alive = [seed not in result.diverged for seed in result.config.experiment.seeds]
    return float(100 * (values.mean(1) * alive).mean()) if any(alive) else 0.0


def tune(bench: Bench) -> dict[str, dict[str, Any]]:
    """The rivals' constants, in the stationary world; kept in chosen.json."""
    store = bench.folder / "chosen.json"
    if store.exists():
        found: dict[str, dict[str, Any]] = json.loads(store.read_text())
        return found
    extra = {"experiment.seeds": TUNING_SEEDS, "experiment.record": ["server", "validation"]}
    chosen = {}
    for method, (form, knob, knob_values) in RIVALS.items():
        keys: dict[str, Any] = {"algorithm.name": method, **form, knob: knob_values[0]}
        for name, grid in (("training.clip", CLIPS), (knob, knob_values)):
            places = [{"training.lr": lr, name: value} for lr, value in product(RATES, grid)]
            points = {repr(place): {**keys, **place} for place in places}
            made = bench.results({label: ("stationary", point) for label, point in points.items()}, extra)
            scores = {label: validation(result) for label, result in made.items()}
            best = max(scores, key=lambda label: scores[label])
            keys = points[best]
            with (bench.folder / "tuning.csv").open("a", newline="") as file:
                csv.writer(file).writerows((method, label, f"{value:.3f}") for label, value in scores.items())
        chosen[method] = keys
        print(f"{method}: {keys}  validation {scores[best]:.2f} %", flush=True)
    store.write_text(json.dumps(chosen, indent=1))
    return chosen


def row(world: str, results: Mapping[str, otafl.Result], base: str) -> str:
    """A world's row of Markdown: levels, and what the base has more or less than each, paired."""
    cells = []
    for label, result in results.items():
        level = f"{estimate(last_accuracy(result))}"
        if label != base:
            gap = paired_difference(results[base], result)
            level += f" ({gap.mean:+.2f} ± {gap.half_width:.2f})"
        lost = f" [{len(result.diverged)} failed]" if result.diverged else ""
        cells.append(level + lost)
    return f"| {world} | {' | '.join(cells)} |"


def show(rows: Mapping[str, Mapping[str, otafl.Result]], base: str) -> None:
    """A table, a world a row."""
    labels = list(next(iter(rows.values())))
    print(f"| world | {' | '.join(labels)} |\n|{'---|' * (len(labels) + 1)}")
    for world, results in rows.items():
        print(row(world, results, base), flush=True)


def main() -> None:
    """Tune or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "regimes", "worlds"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a rehearsal: small model, 20 rounds")
    options = parser.parse_args()
    bench = Bench(options.device, options.workers, options.quick)
    seeds = {"experiment.seeds": SEEDS[:2] if options.quick else SEEDS}
    if options.what == "tune":
        tune(bench)
        return
    own = {"FedOAG-zero": ZERO, "error-free FedAvg": ERROR_FREE}
    if options.what == "regimes":
        rows = own | {"FedOAG-plus, as shipped": SHIPPED, "FedOAG-plus, γ adaptive": ADAPTIVE}
        worlds: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in REGIMES}
    else:
        rows = (
            own
            | tune(bench)
            | {f"ν = {nu}": {**ZERO, "algorithm.nu": nu} for nu in LEVELS if nu != ZERO["algorithm.nu"]}
        )
        worlds = WORLDS
    jobs = {f"{w}|{label}": (p, {**k, **row}) for w, (p, k) in worlds.items() for label, row in rows.items()}
    found = bench.results(jobs, seeds)
    show({w: {label: found[f"{w}|{label}"] for label in rows} for w in worlds}, "FedOAG-zero")


if __name__ == "__main__":
    main()
