"""The figure of docs/theory.md: which objective each method converges to (the paper's Remark 1).

    python recipes/inconsistency.py [--rounds 4000]

Quadratics ½(x − c_i)²: 20 devices heard with probability 0.9 whose optimum is 0, 10 heard with probability 0.05 whose
optimum is 1, some receiver noise. The optimum of F, the plain mean, is 1/3; that of the p-weighted mean is 0.027. A
minute or two on two cores.
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
from otafl.report.figures import STYLES, save, write_csv
from otafl.simulation import Simulation

PROBABILITIES = [0.9] * 20 + [0.05] * 10
GAMMA = SYMBOL_ENERGY_J = 1e-9
TRUE, WEIGHTED = 1 / 3, 10 * 0.05 / (20 * 0.9 + 10 * 0.05)
OUT = Path("results") / "inconsistency.png"
CASES = (
    ("OTA-FedAvg", "ota-fedavg", {"algorithm.gamma": GAMMA}),
    ("SCA, ω = 0.1", "sca", {"algorithm.omega": 0.1}),
    ("FedOAG", "fedoag", {"algorithm.gamma": GAMMA}),
    ("FedOAG-plus", "fedoag-plus", {"algorithm.gamma": GAMMA}),
)
EVERY = 20


def main() -> None:
    """Run the four methods and draw how far their models are from either optimum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4000)
    rounds = parser.parse_args().rounds
    gains = [GAMMA**2 / (SYMBOL_ENERGY_J * -math.log(p)) for p in PROBABILITIES]
    world = {
        "experiment.rounds": rounds,
        "experiment.seeds": list(range(10)),
        "data.name": "quadratic",
        "data.dimension": 1,
        "data.centers": [[0.0]] * 20 + [[1.0]] * 10,
        "model.name": "point",
        "model.start": 1.0,
        "training.local_steps": 1,
        "training.batch_size": 1,
        "training.lr": 0.002,
        "training.skip_unheard": False,  # the mean of all devices is looked at
        "training.lr_schedule": "constant",
        "training.precision": "float64",
        "cell.devices": 30,
        "cell.radius_m": 1e6,
        "cell.placement": "given",
        "cell.positions_m": [[(1e-5 / gain) ** (1 / 3.5), 0.0] for gain in gains],
        "radio.noise_dbm_hz": -168.0,
    }
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained", sharey=True)
    rows = []
    at = np.arange(0, rounds, EVERY)
    for label, name, keys in CASES:
        sim = Simulation(
            otafl.load_config("stationary", {**world, "algorithm.name": name, **keys}), torch.device("cpu")
        )
        state, server, mean = sim.init(), [], []
        for done in range(rounds):
            if done % EVERY == 0:
                server.append(state.params[:, 0].mean().item())
                mean.append(sim.mean_params(state)[:, 0].mean().item())
            state = sim.step(state, done).state
        colour = STYLES[name][0]
        for axes, optimum in zip(panels, (TRUE, WEIGHTED), strict=True):
            axes.plot(at, np.abs(np.array(server) - optimum), color=colour, linewidth=1.6, label=label)
            if hasattr(state, "local_params"):
                axes.plot(at, np.abs(np.array(mean) - optimum), ":", color=colour, linewidth=1.2)
        rows += [(label, int(t), f"{s:.6f}", f"{m:.6f}") for t, s, m in zip(at, server, mean, strict=True)]
        tail = len(server) // 4
        print(f"{label:<14} server {np.mean(server[-tail:]):.4f}, mean of the devices {np.mean(mean[-tail:]):.4f}")
    for axes, title in zip(
        panels, ("distance to the optimum of F (1/3)", "to that of the p-weighted mean (0.027)"), strict=True
    ):
        axes.set_yscale("log")
        axes.set_ylim(2e-4, 1)
        axes.set_xlabel("round")
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    panels[0].set_ylabel("|mean of 10 seeds − optimum|; dotted: x̄")
    panels[1].legend(frameon=False, fontsize=9)
    write_csv(OUT, ("method", "round", "server_model", "mean_model"), rows)
    print(f"figure {save(figure, OUT)}")


if __name__ == "__main__":
    main()
