"""SCA's designs: golden numbers, two solvers that agree, stationarity, limits and invariants."""

import numpy as np
import pytest
from scipy.optimize import brentq

from otafl.algorithms.design import sca

PLACES_M = 1500 * np.sqrt((np.arange(30) + 0.5) / 30)  # the middle of each of 30 equal-area rings
PAPER_REACH = np.sqrt(814_090 * 1e-5 * PLACES_M**-3.5 * 1e-9)
PAPER_NOISE = 814_090 * 10 ** (-17.3) * 1e-3

FIXTURES = [
    (
        (0.5, 1, 2), 0.02, 1.0, 0.5, 0.0,
        (0.22823099, 0.24627835, 0.24745717), (0.28043003, 0.35077077, 0.36879920), 0.0412675284,
    ),
    (
        (0.5, 1, 2), 0.02, 3.0, 0.5, np.array([0.3, 0.1, 0.0]),
        (0.23304494, 0.22283557, 0.22120024), (0.30341764, 0.34305719, 0.35352517), 0.0649947419,
    ),
]  # fmt: skip


def slope_of(
    gamma: np.ndarray,
    reach: np.ndarray,
    noise: float,
    bias_weight: float,
    variance_weight: float,
    spread: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Gradient ∂Ψ/∂ ln y_i, which is zero at the optimum; the optimum always lies inside 0 < y_i < ½."""
    y = (gamma / reach) ** 2
    p = sca.weights(gamma, reach)
    alpha = sca.amplitudes(gamma, reach).sum(-1, keepdims=True)
    by_weight = 2 * bias_weight * (p - 1 / reach.shape[-1]) + 2 * variance_weight * p * (np.expm1(y) + spread)
    by_amplitude = p * (by_weight - (by_weight * p).sum(-1, keepdims=True))
    by_amplitude -= 2 * variance_weight * noise / alpha**2 * p
    return np.asarray((0.5 - y) * by_amplitude + variance_weight * p**2 * np.exp(y) * y)


def instances(count: int = 12) -> list[tuple[np.ndarray, float, float, float, np.ndarray]]:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        m = int(rng.integers(2, 12))
        reach = np.exp(rng.normal(0, 1, m))
        noise, wb, wv = np.exp(rng.normal(0, 2, 3))
        found.append((reach, float(noise), float(wb), float(wv), rng.uniform(0, 1, m)))
    return found


@pytest.mark.parametrize(("reach", "noise", "wb", "wv", "spread", "gamma", "p", "value"), FIXTURES)
@pytest.mark.parametrize(("solver", "tolerance"), [("exact", 1e-7), ("successive", 1e-4)])
def test_golden(
    solver: str, tolerance: float, reach: tuple[float, ...], noise: float, wb: float, wv: float, spread: float,
    gamma: tuple[float, ...], p: tuple[float, ...], value: float,
) -> None:  # fmt: skip
    s = np.array(reach)
    found = getattr(sca, solver)(s, noise, wb, wv, spread)
    assert found == pytest.approx(gamma, rel=tolerance)
    assert sca.weights(found, s) == pytest.approx(p, rel=tolerance)
    assert float(sca.bound(found, s, noise, wb, wv, spread)) == pytest.approx(
        value, rel=2e-9 if solver == "exact" else 1e-8
    )


def test_golden_amplitudes() -> None:
    """α_i and their sum."""
    s = np.array([0.5, 1, 2])
    one, other = (sca.exact(s, *fixture[1:4], fixture[4]) for fixture in FIXTURES)
    assert sca.amplitudes(one, s) == pytest.approx([0.18530455, 0.23178480, 0.24369776], rel=1e-7)
    assert sca.amplitudes(one, s).sum() == pytest.approx(0.660787108, rel=1e-8)
    assert sca.amplitudes(other, s).sum() == pytest.approx(0.618091552, rel=1e-8)


def test_golden_closed_forms() -> None:
    s = np.array([0.5, 1, 2])
    zero = sca.zero_bias(s)
    assert (zero / s) ** 2 == pytest.approx([0.5, 0.05091422, 0.01177007], rel=1e-6)
    assert sca.amplitudes(zero, s) == pytest.approx([0.21444097] * 3, rel=1e-7)
    assert sca.weights(sca.min_noise(s), s) == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=1e-12)


@pytest.mark.parametrize(
    ("noise_var", "y"), [(1e-8, 0.000092), (1e-4, 0.009178), (1e-2, 0.087503), (1.0, 0.429424), (100.0, 0.499111)]
)
def test_s1_equal_devices(noise_var: float, y: float) -> None:
    """p_i = 1/m and y² e^{−y}/(1 − 2y) = ν/(m S²), whatever the weights; d = 3 and G = 1.2 enter ν = d σ_z²/G²."""
    s, nu = np.full(5, 0.7), 3 * noise_var / 1.44
    found = (sca.exact(s, nu, 1.0, 0.5 * 1.44) / s) ** 2
    assert found == pytest.approx([y] * 5, abs=5e-7)
    root = brentq(lambda v: v**2 * np.exp(-v) / (1 - 2 * v) - nu / (5 * 0.49), 1e-12, 0.5 - 1e-12)
    assert found == pytest.approx([root] * 5, rel=1e-6)
    assert sca.exact(s, nu, 7.0, 0.01) == pytest.approx(sca.exact(s, nu, 1.0, 0.72), rel=1e-9)


@pytest.mark.parametrize(
    ("s", "noise", "wb", "wv", "value", "y"),
    [
        ((1, 0.2), 0.05, 1.0, 1.0, 0.58475264, (0.138736, 0.415125)),
        ((1, 0.05), 0.002, 1.0, 0.2, 0.16534408, (0.001794, 0.425845)),
    ],
)
@pytest.mark.parametrize("solver", ["exact", "successive"])
def test_two_devices_against_a_grid(
    solver: str, s: tuple[float, float], noise: float, wb: float, wv: float, value: float, y: tuple[float, float]
) -> None:
    reach = np.array(s, dtype=float)
    found = getattr(sca, solver)(reach, noise, wb, wv)
    assert (found / reach) ** 2 == pytest.approx(y, abs=1e-6 if solver == "exact" else 1e-4)
    assert float(sca.bound(found, reach, noise, wb, wv)) == pytest.approx(value, rel=1e-7)
    axis = np.exp(np.linspace(np.log(1e-4), np.log(0.5), 1001))
    grid = reach * np.sqrt(np.stack(np.meshgrid(axis, axis, indexing="ij"), -1))
    values = sca.bound(grid, reach, noise, wb, wv)
    assert value <= values.min() <= value * (1 + 1e-4)
    nearest = np.unravel_index(values.argmin(), values.shape)
    assert [axis[i] for i in nearest] == pytest.approx(y, rel=2e-2)


@pytest.mark.parametrize("omega", [1e-4, 2e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0])
def test_solvers_agree_in_the_papers_setting(omega: float) -> None:
    values = [
        float(sca.bound(solver(PAPER_REACH, PAPER_NOISE, 30.0, omega), PAPER_REACH, PAPER_NOISE, 30.0, omega))
        for solver in (sca.exact, sca.successive)
    ]
    assert values[1] == pytest.approx(values[0], rel=1e-8)


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e9])
def test_solvers_agree_with_hardly_any_and_with_much_noise(noise: float) -> None:
    reach = np.array([0.3, 0.8, 1.5, 2.2])
    assert sca.successive(reach, noise, 1.0, 1.0) == pytest.approx(sca.exact(reach, noise, 1.0, 1.0), rel=2e-2)


@pytest.mark.parametrize("solver", ["exact", "successive"])
def test_paper_setting(solver: str) -> None:
    found = getattr(sca, solver)(PAPER_REACH, PAPER_NOISE, 30.0, 1e-2)
    assert float(sca.bound(found, PAPER_REACH, PAPER_NOISE, 30.0, 1e-2)) == pytest.approx(1.00094, rel=1e-5)
    assert sca.amplitudes(found, PAPER_REACH).sum() == pytest.approx(7.7278e-9, rel=1e-4)
    flatness = np.abs(slope_of(found, PAPER_REACH, PAPER_NOISE, 30.0, 1e-2)).max()
    assert flatness < (1e-12 if solver == "exact" else 1e-6)  # of a bound of 1
    assert (found[0], found[-1]) == (pytest.approx(5.171e-10, rel=1e-3), pytest.approx(1.791e-10, rel=1e-3))


@pytest.mark.parametrize(
    ("omega", "bias", "noise", "active"),
    [
        (1e-4, 0.0001, 16.0, 25.1),
        (1e-3, 0.0016, 12.1, 22.5),
        (1e-2, 0.0106, 8.27, 19.7),
        (0.1, 0.047, 5.83, 18.5),
        (1, 0.091, 5.04, 18.2),
    ],
)  # fmt: skip
def test_what_omega_means_in_the_papers_setting(omega: float, bias: float, noise: float, active: float) -> None:
    """Bias Σ (p_i − 1/m)², norm of the noise in units of the bound, devices on the air."""
    found = sca.exact(PAPER_REACH, PAPER_NOISE, 30.0, omega)
    p = sca.weights(found, PAPER_REACH)
    assert ((p - 1 / 30) ** 2).sum() == pytest.approx(bias, rel=0.05, abs=6e-5)
    assert np.sqrt(PAPER_NOISE) / sca.amplitudes(found, PAPER_REACH).sum() == pytest.approx(noise, rel=5e-3)
    assert sca.transmit_probability(found, PAPER_REACH).sum() == pytest.approx(active, rel=5e-3)


@pytest.mark.parametrize("instance", instances())
def test_both_solvers_agree_and_nothing_is_better(instance: tuple[np.ndarray, float, float, float, np.ndarray]) -> None:
    reach, *rest = instance
    best = float(sca.bound(found := sca.exact(reach, *rest), reach, *rest))
    stepwise = float(sca.bound(sca.successive(reach, *rest), reach, *rest))
    assert best <= stepwise <= best * (1 + 1e-6)
    scale = rest[2] + rest[1]  # of the two weights
    assert np.abs(slope_of(found, reach, *rest)).max() < 1e-9 * scale * max(1.0, best)
    y = (found / reach) ** 2
    assert ((y > 0) & (y < 0.5)).all()
    assert sca.transmit_probability(found, reach).min() >= np.exp(-0.5)  # S5
    assert sca.weights(found, reach).sum() == pytest.approx(1)
    rng = np.random.default_rng(0)
    others = reach * np.sqrt(rng.uniform(0, 0.5, (200, len(reach))))
    assert (sca.bound(others, reach, *rest) >= best).all()
    for other in (sca.min_noise(reach), sca.zero_bias(reach)):
        assert sca.bound(other, reach, *rest) >= best * (1 - 1e-12)


def test_slope_is_the_derivative() -> None:
    reach, *rest = instances(1)[0]
    y = np.linspace(0.05, 0.45, len(reach))
    for i in range(len(reach)):
        step = 1e-6
        up, down = y.copy(), y.copy()
        up[i] *= np.exp(step)
        down[i] *= np.exp(-step)
        change = sca.bound(reach * np.sqrt(up), reach, *rest) - sca.bound(reach * np.sqrt(down), reach, *rest)
        slope = slope_of(reach * np.sqrt(y), reach, *rest)[i]
        assert change / (2 * step) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_s2_and_the_two_ends() -> None:
    """σ_z → 0: everybody, p = 1/m; σ_z → ∞: y = ½, p ∝ √Λ; all weight on bias: the zero-bias design."""
    reach = np.array([0.3, 1.0, 2.5])
    quiet = sca.exact(reach, 1e-10, 1.0, 1.0)
    assert sca.transmit_probability(quiet, reach).min() > 0.999
    assert sca.weights(quiet, reach) == pytest.approx([1 / 3] * 3, rel=1e-3)
    assert sca.exact(reach, 1e9, 1.0, 1.0) == pytest.approx(sca.min_noise(reach), rel=1e-3)
    assert sca.exact(PAPER_REACH, PAPER_NOISE, 1.0, 1e6) == pytest.approx(sca.min_noise(PAPER_REACH), rel=1e-2)
    unbiased = sca.exact(PAPER_REACH, PAPER_NOISE, 1.0, 1e-12)
    assert unbiased == pytest.approx(sca.zero_bias(PAPER_REACH), rel=1e-2)
    assert np.isfinite(sca.exact(reach, 0.0, 1.0, 1.0)).all()  # no noise at all


@pytest.mark.parametrize("instance", instances())
def test_s3_stronger_devices_weigh_no_less(instance: tuple[np.ndarray, float, float, float, np.ndarray]) -> None:
    reach = np.sort(instance[0])
    alpha = sca.amplitudes(sca.exact(reach, *instance[1:4]), reach)
    assert (np.diff(alpha) >= -1e-12).all()


def test_zero_bias_and_the_other_methods_in_the_papers_setting() -> None:
    """Noise norms in units of the norm bound, and devices on the air: what the methods' pages say."""
    zero = sca.zero_bias(PAPER_REACH)
    assert np.sqrt(PAPER_NOISE) / sca.amplitudes(zero, PAPER_REACH).sum() == pytest.approx(19.6, rel=5e-3)
    assert sca.transmit_probability(zero, PAPER_REACH).sum() == pytest.approx(27, abs=0.2)
    rate = (1 / PAPER_REACH**2).sum()  # vanilla: the weakest of 30
    assert np.sqrt(PAPER_NOISE * rate / np.log(2)) / 30 == pytest.approx(33.8, rel=5e-3)
    assert np.sqrt(np.pi * PAPER_NOISE * rate) / 30 == pytest.approx(49.9, rel=5e-3)
    weakest = (PAPER_REACH**2 * np.random.default_rng(1).exponential(size=(100_000, 30))).min(1)
    noises = np.sqrt(PAPER_NOISE / weakest) / 30  # no variance: its median is what a simulation can tell
    assert abs(np.mean(noises < 33.8) - 0.5) < 5 * 0.5 / np.sqrt(100_000) + 2e-3
    inside = PAPER_REACH[PLACES_M <= 900]
    assert len(inside) == 11
    for reach, noise, active in ((inside, 15.8, 9.2), (PAPER_REACH, 14.2, 25.2)):  # BB, energy, g = ½
        q = np.exp(-0.5 * (reach.min() / reach) ** 2)
        assert np.sqrt(PAPER_NOISE) / (np.sqrt(0.5) * reach.min() * q.sum()) == pytest.approx(noise, rel=5e-3)
        assert q.sum() == pytest.approx(active, abs=0.06)
    gamma = np.sqrt(0.5) * inside.min()  # BB, fading
    assert np.sqrt(PAPER_NOISE) / (gamma * 11 * np.exp(-0.5)) == pytest.approx(21.7, rel=5e-3)
    rate = (1 / inside**2).sum()  # BB, instantaneous
    assert np.sqrt(PAPER_NOISE * rate / np.log(2)) / 11 == pytest.approx(23.2, rel=5e-3)
    full = PAPER_REACH * np.sqrt(np.random.default_rng(0).exponential(size=(20_000, 30)))  # OPC, all at full energy
    a = full.sum(1) / (PAPER_NOISE + (full**2).sum(1))
    assert (a[:, None] * full).max() < 1
    assert (a[:, None] * full).mean() == pytest.approx(0.0055, rel=0.1)
    assert np.median(np.sqrt(PAPER_NOISE) / full.sum(1)) == pytest.approx(2.5, rel=0.1)


def test_s4_threshold_structure_where_noise_dominates() -> None:
    """α_i = min(α_i,max, ᾱ) with ᾱ the smallest of the prefix ratios: nearly the optimum in the paper's setting."""
    omega, wb = 1e-2, 30.0
    most = np.sort(PAPER_REACH / np.sqrt(2 * np.e))
    level = ((np.cumsum(most**2) + omega / wb * PAPER_NOISE) / np.cumsum(most)).min()
    alpha = np.minimum(PAPER_REACH / np.sqrt(2 * np.e), level)
    p = alpha / alpha.sum()
    simple = wb * ((p - 1 / 30) ** 2).sum() + omega * PAPER_NOISE / alpha.sum() ** 2
    found = sca.exact(PAPER_REACH, PAPER_NOISE, wb, omega)
    alpha_found = sca.amplitudes(found, PAPER_REACH)
    p_found = alpha_found / alpha_found.sum()
    exact = wb * ((p_found - 1 / 30) ** 2).sum() + omega * PAPER_NOISE / alpha_found.sum() ** 2
    assert simple == pytest.approx(exact, rel=1e-4)


def test_s6_units_do_not_matter_and_instances_are_independent() -> None:
    reach, noise, wb, wv, spread = instances(1)[0]
    found = sca.exact(reach, noise, wb, wv, spread)
    assert sca.exact(1e-9 * reach, 1e-18 * noise, wb, wv, spread) == pytest.approx(1e-9 * found, rel=1e-9)
    both = sca.exact(np.stack([reach, 2 * reach]), noise, wb, wv, spread)
    assert both[0] == pytest.approx(found, rel=1e-12)
    assert both[1] == pytest.approx(sca.exact(2 * reach, noise, wb, wv, spread), rel=1e-12)


def test_s7_moments_by_simulation() -> None:
    """E D̂ = Σ p_i g_i, Var = Σ p_i² ((1/q_i − 1)(‖g_i‖² + σ_i²) + σ_i²) + d σ_z²/α²; tolerance 5 standard errors."""
    rng, count = np.random.default_rng(1), 400_000
    reach = np.array([0.5, 1.0, 2.0])
    gamma = np.array([0.3, 0.5, 0.4])
    vectors = np.array([[0.6, 0.8], [-1.0, 0.0], [0.0, 0.5]])
    noise_var = 0.01
    sent = rng.exponential(size=(count, 3)) >= (gamma / reach) ** 2
    alpha = sca.amplitudes(gamma, reach).sum()
    spread = np.array([0.3, 0.0, 0.5])  # σ_i² of random vectors in two dimensions
    drawn = vectors + np.sqrt(spread / 2)[:, None] * rng.standard_normal((count, 3, 2))
    heard = np.einsum("ni,nid->nd", sent * gamma, drawn) + np.sqrt(noise_var) * rng.standard_normal((count, 2))
    estimates = heard / alpha
    p, q = sca.weights(gamma, reach), sca.transmit_probability(gamma, reach)
    mean = p @ vectors
    assert (np.abs(estimates.mean(0) - mean) < 5 * estimates.std(0) / np.sqrt(count)).all()
    squares = ((estimates - mean) ** 2).sum(1)
    energy = (vectors**2).sum(1) + spread
    expected = (p**2 * ((1 / q - 1) * energy + spread)).sum() + 2 * noise_var / alpha**2
    assert abs(squares.mean() - expected) < 5 * squares.std() / np.sqrt(count)
