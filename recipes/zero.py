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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rule import PRECISION, Bench

import otafl
from otafl.report.statistics import estimate, last_accuracy, paired_difference

OUT = Path("results") / "zero"
GBMA = Path(__file__).parents[1] / "examples" / "gbma.py"
SEEDS = list(range(200, 210))
TUNING_HERE: dict[str, Any] = {
    "experiment.seeds": [100, 101, 102],
    "experiment.record": ["server", "validation"],
}

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


def tune(bench: Bench) -> dict[str, dict[str, Any]]:
    """The rivals' constants, in the stationary world."""
    chosen = {}
    for method, (form, knob, values) in RIVALS.items():
        start = {"algorithm.name": method, PRECISION: "tf32", **form, knob: values[0]}
        chosen[method] = bench.choose("stationary", start, RATES, [("training.clip", CLIPS), (knob, values)]).keys
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


def main() -> None:
    """Tune or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "regimes", "worlds"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a rehearsal: small model, 20 rounds")
    options = parser.parse_args()
    folder = OUT / ("quick" if options.quick else "full")
    plugins = (str(GBMA), str(Path(__file__).with_name("far_class.py")))
    bench = Bench(folder, options.device, options.workers, options.quick, TUNING_HERE, SEEDS, plugins)
    if options.what == "tune":
        tune(bench)
        return
    rows = {"FedOAG-zero": ZERO, "error-free FedAvg": ERROR_FREE}
    if options.what == "regimes":
        rows |= {"FedOAG-plus, as shipped": SHIPPED, "FedOAG-plus, γ adaptive": ADAPTIVE}
        worlds: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in REGIMES}
    else:
        rows |= tune(bench)
        rows |= {f"ν = {nu}": {**ZERO, "algorithm.nu": nu} for nu in LEVELS if nu != ZERO["algorithm.nu"]}
        worlds = WORLDS
    print(f"| world | {' | '.join(rows)} |\n|{'---|' * (len(rows) + 1)}")
    for world, (preset, keys) in worlds.items():
        found = bench.report(preset, {label: {**keys, PRECISION: "tf32", **own} for label, own in rows.items()})
        print(row(world, found, "FedOAG-zero"), flush=True)


if __name__ == "__main__":
    main()
