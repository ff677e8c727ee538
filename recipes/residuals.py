"""The figure of docs/algorithms/fedoag-plus.md: why an active device must send at least a share of its innovation.

    python recipes/residuals.py [--rounds 6000]

Noise-free quadratics: 20 devices heard with probability 0.9 whose optimum is 0, 10 heard with probability 0.05 whose
optimum is 1. The optimum of the mean is 1/3. Two minutes on two cores.
"""

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

import otafl
from otafl.simulation import Simulation

PROBABILITIES = [0.9] * 20 + [0.05] * 10
GAMMA = SYMBOL_ENERGY_J = 1e-9
OUT = Path("results") / "residuals.png"
CASES = (
    ("FedOAG", "fedoag", {}, "#0072B2", "-"),
    ("FedOAG-plus, θ_min = 1/2", "fedoag-plus", {}, "#D55E00", "-"),
    ("FedOAG-plus, θ_min = 0", "fedoag-plus", {"algorithm.theta_min": 0.0}, "#CC79A7", "--"),
    ("OTA-FedAvg (no memory)", "ota-fedavg", {}, "#777777", "-."),
)


def main() -> None:
    """Run the four methods and draw where their server models go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6000)
    rounds = parser.parse_args().rounds
    gains = [GAMMA**2 / (SYMBOL_ENERGY_J * -math.log(p)) for p in PROBABILITIES]
    world = {
        "experiment.rounds": rounds,
        "experiment.seeds": list(range(5)),
        "data.name": "quadratic",
        "data.dimension": 1,
        "data.centers": [[0.0]] * 20 + [[1.0]] * 10,
        "model.name": "point",
        "model.start": 0.5,
        "training.local_steps": 1,
        "training.batch_size": 1,
        "training.lr": 0.001,
        "training.lr_schedule": "constant",
        "training.precision": "float64",
        "cell.devices": 30,
        "cell.radius_m": 1e6,
        "cell.placement": "given",
        "cell.positions_m": [[(1e-5 / gain) ** (1 / 3.5), 0.0] for gain in gains],
        "radio.noise_dbm_hz": float("-inf"),
        "algorithm.gamma": GAMMA,
    }
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    axes.axhline(1 / 3, color="black", linewidth=0.8)
    axes.text(rounds * 1.01, 1 / 3, "optimum 1/3", va="center")
    for label, name, keys, colour, line in CASES:
        sim = Simulation(
            otafl.load_config("stationary", {**world, "algorithm.name": name, **keys}), torch.device("cpu")
        )
        state, model = sim.init(), []
        for done in range(rounds):
            model.append(float(state.params.mean()))
            state = sim.step(state, done).state
        axes.plot(model, line, color=colour, linewidth=1.6, label=label)
        print(f"{label:<26} {np.mean(model[-rounds // 10 :]):.4f} over the last tenth")
    axes.set_xlabel("round")
    axes.set_ylabel("server model, mean of 5 seeds")
    axes.set_ylim(0, 0.52)
    axes.set_xlim(0, rounds)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, dpi=200)
    print(f"figure {OUT}")


if __name__ == "__main__":
    main()
