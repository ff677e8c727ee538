"""Where methods go when one group of devices is hardly heard: the figures of docs/theory.md and of FedOAG-plus's page.

    python recipes/two_groups.py [--rounds 6000]

Quadratics ½(x − c_i)²: 20 devices heard with probability 0.9 whose optimum is 0, 10 heard with probability 0.05 whose
optimum is 1. The optimum of F, the plain mean, is 1/3; that of the p-weighted mean is 0.027. `inconsistency` has some
receiver noise and shows which of the two each method goes to; `residuals` has none and shows why an active device of
FedOAG-plus sends at least a share of its innovation. Three minutes on two cores.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import otafl
from otafl.papers.fedoag.theory.figures import distances
from otafl.report.figures import STYLES, drawing, save, write_csv
from otafl.simulation.build import Simulation

PROBABILITIES = [0.9] * 20 + [0.05] * 10
GAMMA = SYMBOL_ENERGY_J = 1e-9
TRUE, WEIGHTED = 1 / 3, 10 * 0.05 / (20 * 0.9 + 10 * 0.05)
OUT = Path("results")
EVERY = 20
GAINS = [GAMMA**2 / (SYMBOL_ENERGY_J * -math.log(p)) for p in PROBABILITIES]
WORLD: dict[str, Any] = {
    "data.name": "quadratic",
    "data.dimension": 1,
    "data.centers": [[0.0]] * 20 + [[1.0]] * 10,
    "model.name": "point",
    "training.local_steps": 1,
    "training.batch_size": 1,
    "training.skip_unheard": False,  # the mean of all devices is looked at
    "training.lr_schedule": "constant",
    "training.precision": "float64",
    "cell.devices": 30,
    "cell.radius_m": 1e6,
    "cell.placement": "given",
    "cell.positions_m": [[(1e-5 / gain) ** (1 / 3.5), 0.0] for gain in GAINS],
}


def models(name: str, rounds: int, keys: Mapping[str, Any]) -> tuple[list[float], list[float] | None]:
    """Server model and mean of the devices' models over rounds, mean over seeds; no mean where devices have none."""
    chosen = {**WORLD, **keys, "experiment.rounds": rounds, "algorithm.name": name}
    if name != "sca":
        chosen["algorithm.gamma"] = GAMMA
    sim = Simulation(otafl.load_config("stationary", chosen), torch.device("cpu"))
    state, server, mean = sim.init(), [], []
    for done in range(rounds):
        if done % EVERY == 0:
            server.append(state.params[:, 0].mean().item())
            mean.append(sim.mean_params(state)[:, 0].mean().item())
        state = sim.step(state, done).state
    return server, mean if hasattr(state, "devices") else None


def inconsistency(rounds: int) -> None:
    """How far each method's models are from either optimum."""
    world = {
        "experiment.seeds": list(range(10)),
        "model.start": 1.0,
        "training.lr": 0.002,
        "radio.noise_dbm_hz": -168.0,
    }
    cases = (("OTA-FedAvg", "ota-fedavg", {}), ("SCA, ω = 0.1", "sca", {"algorithm.omega": 0.1}))
    cases += (("FedOAG", "fedoag", {}), ("FedOAG-plus", "fedoag-plus", {}))
    curves = {}
    for label, name, keys in cases:
        server, mean = models(name, rounds, {**world, **keys})
        tail = len(server) // 4
        last = "" if mean is None else f", mean of the devices {np.mean(mean[-tail:]):.4f}"
        print(f"{label:<26} {np.mean(server[-tail:]):.4f}{last} over the last quarter")
        curves[label] = {
            "style": STYLES[name][0],
            "server": [np.abs(np.array(server) - optimum) for optimum in (TRUE, WEIGHTED)],
            "mean": None if mean is None else [np.abs(np.array(mean) - optimum) for optimum in (TRUE, WEIGHTED)],
        }
    titles = ("distance to the optimum of F (1/3)", "to that of the p-weighted mean (0.027)")
    at = np.arange(0, rounds, EVERY)
    path = distances(
        at, curves, titles, "|mean of 10 seeds − optimum|; dotted: x̄", OUT / "inconsistency.png", (2e-4, 1)
    )
    print(f"figure {path}")


def residuals(rounds: int) -> None:
    """Where server models go without noise."""
    world = {"experiment.seeds": list(range(5)), "model.start": 0.5, "training.lr": 0.001}
    cases = (
        ("FedOAG", "fedoag", {}, "#0072B2", "-"),
        ("FedOAG-plus, θ_min = 1/2", "fedoag-plus", {}, "#D55E00", "-"),
        ("FedOAG-plus, θ_min = 0", "fedoag-plus", {"algorithm.theta_min": 0.0}, "#CC79A7", "--"),
        ("OTA-FedAvg (no memory)", "ota-fedavg", {}, "#777777", "-."),
    )
    rows = []
    with drawing(6.4, 3.4) as (figure, axes):
        axes.axhline(1 / 3, color="black", linewidth=0.8)
        axes.text(rounds * 1.01, 1 / 3, "optimum 1/3", va="center")
        for label, name, keys, colour, line in cases:
            server, _ = models(name, rounds, {**world, "radio.noise_dbm_hz": float("-inf"), **keys})
            at = np.arange(0, rounds, EVERY)
            axes.plot(at, server, line, color=colour, linewidth=1.6, label=label)
            rows += [(label, int(t), f"{value:.6f}") for t, value in zip(at, server, strict=True)]
            print(f"{label:<26} {np.mean(server[-len(server) // 10 :]):.4f} over the last tenth, no noise")
        axes.set_xlabel("round")
        axes.set_ylabel("server model, mean of 5 seeds")
        axes.set_ylim(0, 0.52)
        axes.set_xlim(0, rounds)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False, loc="upper right", fontsize=9)
        write_csv(OUT / "residuals.png", ("method", "round", "server_model"), rows)
        print(f"figure {save(figure, OUT / 'residuals.png')}")


def main() -> None:
    """Draw both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6000)
    rounds = parser.parse_args().rounds
    inconsistency(2 * rounds // 3)
    residuals(rounds)


if __name__ == "__main__":
    main()
