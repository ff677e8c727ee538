"""OBDA and FSK-MV: majority votes of signs, and how often noise overrules them."""

import math
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from tests.algorithms.worlds import NOISE_FREE, gradients, make
from tests.conftest import TINY_GAMMA, TINY_PARAMS


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
