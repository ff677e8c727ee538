"""Two figures of docs/theory.md that need training: which objective methods minimise on MNIST, and the 1/√T rate.

    python recipes/theory.py [mnist|rate]

`mnist`: softmax regression on 20 principal components of MNIST, a convex problem, so that the minima of F = (1/m) Σ F_i
and of the p-weighted F̃ = Σ p_i F_i/Σ p_i can be computed; how far models are above either minimum, over rounds.
`rate`: a smooth non-convex problem (a tanh network on digits) with Corollary 1's step size η = √m/(L√(sT)): the mean of
‖∇F(x̄)‖² over T rounds, for T from 250 to 16,000, with the slope of the line through it on log-log axes, seed by seed.
Some six minutes each on two cores.
"""

import argparse
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import otafl
from otafl.config.schema import scaled_gamma
from otafl.engine.models import TaskShape
from otafl.papers.fedoag.theory.bounds import corollary_lr
from otafl.papers.fedoag.theory.estimates import constants
from otafl.papers.fedoag.theory.figures import distances, rate
from otafl.report.figures import LABELS, STYLES
from otafl.report.statistics import estimate
from otafl.simulation.build import Simulation
from otafl.world.data import MNIST

OUT = Path("results")
CPU = torch.device("cpu")
EVERY = 50
NOISE_DBM_HZ = -194.0  # 20 dB below the paper's: small models have few coordinates to average noise over
SEEDS = [0, 1, 2, 3, 4]


@otafl.register_dataset("mnist-components")
@dataclass(frozen=True)
class Components:
    """Principal components of MNIST, whitened: few features, well conditioned."""

    count: int = 20

    def load(self, num_devices: int) -> otafl.Dataset:
        """As MNIST, but for the features."""
        return _components(self.count)


@cache
def _components(count: int) -> otafl.Dataset:
    whole = MNIST().load(1)
    pixels = whole.train.features.reshape(len(whole.train.targets), -1)
    mean = pixels.mean(0)
    values, vectors = np.linalg.eigh(np.cov(pixels - mean, rowvar=False))
    project = vectors[:, -count:] / np.sqrt(values[-count:])

    def split(part: otafl.Split) -> otafl.Split:
        features = (part.features.reshape(len(part.targets), -1) - mean) @ project
        return otafl.Split(features.astype(np.float32), part.targets)

    return otafl.Dataset(train=split(whole.train), test=split(whole.test), validation=None, num_classes=10)


class Weighted:
    """Σ_i w_i F_i of one seed of a softmax-regression problem."""

    def __init__(self, sim: Simulation, seed: int, weights: Tensor) -> None:
        """Weights [M] of the devices' mean losses."""
        self._shape = sim.objective
        shares = [torch.as_tensor(share) for share in sim.shares[seed]]
        self._features, self._targets = (values[torch.cat(shares)] for values in sim.objective.train)
        self._weights = torch.cat(
            [torch.full((len(share),), float(w) / len(share)) for w, share in zip(weights, shares, strict=True)]
        )

    def __call__(self, params: Tensor) -> Tensor:
        """The loss at params [P]."""
        layer = self._shape.unflatten(params)
        scores = nn.functional.linear(self._features, *(layer[name] for name in ("0.weight", "0.bias")))
        return (nn.functional.cross_entropy(scores, self._targets, reduction="none") * self._weights).sum()

    def least(self, start: Tensor) -> float:
        """Its minimum, by L-BFGS."""
        point = start.clone().requires_grad_(True)
        optimiser = torch.optim.LBFGS([point], max_iter=600, history_size=30, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = self(point)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimiser.step(closure)
        return float(self(point.detach()))


def mnist(rounds: int = 3000) -> None:
    """How far the methods' models are above the minimum of F and of F̃."""
    keys: dict[str, Any] = {
        "data.name": "mnist-components",
        "model.name": "softmax",
        "experiment.seeds": SEEDS,
        "experiment.rounds": rounds,
        "training.local_steps": 5,
        "training.lr": 0.02,
        "training.lr_schedule": "constant",
        "training.skip_unheard": False,
        "radio.noise_dbm_hz": float("-inf"),  # noise would hide which minimum is approached
    }
    curves: dict[str, Any] = {}
    objectives: list[tuple[Weighted, Weighted]] = []
    least = np.empty((len(SEEDS), 2))
    for name in ("ota-fedavg", "sca", "fedoag", "fedoag-plus"):
        config = otafl.load_config("stationary", {**keys, "algorithm.name": name})
        if name == "sca":
            config = config.replace({"algorithm.omega": 0.03})
        else:
            config = config.replace({"algorithm.gamma": scaled_gamma(5e-10, config)})
        sim = Simulation(config, CPU)
        if not objectives:
            for s in range(len(SEEDS)):
                prob = torch.as_tensor(sim.uplink_probability(s)[0])
                equal = torch.full((len(prob),), 1 / len(prob))
                objectives.append((Weighted(sim, s, equal), Weighted(sim, s, prob / prob.sum())))
                least[s] = [objective.least(sim.problem.initial[s]) for objective in objectives[s]]
                print(f"seed {s}: min F {least[s, 0]:.4f}, min F̃ {least[s, 1]:.4f}", flush=True)
        state, server, mean = sim.init(), [], []
        for done in range(rounds):
            if done % EVERY == 0:
                for models, into in ((state.params, server), (sim.mean_params(state), mean)):
                    into.append([[float(f(x)) for f in pair] for x, pair in zip(models, objectives, strict=True)])
            state = sim.step(state, done).state
        above = [(np.array(values) - least).mean(1).T for values in (server, mean)]  # [2, rounds], mean over seeds
        own = hasattr(state, "devices")
        curves[LABELS[name]] = {"style": STYLES[name][0], "server": above[0], "mean": above[1] if own else None}
        print(f"{name:<12} F − min F {above[0][0, -1]:.4f}, F̃ − min F̃ {above[0][1, -1]:.4f}", flush=True)
        if own:
            print(f"{'x̄':<12} F − min F {above[1][0, -1]:.4f}, F̃ − min F̃ {above[1][1, -1]:.4f}", flush=True)
    titles = ("F(x) − min F: every device alike", "F̃(x) − min F̃: devices weighted by p_i")
    label, at = "loss above its minimum; dotted: x̄", np.arange(0, rounds, EVERY)
    path = distances(at, curves, titles, label, OUT / "mnist-inconsistency.png", (0.02, 3))
    print(f"figure {path}")


@otafl.register_model("tanh")
@dataclass(frozen=True)
class Tanh:
    """A network without kinks: smooth and non-convex."""

    hidden: tuple[int, ...] = (16,)

    def build(self, shape: TaskShape) -> nn.Module:
        """Linear and tanh layers from features to class scores."""
        widths = (shape.num_features, *self.hidden)
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(widths[-1], shape.num_classes))


def averaged_gradient(rounds: int, smoothness: float | None = None) -> tuple[np.ndarray, float]:
    """Mean of ‖∇F(x̄)‖² over so many rounds, per seed, and L; L is estimated where it is not given."""
    keys: dict[str, Any] = {
        "data.name": "digits",
        "model.name": "tanh",
        "cell.devices": 10,
        "experiment.seeds": SEEDS,
        "experiment.rounds": rounds,
        "experiment.eval_every": max(1, rounds // 125),
        "experiment.record": ["server", "mean", "gradient"],
        "training.local_steps": 5,
        "training.lr_schedule": "constant",
        "radio.noise_dbm_hz": NOISE_DBM_HZ,
    }
    config = otafl.load_config("stationary", keys)
    config = config.replace({"algorithm.gamma": scaled_gamma(3e-10, config)})
    if smoothness is None:
        smoothness = constants(sim := Simulation(config, CPU), [sim.problem.initial[0]])["smoothness"].value
    lr = corollary_lr(10, 5, smoothness, rounds)
    result = otafl.run(config.replace({"training.lr": lr}), device="cpu")
    return result.metrics["mean_grad_norm_sq"][:, :-1].mean(1), smoothness


def rate_figure() -> None:
    """The rate that Corollary 1 promises."""
    numbers = np.array([250, 500, 1000, 2000, 4000, 8000, 16000])
    values, smoothness = np.empty((len(SEEDS), len(numbers))), None
    for i, rounds in enumerate(numbers.tolist()):
        values[:, i], smoothness = averaged_gradient(rounds, smoothness)
        print(f"T = {rounds:<6} L = {smoothness:.3g}: {values[:, i].mean():.4g}", flush=True)
    slopes = estimate(np.array([np.polyfit(np.log(numbers), np.log(row), 1)[0] for row in values]))
    print(f"slope {slopes.mean:.3f} ± {slopes.half_width:.3f} (95 % interval over {len(SEEDS)} seeds)")
    title = "FedOAG, tanh network on digits, 10 devices, receiver noise"
    print(f"figure {rate(numbers, values, slopes, OUT / 'rate.png', title)}")


def main() -> None:
    """Draw what is asked for, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("mnist", "rate"))
    what = parser.parse_args().what
    if what in (None, "rate"):
        rate_figure()
    if what in (None, "mnist"):
        mnist()


if __name__ == "__main__":
    main()
