"""Every method on MNIST, stationary: tuned by one rule, then ten seeds; a table of docs/results.md.

    python recipes/comparison.py [--device cuda] [--workers 6] [--only BB ...] [--quick]

The rule is in recipes/rule.py. Nine learning rates, 3 … 0.0003, and seven values of each knob. FedOAG's γ and BB's
truncation are the same knob, a threshold on the channel: BB's seven values are those of γ in the paper's cell with
nobody left out. What was measured is kept in results/comparison. `--quick` is a rehearsal on a CPU.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rule import Bench, Choice, Knob, table

from otafl.report.figures import accuracy_over_rounds

OUT = Path("results") / "comparison"
LEARNING_RATES = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
GAMMA: Knob = ("algorithm.gamma", (1e-10, 2e-10, 3e-10, 5e-10, 1e-9, 2e-9, 3e-9))
TRUNCATION: Knob = ("algorithm.truncation", (0.15, 0.61, 1.37, 3.8, 15.0, 61.0, 137.0))
RADIUS: Knob = ("algorithm.interior_radius_m", (600.0, 750.0, 900.0, 1050.0, 1200.0, 1350.0, 1500.0))
OMEGA: Knob = ("algorithm.omega", (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0))
LIMIT: Knob = ("algorithm.norm_limit", (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0))
WHOLE = {"interior_radius_m": 1500.0}  # with nobody left out, until the radius is chosen


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    label: str
    algorithm: str
    knobs: tuple[Knob, ...] = ()
    keys: dict[str, Any] = field(default_factory=dict)
    after: str = ""
    """Another row, whose choice this one takes over but for the learning rate and its own knobs."""


def clipped(label: str, algorithm: str, *knobs: Knob, **keys: Any) -> Entry:
    """The form in which the bound on norms is fixed: a knob more, chosen first; others begin where that form ended."""
    return Entry(f"{label}, clipped", algorithm, (LIMIT, *knobs), {"norms": "clip", **keys}, label if knobs else "")


ENTRIES = (
    Entry("FedAvg, error-free", "fedavg"),
    Entry("FedOAG", "fedoag", (GAMMA,)),
    Entry("FedOAG-plus", "fedoag-plus", (GAMMA,)),
    Entry("FedOAG-plus, θ_min = 1", "fedoag-plus", (GAMMA,), {"theta_min": 1.0}),
    Entry("OTA-FedAvg", "ota-fedavg", (GAMMA,)),
    Entry("SCA", "sca", (OMEGA,)),
    Entry("vanilla", "vanilla"),
    Entry("vanilla, tight", "vanilla", keys={"rule": "tight"}),
    Entry("BB-interior", "bb-interior", (TRUNCATION, RADIUS), WHOLE),
    Entry("BB-alternative", "bb-alternative", (TRUNCATION, RADIUS), WHOLE),
    Entry("OPC", "opc", keys={"renormalise": True}),
    Entry("LCPC, truncate", "lcpc", keys={"form": "truncate"}),
    Entry("LCPC, clip", "lcpc", keys={"form": "clip"}),
    Entry("Air-FEEL, unbiased", "air-feel"),
    Entry("Air-FEEL, biased", "air-feel", keys={"regime": "biased"}),
    clipped("SCA", "sca", OMEGA),
    clipped("vanilla", "vanilla"),
    clipped("BB-interior", "bb-interior", TRUNCATION),
    clipped("BB-alternative", "bb-alternative", TRUNCATION),
    clipped("OPC", "opc", renormalise=True),
    clipped("LCPC, truncate", "lcpc", form="truncate"),
    clipped("LCPC, clip", "lcpc", form="clip"),
    clipped("Air-FEEL, unbiased", "air-feel"),
    Entry("FedPBC, error-free", "fedpbc", after="FedOAG"),
    Entry("FedAWE, error-free", "fedawe", after="FedOAG"),
    Entry("MIFA, error-free", "mifa", after="FedOAG"),
)
SHOWN = ("FedAvg, error-free", "FedOAG-plus", "OPC", "SCA", "Air-FEEL, unbiased", "FedOAG", "BB-interior")


def choose(bench: Bench, entry: Entry, choices: dict[str, Choice], precision: str) -> Choice:
    """Tune a row."""
    keys = {f"algorithm.{key}": value for key, value in entry.keys.items()}
    keys = {"algorithm.name": entry.algorithm, "training.precision": precision, **keys}
    if entry.after:
        taken = choices[entry.after].keys
        keys = {key: taken[key] for key in taken if key not in ("training.lr", "algorithm.name")} | keys
    rates, knobs = LEARNING_RATES, entry.knobs
    if bench.quick:
        rates, knobs = rates[1:4], tuple((name, values[1:4]) for name, values in knobs)
    return bench.choose("quick" if bench.quick else "stationary", keys, rates, knobs)


def main() -> None:
    """Tune, run, and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", default="tf32", help="of all runs")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose label begins so; FedOAG's is always made")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    folder = OUT / ("quick" if options.quick else "full")
    bench = Bench(folder, options.device, options.workers, options.quick)
    begins = tuple(options.only) or ("",)
    entries = [entry for entry in ENTRIES if entry.label == "FedOAG" or entry.label.startswith(begins)]
    choices: dict[str, Choice] = {}
    for entry in entries:
        choices[entry.label] = choose(bench, entry, choices, options.precision)
    results = bench.report(
        "quick" if options.quick else "stationary", {e.label: choices[e.label].keys for e in entries}
    )
    print(f"\n{table(results, choices, 'FedOAG')}\n")
    title = "MNIST, stationary, norms normalised, each method tuned by the same rule"
    curves = {name: results[name] for name in SHOWN if name in results}
    print(f"figure {accuracy_over_rounds(curves, folder / 'comparison.png', title, None if options.quick else 86.0)}")


if __name__ == "__main__":
    main()
