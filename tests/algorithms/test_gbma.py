"""GBMA: its limit, and the moments of its weights."""

import math

import torch

from tests.algorithms.worlds import NOISE_FREE, channels, gradients, make
from tests.conftest import TINY_PARAMS


def test_gbma_is_parallel_to_opc_with_much_noise() -> None:
    """Both then send at full amplitude; OPC's factor differs by Σ|h|/Σ E|h|."""
    loud = {"radio.noise_dbm_hz": -60.0, "algorithm.norm_limit": 2.0}
    gbma = make("gbma", loud)
    opc = make("opc", {**loud, "algorithm.norms": "clip", "algorithm.renormalise": True})
    opc_step = opc.step(opc.init(), 0)
    h = channels(gbma).abs()
    updates = gradients(gbma, gbma.problem.initial)
    clipped = updates * (2.0 / updates.norm(dim=-1).clamp(min=2.0))[..., None]
    mean_size = torch.stack([torch.from_numpy(world.mean_gain[0]) for world in gbma.worlds]).mul(math.pi / 4).sqrt()
    step = gbma.step(gbma.init(), 0)
    moved = (step.state.params - gbma.problem.initial) / gbma.config.training.lr_at(0)
    r = math.sqrt(TINY_PARAMS * gbma.problem.symbol_energy_j) / 2.0
    noise = gbma.air.noise(gbma.seeds, "noise", 0, TINY_PARAMS) * gbma.problem.noise_var_j**0.5
    expected = ((h[..., None] * clipped).sum(1) + noise / r) / mean_size.sum(-1, keepdim=True)
    assert torch.allclose(moved, expected, rtol=1e-9, atol=1e-9)
    assert torch.allclose(step.info.noise_std, gbma.problem.noise_var_j**0.5 / r / mean_size.sum(-1), rtol=1e-9)
    weights = opc_step.info.weights * updates.norm(dim=-1).clamp(min=2.0) / 2.0  # of the clipped updates
    parallel = weights / weights.sum(-1, keepdim=True)
    assert torch.allclose(parallel, h / h.sum(-1, keepdim=True), rtol=1e-6)
    assert torch.allclose(step.energy_ratio, torch.ones(2, dtype=torch.float64), rtol=1e-9)


def test_gbma_weights_have_rayleighs_mean_and_variance() -> None:
    """E w_i = E|h_i|/(m μ), Var w_i = Λ_i (1 − π/4)/(m μ)², within 5 standard errors, from what the model moves by."""
    quiet = {"experiment.rounds": 4000, "experiment.seeds": [0], "training.lr_schedule": "constant", **NOISE_FREE}
    sim = make("gbma", {**quiet, "algorithm.norm_limit": 1e3})
    gain = torch.from_numpy(sim.worlds[0].mean_gain[0])
    size = (math.pi / 4 * gain).sqrt()
    batches, made = sim.sampler.at(0), []
    updates = gradients(sim, sim.problem.initial)[0]
    for t in range(4000):
        step = sim.take(sim.init(), sim.round_at(t, batches=batches))
        made.append((step.state.params - sim.problem.initial)[0] / sim.config.training.lr_at(0))
    weights = torch.linalg.lstsq(
        updates.t(), torch.stack(made).t()
    ).solution.t()  # Σ w_i Δ_i, six of them in 53 dimensions
    variance = gain * (1 - math.pi / 4) / size.sum() ** 2
    assert ((weights.mean(0) - size / size.sum()).abs() < 5 * (variance / 4000).sqrt()).all()
    assert (weights.var(0) / variance - 1).abs().max() < 5 * math.sqrt(
        2.25 / 4000
    )  # a Rayleigh variable's kurtosis 3.25
