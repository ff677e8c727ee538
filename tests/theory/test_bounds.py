"""Staleness and the paper's bounds, against simulation; what is false as printed, with its counter-example."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from otafl.theory import bounds, mixing, staleness
from tests.algorithms.test_fedoag import p_weighted_world
from tests.conftest import make_quadratic, simulate

SIMPLE = bounds.Constants(
    num_devices=4,
    local_steps=3,
    num_params=5,
    lr=1e-4,
    smoothness=2.0,
    gradient_var=0.3,
    dissimilarity=0.7,
    dissimilarity_slope=0.5,
    gradient_bound=2.0,
    initial_gap=1.5,
    noise_var=0.01,
    gamma=0.3,
    least_prob=0.4,
    gap=0.2,
)


def test_staleness_against_simulation_and_lemma_7() -> None:
    """Time-varying p; 5 standard errors; below 1/c and 2/c², which constant p approach."""
    rng, count, rounds = np.random.default_rng(0), 40_000, 25
    p = rng.uniform(0.2, 0.9, rounds)
    first, second = staleness.moments(p)
    last = np.full(count, -1)
    for r in range(rounds):
        x = r - last
        assert abs(x.mean() - first[r]) <= 5 * x.std() / math.sqrt(count) + 1e-12
        assert abs((x**2).mean() - second[r]) <= 5 * (x**2).std() / math.sqrt(count) + 1e-12
        last = np.where(rng.random(count) < p[r], r, last)
    assert (first <= 1 / p.min()).all()
    assert (second <= 2 / p.min() ** 2).all()
    first, second = staleness.moments(np.full(400, 0.1))
    assert (first[-1], second[-1]) == pytest.approx((10.0, 190.0), rel=1e-6)
    assert staleness.never_heard(np.full((800, 1), 1e-7))[0] == pytest.approx(math.exp(-8e-5), rel=1e-9)


def test_lemma_1_products_contract() -> None:
    """E‖B (Π W − J)‖² ≤ ρ^t ‖B‖²; tight after one step for the second eigenvector, loose for random B."""
    rng, count = np.random.default_rng(1), 4000
    p = np.array([0.9, 0.6, 0.3, 0.5, 0.2])
    rho = 1 - mixing.spectral_gap(p)
    mean = np.full((5, 5), 0.2)
    for vector, tight in ((np.linalg.eigh(mixing.expected_mixing(p))[1][:, -2], True), (rng.standard_normal(5), False)):
        for t in (1, 3, 6):
            values = np.empty(count)
            for n in range(count):
                product = np.eye(5)
                for _ in range(t):
                    product = product @ mixing.mixing_matrix(rng.random(5) < p)
                values[n] = np.sum((vector @ (product - mean)) ** 2)
            error = 5 * values.std() / math.sqrt(count)
            assert values.mean() <= rho**t * np.sum(vector**2) + error
            if tight and t == 1:
                assert values.mean() >= rho - error


@pytest.mark.parametrize("m", [2, 5, 30])
@pytest.mark.parametrize("c", [0.05, 0.4, 1.0])
def test_lemma_2_is_a_lower_bound_on_the_gap(m: int, c: float) -> None:
    p = np.linspace(c, 1, m)
    assert bounds.ergodicity(m, c) <= mixing.spectral_gap(p)


def test_lemma_3_kappa() -> None:
    """By its definition; 1 as η → 0; at most 2 (e − 2) for η = 1/(s L); attained on the quadratic that grows."""
    for s in (2, 5, 10):
        k = dataclasses.replace(SIMPLE, local_steps=s, lr=0.05)
        x = k.lr * k.smoothness
        assert k.kappa == pytest.approx(2 * ((1 + x) ** s - 1 - s * x) / (s * (s - 1) * x**2), rel=1e-12)
        assert dataclasses.replace(k, lr=1e-9).kappa == pytest.approx(1, abs=1e-6)
        near = dataclasses.replace(k, lr=0.99e-3 / (2 * s)).kappa, dataclasses.replace(k, lr=1.01e-3 / (2 * s)).kappa
        assert near[0] == pytest.approx(near[1], rel=1e-4)
        assert dataclasses.replace(k, lr=1 / (s * 2.0)).kappa <= 2 * (math.e - 2)
    # concave quadratic −L x²/2: x grows by 1 + ηL a step, and the deviation of the summed gradients is the bound
    eta, smooth, s, x = 0.05, 2.0, 5, 1.0
    total, start = 0.0, -smooth * x
    for _ in range(s):
        total += -smooth * x - start
        x -= eta * -smooth * x
    k = dataclasses.replace(SIMPLE, local_steps=s, lr=eta, smoothness=smooth)
    assert abs(total) == pytest.approx(k.kappa * eta * s * (s - 1) * smooth / 2 * abs(start), rel=1e-12)


def quadratic_world(rounds: int, lr: float, start: float) -> Any:
    """Two devices, p = (0.9, 0.3), c = (0, 1), one step, no noise."""
    keys = {"experiment.rounds": rounds, "experiment.seeds": list(range(40)), "training.lr": lr, "model.start": start}
    return simulate(make_quadratic("fedoag", p_weighted_world(keys)))


def test_lemma_6_is_false_as_printed_and_holds_mended() -> None:
    """Noise-free quadratics from the optimum of F: ∇F(x̄) = 0 in all rounds, so the printed right side is 0."""
    prob = np.array([0.9, 0.3])
    k = bounds.Constants(
        num_devices=2,
        local_steps=1,
        num_params=1,
        lr=0.0,
        smoothness=1.0,
        gradient_var=0.0,
        dissimilarity=0.25,
        dissimilarity_slope=0.0,
        gradient_bound=1.0,
        initial_gap=0.0,
        noise_var=0.0,
        gamma=1e-9,
        least_prob=0.3,
        gap=mixing.spectral_gap(prob),
    )
    k = dataclasses.replace(k, lr=bounds.largest_lr(k, "consensus"))
    sim = quadratic_world(300, k.lr, 0.5)
    state, total = sim.init(), 0.0
    for t in range(300):
        mean = state.local_params.mean(1, keepdim=True)
        assert torch.allclose(mean, torch.tensor(0.5, dtype=torch.float64), atol=1e-12)
        total += float((state.local_params - mean).square().mean()) / 300
        state = sim.step(state, t).state
    assert bounds.consensus_error(k, grad_sq=0.0, mended=False) == 0
    assert 0 < total <= bounds.consensus_error(k, grad_sq=0.0)


def test_corollary_1_needs_more_rounds_than_printed_when_devices_outnumber_steps() -> None:
    for m, s in ((30, 10), (4, 10)):
        k = dataclasses.replace(SIMPLE, num_devices=m, local_steps=s, lr=1e-9)
        for mended in (True, False):
            rounds = math.ceil(bounds.rounds_needed(k, mended))
            lr = bounds.corollary_lr(m, s, k.smoothness, rounds)
            allowed = lr <= bounds.largest_lr(k, "theorem") * (1 + 1e-9)
            assert allowed == (mended or m <= s)


def test_theorem_1_adds_up_from_its_lemmas() -> None:
    """B is 6 L² times Lemma 6 without gradient and noise, 0 for ρ = 0; D is Lemma 5 in Lemma 4, 72 rounded up to 73."""
    k = SIMPLE
    terms, printed = bounds.theorem(k, 1000), bounds.theorem(k, 1000, mended=False)
    quiet = dataclasses.replace(k, noise_var=0.0)
    assert terms["B"] == pytest.approx(6 * k.smoothness**2 * bounds.consensus_error(quiet, 0.0), rel=1e-12)
    assert terms["B"] > printed["B"]
    assert printed["B"] == pytest.approx(216 * 0.8 * (1e-4 * 3 * 2) ** 2 * 0.3 / (1 - math.sqrt(0.8)) ** 2, rel=1e-9)
    assert terms["A"] == printed["A"] == pytest.approx(6 * 1.5 / (1e-4 * 3 * 1000))
    assert dataclasses.replace(k, gap=1.0).rho == 0
    assert bounds.theorem(dataclasses.replace(k, gap=1.0), 1000)["B"] == 0
    by_lemmas = 6 / (k.lr * 3) * k.lr**2 * k.smoothness * 5 * 0.01 * bounds.norm_bound(k) / (k.gamma**2 * 16)
    assert terms["D"] == pytest.approx(by_lemmas * 73 / 72, rel=1e-12)


@pytest.mark.parametrize("what", ["descent", "norm_bound", "consensus", "theorem"])
def test_largest_lr_is_where_its_condition_is_just_met(what: str) -> None:
    """η s L (κ(η) + 1) equals 1/(108 (β² + 1)), 1, (1 − √ρ)/(632 √(β² + 1)) and that over m, whatever η was before."""
    eta = bounds.largest_lr(SIMPLE, what)
    assert eta == bounds.largest_lr(dataclasses.replace(SIMPLE, lr=10.0), what)
    k = dataclasses.replace(SIMPLE, lr=eta)
    root = math.sqrt(1.5)
    limits = {"descent": 1 / (108 * 1.5), "norm_bound": 1.0, "consensus": k.root_gap / (632 * root)}
    limits["theorem"] = limits["consensus"] / 4
    assert eta * 3 * 2.0 * (k.kappa + 1) == pytest.approx(limits[what], rel=1e-9)


def test_tiny_gaps_keep_their_accuracy() -> None:
    k = dataclasses.replace(SIMPLE, gap=1.5e-12)
    assert k.root_gap == pytest.approx(7.5e-13, rel=1e-9)


def test_gamma_enters_with_c() -> None:
    """Term D as a function of γ: 1/(c γ)², least where c γ is largest."""
    reach = 1e-9
    values = {}
    for gamma in (2e-10, 5e-10, 7.07e-10, 1e-9, 2e-9):
        c = math.exp(-((gamma / reach) ** 2))
        values[gamma] = bounds.theorem(dataclasses.replace(SIMPLE, gamma=gamma, least_prob=c), 100)["D"]
    assert min(values, key=lambda gamma: values[gamma]) == 7.07e-10  # γ e^{−γ²/S²} peaks at S/√2


@pytest.mark.parametrize(("noise_dbm_hz", "start"), [(-172.0, 3.0), (-165.0, 0.5), (float("-inf"), 0.5)])
def test_lemmas_4_and_5_against_simulation(noise_dbm_hz: float, start: float) -> None:
    """Two quadratics, 200 seeds: the mean change of F(x̄) in every round, and the mean of B_t².

    Far from the optimum the gradient's term leads (the bound gives away a factor of three), at it only noise and
    heterogeneity are left. Inequalities in the mean over seeds, with 5 standard errors.
    """
    seeds, rounds = 200, 30
    keys = {"experiment.rounds": rounds, "experiment.seeds": list(range(seeds)), "model.start": start}
    k = dataclasses.replace(
        SIMPLE,
        num_devices=2,
        local_steps=1,
        num_params=1,
        smoothness=1.0,
        gradient_var=0.0,
        dissimilarity=0.25,
        dissimilarity_slope=0.0,
        gradient_bound=max(start, abs(1 - start)) ** 2 * 1.3,
        gamma=1e-9,
        least_prob=0.3,
        noise_var=10 ** (noise_dbm_hz / 10) * 1e-3,
    )
    k = dataclasses.replace(k, lr=bounds.largest_lr(k, "descent"))
    sim = simulate(
        make_quadratic("fedoag", p_weighted_world({**keys, "training.lr": k.lr, "radio.noise_dbm_hz": noise_dbm_hz}))
    )
    state, squares = sim.init(), []
    for t in range(rounds):
        mean = state.local_params.mean(1)[:, 0]
        spread = (state.local_params[..., 0] - mean[:, None]).square().mean(1)
        assert float((state.local_params[..., 0] - torch.tensor([0.0, 1.0])).square().max()) <= k.gradient_bound
        state, info, *_ = sim.step(state, t)
        after = state.local_params.mean(1)[:, 0]
        change = ((after - 0.5).square() - (mean - 0.5).square()) / 2
        bound_sq = info.norm_bound.square()
        squares.append(bound_sq)
        right = bounds.descent(k, float((mean - 0.5).square().mean()), float(bound_sq.mean()), float(spread.mean()))
        assert float(change.mean()) <= right + 5 * float(change.std()) / math.sqrt(seeds)
    if start == 3.0:
        assert float(change.mean()) < 0 > right  # it says that F falls, and F does
    measured = torch.stack(squares).mean()
    assert 0 < float(measured) <= bounds.norm_bound(k)
