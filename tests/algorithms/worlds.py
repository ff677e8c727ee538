"""A small world for tests of methods: what devices learn and which channels they have in a round."""

from typing import Any

import torch
from torch import Tensor

from otafl.simulation.build import Simulation
from tests.conftest import make_config, simulate

NOISE_FREE = {"radio.noise_dbm_hz": float("-inf")}


def make(algorithm: str, keys: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config(algorithm, {"cell.devices": 6, "experiment.rounds": 20, **(keys or {})}))


def gradients(sim: Simulation, params: Tensor, t: int = 0) -> Tensor:
    """Every device's update from a model, [S, M, P]."""
    return sim.round_at(t).train(params).dense()


def channels(sim: Simulation, t: int = 0) -> Tensor:
    """The true channels of a round, [S, M]."""
    return torch.stack([torch.from_numpy(world.coeff[t]) for world in sim.worlds])
