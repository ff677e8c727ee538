"""LCPC's and Air-FEEL's designs: golden numbers, simulation, limits."""

import numpy as np
import pytest

from otafl.algorithms.design import constant, unbiased
from tests.algorithms.design.test_sca import PAPER_NOISE, PAPER_REACH

REACH = np.array([0.3, 0.8, 1.5, 2.2])


def truncation_error(gamma: np.ndarray, reach: np.ndarray, noise: float) -> np.ndarray:
    """Error J*(γ) = m − Q²/(Q + ν/γ²) at the best a, with Q = Σ exp(−γ²/S_i²); γ [...], reach [..., M]."""
    return np.asarray(reach.shape[-1] + constant._gained(gamma, reach, noise))


def test_truncation_golden_and_grid() -> None:
    gamma, a = constant.truncation(REACH, 2.0)
    assert float(gamma) == pytest.approx(0.836373, abs=2e-6)
    assert float(truncation_error(gamma, REACH, 2.0)) == pytest.approx(3.219735, abs=1e-6)
    grid = np.linspace(0.01, 6, 20_000)
    values = np.array([truncation_error(np.array(g), REACH, 2.0) for g in grid])
    assert float(gamma) == pytest.approx(grid[values.argmin()], abs=1e-3)
    heard = np.exp(-((float(gamma) / REACH) ** 2)).sum()

    # the joint error at this a, by its definition, is the reduced one; and a neighbour is worse
    def error(scale: float) -> float:
        level = scale * float(gamma)
        return len(REACH) - 2 * level * heard + level**2 * heard + 2.0 * scale**2

    assert error(float(a)) == pytest.approx(float(truncation_error(gamma, REACH, 2.0)), rel=1e-9)
    assert error(float(a)) < min(error(0.99 * float(a)), error(1.01 * float(a)))


def test_truncation_limits() -> None:
    """Little noise: everybody, a γ → 1; much noise: γ maximises γ Q, which is S/√2 for equal devices."""
    gamma, a = constant.truncation(REACH, 1e-9)
    assert float(a * gamma) == pytest.approx(1, abs=1e-3)
    assert np.exp(-((float(gamma) / REACH) ** 2)).min() > 0.99
    equal = np.full(6, 1.7)
    assert float(constant.truncation(equal, 1e8)[0]) == pytest.approx(1.7 / np.sqrt(2), rel=1e-3)
    grid = np.linspace(0.01, 5, 20_001)
    gain = [g * np.exp(-((g / REACH) ** 2)).sum() for g in grid]
    for noise in (1e8, 1e16, 1e24):
        assert float(constant.truncation(REACH, noise)[0]) == pytest.approx(grid[int(np.argmax(gain))], abs=3e-4)


@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_truncation_of_equal_devices_against_a_grid(noise: float) -> None:
    """J* by its definition, minimised over a and γ on a grid."""
    equal, grid = np.full(6, 1.7), np.linspace(0.01, 6, 20_001)
    heard = 6 * np.exp(-((grid / 1.7) ** 2))
    a = heard * grid / (heard * grid**2 + noise)  # dJ/da = 0
    error = 6 - 2 * a * grid * heard + (a * grid) ** 2 * heard + noise * a**2
    assert float(constant.truncation(equal, noise)[0]) == pytest.approx(grid[error.argmin()], abs=1e-3)


def test_a_fixed_to_the_inverse_of_gamma_is_a_trap() -> None:
    """With a = 1/γ, J = m − Q + ν/γ² is 70 and 30.4 at γ = 1e-8 and 1e-7: best where nobody is heard; not so here."""

    def trap(gamma: float) -> float:
        return float(30 - np.exp(-((gamma / PAPER_REACH) ** 2)).sum() + PAPER_NOISE / gamma**2)

    assert trap(1e-8) == pytest.approx(70, abs=1)
    assert trap(1e-7) == pytest.approx(30.4, abs=0.05)
    assert trap(1e-6) < trap(1e-7) < trap(1e-8)
    gamma, _ = constant.truncation(PAPER_REACH, PAPER_NOISE)
    assert float(truncation_error(gamma, PAPER_REACH, PAPER_NOISE)) < 30 < trap(float(gamma))


@pytest.mark.parametrize("noise", [1e-3, 0.1, 10.0])
def test_clipping_is_a_minimum(noise: float) -> None:
    """J(a) = Σ E(b_i − 1)² + ν a² on a grid."""
    grid = np.geomspace(1e-3, 1e3, 40_001)
    error = constant.clipped_moments(grid, REACH)[1].sum(-1) + noise * grid**2
    assert float(constant.clipping(REACH, noise)) == pytest.approx(grid[error.argmin()], rel=2e-3)


def test_clipping_golden_and_limits() -> None:
    mean, error = constant.clipped_moments(np.array(1.0), REACH)
    assert error == pytest.approx([0.558264, 0.197210, 0.067978, 0.033063], abs=1e-6)
    assert mean == pytest.approx([0.265867, 0.654319, 0.869683, 0.935196], abs=1e-6)
    for noise in (1e7, 1e16, 1e24):
        expected = np.sqrt(np.pi) / 2 * REACH.sum() / (noise + (REACH**2).sum())
        assert float(constant.clipping(REACH, noise)) == pytest.approx(expected, rel=1e-5)


def test_clipped_moments_by_simulation() -> None:
    rng, count = np.random.default_rng(2), 200_000
    b = np.minimum(1, 0.7 * REACH * np.sqrt(rng.exponential(size=(count, 4))))
    mean, error = constant.clipped_moments(np.array(0.7), REACH)
    assert (np.abs(b.mean(0) - mean) < 5 * b.std(0) / np.sqrt(count)).all()
    wrong = (1 - b) ** 2
    assert (np.abs(wrong.mean(0) - error) < 5 * wrong.std(0) / np.sqrt(count)).all()


def test_lcpc_in_the_papers_setting() -> None:
    gamma, _ = constant.truncation(PAPER_REACH, PAPER_NOISE)
    prob = np.exp(-((float(gamma) / PAPER_REACH) ** 2))
    p = prob / prob.sum()
    assert float(gamma) == pytest.approx(4.18e-10, rel=1e-3)
    assert prob.sum() == pytest.approx(14.5, rel=1e-3)
    assert np.sqrt(PAPER_NOISE) / (float(gamma) * prob.sum()) == pytest.approx(10.5, rel=5e-3)
    assert ((p - 1 / 30) ** 2).sum() == pytest.approx(0.0141, rel=5e-3)
    a = constant.clipping(PAPER_REACH, PAPER_NOISE)
    mean = constant.clipped_moments(a, PAPER_REACH)[0]
    assert np.sqrt(PAPER_NOISE) * a / mean.sum() == pytest.approx(2.4, rel=2e-2)
    assert ((mean / mean.sum() - 1 / 30) ** 2).sum() == pytest.approx(0.091, rel=5e-3)


def test_unbiased_golden() -> None:
    reach = 2 * np.sqrt([0.2, 1, 3])
    a = 1.2 * unbiased.least_scale(reach)
    factor = unbiased.factors(a, reach)
    assert factor == pytest.approx([1.3242, 1.0394, 1.0124], abs=1e-4)
    strength = a * reach
    assert -(strength**2) * np.expm1(-((factor / strength) ** 2)) == pytest.approx([1.1289, 1.0192, 1.0062], abs=1e-4)


def test_unbiased_by_simulation_and_limits() -> None:
    rng, count = np.random.default_rng(3), 300_000
    a = np.asarray(1.1 * unbiased.least_scale(REACH))
    factor = unbiased.factors(a, REACH)
    b = np.minimum(factor, a * REACH * np.sqrt(rng.exponential(size=(count, 4))))
    assert (np.abs(b.mean(0) - 1) < 5 * b.std(0) / np.sqrt(count)).all()
    squares = ((b - 1) ** 2).sum(1)
    expected = float(unbiased.variance(a, REACH, 0.0))
    assert abs(squares.mean() - expected) < 5 * squares.std() / np.sqrt(count)
    assert unbiased.factors(np.asarray(1e5), REACH) == pytest.approx([1] * 4, rel=1e-6)  # full inversion
    assert float(unbiased.variance(np.asarray(1e5), REACH, 0.0)) < 1e-8
    assert float(unbiased.least_scale(np.full(3, 2.0))) == pytest.approx(1 / np.sqrt(np.pi), rel=1e-12)
    assert np.isinf(unbiased.factors(unbiased.least_scale(REACH), REACH)[0])  # full power in every fade


def test_unbiased_in_the_papers_setting() -> None:
    """A = a_min, noise norm 9.49 in units of the bound, variance of the weights 0.0024."""
    a = unbiased.scale(PAPER_REACH, PAPER_NOISE)
    assert float(a) == pytest.approx(float(unbiased.least_scale(PAPER_REACH)), rel=1e-12)
    assert np.sqrt(PAPER_NOISE) * float(a) / 30 == pytest.approx(9.49, rel=1e-3)
    assert float(unbiased.variance(a, PAPER_REACH, 0.0)) / 900 == pytest.approx(0.0024, rel=5e-2)


def test_unbiased_scale_is_a_minimum() -> None:
    """Where noise is weak the best a is inside, and neighbours are worse."""
    a = unbiased.scale(REACH, 1e-3)
    assert a > unbiased.least_scale(REACH)
    best = unbiased.variance(a, REACH, 1e-3)
    assert best < min(unbiased.variance(a * 1.02, REACH, 1e-3), unbiased.variance(a / 1.02, REACH, 1e-3))
