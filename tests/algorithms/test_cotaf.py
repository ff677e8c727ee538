"""COTAF: truncated inversion with the largest of all norms."""

import math

import torch

from tests.algorithms.worlds import NOISE_FREE, gradients, make
from tests.conftest import TINY_GAMMA


def test_cotaf_is_truncated_inversion_with_the_largest_of_all_norms() -> None:
    """x^{t+1} = x^t + η (mean_A Δ_i + B/(γ|A|) z), B over all devices, with the very noise of the air."""
    sim = make("cotaf")
    state = sim.init()
    seen, louder = set(), False
    for t in range(12):
        updates = gradients(sim, state.params, t)
        h = torch.stack([torch.from_numpy(world.coeff[t]) for world in sim.worlds])
        full = h.abs() * math.sqrt(sim.problem.num_params * sim.problem.symbol_energy_j)
        active = full >= sim.algorithm.gamma
        bound = updates.norm(dim=-1).amax(-1)
        noise = sim.air.noise(sim.seeds, "noise", t, sim.problem.num_params) * sim.problem.noise_var_j**0.5
        count = active.sum(-1)
        total = torch.where(active[..., None], updates, 0.0).sum(1) + (bound / sim.algorithm.gamma)[:, None] * noise
        expected = torch.where(
            (count > 0)[:, None],
            state.params + sim.config.training.lr_at(t) * total / count.clamp(min=1)[:, None],
            state.params,
        )
        seen |= set(count.tolist())
        step = sim.step(state, t)
        assert torch.allclose(step.state.params, expected, rtol=1e-9, atol=1e-10)
        heard = torch.where(active, updates.norm(dim=-1), 0.0).amax(-1)
        assert torch.allclose(step.info.norm_bound, heard, rtol=1e-12)
        louder |= bool((bound > heard).any())
        state = step.state
    assert len(seen) > 2
    assert louder


def test_cotaf_equals_ota_fedavg_where_the_loudest_device_is_active() -> None:
    """With everybody active B over all is B over A, and COTAF is FedOAG's uplink without memory, noise included."""
    keys = {"algorithm.gamma": TINY_GAMMA * 1e-2, "cell.radius_m": 200.0, "radio.noise_dbm_hz": -240.0}
    one, other = make("cotaf", keys), make("ota-fedavg", keys)
    a, b = one.init(), other.init()
    for t in range(4):
        step, same = one.step(a, t), other.step(b, t)
        assert step.info.active.all()
        assert torch.allclose(step.info.norm_bound, same.info.norm_bound, rtol=1e-9)
        a, b = step.state, same.state
    assert torch.allclose(a.params, b.params, rtol=1e-9, atol=1e-10)
    quiet = make("cotaf", {**keys, **NOISE_FREE})
    assert not torch.allclose(quiet.step(quiet.init(), 0).state.params, one.step(one.init(), 0).state.params, rtol=1e-4)
