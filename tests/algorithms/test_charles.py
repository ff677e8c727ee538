"""CHARLES: its definition, more steps for weak channels, the energy limit."""

import math

import torch

from tests.algorithms.worlds import NOISE_FREE, channels, make
from tests.conftest import TINY_GAMMA, TINY_PARAMS


def test_charles_with_strong_channels_is_fedavg() -> None:
    """All devices take s steps and are sent in full: D̂ = s mean Δ_i/s."""
    keys = {**NOISE_FREE, "algorithm.gamma": TINY_GAMMA * 1e-6, "algorithm.norm_limit": 100.0}
    sim = make("charles", {**keys, "algorithm.least_steps": 9})  # more than local_steps = 3
    other = make("fedavg")
    one, same = sim.step(sim.init(), 0), other.step(other.init(), 0)
    assert torch.allclose(one.state.params, same.state.params, rtol=0, atol=1e-9)
    assert (one.info.extra["sent_whole"] == 1).all()
    assert (one.info.extra["steps_taken"] == 3).all()


def test_charles_is_its_definition_with_unequal_steps_and_noise() -> None:
    """D̂ = η_g s G/(m γ) (Σ min(γ/G, √(d E_s) |h_i|/‖u_i‖) u_i + z), u_i = Δ_i/τ_i of τ_i = τ_min ρ_i² steps."""
    keys = {"algorithm.least_steps": 1, "algorithm.server_lr": 0.7, "algorithm.norm_limit": 0.3}
    sim = make("charles", {**keys, "experiment.rounds": 20})
    whole = set()
    for t in range(20):
        full = channels(sim, t).abs() * math.sqrt(TINY_PARAMS * sim.problem.symbol_energy_j)
        gamma = sim.algorithm.gamma
        steps = (gamma / full).square().ceil().clamp(1, 3)
        each = sim.round_at(t).train(sim.problem.initial, steps=steps.long()).dense() / steps[..., None]
        arrives = torch.minimum(torch.full_like(full, gamma / 0.3), full / each.norm(dim=-1))
        noise = sim.air.noise(sim.seeds, "noise", t, TINY_PARAMS) * sim.problem.noise_var_j**0.5
        rescale = 0.7 * 3 * 0.3 / (6 * gamma)
        expected = rescale * ((arrives[..., None] * each).sum(1) + noise)
        step = sim.step(sim.init(), t)
        moved = (step.state.params - sim.problem.initial) / sim.config.training.lr_at(t)
        assert torch.allclose(moved, expected, rtol=1e-8, atol=1e-9)
        assert torch.allclose(step.info.noise_std, torch.full((2,), rescale * sim.problem.noise_var_j**0.5).double())
        assert torch.allclose(step.info.weights, rescale * arrives / steps)
        assert torch.allclose(step.energy_ratio, (arrives / full * each.norm(dim=-1)).square().amax(-1), rtol=1e-9)
        whole |= set((arrives == gamma / 0.3).flatten().tolist())
    assert whole == {False, True}


def test_charles_gives_weak_channels_more_steps_and_keeps_the_energy_limit() -> None:
    sim = make("charles", {"algorithm.least_steps": 1, "experiment.rounds": 20})
    steps = []
    for t in range(20):
        step = sim.step(sim.init(), t)
        assert float(step.energy_ratio.max()) <= 1 + 1e-12
        h = torch.stack([torch.from_numpy(world.coeff[t]) for world in sim.worlds]).abs()
        full = h * math.sqrt(TINY_PARAMS * sim.problem.symbol_energy_j)
        expected = (sim.algorithm.gamma / full).square().ceil().clamp(1, 3)
        assert torch.allclose(step.info.extra["steps_taken"], expected.mean(-1))
        steps += expected.flatten().tolist()
    assert len(set(steps)) == 3
