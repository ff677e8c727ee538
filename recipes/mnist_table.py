"""The MNIST table of docs/results.md: the paper's setting, five seeds, three regimes for FedOAG.

python recipes/mnist_table.py [--device cuda]      about a minute on a data-centre GPU, hours on two cores
"""

import argparse
from pathlib import Path

import otafl
from otafl.report.statistics import estimate, last_accuracy, paired_difference

OUT = Path("results") / "mnist-table"
CASES = (
    ("stationary", "fedavg"),
    ("stationary", "fedoag"),
    ("nonstationary", "fedoag"),
    ("mixed", "fedoag"),
    ("stationary", "ota-fedavg"),
)


def main() -> None:
    """Run what is missing and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=800)
    options = parser.parse_args()
    results = {}
    for preset, name in CASES:
        config = otafl.load_config(preset, {"algorithm.name": name, "experiment.rounds": options.rounds})
        out = OUT / f"{preset}-{name}-{config.digest[:8]}"
        results[preset, name] = otafl.run(config, out=out, device=options.device)
        summary = results[preset, name].summary
        print(f"{preset} {name}: {summary['wall_s']:.1f} s on {summary['device']}", flush=True)
    print("\n| method | regime | test accuracy (%) | per seed | active devices | time (s) |")
    print("|---|---|---|---|---|---|")
    for (preset, name), result in results.items():
        accuracy = last_accuracy(result)
        seeds = ", ".join(f"{value:.1f}" for value in accuracy)
        summary = result.summary
        active, wall_s = summary["num_active"], summary["wall_s"]
        print(f"| {name} | {preset} | {estimate(accuracy)} | {seeds} | {active:.2f} | {wall_s:.0f} |")
    base = results["stationary", "fedoag"]
    print("\n| paired by seed | difference (points) | 95 % interval |\n|---|---|---|")
    for preset, name in CASES[2:]:
        gap = paired_difference(results[preset, name], base)
        low, high = gap.mean - gap.half_width, gap.mean + gap.half_width
        print(f"| {name}, {preset}, minus fedoag, stationary | {gap.mean:+.2f} | {low:+.2f} … {high:+.2f} |")


if __name__ == "__main__":
    main()
