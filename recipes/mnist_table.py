"""The tables of docs/results.md: the paper's setting on MNIST, five seeds.

    python recipes/mnist_table.py [--device cuda] [--sensitivity]

Three minutes on a data-centre GPU (seven with the sensitivity rows), hours on two cores. Runs that are already there
are read, not repeated.
"""

import argparse
from pathlib import Path
from typing import Any

import otafl
from otafl.report.figures import accuracy_over_rounds
from otafl.report.statistics import estimate, last_accuracy, paired_difference

OUT = Path("results") / "mnist-table"
CASES = (
    ("stationary", "fedavg"),
    ("stationary", "fedoag"),
    ("nonstationary", "fedoag"),
    ("mixed", "fedoag"),
    ("stationary", "ota-fedavg"),
)
SENSITIVITY: dict[str, dict[str, Any]] = {
    "noise N_0/2 per dimension": {"radio.noise_convention": "n0/2"},
    "60,000 training images": {"data.train_images": 60_000},
    "constant learning rate": {"training.lr_schedule": "constant"},
    "one batch per round": {"training.batches": "per_round"},
    "uniform placement": {"cell.placement": "uniform"},
    "PyTorch's default initialisation": {"model.init": "torch"},
    "γ = 5e-10": {"algorithm.gamma": 5e-10},
}
MORE_SEEDS = list(range(20))


def run(preset: str, overrides: dict[str, Any], device: str) -> otafl.Result:
    """A run in its own directory, or what an earlier one left there."""
    config = otafl.load_config(preset, overrides)
    name = f"{preset}-{config.algorithm.name}-{config.digest[:8]}"
    result = otafl.run(config, out=OUT / name, device=device)
    print(f"{name}: {result.summary['wall_s']:.1f} s on {result.summary['device']}", flush=True)
    return result


def row(label: str, result: otafl.Result) -> str:
    """A line of a table."""
    accuracy = last_accuracy(result)
    mean = estimate(accuracy)
    seeds = ", ".join(f"{value:.1f}" for value in accuracy)
    low, high = mean.mean - mean.half_width, mean.mean + mean.half_width
    return f"| {label} | {mean} | {low:.1f} … {high:.1f} | {seeds} | {result.summary['num_active']:.2f} |"


def main() -> None:
    """Run what is missing and print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sensitivity", action="store_true")
    options = parser.parse_args()
    results = {case: run(case[0], {"algorithm.name": case[1]}, options.device) for case in CASES}
    header = (
        "test accuracy (%), mean ± std | 95 % interval of the mean | per seed | active devices |\n|---|---|---|---|---|"
    )
    lines = ["", f"| method, regime | {header}"]
    lines += [row(f"{name}, {preset}", result) for (preset, name), result in results.items()]
    lines += ["", "| paired by seed, minus fedoag, stationary | difference (points) | 95 % interval |", "|---|---|---|"]
    base = results["stationary", "fedoag"]
    for preset, name in CASES[2:]:
        gap = paired_difference(results[preset, name], base)
        low, high = gap.mean - gap.half_width, gap.mean + gap.half_width
        lines.append(f"| {name}, {preset} | {gap.mean:+.2f} | {low:+.2f} … {high:+.2f} |")
    if options.sensitivity:
        lines += ["", f"| fedoag, stationary, but | {header}", row("(nothing changed)", base)]
        lines += [row(label, run("stationary", keys, options.device)) for label, keys in SENSITIVITY.items()]
        lines.append(row("seeds 0–19", run("stationary", {"experiment.seeds": MORE_SEEDS}, options.device)))
    curves = {name: result for (preset, name), result in results.items() if preset == "stationary"}
    title = "MNIST, 30 devices in a cell of 1500 m, 0 dBm, Rayleigh fading, no motion"
    figure = accuracy_over_rounds(curves, OUT / "mnist-stationary.png", title)
    print("\n".join([*lines, "", f"figure {figure}"]))


if __name__ == "__main__":
    main()
