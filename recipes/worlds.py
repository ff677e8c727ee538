"""FedOAG and the methods it is compared with in six wireless worlds: the table of docs/worlds.md.

    python recipes/worlds.py [--device cuda] [--world NAME ...] [--quick]

In each world every method has its learning rate and one parameter of its own chosen by one rule: accuracy on the
validation set after 100 rounds, mean of seeds 100–102 (TF32), over five learning rates around the one that was best in
the paper's cell and five values of the parameter. Then seeds 0–4, 800 rounds, test set, last 50 rounds (TF32 too).
γ is relative to the cell: grid values are for the paper's path loss and are scaled by the root of the median gain.
Ten minutes on a data-centre GPU; what was measured is kept in results/worlds and not measured again.
"""

import argparse
import csv
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

import otafl
from otafl.report.statistics import estimate, last_accuracy, paired_difference
from otafl.world.channel import trajectory

OUT = Path("results") / "worlds"
WORLDS = ("stationary", "rician", "nakagami", "shadowed", "correlated", "urban")
GAMMA = ("gamma", (1e-10, 2e-10, 3e-10, 5e-10, 1e-9))
RADIUS = ("interior_radius_m", (600.0, 900.0, 1200.0, 1350.0, 1500.0))
METHODS: dict[str, tuple[float, tuple[str, tuple[Any, ...]]]] = {
    "fedoag": (0.1, GAMMA),
    "fedoag-plus": (0.1, GAMMA),
    "sca": (0.1, ("omega", (0.003, 0.01, 0.03, 0.1, 0.3))),
    "vanilla": (0.003, ("rule", ("weakest", "tight"))),
    "bb-interior": (0.03, RADIUS),
    "bb-alternative": (0.03, RADIUS),
}
RATES = (9.0, 3.0, 1.0, 1 / 3, 1 / 9)


def gain_factor(world: str) -> float:
    """Root of the world's median mean gain over the paper's."""
    medians = []
    for name in (world, "stationary"):
        c = otafl.load_config(name)
        parts = (c.cell, c.mobility.spec, c.pathloss.spec, c.fading.spec, 50)
        medians.append(np.median([trajectory(*parts, seed).mean_gain for seed in (100, 101, 102)]))
    return math.sqrt(medians[0] / medians[1])


def config_of(world: str, method: str, lr: float, key: str, value: Any, extra: dict[str, Any]) -> otafl.Config:
    """A point of a method's grid."""
    chosen = {"algorithm.name": method, "training.lr": float(f"{lr:.1g}"), f"algorithm.{key}": value}
    return otafl.load_config(world, {**chosen, "training.precision": "tf32", **extra})


def tuned(world: str, method: str, device: str, store: Path, quick: dict[str, Any]) -> tuple[float, Any]:
    """Learning rate and parameter with the best validation accuracy."""
    centre, (key, values) = METHODS[method]
    if key == "gamma":
        factor = gain_factor(world)
        values = tuple(float(f"{value * factor:.3g}") for value in values)
    known: dict[str, float] = {}
    if store.exists():
        with store.open(newline="") as file:
            known = {row["digest"]: float(row["validation_accuracy"]) for row in csv.DictReader(file)}
    scores: dict[tuple[float, Any], float] = {}
    extra = {"experiment.rounds": 100, "experiment.eval_every": 100, "experiment.seeds": [100, 101, 102]}
    for value, rate in itertools.product(values, RATES):
        config = config_of(
            world, method, centre * rate, key, value, {**extra, "experiment.record": ["server", "validation"], **quick}
        )
        if config.digest not in known:
            accuracy = float(np.mean(otafl.run(config, device=device).metrics["validation_accuracy"][:, -1]))
            known[config.digest] = 0.0 if math.isnan(accuracy) else 100 * accuracy
            store.parent.mkdir(parents=True, exist_ok=True)
            head = [] if store.exists() else [("world", "method", "lr", "value", "digest", "validation_accuracy")]
            with store.open("a", newline="") as file:
                row = (world, method, config.training.lr, value, config.digest, known[config.digest])
                csv.writer(file).writerows([*head, row])
        scores[config.training.lr, value] = known[config.digest]
    best = max(scores, key=lambda point: scores[point])
    edge = best[0] in (max(p[0] for p in scores), min(p[0] for p in scores))
    print(f"{world:<11} {method:<15} lr {best[0]:<6g} {key} {best[1]}  validation {scores[best]:.2f} %"
          f"{'  (learning rate at an edge)' if edge else ''}", flush=True)  # fmt: skip
    return best


def main() -> None:
    """Tune, run, and print a table as Markdown after each world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--world", nargs="*", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--quick", action="store_true", help="a rehearsal: small model, 20 rounds")
    options = parser.parse_args()
    quick: dict[str, Any] = {"model.hidden": [32], "experiment.rounds": 20} if options.quick else {}
    folder = OUT / ("quick" if options.quick else "full")
    for world in options.world:
        results = {}
        for method, (_, (key, _)) in METHODS.items():
            lr, value = tuned(world, method, options.device, folder / "tuning.csv", quick)
            config = config_of(world, method, lr, key, value, quick)
            out = folder / f"{world}-{method}-{config.digest[:8]}"
            results[method] = (lr, value, otafl.run(config, out=out, device=options.device))
        base = results["fedoag"][2]
        print(
            f"\n| {world} | η_0 | own | test accuracy (%) | minus FedOAG, paired | active |\n|---|---|---|---|---|---|"
        )
        for method, (lr, value, result) in results.items():
            gap = paired_difference(result, base)
            accuracy = (
                f"{len(result.diverged)} of 5 seeds diverged" if result.diverged else estimate(last_accuracy(result))
            )
            row = (method, f"{lr:g}", value, accuracy, f"{gap.mean:+.2f} ± {gap.half_width:.2f}")
            print("|", " | ".join(map(str, (*row, f"{result.summary['num_active']:.1f}"))), "|", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
