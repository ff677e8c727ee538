"""CA-DSGD: reconstruction, error feedback, and what is heard."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from otafl.algorithms.parts.projection import Projection, reconstruct
from otafl.radio.vectors import Vectors
from tests.algorithms.worlds import NOISE_FREE, gradients, make
from tests.conftest import TINY_PARAMS


@pytest.mark.parametrize(("share", "steps", "most"), [(0.5, 60, 1e-3), (0.25, 60, 2e-2)])
def test_amp_recovers_sparse_vectors(share: float, steps: int, most: float) -> None:
    """Without noise, at q = 5 k; the projection keeps lengths in the mean."""
    rng = np.random.default_rng(8)
    size, rows = 4000, int(4000 * share)
    projection = Projection.of(size, rows, torch.zeros(1, dtype=torch.float64))
    x = np.zeros((3, size))
    for row in x:
        row[rng.permutation(size)[: rows // 5]] = rng.standard_normal(rows // 5)
    sparse = torch.from_numpy(x)
    heard = projection.apply(sparse)
    assert torch.allclose(heard.norm(dim=-1) / sparse.norm(dim=-1), torch.ones(3, dtype=torch.float64), atol=0.1)
    found = reconstruct(projection, heard, steps)
    assert ((found - sparse).norm(dim=-1) / sparse.norm(dim=-1) < most).all()
    full = Projection.of(size, size, torch.zeros(1, dtype=torch.float64))  # orthonormal: its transpose is its inverse
    assert torch.allclose(full.back(full.apply(sparse)), sparse, atol=1e-10)


def test_ca_dsgd_keeps_what_it_does_not_send() -> None:
    """What is sent and what is kept are all; k entries are sent, no longer than G, if they are heard; energy."""
    keys = {"algorithm.sparsity": 0.2, "algorithm.uses": 0.9, "algorithm.pilot": 3.0, "radio.noise_dbm_hz": -205.0}
    sim = make("ca-dsgd", keys)
    state, left = sim.init(), torch.zeros(2, 6, TINY_PARAMS, dtype=torch.float64)
    count = math.ceil(0.2 * TINY_PARAMS)
    projection = Projection.of(TINY_PARAMS, math.ceil(0.9 * TINY_PARAMS) - 1, left)
    heard, shortened = set(), set()
    for t in range(12):
        v = gradients(sim, state.params, t) + left
        before, step = state.params.clone(), sim.step(state, t)
        places = v.abs().topk(count, dim=-1).indices
        sent = torch.zeros_like(v).scatter(-1, places, v.gather(-1, places))
        length = projection.apply(sent).norm(dim=-1, keepdim=True)
        sent, moved = sent * (3.0 / length).clamp(max=1), (step.state.params != before).any(-1)
        expected = torch.where(step.info.active[..., None] & moved[:, None, None], v - sent, v)
        assert torch.allclose(step.state.unsent.values, expected, rtol=0, atol=1e-10)
        assert float(step.energy_ratio.max()) <= 1 + 1e-9
        heard |= set(zip(step.info.active.any(-1).tolist(), moved.tolist(), strict=True))
        assert moved.tolist() == step.info.extra["heard"].bool().tolist()
        shortened |= set((length > 3.0).flatten().tolist())
        state, left = step.state, expected
    assert heard >= {(True, True), (True, False)}
    assert shortened == {False, True}


def test_ca_dsgd_is_heard_however_much_has_been_kept() -> None:
    """What is sent has at most norm G, so that the last symbol does not drown in it."""
    sim = make("ca-dsgd", {"radio.noise_dbm_hz": -223.0})
    state = sim.init()
    much = torch.full_like(state.unsent.values, 1e6)
    step = sim.take(dataclasses.replace(state, unsent=Vectors(much)), sim.round_at(0))
    assert step.info.active.any(-1).all()
    assert (step.info.extra["heard"] == 1).all()


def test_ca_dsgd_hears_the_weighted_mean_of_what_is_sent() -> None:
    """No noise, everything sent, one step without a threshold: D̂ = Pᵀ Σ c_i w_i/Σ c_i, c_i ∝ 1/√(‖w_i‖² + G²).

    w_i is P v_i, shortened to G.
    """
    keys = {"algorithm.sparsity": 1.0, "algorithm.uses": 1.0, "algorithm.gamma": 1e-25, "algorithm.pilot": 3.0}
    sim = make("ca-dsgd", {**keys, "algorithm.steps": 1, "algorithm.threshold": 0.0, **NOISE_FREE})
    updates = gradients(sim, sim.problem.initial)
    projection = Projection.of(TINY_PARAMS, TINY_PARAMS - 1, updates)
    length = projection.apply(updates).norm(dim=-1)
    shorter = (3.0 / length).clamp(max=1)
    assert set((shorter < 1).flatten().tolist()) == {False, True}
    amplitude = 1 / torch.sqrt((shorter * length).square() + 3.0**2)
    assert float(amplitude.max() / amplitude.min()) > 1.1
    mean = ((amplitude * shorter)[..., None] * updates).sum(1) / amplitude.sum(-1, keepdim=True)
    moved = (sim.step(sim.init(), 0).state.params - sim.problem.initial) / sim.config.training.lr_at(0)
    assert torch.allclose(moved, projection.back(projection.apply(mean)), rtol=1e-7, atol=1e-9)


def test_ca_dsgd_recovers_what_several_devices_send_if_it_is_sparse() -> None:
    """Six devices with 1 % each on a quarter of the uses, default settings: what is found is nearly their mean."""
    from otafl.algorithms.ca_dsgd import CADSGD

    size = 5000
    projection = Projection.of(size, size // 4 - 1, torch.zeros(1))
    generator = torch.Generator().manual_seed(0)
    sparse = torch.zeros(6, size)
    for row in sparse:
        row[torch.randperm(size, generator=generator)[: size // 100]] = torch.randn(size // 100, generator=generator)
    mean = sparse.mean(0)
    found = reconstruct(projection, projection.apply(mean), CADSGD().steps, CADSGD().threshold)
    assert float((found - mean).norm() / mean.norm()) < 0.15
    one = reconstruct(projection, projection.apply(sparse[0]), CADSGD().steps, CADSGD().threshold)
    assert float((one - sparse[0]).norm() / sparse[0].norm()) < 0.02
