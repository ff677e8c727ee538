"""Statistics over seeds: estimates with intervals, paired differences, tests.

A seed that failed (its model exploded, or its loss was not finite) counts with an accuracy of 0.

Knows: results of several seeds.
Does not know: files, figures.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otafl.runs.result import Result, first_averaged

LEVEL = 0.05
"""The rate at which a whole table may contain a verdict where there is no difference."""


class Estimate(NamedTuple):
    """A mean over seeds, the standard deviation between seeds, and the half-width of its 95 % interval."""

    mean: float
    std: float
    half_width: float
    num_seeds: int

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.std:.2f}" if self.num_seeds > 1 else f"{self.mean:.2f}"


def estimate(values: NDArray[np.float64]) -> Estimate:
    """Mean of independent values [n], their standard deviation, and a 95 % interval by Student's t.

    The interval is mean ± t_{0.975, n−1} std/√n.

    Args:
        values: one value per seed, [n].

    Returns:
        Mean, standard deviation (n − 1), half the interval and n; the last two are NaN for a single value.

    >>> print(estimate(np.array([96.0, 97.0, 98.0])))
    97.00 ± 1.00
    """
    from scipy.stats import t as student

    count = len(values)
    if count < 2:
        return Estimate(float(values.mean()) if count else math.nan, math.nan, math.nan, count)
    std = float(values.std(ddof=1))
    half_width = float(student.ppf(0.975, count - 1)) * std / math.sqrt(count)
    return Estimate(float(values.mean()), std, half_width, count)


def welch(one: NDArray[np.float64], other: NDArray[np.float64]) -> Estimate:
    """The difference of two means whose values belong to different worlds, with Welch's 95 % interval.

    Args:
        one: a value per seed.
        other: a value per seed, their mean is subtracted.

    >>> found = welch(np.array([2.0, 4.0]), np.array([1.0, 1.0]))
    >>> found.mean, round(found.half_width, 1)  # one degree of freedom
    (2.0, 12.7)
    """
    from scipy.stats import t as student

    few = min(len(one), len(other))
    gap = float(one.mean() - other.mean())
    if few < 2:
        return Estimate(gap, math.nan, math.nan, few)
    parts = [float(values.var(ddof=1)) / len(values) for values in (one, other)]
    spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True))
    error = math.sqrt(sum(parts))
    half_width = float(student.ppf(0.975, sum(parts) ** 2 / spread)) * error if spread else 0.0
    return Estimate(gap, error * math.sqrt(few), half_width, few)


def error_bar(value: Estimate) -> float:
    """Length of an error bar: half the 95 % interval; the standard deviation if there are fewer than three seeds."""
    return 0.0 if value.num_seeds < 2 else value.std if value.num_seeds < 3 else value.half_width


def error_bar_text(num_seeds: int) -> str:
    """The meaning of an error bar, in words."""
    if num_seeds < 2:
        return "one seed"
    return f"± one standard deviation of {num_seeds} seeds" if num_seeds < 3 else f"95 % interval of {num_seeds} seeds"


def last_accuracy(result: Result) -> NDArray[np.float64]:
    """Test accuracy of every seed, as a mean over the recorded rounds r > T − 50.

    Args:
        result: a finished run of T rounds.

    Returns:
        Percent, [S]; 0 for a seed that failed.

    >>> import otafl
    >>> small = {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2}
    >>> run = otafl.run(otafl.load_config("quick", small))
    >>> last_accuracy(run).shape, bool((last_accuracy(run) == final_accuracy(run)).all())  # one row after round 0
    ((2,), True)
    """
    late = np.flatnonzero(result.rounds > first_averaged(result.config))
    return _accuracy(result, late)


def final_accuracy(result: Result) -> NDArray[np.float64]:
    """Test accuracy of every seed's last model.

    Args:
        result: a finished run.

    Returns:
        Percent, [S]; 0 for a seed that failed.
    """
    return _accuracy(result, np.flatnonzero(result.rounds == result.config.experiment.rounds))


def accuracy_in(result: Result, rows: NDArray[np.intp], name: str = "test_accuracy") -> NDArray[np.float64]:
    """Accuracy in percent of every seed's model of a row of its own, `rows` [S]; 0 if the seed failed; [S]."""
    chosen = 100 * result.metrics[name][np.arange(len(rows)), rows]
    alive = [seed not in result.diverged for seed in result.config.experiment.seeds]
    return np.where(alive, chosen, 0.0)


def _accuracy(result: Result, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    values = np.zeros(len(result.config.experiment.seeds))
    for s, seed in enumerate(result.config.experiment.seeds):
        if seed not in result.diverged:
            values[s] = 100 * result.metrics["test_accuracy"][s, rows].mean()
    return values


def paired_difference(one: Result, other: Result) -> Estimate:
    """The difference of last accuracies, paired by seed, since a seed means the same world for both.

    Args:
        one: a finished run.
        other: another with the same seeds in the same order, which is subtracted.

    Returns:
        Mean difference in points of a percent, with its 95 % interval.

    >>> import otafl
    >>> small = {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2}
    >>> run = otafl.run(otafl.load_config("quick", small))
    >>> paired_difference(run, run).mean
    0.0

    Raises:
        ValueError: the seeds differ.
    """
    if one.config.experiment.seeds != other.config.experiment.seeds:
        raise ValueError("paired differences need the same seeds in the same order")
    return estimate(last_accuracy(one) - last_accuracy(other))


def rounds_to_reach(result: Result, level: float) -> NDArray[np.float64]:
    """Per seed, the first recorded round whose test accuracy in percent is at least `level`; NaN where none is.

    A seed that failed does not reach anything.
    """
    alive = np.array([seed not in result.diverged for seed in result.config.experiment.seeds])
    reached = (100 * result.metrics["test_accuracy"] >= level) & alive[:, None]
    first = np.where(reached.any(1), result.rounds[reached.argmax(1)], np.nan)
    return np.asarray(first, dtype=np.float64)


def mean_accuracy(result: Result) -> NDArray[np.float64]:
    """Per seed, the area under the curve of test accuracy in percent over all rounds; 0 from where a seed failed."""
    accuracy = np.nan_to_num(100 * result.metrics["test_accuracy"])
    return np.asarray(np.trapezoid(accuracy, result.rounds, axis=1) / result.config.experiment.rounds)


class Comparison(NamedTuple):
    """A paired difference in a table, with a p-value adjusted for the size of the table."""

    gap: Estimate
    p: float
    """Adjusted by Holm's method for all comparisons of the table; NaN for fewer than two seeds."""
    family: int
    """Number of comparisons in the table."""

    @property
    def told(self) -> bool:
        """Whether the difference is significant."""
        return self.p < LEVEL


def p_value(value: Estimate, bound: float = 0.0) -> float:
    """Two-sided p of Student's t-test that the mean is `bound`; NaN for fewer than two seeds.

    If all values are equal there is no spread to judge by, and p is that of the sign test, 2^{1−n} for n seeds.
    """
    from scipy.stats import t as student

    if value.num_seeds < 2 or math.isnan(value.mean):
        return math.nan
    distance, error = abs(value.mean - bound), value.std / math.sqrt(value.num_seeds)
    if error <= 1e-9 * distance:
        return float(2.0 ** (1 - value.num_seeds)) if distance else 1.0
    return float(2 * student.sf(distance / error, value.num_seeds - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: if there is no effect, one of them is below 5 % with probability at most 5 %.

    This holds however the tests depend on each other. NaN stays, and does not count as a test.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted((p, k) for k, p in enumerate(p_values) if not math.isnan(p))
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, k) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[k] = largest
    return adjusted


def compared(values: Mapping[str, NDArray[np.float64]], base: str) -> dict[str, Comparison]:
    """Compare every row of a table with `base`, paired by seed, with p-values adjusted for their number.

    Args:
        values: name of a row to its values, one per seed, the same seeds in the same order for all.
        base: name of the row that the others are compared with.

    >>> found = compared({"a": np.array([1.0, 2.0, 3.0]), "b": np.array([2.0, 3.1, 4.0])}, "a")
    >>> round(found["b"].gap.mean, 2), found["b"].told
    (1.03, True)
    """
    gaps = {name: estimate(value - values[base]) for name, value in values.items() if name != base}
    adjusted = holm([p_value(gap) for gap in gaps.values()])
    return {name: Comparison(gap, p, len(gaps)) for (name, gap), p in zip(gaps.items(), adjusted, strict=True)}


def verdict(one: str, other: str, found: Comparison) -> str:
    """A sentence that says whether the seeds separate two methods; the difference is `one` minus `other`."""
    gap = found.gap
    seeds = f"{gap.num_seeds} seeds" if gap.num_seeds != 1 else "one seed"
    if math.isnan(found.p):
        return f"{one} and {other}: {seeds} cannot separate two methods"
    better, worse = (one, other) if gap.mean > 0 else (other, one)
    size = f"{abs(gap.mean):.2f} ± {gap.half_width:.2f} points"
    how = f"{seeds}, paired, 95 %"
    chance = f"p {'< 0.001' if found.p < 0.001 else f'= {found.p:.2g}'}"
    if found.family > 1:
        chance += f" after Holm's correction for {found.family} comparisons"
    if found.told:
        return f"{better} is better than {worse} by {size} ({how}; {chance})"
    alone = " for this pair alone" if found.family > 1 else ""
    return f"{seeds} cannot separate {one} and {other}: {better} is ahead by {size} (paired, 95 %{alone}; {chance})"
