"""The second circle of methods: each against what its paper's equations say exactly, and its limits."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm
from torch import Tensor

from otafl.algorithms.beamforming import receive_vectors
from otafl.algorithms.design.bits import Cell, cost, spend, split
from otafl.algorithms.parts.intervals import Intervals
from otafl.algorithms.parts.projection import Projection, reconstruct
from otafl.errors import ConfigError
from otafl.radio.digital import quantised, rates, slots
from otafl.radio.vectors import Vectors
from otafl.simulation.build import Simulation
from tests.conftest import TINY_GAMMA, TINY_PARAMS, make_config, simulate

NOISE_FREE = {"radio.noise_dbm_hz": float("-inf")}


def make(algorithm: str, keys: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config(algorithm, {"cell.devices": 6, "experiment.rounds": 20, **(keys or {})}))


def gradients(sim: Simulation, params: Tensor, t: int = 0) -> Tensor:
    """Every device's update from a model, [S, M, P]."""
    return sim.round_at(t).train(params).dense()


def channels(sim: Simulation, t: int = 0) -> Tensor:
    """The true channels of a round, [S, M]."""
    return torch.stack([torch.from_numpy(world.coeff[t]) for world in sim.worlds])


# --- COTAF ---


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


# --- GBMA ---


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


# --- OBDA, FSK-MV ---


def sign(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)


def test_obda_without_noise_is_a_majority_vote() -> None:
    sim = make("obda", NOISE_FREE)
    step = sim.step(sim.init(), 0)
    votes = torch.where(step.info.active[..., None], sign(gradients(sim, sim.problem.initial)), 0.0).sum(1)
    moved = step.state.params - sim.problem.initial
    size = sim.config.training.lr_at(0) * sim.algorithm.server_step
    clear = votes != 0
    assert clear.double().mean() > 0.5
    assert torch.equal(sign(moved)[clear], sign(votes)[clear])
    assert torch.allclose(moved.abs(), torch.full_like(moved, size), rtol=1e-9)


def test_obda_hears_a_net_vote_wrongly_as_often_as_the_q_function_says() -> None:
    """One device alone: P(wrong) = Q(γ/(√d σ_z)), over coordinates and rounds, within 5 standard errors."""
    gamma = 3.0 * TINY_GAMMA
    keys = {"cell.devices": 1, "algorithm.gamma": gamma, "experiment.rounds": 400, "experiment.seeds": [0]}
    keys["cell.radius_m"] = 100.0
    wanted = gamma / math.sqrt(TINY_PARAMS) / 0.8  # σ_z at which k = 1 vote is 0.8 standard deviations
    sim = make("obda", {**keys, "radio.noise_dbm_hz": 10 * math.log10(wanted**2 * 1e3)})
    start, wrong, total = sim.init(), 0.0, 0
    for t in range(400):
        step = sim.step(start, t)
        if step.info.active.all():
            mine = sign(gradients(sim, sim.problem.initial, t)[:, 0])
            wrong += float((sign(step.state.params - sim.problem.initial) != mine).double().sum())
            total += mine.numel()
    assert total > 5000
    expected = float(norm.sf(0.8))
    assert abs(wrong / total - expected) < 5 * math.sqrt(expected * (1 - expected) / total)


def test_obda_with_error_feedback_loses_nothing_of_one_device() -> None:
    """One device, no noise: Σ (x^{t+1} − x^t)/η_t + e_T = Σ Δ_t, the steps and what is kept are all that was learnt."""
    keys = {"cell.devices": 1, "algorithm.gamma": 1e-25, "algorithm.error_feedback": True, **NOISE_FREE}
    sim = make("obda", keys)
    state, learnt, moved = sim.init(), torch.zeros(2, TINY_PARAMS).double(), torch.zeros(2, TINY_PARAMS).double()
    for t in range(8):
        learnt += gradients(sim, state.params, t)[:, 0]
        step = sim.step(state, t)
        moved += (step.state.params - state.params) / sim.config.training.lr_at(t)
        state = step.state
    assert torch.allclose(moved + state.unsent.values[:, 0], learnt, rtol=0, atol=1e-10)
    assert float(state.unsent.values.abs().max()) > 0


def test_obda_silent_devices_keep_all() -> None:
    sim = make("obda", {"algorithm.error_feedback": True})
    state, left, silent = sim.init(), torch.zeros(2, 6, TINY_PARAMS, dtype=torch.float64), 0
    for t in range(6):
        total = gradients(sim, state.params, t) + left
        step = sim.step(state, t)
        quiet = ~step.info.active
        silent += int(quiet.sum())
        assert torch.allclose(step.state.unsent.values[quiet], total[quiet], rtol=0, atol=1e-10)
        state, left = step.state, step.state.unsent.values.clone()
    assert silent


def test_obda_takes_the_sign_of_the_noise_where_nobody_votes() -> None:
    """The server has no side link: x moves by η η_s sign(z) in every coordinate."""
    sim = make("obda", {"algorithm.gamma": 1e3})
    step = sim.step(sim.init(), 0)
    assert not step.info.active.any()
    noise = sim.air.noise(sim.seeds, "noise", 0, TINY_PARAMS)
    expected = sim.problem.initial + sim.config.training.lr_at(0) * sim.algorithm.server_step * sign(noise)
    assert torch.allclose(step.state.params, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["obda", "fsk-mv"])
def test_one_device_without_noise_is_sign_sgd(algorithm: str) -> None:
    keys = {"cell.devices": 1, **NOISE_FREE} | ({"algorithm.gamma": 1e-25} if algorithm == "obda" else {})
    sim = make(algorithm, keys)
    moved = sim.step(sim.init(), 0).state.params - sim.problem.initial
    expected = sign(gradients(sim, sim.problem.initial)[:, 0]) * sim.algorithm.server_step
    assert torch.allclose(moved, sim.config.training.lr_at(0) * expected, rtol=1e-9)


def test_fsk_mv_follows_the_louder_tone_and_near_devices_outvote_far_ones() -> None:
    """Two near devices against four far ones: where they disagree, the near ones win nearly always."""
    places = [[at, 0.0] for at in (50.0, 50.0, 900.0, 900.0, 900.0, 900.0)]
    sim = make("fsk-mv", {"experiment.rounds": 40, "cell.placement": "given", "cell.positions_m": places})
    won, total = 0.0, 0
    for t in range(40):
        votes = sign(gradients(sim, sim.problem.initial, t))
        near, rest = votes[:, 0], votes[:, 2:].sum(1)
        contested = (votes[:, 0] == votes[:, 1]) & (rest * near <= -2)  # three of the four, or all, are against
        moved = sign(sim.step(sim.init(), t).state.params - sim.problem.initial)
        won += float((moved == near)[contested].double().sum())
        total += int(contested.sum())
    assert total > 50
    assert won / total > 0.95


@pytest.mark.parametrize("antennas", [1, 3])
def test_fsk_mv_hears_gains_times_votes(antennas: int) -> None:
    """E[e_+ − e_−] = 2 E_s N Σ Λ_i s_i, whatever the noise, within 5 standard errors; energy at the limit."""
    from otafl.algorithms.fsk_mv import FSKMV
    from otafl.core.round import Round

    keys = {"radio.antennas": antennas, "experiment.rounds": 1500, "experiment.seeds": [0], "cell.devices": 3}
    sim = make("fsk-mv", {**keys, "training.local_steps": 1})
    heard: list[Tensor] = []

    class Ear(Round):
        def uplink(self, *arguments: Any, **options: Any) -> Tensor:
            heard.append(super().uplink(*arguments, **options))
            return heard[-1]

    # the same votes in every round: the updates of round 0
    batches = sim.sampler.at(0)
    votes = sign(gradients(sim, sim.problem.initial))
    for t in range(1500):
        made: Any = sim.round_at(t, batches=batches)
        made.__class__, made.lr = Ear, sim.config.training.lr_at(0)
        FSKMV().step(sim.init(), made)
    energy = torch.stack(heard)[:, 0].reshape(1500, TINY_PARAMS, 2)
    difference = energy[..., 0] - energy[..., 1]
    gain = torch.from_numpy(sim.worlds[0].antenna_gain[0])
    expected = 2 * sim.problem.symbol_energy_j * antennas * (gain[:, None] * votes[0]).sum(0)
    error = difference.std(0) / math.sqrt(1500)
    assert ((difference.mean(0) - expected).abs() < 5 * error).all()
    assert float(sim.step(sim.init(), 0).energy_ratio.max()) == pytest.approx(1.0, rel=1e-5)


# --- antennas ---


@pytest.mark.parametrize("antennas", [1, 4, 64])
def test_blind_reception_has_weights_that_sum_to_one(antennas: int) -> None:
    """w_i = Re Σ_n s_n* h_{i,n}/Σ_n |s_n|² sum to 1 surely, and are what the server's model moves by without noise."""
    sim = make("blind", {"radio.antennas": antennas, **NOISE_FREE})
    for t in range(3):
        h = torch.stack([torch.from_numpy(world.each[t]) for world in sim.worlds])
        s = h.sum(1, keepdim=True)
        weights = (s.conj() * h).sum(-1).real / s.abs().square().sum(-1)
        assert torch.allclose(weights.sum(-1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)
        moved = sim.step(sim.init(), t).state.params - sim.problem.initial
        expected = (weights[..., None] * gradients(sim, sim.problem.initial, t)).sum(1)
        assert torch.allclose(moved, sim.config.training.lr_at(t) * expected, rtol=1e-8, atol=1e-11)


def test_blind_weights_go_to_the_gains_as_one_over_the_root_of_antennas() -> None:
    """The weights that the model moves by, from the updates of six devices that lie in 53 dimensions."""
    off = []
    for antennas in (8, 128):
        places = [[at, 0.0] for at in (300.0, 310.0, 320.0, 350.0, 400.0, 450.0)]
        keys = {"cell.placement": "given", "cell.positions_m": places, "experiment.rounds": 150, **NOISE_FREE}
        sim = make("blind", {**keys, "radio.antennas": antennas, "experiment.seeds": [0]})
        gain = torch.from_numpy(sim.worlds[0].antenna_gain[0])
        found = []
        for t in range(150):
            moved = (sim.step(sim.init(), t).state.params - sim.problem.initial) / sim.config.training.lr_at(t)
            updates = gradients(sim, sim.problem.initial, t)[0]
            found.append(torch.linalg.lstsq(updates.t(), moved.t()).solution[:, 0])
        off.append(float((torch.stack(found) - gain / gain.sum()).abs().mean()))
    assert off[1] < 0.06
    assert off[0] / off[1] == pytest.approx(4.0, rel=0.2)


def test_beamforming_with_one_antenna_is_vanilla() -> None:
    """The same mean, noise and energy; z is turned by the phase of f, which has no meaning for a real sum."""
    one, other = make("beamforming"), make("vanilla")
    for t in range(4):
        step, same = one.step(one.init(), t), other.step(other.init(), t)
        assert torch.allclose(step.info.noise_std, same.info.noise_std, rtol=1e-9)
        assert torch.allclose(step.energy_ratio, same.energy_ratio, rtol=1e-9)
    one, other = make("beamforming", NOISE_FREE), make("vanilla", NOISE_FREE)
    assert torch.allclose(one.step(one.init(), 0).state.params, other.step(other.init(), 0).state.params, atol=1e-10)
    free, ideal = make("beamforming", {**NOISE_FREE, "radio.antennas": 3}), make("fedavg")
    assert torch.allclose(free.step(free.init(), 0).state.params, ideal.step(ideal.init(), 0).state.params, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["beamforming", "blind"])
def test_noise_after_combining_antennas_is_as_strong_as_reported(algorithm: str) -> None:
    """Over rounds from one model: (x^{t+1} − the same without noise)/η has standard deviation noise_std."""
    keys = {"radio.antennas": 4, "experiment.rounds": 60, "experiment.seeds": [0]}
    loud, quiet = make(algorithm, keys), make(algorithm, {**keys, **NOISE_FREE})
    ratios, smaller = [], []
    for t in range(60):
        step, free = loud.step(loud.init(), t), quiet.step(quiet.init(), t)
        noise = (step.state.params - free.state.params) / loud.config.training.lr_at(t)
        ratios.append(noise / step.info.noise_std[:, None])
        smaller.append(step.info.noise_std)
    values = torch.stack(ratios)
    assert abs(float(values.std()) - 1) < 5 / math.sqrt(2 * values.numel())
    if algorithm == "beamforming":
        one = make(algorithm, {**keys, "radio.antennas": 1})
        alone = torch.stack([one.step(one.init(), t).info.noise_std for t in range(60)])
        assert torch.stack(smaller).median() < 0.7 * alone.median()


def test_blind_reception_of_a_cohort_sums_to_one_over_the_cohort() -> None:
    sim = make("blind", {"radio.antennas": 4, "cell.cohort": 3, **NOISE_FREE})
    for t in range(5):
        round_ = sim.round_at(t)
        who = round_.everyone
        assert (who.sum(-1) == 3).all()
        h = torch.where(who[..., None], torch.stack([torch.from_numpy(world.each[t]) for world in sim.worlds]), 0.0)
        s = h.sum(1, keepdim=True)
        weights = (s.conj() * h).sum(-1).real / s.abs().square().sum(-1)
        assert torch.allclose(weights.sum(-1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)
        moved = sim.step(sim.init(), t).state.params - sim.problem.initial
        expected = (weights[..., None] * gradients(sim, sim.problem.initial, t)).sum(1)
        assert torch.allclose(moved, sim.config.training.lr_at(t) * expected, rtol=1e-8, atol=1e-11)


def least(f: Tensor, h: Tensor) -> Tensor:
    return torch.einsum("...n,...mn->...m", f.conj(), h).abs().square().amin(-1)


def test_receive_vectors_reach_the_best_of_a_fine_grid() -> None:
    """Two antennas, three devices: f = (cos a, e^{jb} sin a) over a grid; within one percent."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(40, 3, 2, generator=generator, dtype=torch.complex128)
    h = h * torch.rand(40, 3, 1, generator=generator, dtype=torch.float64).mul(2).exp()
    a, b = torch.meshgrid(torch.linspace(0, math.pi / 2, 241), torch.linspace(0, 2 * math.pi, 481), indexing="ij")
    a, b = a.double().flatten(), b.double().flatten()
    grid = torch.stack([a.cos().to(h.dtype), torch.polar(a.sin(), b)], -1)
    best = torch.einsum("kn,bmn->bkm", grid.conj(), h).abs().square().amin(-1).amax(-1)
    found = least(receive_vectors(h, torch.ones(40, 3, dtype=torch.bool), 60), h)
    assert (found > 0.99 * best).all()


def test_receive_vectors_are_never_below_a_start_and_improve_with_antennas() -> None:
    generator = torch.Generator().manual_seed(2)
    every = torch.ones(20, 8, dtype=torch.bool)
    h = torch.randn(20, 8, 16, generator=generator, dtype=torch.complex128)
    values = []
    for antennas in (1, 4, 16):
        part = h[..., :antennas]
        f = receive_vectors(part, every, 30)
        assert torch.allclose(torch.linalg.vector_norm(f, dim=-1), torch.ones(20, dtype=torch.float64))
        reached = least(f, part)
        starts = [part.sum(-2)] + [torch.eye(antennas, dtype=h.dtype)[n].expand(20, -1) for n in range(antennas)]
        for start in starts:
            start = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
            assert (reached >= least(start, part) * (1 - 1e-9)).all()
        values.append(float(reached.mean()))
    assert values[0] < values[1] < values[2]


# --- FedAU, FedVARP ---


def test_intervals_are_the_authors() -> None:
    """A device that is there every third round has intervals of 3; silence is cut at K; a new one counts next round."""
    mask = torch.tensor([[True, False, False]])
    found = Intervals.none(mask)
    history = []
    for t in range(9):
        history.append(found.mean[0].tolist())
        active = torch.tensor([[True, t % 3 == 2, False]])
        found = found.after(active, cutoff=4)
    assert history[0] == [1.0, 1.0, 1.0]
    assert [row[1] for row in history] == [1, 1, 1, 3, 3, 3, 3, 3, 3]
    assert [row[2] for row in history] == [1, 1, 1, 1, 4, 4, 4, 4, 4]
    assert all(row[0] == 1 for row in history)


def test_fedau_with_everybody_there_is_fedavg_and_its_weights_estimate_one_over_p() -> None:
    everybody = {"algorithm.gamma": 1e-25}
    one, other = make("fedau", everybody), make("fedavg")
    a, b = one.init(), other.init()
    for t in range(4):
        a, b = one.step(a, t).state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-12)
    rng = np.random.default_rng(3)
    found = Intervals.none(torch.zeros(1, 3, dtype=torch.bool))
    for _ in range(4000):
        found = found.after(torch.from_numpy(rng.random((1, 3)) < [0.9, 0.5, 0.2]), cutoff=50)
    for p, mean in zip((0.9, 0.5, 0.2), found.mean[0].tolist(), strict=True):  # geometric intervals
        assert abs(mean - 1 / p) < 5 * math.sqrt((1 - p) / p**2 / (4000 * p))


def test_fedaus_server_step_scales_the_first_round() -> None:
    one, other = make("fedau", {"algorithm.server_lr": 0.4}), make("fedau")
    start = one.problem.initial
    steps = [sim.step(sim.init(), 0).state.params - start for sim in (one, other)]
    assert torch.allclose(steps[0], 0.4 * steps[1], rtol=1e-9, atol=1e-14)
    assert float(steps[1].abs().max()) > 0


def test_fedau_over_the_air_without_noise_is_fedau() -> None:
    one, other = make("ota-fedau", NOISE_FREE), make("fedau")
    a, b = one.init(), other.init()
    for t in range(10):
        a, b = one.step(a, t).state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-10)


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_fedvarp_is_its_definition(server_lr: float) -> None:
    """D̂ = mean_A (Δ_i − y_i) + mean y; a round with nobody changes nothing."""
    sim = make("fedvarp", {"algorithm.server_lr": server_lr, "algorithm.gamma": 4 * TINY_GAMMA})
    state, server, empty = sim.init(), sim.problem.initial.clone(), 0
    y = torch.zeros(2, 6, TINY_PARAMS, dtype=torch.float64)
    for t in range(20):
        updates = gradients(sim, server, t)
        state, info, *_ = sim.step(state, t)
        for s in range(2):
            active = info.active[s]
            if not active.any():
                empty += 1
                continue
            mean = (updates[s] - y[s])[active].mean(0) + y[s].mean(0)
            server[s] = server[s] + server_lr * sim.config.training.lr_at(t) * mean
            y[s][active] = updates[s][active]
        assert torch.allclose(state.params, server, rtol=0, atol=1e-10)
    assert 0 < empty < 30


# --- digital ---


def test_the_quantiser_is_unbiased_and_bounded() -> None:
    rng = np.random.default_rng(4)
    v = torch.from_numpy(rng.standard_normal(50)) * torch.linspace(0, 3, 50)
    for bits in (1, 2, 4):
        drawn = torch.from_numpy(rng.random((20_000, 50)))
        found = quantised(v.expand(20_000, -1), bits, drawn)
        step = 2 * float(v.abs().max()) / (2**bits - 1)
        assert len(torch.unique((found / step * 1e6).round())) <= 2**bits
        assert ((found - v).abs() <= step * (1 + 1e-9)).all()
        error = found.std(0) / math.sqrt(20_000)
        assert ((found.mean(0) - v).abs() < 5 * error + 1e-12).all()
        assert (found.var(0) <= step**2 / 4 * 1.02 + 1e-12).all()
    assert torch.equal(quantised(torch.zeros(3), 4, torch.rand(3)), torch.zeros(3))


def test_slots_and_energies_by_hand() -> None:
    """Two devices: rate B log2(1 + |h|² E_s/(2σ²)); the better one first, the other only if it fits."""
    h = torch.tensor([[2.0, 1.0]], dtype=torch.complex128)
    rate = rates(h, 2.0, 0.5, 100.0)
    assert rate.tolist()[0] == pytest.approx([100 * math.log2(1 + 8), 100 * math.log2(1 + 2)])
    bits, who = torch.full((1, 2), 1000.0, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    first, second = 1000 / (100 * math.log2(9)), 1000 / (100 * math.log2(3))
    for deadline, through in ((first - 0.01, [0, 0]), (first + 0.01, [1, 0]), (first + second + 0.01, [1, 1])):
        delivered, seconds = slots(bits, rate, who, deadline)
        assert delivered.tolist() == [list(map(bool, through))]
        assert seconds.tolist()[0] == pytest.approx([first * through[0], second * through[1]])
    assert slots(bits, rate, torch.tensor([[False, True]]), 100.0)[0].tolist() == [[False, True]]
    assert slots(bits, torch.zeros_like(rate), who, 1e9)[0].tolist() == [[False, False]]


def test_digital_with_many_bits_and_time_is_error_free_averaging() -> None:
    keys = {"algorithm.bits": 24, "algorithm.deadline_s": 8.0, "radio.tx_power_dbm": 60.0, "cell.radius_m": 100.0}
    one, other = make("digital", keys), make("fedavg")
    a, b = one.init(), make("fedavg", {"cell.radius_m": 100.0}).init()
    for t in range(4):
        step = one.step(a, t)
        assert step.info.active.all()
        a, b = step.state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-6)


def test_digital_time_and_energy_reach_the_ledger() -> None:
    """uplink_s is the sum of slots and energy_j is P times it, P = E_s B; who does not fit spends nothing."""
    import otafl

    keys = {"experiment.rounds": 3, "algorithm.bits": 4, "radio.tx_power_dbm": 20.0}
    sim = make("digital", keys)
    result = otafl.run(sim.config, device="cpu")
    power = sim.config.radio.symbol_energy_j * sim.config.radio.bandwidth_hz
    seconds = np.zeros(2)
    for t in range(3):
        for s, world in enumerate(sim.worlds):
            snr = np.abs(world.coeff[t]) ** 2 * sim.problem.symbol_energy_j / (2 * sim.problem.noise_var_j)
            slot = np.sort((4 * TINY_PARAMS + 32) / (1e6 * np.log2(1 + snr)))
            seconds[s] += slot[np.cumsum(slot) <= 8.0].sum()
    assert result.metrics["uplink_s"][:, -1] == pytest.approx(seconds, rel=1e-7)  # log1p here, log2(1 + x) above
    assert result.metrics["energy_j"][:, -1] == pytest.approx(power * seconds, rel=1e-7)
    assert (result.metrics["channel_uses"] == 0).all()


def test_digital_averages_those_that_are_delivered() -> None:
    """A deadline that only some meet: the mean is over them, and they are the ones with the best channels."""
    keys = {"algorithm.bits": 24, "radio.tx_power_dbm": 0.0, "radio.bandwidth_hz": 1e3}
    sim, counts = make("digital", keys), set()
    for t in range(10):
        step = sim.step(sim.init(), t)
        who, h = step.info.active, channels(sim, t).abs()
        updates = gradients(sim, sim.problem.initial, t)
        for s in range(2):
            counts.add(int(who[s].sum()))
            if who[s].any():
                moved = (step.state.params - sim.problem.initial)[s] / sim.config.training.lr_at(t)
                assert torch.allclose(moved, updates[s, who[s]].mean(0), rtol=0, atol=1e-5)
                assert h[s, who[s]].min() > torch.where(who[s], 0.0, h[s]).max()
            else:
                assert torch.equal(step.state.params[s], sim.problem.initial[s])
    assert counts & {1, 2, 3, 4, 5}


def test_a_deadline_beyond_the_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="a round lasts 8 s"):
        make_config("digital", {"algorithm.deadline_s": 9.0})
    make_config("digital", {"algorithm.deadline_s": 9.0, "fading.round_s": 10.0})


# --- the hybrid ---


def rounding(error: np.ndarray, bits: np.ndarray) -> Any:
    """Σ A_i/(2^{r_i} − 1)²."""
    return (error / (2.0**bits - 1) ** 2).sum(-1)


def bits_of(error: np.ndarray, time: np.ndarray, budget: float) -> np.ndarray:
    numbers = (torch.from_numpy(values)[None] for values in (error, time))
    everybody = torch.ones(1, 1, len(error), dtype=torch.bool)
    return spend(*numbers, everybody, torch.full((1, 1), budget, dtype=torch.float64))[0, 0].numpy()


def relaxed(error: np.ndarray, time: np.ndarray, budget: float) -> float:
    """The least error with real r_i ≥ 1, by a general solver."""
    solved = minimize(
        lambda r: float(rounding(error, r)),
        np.full(len(error), 2.0),
        bounds=[(1, 30)] * len(error),
        constraints={"type": "ineq", "fun": lambda r: budget - float((time * r).sum())},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return float(solved.fun)


def test_whole_bits_are_nearly_the_best_there_are() -> None:
    """The optimum over reals is 0.0215596 for A = (1, 4, 0.3), τ = (1, 2, 0.5), T = 14; that over integers is above."""
    error, time = np.array([1.0, 4.0, 0.3]), np.array([1.0, 2.0, 0.5])
    assert relaxed(error, time, 14.0) == pytest.approx(0.0215596, abs=2e-7)
    rng, ratios = np.random.default_rng(5), []
    grid = np.array(list(itertools.product(range(1, 13), repeat=3)), dtype=float)
    for _ in range(40):
        budget = float(time.sum() * rng.uniform(1, 6))
        found = rounding(error, bits_of(error, time, budget))
        best = rounding(error, grid[grid @ time <= budget]).min()
        assert relaxed(error, time, budget) * (1 - 1e-6) <= best <= found * (1 + 1e-12)
        ratios.append(found / best)
        error, time = np.exp(rng.normal(0, 1, 3)), np.exp(rng.normal(0, 0.5, 3))
    assert np.mean(ratios) < 1.05
    assert max(ratios) < 1.6


def test_whole_bits_fit_and_leave_no_time_for_one_more() -> None:
    rng = np.random.default_rng(6)
    for _ in range(20):
        error, time = np.exp(rng.normal(0, 1, 5)), np.exp(rng.normal(0, 1, 5))
        budget = float(time.sum() * rng.uniform(1, 6))
        bits = bits_of(error, time, budget)
        assert (bits >= 1).all()
        assert (time * bits).sum() <= budget * (1 + 1e-12)
        assert (time > budget - (time * bits).sum()).all()
    assert bits_of(np.ones(2), np.array([1.0, 1e-3]), 1e9).tolist() == [24, 24]


def test_the_split_is_the_best_of_all_subsets() -> None:
    """Whatever the rates: a digital device that is no weaker than the weakest analog one is analog at no cost."""
    rng = np.random.default_rng(7)
    everyone, counts = torch.ones(1, 5, dtype=torch.bool), set()
    subsets = torch.tensor(list(itertools.product([False, True], repeat=5)))[None]
    for _ in range(30):
        strength, largest = (torch.from_numpy(np.exp(rng.normal(0, s, (1, 5)))) for s in (1.5, 0.7))
        cell = Cell(size=50, noise=0.02, peak=1.0, bandwidth_hz=50.0, deadline_s=float(rng.uniform(3, 40)))
        rate = torch.from_numpy(100.0 * np.exp(rng.normal(0, 0.7, (1, 5))))
        bits, found = split(strength, largest, rate, everyone, cell)
        every = cost(strength / largest, largest, rate, everyone, subsets, cell)[1]
        assert float(found) <= float(every.min()) * (1 + 1e-9)
        digital = bits[0] > 0
        used_s = ((bits * 50 + 32) / rate)[0, digital].sum() + float((~digital).any()) * 50 / 50.0
        assert float(used_s) <= cell.deadline_s * (1 + 1e-9)
        counts.add(int(digital.sum()))
    assert len(counts) > 2
    assert split(strength, largest, rate, everyone, cell._replace(noise=0.0))[0].tolist() == [[0] * 5]


def test_seeds_are_split_alone_and_devices_outside_the_cohort_do_not_count() -> None:
    rng = np.random.default_rng(8)
    strength, largest, rate = (torch.from_numpy(np.exp(rng.normal(0, 1, (4, 7)))) for _ in range(3))
    cell = Cell(size=50, noise=0.02, peak=1.0, bandwidth_hz=50.0, deadline_s=300.0)
    who = torch.from_numpy(rng.random((4, 7)) < 0.7)
    together, errors = split(strength, largest, rate, who, cell)
    assert (together[~who] == 0).all()
    assert bool((together > 0).any())
    for s in range(4):
        alone = who[s : s + 1]
        part = [values[s : s + 1, alone[0]] for values in (strength, largest, rate)]
        bits, error = split(*part, torch.ones(1, int(alone.sum()), dtype=torch.bool), cell)
        assert torch.equal(bits[0], together[s, who[s]])
        assert float(error) == pytest.approx(float(errors[s]), rel=1e-12)


def test_hybrid_without_digital_devices_is_vanilla_with_peaks() -> None:
    """K = 0: g = √E_s min |h_i|/‖Δ_i‖_∞, everybody inverts; noise g^{-1} σ_z/m, here by the noise itself."""
    sim = make("hybrid", {"radio.bandwidth_hz": 10.0, "radio.tx_power_dbm": -50.0, "algorithm.deadline_s": 8.0})
    updates = gradients(sim, sim.problem.initial)
    step = sim.step(sim.init(), 0)
    if float(step.info.extra["digital"].sum()):
        pytest.fail("a device went digital")
    h = torch.stack([torch.from_numpy(world.coeff[0]) for world in sim.worlds]).abs()
    gamma = sim.problem.symbol_energy_j**0.5 * (h / updates.abs().amax(-1)).amin(-1)
    noise = sim.air.noise(sim.seeds, "noise", 0, TINY_PARAMS) * sim.problem.noise_var_j**0.5
    mean = updates.mean(1) + noise / (6 * gamma[:, None])
    moved = (step.state.params - sim.problem.initial) / sim.config.training.lr_at(0)
    assert torch.allclose(moved, mean, rtol=1e-8, atol=1e-10)
    assert float(step.energy_ratio.max()) <= 1 + 1e-12


def test_hybrid_adds_both_kinds_and_keeps_both_limits() -> None:
    """D̂ = (Σ_digital Q(Δ_i) + Σ_analog Δ_i + z/γ)/m: within the grid's step of the mean; |x̂| ≤ √E_s for every entry."""
    keys = {"radio.bandwidth_hz": 1e4, "radio.tx_power_dbm": 10.0, "algorithm.deadline_s": 0.1, "experiment.rounds": 30}
    sim = make("hybrid", keys)
    seen = set()
    for t in range(30):
        updates, h = gradients(sim, sim.problem.initial, t), channels(sim, t).abs()
        peaks = updates.abs().amax(-1)
        round_ = sim.round_at(t)
        bits = sim.algorithm._bits(round_, peaks.double())
        step = sim.take(sim.init(), sim.round_at(t))
        digital = bits > 0
        assert torch.equal(step.info.extra["digital"], digital.sum(-1).double())
        gamma = sim.problem.symbol_energy_j**0.5 * torch.where(digital, torch.inf, h / peaks).amin(-1)
        sent = torch.where(digital, 0.0, gamma[:, None] / h * peaks)
        assert float(sent.max()) <= sim.problem.symbol_energy_j**0.5 * (1 + 1e-9)
        noise = sim.air.noise(sim.seeds, "noise", t, TINY_PARAMS) * sim.problem.noise_var_j**0.5
        noise = torch.where(gamma[:, None].isfinite(), noise / gamma[:, None], 0.0)
        moved = (step.state.params - sim.problem.initial) / sim.config.training.lr_at(t)
        grid = torch.where(digital, 2 * peaks / (2.0 ** bits.clamp(min=1) - 1), 0.0).sum(-1, keepdim=True)
        off = 6 * moved - updates.sum(1) - noise
        assert (off.abs() <= grid * (1 + 1e-6) + 1e-9).all()
        if digital.any():
            assert float(off.abs().max()) > 0
        seen |= set(digital.sum(-1).tolist())
    assert len(seen) > 1


def test_hybrid_refuses_a_deadline_in_which_no_upload_fits() -> None:
    with pytest.raises(ConfigError, match="an analog upload of 53 parameters takes 53 s"):
        make("hybrid", {"radio.bandwidth_hz": 1.0}).init()


# --- CA-DSGD ---


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


# --- CHARLES ---


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
