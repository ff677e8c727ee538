"""FedOAG and the methods it is compared with in six wireless worlds: the table of docs/worlds.md.

    python recipes/worlds.py [--device cuda] [--workers 6] [--world NAME ...] [--only METHOD ...] [--quick]

In each world every method is tuned by the rule of recipes/rule.py, over five learning rates around the one that was
best in the paper's cell and five values of each knob (seven where the best lay at an end of a grid). γ is relative to
the cell: grid values are for the paper's path loss and are scaled by the root of the median gain. BB's truncation has
the same thresholds. What was measured is kept in results/worlds.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from rule import Bench, Choice, Knob, table

import otafl
from otafl.report.statistics import holm, p_value, paired_difference
from otafl.world.channel import trajectory

OUT = Path("results") / "worlds"
WORLDS = ("stationary", "rician", "nakagami", "shadowed", "correlated", "urban")
GAMMAS = (0.3e-10, 0.5e-10, 1e-10, 2e-10, 3e-10, 5e-10, 1e-9)
TRUNCATIONS = (0.0137, 0.038, 0.15, 0.61, 1.37, 3.8, 15.0)  # the same thresholds in the paper's cell
GAMMA: Knob = ("algorithm.gamma", ())  # the values are the world's
TRUNCATION: Knob = ("algorithm.truncation", ())
RADIUS: Knob = ("algorithm.interior_radius_m", (600.0, 900.0, 1200.0, 1350.0, 1500.0))
WHOLE = {"algorithm.interior_radius_m": 1500.0}  # with nobody left out, until the radius is chosen
METHODS: dict[str, tuple[float, tuple[Knob, ...], dict[str, Any]]] = {
    "fedoag": (0.1, (GAMMA,), {}),
    "fedoag-plus": (0.1, (GAMMA,), {}),
    "sca": (0.1, (("algorithm.omega", (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)),), {}),
    "vanilla": (0.003, (("algorithm.rule", ("weakest", "tight")),), {}),
    "bb-interior": (0.03, (TRUNCATION, RADIUS), WHOLE),
    "bb-alternative": (0.03, (TRUNCATION, RADIUS), WHOLE),
}
RATES = (27.0, 9.0, 3.0, 1.0, 1 / 3, 1 / 9, 1 / 27)
WIDE = ("shadowed", "urban")
"""Where the best of some method lay at an end of five rates or five values; there all methods have seven of both."""


def thresholds(world: str) -> tuple[Knob, Knob]:
    """FedOAG's γ, scaled with the root of the world's median gain over the paper's, and BB's truncations for the same.

    BB's γ² goes as its truncation times the gain of the weakest device: the median over rounds and seeds.
    """
    medians = []
    for name in (world, "stationary"):
        c = otafl.load_config(name)
        parts = (c.cell, c.mobility.spec, c.pathloss.spec, c.fading.spec, 50)
        gains = np.stack([trajectory(*parts, seed).mean_gain for seed in (100, 101, 102)])
        medians.append((np.median(gains), np.median(gains.min(-1))))
    gain, least = (float(here / there) for here, there in zip(*medians, strict=True))
    return (
        ("algorithm.gamma", tuple(float(f"{value * math.sqrt(gain):.3g}") for value in GAMMAS)),
        ("algorithm.truncation", tuple(float(f"{value * gain / least:.3g}") for value in TRUNCATIONS)),
    )


def choose(bench: Bench, world: str, method: str) -> Choice:
    """Tune a method in a world."""
    centre, knobs, start = METHODS[method]
    own = dict(thresholds(world))
    knobs = tuple((name, own.get(name, values)) for name, values in knobs)
    rates = [float(f"{centre * rate:.1g}") for rate in RATES]
    if world not in WIDE:
        rates, knobs = rates[1:-1], tuple((name, values[2:] if len(values) == 7 else values) for name, values in knobs)
    if bench.quick:
        rates, knobs = rates[1:3], tuple((name, values[1:3]) for name, values in knobs)
    keys = {"algorithm.name": method, "training.precision": "tf32", **start}
    return bench.choose(world, keys, rates, knobs)


def main() -> None:
    """Tune, run, and print a table as Markdown after each world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--world", nargs="*", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--only", nargs="*", default=[], choices=list(METHODS), help="beside FedOAG")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: small model, 20 rounds")
    options = parser.parse_args()
    bench = Bench(OUT / ("quick" if options.quick else "full"), options.device, options.workers, options.quick)
    methods = [name for name in METHODS if not options.only or name in ("fedoag", *options.only)]
    gaps = {}
    for world in options.world:
        choices = {method: choose(bench, world, method) for method in methods}
        results = bench.report(world, {method: choice.keys for method, choice in choices.items()})
        print(f"\n**{world}**\n\n{table(results, choices, 'fedoag')}\n", flush=True)
        gaps |= {(world, name): paired_difference(results[name], results["fedoag"]) for name in methods[1:]}
    print(f"All worlds are one table: {len(gaps)} comparisons with FedOAG, p by Holm")
    for (world, name), p in zip(gaps, holm([p_value(gap) for gap in gaps.values()]), strict=True):
        print(f"{world:<11} {name:<15} {gaps[world, name].mean:+.2f} ± {gaps[world, name].half_width:.2f}  p {p:.3g}")


if __name__ == "__main__":
    main()
