"""Statistics that do not flatter: the whole procedure, from tuning to a verdict, where nothing is to be found."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from otafl.report.statistics import compared, estimate, holm, p_value

METHODS, VALUES, TUNING_SEEDS, SEEDS = 8, 7, 3, 10
Draw = Callable[[tuple[int, ...]], NDArray[np.float64]]


def test_p_is_students() -> None:
    values = np.random.default_rng(0).standard_normal(10) + 0.4
    assert p_value(estimate(values)) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-12)
    assert p_value(estimate(values), 1.0) == pytest.approx(stats.ttest_1samp(values, 1.0).pvalue, rel=1e-12)
    low = estimate(values).low  # the end of the 95 % interval is where p is 5 %
    assert p_value(estimate(values), low) == pytest.approx(0.05, rel=1e-9)
    assert math.isnan(p_value(estimate(values[:1])))
    assert p_value(estimate(np.zeros(5))) == 1
    assert p_value(estimate(np.ones(5))) == 2 * 0.5**5  # no spread: all five on one side
    assert p_value(estimate(np.full(2, 0.1) + np.array([0, 1e-17]))) == 0.5


def test_holm_by_its_definition() -> None:
    """Step down: the smallest p against 5 %/k, the next against 5 %/(k − 1), until one is above; all later fail."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        p = rng.uniform(0, 0.06, rng.integers(1, 9))
        order, refused = np.argsort(p), np.zeros(len(p), bool)
        for rank, k in enumerate(order):
            if p[k] >= 0.05 / (len(p) - rank):
                break
            refused[k] = True
        assert [value < 0.05 for value in holm(list(p))] == refused.tolist()
    assert holm([]) == []
    assert holm([math.nan, 0.02]) == pytest.approx([math.nan, 0.02], nan_ok=True)


def table(rng: np.random.Generator, draw: Draw, honest: bool) -> bool:
    """Tune and report equal methods once; whether the table has a verdict, every one of which is false.

    Honest: values are chosen on the validation set with other seeds, and p is corrected for the number of comparisons.
    Otherwise one method reports the best of its values on the reported seeds, and each comparison stands alone.
    """
    worlds = 2.0 * rng.standard_normal(SEEDS)  # a seed is the same world for all
    values = {}
    for method in range(METHODS):
        reported = worlds + draw((VALUES if honest or method == 0 else 1, SEEDS))
        chosen = draw((VALUES, TUNING_SEEDS)) if honest else reported
        values[str(method)] = reported[chosen.mean(1).argmax()]
    found = compared(values, "0")
    return any(one.told if honest else p_value(one.gap) < 0.05 for one in found.values())


def failing(rng: np.random.Generator) -> Draw:
    """A twentieth of the seeds fails and counts with 0 in place of 90."""
    return lambda shape: np.where(rng.random(shape) < 0.05, -90.0, rng.standard_normal(shape))


@pytest.mark.parametrize(
    "law", [lambda rng: rng.standard_normal, lambda rng: lambda shape: rng.exponential(1.0, shape), failing]
)
def test_equal_methods_are_told_apart_in_at_most_5_percent_of_tables(
    law: Callable[[np.random.Generator], Draw],
) -> None:
    rng, tables = np.random.default_rng(2), 2000
    rate = np.mean([table(rng, law(rng), honest=True) for _ in range(tables)])
    assert rate <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / tables)


def test_the_same_without_care_is_wrong_often() -> None:
    """Each comparison by itself, values chosen on the reported seeds: the test above can fail."""
    rng = np.random.default_rng(3)
    assert np.mean([table(rng, rng.standard_normal, honest=False) for _ in range(500)]) > 0.15


def test_a_difference_that_is_there_is_found() -> None:
    """One standard deviation between paired seeds times two: nearly always, among seven comparisons."""
    rng, found = np.random.default_rng(4), 0
    for _ in range(300):
        values = {str(k): rng.standard_normal(SEEDS) + (2.5 if k == 5 else 0.0) for k in range(METHODS)}
        found += compared(values, "0")["5"].told
    assert found > 0.9 * 300
