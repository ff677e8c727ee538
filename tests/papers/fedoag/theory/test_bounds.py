"""Staleness and the paper's bounds, against simulation; what is false as printed, with its counter-example."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from otafl.config.schema import load_config
from otafl.papers.fedoag.theory import bounds, mixing, staleness
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
        mean = state.devices.models.mean(1, keepdim=True)
        assert torch.allclose(mean, torch.tensor(0.5, dtype=torch.float64), atol=1e-12)
        total += float((state.devices.models - mean).square().mean()) / 300
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
    """Lemma 4 summed over rounds, Lemma 5 and Lemma 6 in it, times 6/(ηs)."""
    k = SIMPLE
    terms, printed = bounds.theorem(k, 1000), bounds.theorem(k, 1000, mended=False)
    quiet = dataclasses.replace(k, noise_var=0.0)
    factor = 6 / (k.lr * k.local_steps)
    spread = k.lr * k.local_steps * k.smoothness**2  # of the consensus error in Lemma 4
    alone = {"grad_sq": 0.0, "bound_sq": 0.0, "consensus": 0.0}
    noise = bounds.descent(k, **{**alone, "bound_sq": bounds.norm_bound(k)}) - bounds.descent(k, **alone)
    apart = bounds.consensus_error(k, 0.0) - bounds.consensus_error(quiet, 0.0)  # what noise does to it
    assert terms["A"] == printed["A"] == pytest.approx(factor * 1.5 / 1000, rel=1e-12)
    assert terms["B"] == pytest.approx(factor * spread * bounds.consensus_error(quiet, 0.0), rel=1e-12)
    assert terms["C"] == pytest.approx(factor * bounds.descent(k, **alone), rel=1e-12)
    assert terms["D"] == pytest.approx(factor * (noise + spread * apart), rel=1e-9)
    assert printed["D"] == pytest.approx(factor * noise * 73 / 72, rel=1e-12)
    assert printed["B"] == pytest.approx(216 * 0.8 * (1e-4 * 3 * 2) ** 2 * 0.3 / (1 - math.sqrt(0.8)) ** 2, rel=1e-9)
    alike = dataclasses.replace(k, gap=1.0)  # everybody heard: ρ = 0, no consensus error, and 73 is enough
    assert alike.rho == bounds.theorem(alike, 1000)["B"] == 0
    assert bounds.theorem(alike, 1000)["D"] < bounds.theorem(alike, 1000, mended=False)["D"]


def test_what_theorem_1_drops_is_not_small() -> None:
    """At the largest step size D is (72 + absorbed)/73 of the printed one, which needs absorbed ≤ 1.

    In the paper's cell at γ = 3e-10, one device in the middle of each of 30 rings of equal area, it is 81 for β = 0.
    """
    middles = 1500.0 * np.sqrt((np.arange(30) + 0.5) / 30)
    config = load_config("stationary")
    gain = config.pathloss.spec.mean_gain(middles)
    prob = np.exp(-((3e-10) ** 2) / (814_090 * config.radio.symbol_energy_j * gain))
    k = dataclasses.replace(
        SIMPLE,
        num_devices=30,
        local_steps=10,
        dissimilarity_slope=0.0,
        least_prob=float(prob.min()),
        gap=mixing.spectral_gap(prob),
    )
    k = dataclasses.replace(k, lr=bounds.largest_lr(k, "theorem"))
    assert bounds.absorbed(k) == pytest.approx(81, rel=0.01)
    ratio = bounds.theorem(k, 800)["D"] / bounds.theorem(k, 800, mended=False)["D"]
    assert ratio == pytest.approx((72 + bounds.absorbed(k)) / 73, rel=1e-6)


def quadratic_change(rng: np.random.Generator, k: bounds.Constants) -> tuple[float, float, float]:
    """(E F(x̄⁺) − F(x̄), ‖∇F(x̄)‖², consensus error), exactly, of one silent round on random quadratics.

    F_i = ½ xᵀH x − b_iᵀx with the same H, eigenvalues ±L or smaller, so β = 0 and ζ² is the spread of b_i. A round's
    one sample adds the same ξ_i to all s gradients, which then sum to P (∇F_i + ξ_i), P = Σ_k (I − ηH)^k.
    """
    m, dim = k.num_devices, 3
    values = k.smoothness * rng.choice([-1.0, 1.0, 0.3], dim)
    pull = rng.standard_normal((m, dim)) * rng.choice([0.0, 1.0])
    pull -= pull.mean(0)
    pull *= math.sqrt(k.dissimilarity / max(1e-300, (pull**2).sum(1).mean()))
    models = rng.standard_normal((m, dim)) * rng.choice([0.0, 1e-3, 1.0]) / k.smoothness + rng.standard_normal(dim)
    gradients = models * values - pull  # the optimum of F is 0
    summed = sum((1 - k.lr * values) ** step for step in range(k.local_steps))
    mean = models.mean(0)
    after = mean - k.lr * (summed * gradients).mean(0)
    sampled = np.sum(values * (k.lr * summed) ** 2) / 2 * k.gradient_var / dim / m  # E of ½ Σ λ (ηPξ̄)²
    change = float(np.sum(values * (after**2 - mean**2)) / 2 + sampled)
    return change, float(np.sum((values * mean) ** 2)), float(((models - mean) ** 2).sum(1).mean())


@pytest.mark.parametrize("smoothness", [1e-3, 1.0, 1e3])
def test_lemma_4_holds_with_local_steps_whatever_the_units(smoothness: float) -> None:
    """At the largest η allowed, without the printed κ² L²; and the gradient's third is within a factor of two."""
    rng, closest = np.random.default_rng(3), -math.inf
    for steps in (1, 2, 10):
        for var, spread in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
            k = dataclasses.replace(SIMPLE, local_steps=steps, smoothness=smoothness, dissimilarity_slope=0.0)
            k = dataclasses.replace(k, gradient_var=var, dissimilarity=spread, noise_var=0.0)
            k = dataclasses.replace(k, lr=bounds.largest_lr(k, "descent"))
            assert (k.kappa > 0) == (steps > 1)
            for _ in range(300):
                change, grad_sq, consensus = quadratic_change(rng, k)
                right = bounds.descent(k, grad_sq, 0.0, consensus)
                assert change <= right + 1e-12 * (abs(change) + abs(right))
                if var == spread == consensus == 0:
                    closest = max(closest, change / (k.lr * steps * grad_sq))
    assert -1.05 < closest < -0.95  # a gradient step: F falls by ηs‖∇F‖², of which the lemma promises a third


@pytest.mark.parametrize("noise_dbm_hz", [-172.0, -150.0])
def test_theorem_1_and_lemma_6_against_simulation(noise_dbm_hz: float) -> None:
    """Two quadratics from the optimum of F, 200 seeds, at the largest η: gradients and consensus stay below the bounds.

    There is nothing to descend, so that term A is 0 and what is seen is the noise (D) and what devices' pulls do. With
    more noise models roam, so G² is the largest squared gradient that was seen. The bounds give away four to five
    orders of magnitude here, so this would find a wrong power of c, γ, m or η, not a wrong factor: those are held by
    `test_theorem_1_adds_up_from_its_lemmas`.
    """
    seeds, rounds = 200, 400
    k = dataclasses.replace(
        SIMPLE,
        num_devices=2,
        local_steps=3,
        num_params=1,
        smoothness=1.0,
        gradient_var=0.0,
        dissimilarity=0.25,
        dissimilarity_slope=0.0,
        initial_gap=0.0,
        gamma=1e-9,
        least_prob=0.3,
        gap=mixing.spectral_gap(np.array([0.9, 0.3])),
        noise_var=10 ** (noise_dbm_hz / 10) * 1e-3,
    )
    k = dataclasses.replace(k, lr=bounds.largest_lr(k, "theorem"))
    keys = {
        "experiment.rounds": rounds,
        "experiment.seeds": list(range(seeds)),
        "model.start": 0.5,
        "training.lr": k.lr,
        "training.local_steps": 3,
        "radio.noise_dbm_hz": noise_dbm_hz,
    }
    sim = simulate(make_quadratic("fedoag", p_weighted_world(keys)))
    state, grad_sq, consensus, largest = sim.init(), 0.0, 0.0, 0.0
    for t in range(rounds):
        models = state.devices.models[..., 0]
        mean = models.mean(1)
        grad_sq += float((mean - 0.5).square().mean()) / rounds
        consensus += float((models - mean[:, None]).square().mean()) / rounds
        largest = max(largest, float((models - torch.tensor([0.0, 1.0])).square().max()))
        state = sim.step(state, t).state
    k = dataclasses.replace(k, gradient_bound=largest)
    terms = bounds.theorem(k, rounds)
    assert 1e-6 * sum(terms.values()) < grad_sq <= sum(terms.values())
    assert 1e-6 * bounds.consensus_error(k, grad_sq) < consensus <= bounds.consensus_error(k, grad_sq)
    if noise_dbm_hz == -150.0:
        assert terms["D"] > terms["B"] + terms["C"]  # the noise leads


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
        mean = state.devices.models.mean(1)[:, 0]
        spread = (state.devices.models[..., 0] - mean[:, None]).square().mean(1)
        assert float((state.devices.models[..., 0] - torch.tensor([0.0, 1.0])).square().max()) <= k.gradient_bound
        state, info, *_ = sim.step(state, t)
        after = state.devices.models.mean(1)[:, 0]
        change = ((after - 0.5).square() - (mean - 0.5).square()) / 2
        bound_sq = info.norm_bound.square()
        squares.append(bound_sq)
        right = bounds.descent(k, float((mean - 0.5).square().mean()), float(bound_sq.mean()), float(spread.mean()))
        assert float(change.mean()) <= right + 5 * float(change.std()) / math.sqrt(seeds)
    if start == 3.0:
        assert float(change.mean()) < 0 > right  # it says that F falls, and F does
    measured = torch.stack(squares).mean()
    assert 0 < float(measured) <= bounds.norm_bound(k)
