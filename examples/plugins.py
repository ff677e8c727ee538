"""Your own method, fading, mobility, data set and model, without touching the package.

Run it as it is (`python examples/plugins.py`), or make the classes known to the command line by entry points in
your own package's pyproject.toml:

    [project.entry-points."otafl.algorithms"]
    server-step = "my_package.plugins:ServerStep"

Each class is a frozen dataclass; its fields are the keys of its section of the configuration.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import otafl
from otafl.algorithms.parts.truncated import above_threshold, heard_mean


@dataclass(frozen=True)
class State:
    """What the next round needs; `params` is the server model, [seeds, parameters]."""

    params: Tensor


@otafl.register_algorithm("server-step")
@dataclass(frozen=True)
class ServerStep:
    """Average of the active devices, with a step size of the server's own."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(device=frozenset({"h"}))

    gamma: float = 1e-9
    server_step: float = 0.5

    def init(self, problem: otafl.Problem) -> State:
        """Start from the initial model."""
        return State(problem.initial)

    def active(self, device: otafl.View, problem: otafl.Problem) -> Tensor:
        """Who transmits: the devices whose channel is good enough."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: otafl.Round) -> tuple[State, otafl.Info]:  # noqa: A002
        """Devices see `round.device`; the server only what was reported or received."""
        updates = round.train(state.params, round.active)
        heard = heard_mean(round, updates, self.gamma, round.active)
        moved = state.params + self.server_step * round.lr * heard.mean
        params = torch.where(heard.who.any(-1, keepdim=True), moved, state.params)
        step_norm = torch.linalg.vector_norm(params - state.params, dim=-1, dtype=torch.float64)
        return State(params), otafl.Info(heard.who, heard.norm_bound, extra={"step_norm": step_norm})


@otafl.register_fading("one-strong-path")
@dataclass(frozen=True)
class Rician:
    """Rician fading of unit power with factor K."""

    k: float = 3.0

    def coefficients(self, positions_m: np.ndarray, streams: otafl.Streams) -> np.ndarray:
        """One coefficient per round and device; draws come from addressed streams."""
        rounds, devices = positions_m.shape[:2]
        scattered = np.stack([streams.at("fading", t).standard_normal((devices, 2)) for t in range(rounds)])
        scattered = (scattered[..., 0] + 1j * scattered[..., 1]) / np.sqrt(2)
        return np.sqrt(self.k / (self.k + 1)) + scattered / np.sqrt(self.k + 1)

    def exceed_prob(self, power: np.ndarray) -> np.ndarray:
        """P(|g|² ≥ power): Marcum's Q function, as a non-central χ² with two degrees of freedom."""
        from scipy.stats import ncx2

        return np.asarray(ncx2.sf(2 * (self.k + 1) * np.asarray(power), 2, 2 * self.k))


@otafl.register_mobility("outward")
@dataclass(frozen=True)
class Outward:
    """Every device walks away from the server until the cell's edge."""

    speed_mps: float = 1.0
    round_s: float = 8.0

    def positions(
        self, start_m: np.ndarray, cell_radius_m: float, num_rounds: int, streams: otafl.Streams
    ) -> np.ndarray:
        """Positions of every round, [rounds, devices, 2]."""
        distance_m = np.hypot(start_m[:, 0], start_m[:, 1])
        walked_m = self.speed_mps * self.round_s * np.arange(num_rounds)[:, None]
        return start_m * (np.minimum(distance_m + walked_m, cell_radius_m) / distance_m)[..., None]


@otafl.register_dataset("rings")
@dataclass(frozen=True)
class Rings:
    """Points on noisy circles; the class is the circle."""

    points: int = 600

    def load(self, num_devices: int) -> otafl.Dataset:
        """Half to train, half to test."""
        rng = otafl.Streams(0).at("rings")
        targets = rng.integers(3, size=self.points)
        angle, radius = 2 * np.pi * rng.random(self.points), targets + 1 + 0.1 * rng.standard_normal(self.points)
        features = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).astype(np.float32)
        half = self.points // 2
        train, test = (otafl.Split(features[part], targets[part]) for part in (slice(half), slice(half, None)))
        return otafl.Dataset(train=train, test=test, validation=None, num_classes=3)


@otafl.register_model("tanh-net")
@dataclass(frozen=True)
class TanhNet:
    """A small network of tanh units."""

    width: int = 16

    def build(self, shape: otafl.TaskShape) -> nn.Module:
        """Any nn.Module without dropout or running statistics."""
        return nn.Sequential(
            nn.Linear(shape.num_features, self.width), nn.Tanh(), nn.Linear(self.width, shape.num_classes)
        )


def main() -> otafl.Result:
    """Run all five together."""
    config = otafl.load_config(
        "stationary",
        {
            "experiment.name": "plugins",
            "experiment.rounds": 30,
            "experiment.seeds": [0, 1],
            "algorithm.name": "server-step",
            "algorithm.gamma": 5e-12,
            "fading.name": "one-strong-path",
            "fading.k": 5.0,
            "mobility.name": "outward",
            "data.name": "rings",
            "model.name": "tanh-net",
            "radio.noise_dbm_hz": -190.0,
        },
    )
    return otafl.run(config)


if __name__ == "__main__":
    result = main()
    print(f"test accuracy over rounds (mean of seeds): {result.metrics['test_accuracy'].mean(0).round(3)}")
