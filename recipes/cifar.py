"""CIFAR-10 with ResNet-8: methods tuned once, then four worlds; the table and the curves of a page of results.

    python recipes/cifar.py [--device cuda] [--precision bf16] [--rounds 200] [--seeds 0 1 2 3 4] [--path ARCHIVE]

The images are the JPEG copy of CIFAR-10 as a folder or archive (`--path`, within OTAFL_DATA; results say so), or, with
`--path original`, the data set `cifar10`. Worlds: the paper's cell, and the same with +10 dBm, each with Dirichlet 0.1
and 0.5. Each method has η_0 and, where it has one, a knob chosen from at most six points in the first world, by the
validation accuracy after half of the rounds, mean of seeds 100 to 102, where a seed that failed counts with 0.
FedOAG-zero keeps its defaults. The constants are then frozen. What was measured is kept in results/cifar.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from rule import Bench, Choice, Keys, table

from otafl.config.schema import PAPER_PARAMS
from otafl.report.figures import accuracy_over_rounds

OUT = Path("results") / "cifar"
SCALE = (77_850 / PAPER_PARAMS) ** 0.5  # of γ, so that the same devices are heard as with the paper's network
RATES = (0.03, 0.1, 0.3)
METHODS: dict[str, tuple[dict[str, Any], str, tuple[float, ...]]] = {
    "FedAvg, error-free": ({"algorithm.name": "fedavg"}, "training.clip", (4.0, float("inf"))),
    "FedOAG": ({"algorithm.name": "fedoag"}, "algorithm.gamma", (3e-10 * SCALE, 1e-9 * SCALE)),
    "FedOAG-plus": ({"algorithm.name": "fedoag-plus"}, "algorithm.gamma", (2e-10 * SCALE, 6e-10 * SCALE)),
    "SCA": ({"algorithm.name": "sca"}, "algorithm.omega", (0.01, 0.1)),
    "OTA-FedAvg": ({"algorithm.name": "ota-fedavg"}, "algorithm.gamma", (3e-10 * SCALE, 1e-9 * SCALE)),
}
ZERO = {"algorithm.name": "fedoag-zero", "training.lr": 0.5, "training.clip": 4.0, "training.warmup": 10}
WORLDS: dict[str, dict[str, Any]] = {
    "0 dBm, Dirichlet 0.1": {"data.dirichlet_alpha": 0.1},
    "0 dBm, Dirichlet 0.5": {"data.dirichlet_alpha": 0.5},
    "+10 dBm, Dirichlet 0.1": {"data.dirichlet_alpha": 0.1, "radio.tx_power_dbm": 10.0},
    "+10 dBm, Dirichlet 0.5": {"data.dirichlet_alpha": 0.5, "radio.tx_power_dbm": 10.0},
}


def tuned(bench: Bench, base: Keys) -> Iterator[tuple[str, Choice]]:
    """The constants of every method."""
    first = next(iter(WORLDS.values()))
    for label, (keys, knob, values) in METHODS.items():
        points = [{**base, **first, **keys, "training.lr": lr, knob: value} for lr, value in product(RATES, values)]
        scores = bench.measure("stationary", points)
        best = max(range(len(points)), key=scores.__getitem__)
        chosen = {key: points[best][key] for key in (*keys, "training.lr", knob)}
        print(f"{label}: {chosen}  validation {scores[best]:.2f} %", flush=True)
        yield label, Choice(chosen, scores[best], ())
    yield "FedOAG-zero", Choice(dict(ZERO), float("nan"), ())


def main() -> None:
    """Tune, run, and print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--path", default="cifar10/cifar10-jpeg.tar.xz")
    options = parser.parse_args()
    base: dict[str, Any] = {"model.name": "resnet", "training.precision": options.precision}
    base |= {"data.name": "cifar10"} if options.path == "original" else {"data.name": "image-folder"}
    if options.path != "original":
        base["data.path"] = options.path
    half = max(1, options.rounds // 2)
    tuning = {"experiment.rounds": half, "experiment.eval_every": half, "experiment.seeds": [100, 101, 102]}
    tuning["experiment.record"] = ["server", "validation"]
    bench = Bench(OUT, options.device, options.workers, False, tuning, options.seeds)
    choices = dict(tuned(bench, base))
    for world, keys in WORLDS.items():
        rows = {
            label: {**base, **choice.keys, **keys, "experiment.rounds": options.rounds}
            for label, choice in choices.items()
        }
        results = bench.report("stationary", rows)
        print(f"\n{world}\n\n{table(results, choices, 'FedOAG')}\n", flush=True)
        name = "".join(c if c.isalnum() else "-" for c in world)
        title = f"CIFAR-10{'' if options.path == 'original' else ' (JPEG copy)'}, ResNet-8, {world}"
        print(f"figure {accuracy_over_rounds(results, OUT / f'{name}.png', title)}")


if __name__ == "__main__":
    main()
