"""The gossip matrix: its properties, its mean, and how fast it mixes."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from otafl.papers.fedoag.theory.mixing import (
    expected_mixing,
    expected_mixing_by_enumeration,
    mixing_matrix,
    sampled_mixing,
    spectral_gap,
    uniform_gap,
)
from tests.algorithms.design.test_sca import PAPER_REACH


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_w_is_symmetric_doubly_stochastic_and_idempotent(active: list[bool]) -> None:
    w = mixing_matrix(np.array(active))
    assert np.array_equal(w, w.T)
    assert w.sum(0) == pytest.approx(np.ones(len(active)))
    assert (w >= 0).all()
    assert w @ w == pytest.approx(w, abs=1e-14)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=7))
def test_mean_by_quadrature_is_that_over_all_sets(prob: list[float]) -> None:
    p = np.array(prob)
    assert expected_mixing(p) == pytest.approx(expected_mixing_by_enumeration(p), abs=1e-12)


def test_mean_and_gap_by_monte_carlo() -> None:
    """Unequal probabilities, 30 devices; 5 standard errors per entry."""
    rng, count = np.random.default_rng(0), 20_000
    p = rng.uniform(0.05, 0.95, 30)
    mean, error = sampled_mixing(rng.random((count, 30)) < p)
    exact = expected_mixing(p)
    assert (np.abs(mean - exact) <= 5 * error + 1e-12).all()
    assert spectral_gap(p) == pytest.approx(1 - np.linalg.eigvalsh(exact)[-2], rel=1e-9)


def test_equal_probabilities_have_a_closed_form() -> None:
    """M = (1 − a) I + a 11ᵀ/m, so 1 − ρ = m M_12 with M_12 = E[(|A| − 1)₊]/(m (m − 1))."""
    for m, p in ((2, 0.5), (5, 0.3), (40, 0.02), (10, 1.0)):
        assert spectral_gap(np.full(m, p)) == pytest.approx(uniform_gap(m, p), rel=1e-9)
    assert uniform_gap(2, 0.5) == pytest.approx(0.25)  # M_12 = P(both)/2, and the gap is 2 M_12
    assert uniform_gap(30, 1e-9) == pytest.approx(spectral_gap(np.full(30, 1e-9)), rel=1e-6)
    assert uniform_gap(10, 1.0) == 1  # ρ = 0: FedAvg with receiver noise


@pytest.mark.parametrize(("gamma", "gap"), [(3e-10, 0.240), (5e-10, 0.0192), (1e-9, 1.5e-7)])
def test_gap_in_the_papers_cell(gamma: float, gap: float) -> None:
    p = np.exp(-((gamma / PAPER_REACH) ** 2))
    assert spectral_gap(p) == pytest.approx(gap, rel=0.03)


def test_many_devices_and_the_same_by_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the second and the third eigenvalue are close to each other."""
    cases = [np.random.default_rng(seed).uniform(0.001, 0.9, m) for m in (60, 1000, 1400) for seed in range(4)]
    cases += [np.linspace(0.3, 0.9, 1400), np.full(200, 0.2), np.r_[np.full(700, 0.02), np.full(700, 0.0200001)]]
    dense = [spectral_gap(p) for p in cases]
    monkeypatch.setattr("otafl.papers.fedoag.theory.mixing.DENSE", 0)
    for p, expected in zip(cases, dense, strict=True):
        assert spectral_gap(p) == pytest.approx(expected, rel=1e-9)
    weak = np.exp(-((1e-9 / PAPER_REACH) ** 2))
    assert spectral_gap(weak) == pytest.approx(1.5e-7, rel=0.03)
    assert 0 < spectral_gap(np.random.default_rng(2).uniform(0.001, 0.9, 4000)) < 1
    assert spectral_gap(np.array([0.5, 0.5, 0.0])) == 0
