"""FedPBC, FedAWE and MIFA: what they are without a radio, written again in a few lines."""

from typing import Any

import pytest
import torch
from torch import Tensor

from otafl.simulation.build import Simulation
from tests.algorithms.test_fedoag import NOISE_FREE
from tests.conftest import make_config, simulate

KEYS = {"cell.devices": 6, "experiment.rounds": 20, **NOISE_FREE}


def make(algorithm: str, keys: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config(algorithm, {**KEYS, **(keys or {})}))


def test_fedoag_without_noise_is_fedpbc() -> None:
    """F6: identical iterates, devices' models included."""
    one, other = make("fedoag"), make("fedpbc")
    state, same = one.init(), other.init()
    for t in range(20):
        (state, info, *_), (same, info_same, *_) = one.step(state, t), other.step(same, t)
        assert torch.equal(info.active, info_same.active)
        assert torch.allclose(state.params, same.params, rtol=0, atol=1e-11)
        assert torch.allclose(state.devices.models, same.devices.models, rtol=0, atol=1e-11)


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_fedawe_is_its_definition(server_lr: float) -> None:
    """x^{t+1} = mean over A of x_i − η_g k_i (x_i − x̃_i), k_i = t − τ_i; silent devices do nothing."""
    sim = make("fedawe", {"algorithm.server_lr": server_lr})
    state, local = sim.init(), sim.problem.initial[:, None].repeat(1, 6, 1)
    server, last = sim.problem.initial.clone(), -torch.ones(2, 6)
    echoes = set()
    for t in range(20):
        ends = sim.round_at(t).train(local).end
        state, info, *_ = sim.step(state, t)
        for s in range(2):
            active = info.active[s]
            if not active.any():
                continue
            k = (t - last[s])[active, None].double()
            echoes |= set(k.flatten().tolist())
            server[s] = (local[s, active] - server_lr * k * (local[s, active] - ends[s, active])).mean(0)
            local[s, active], last[s, active] = server[s], float(t)
        assert torch.allclose(state.params, server, rtol=0, atol=1e-10)
        assert torch.allclose(state.devices.models, local, rtol=0, atol=1e-10)
    assert len(echoes) > 2


def test_mifa_is_its_definition() -> None:
    """x^{t+1} = x^t + (1/m) Σ M_i with M_i the latest update of each device, 0 before its first."""
    sim = make("mifa")
    state, server = sim.init(), sim.problem.initial.clone()
    memory: Tensor = torch.zeros(2, 6, sim.objective.num_params, dtype=torch.float64)
    for t in range(20):
        latest = sim.round_at(t).train(server).end - server[:, None]
        state, info, *_ = sim.step(state, t)
        memory = torch.where(info.active[..., None], latest, memory)
        server = server + memory.sum(1) / 6
        assert torch.allclose(state.params, server, rtol=0, atol=1e-10)
    assert (memory.norm(dim=-1) > 0).sum() < 12  # somebody has never been heard


@pytest.mark.parametrize("algorithm", ["fedpbc", "fedawe", "mifa"])
def test_everybody_active_is_ideal_fedavg(algorithm: str) -> None:
    one, other = make(algorithm, {"algorithm.gamma": 1e-20}), make("fedavg")
    state, ideal = one.init(), other.init()
    for t in range(6):
        state, ideal = one.step(state, t).state, other.step(ideal, t).state
        assert torch.allclose(state.params, ideal.params, rtol=0, atol=1e-11)
