"""Runs compared: levels with their uncertainty, paired differences by seed, and what cannot be told.

Knows: results, statistics.
Does not know: files.
"""

from collections.abc import Mapping

import numpy as np

from otafl.errors import OtaflError
from otafl.report.statistics import (
    Estimate,
    estimate,
    last_accuracy,
    mean_accuracy,
    paired_difference,
    rounds_to_reach,
    verdict,
)
from otafl.result import Result


def same_world(one: Result, other: Result) -> bool:
    """Whether a seed is the same world for both: geometry, motion, channel, data, start, noise."""
    sections = ("data", "partition", "model", "cell", "mobility", "pathloss", "fading", "radio")
    return all(getattr(one.config, section) == getattr(other.config, section) for section in sections)


def comparison(results: Mapping[str, Result], level: float | None = None) -> str:
    """A table and sentences; the first run is what the others are compared with.

    `level` is the test accuracy in percent for "rounds to reach"; by default 95 % of the middle run's, rounded down.
    """
    if any("test_accuracy" not in result.metrics for result in results.values()):
        raise OtaflError("compare needs runs that record test accuracy; regression problems have none")
    last = {name: estimate(last_accuracy(result)) for name, result in results.items()}
    if level is None:
        level = float(np.floor(0.95 * np.nanmedian([value.mean for value in last.values()])))
    width = max(len("method"), *map(len, results))
    lines = [
        f"{'':<{width}}  {'test accuracy (%)':<30} {'mean over all':>14} {'rounds to':>16}",
        f"{'method':<{width}}  {'mean ± std':<15}{'95 % interval':<15} {'rounds (%)':>14} {f'reach {level:g} %':>16}",
    ]
    for name, result in results.items():
        value, area = last[name], mean_accuracy(result)
        low, high = value.mean - value.half_width, value.mean + value.half_width
        interval = f"{low:.2f} … {high:.2f}" if value.num_seeds > 1 else "one seed"
        lines.append(
            f"{name:<{width}}  {value!s:<15}{interval:<15} {float(np.nanmean(area)):>14.2f} "
            f"{_reach(rounds_to_reach(result, level)):>16}"
        )
    rounds = {result.summary["averaged_over"] for result in results.values()}
    lines += ["", f"accuracy: mean over {' / '.join(sorted(rounds))}, then over seeds; std and interval between seeds"]
    diverged = [name for name, result in results.items() if result.diverged]
    if diverged:
        lines.append(f"seeds diverged in {', '.join(diverged)}: they count as missing")
    (base, reference), *others = results.items()
    for name, result in others:
        lines.append(_sentence(name, result, base, reference))
    return "\n".join(lines)


def _reach(rounds: np.ndarray) -> str:
    missing = int(np.isnan(rounds).sum())
    if missing == len(rounds):
        return "never"
    middle = float(np.nanmedian(rounds)) if missing <= len(rounds) / 2 else np.nan
    note = f" ({missing} of {len(rounds)} never)" if missing else ""
    return f"{middle:.0f}{note}"


def _sentence(name: str, result: Result, base: str, reference: Result) -> str:
    if result.config.experiment.seeds != reference.config.experiment.seeds:
        return f"{name} and {base}: other seeds, so differences are not paired"
    if not same_world(result, reference):
        return f"{name} and {base}: not the same world, so a seed is not the same draw for both; no paired difference"
    gap = paired_difference(result, reference)
    whole = ~np.isnan(last_accuracy(result) - last_accuracy(reference))
    if not whole.all():
        gap = (
            estimate((last_accuracy(result) - last_accuracy(reference))[whole])
            if whole.any()
            else Estimate(np.nan, np.nan, np.nan, 0)
        )
    return verdict(name, base, gap)
