"""Compares runs: levels with their uncertainty, and paired differences by seed.

Knows: results, statistics.
Does not know: files.
"""

from collections.abc import Mapping

import numpy as np

from otafl.errors import OtaflError
from otafl.report.statistics import (
    compared,
    estimate,
    final_accuracy,
    last_accuracy,
    mean_accuracy,
    rounds_to_reach,
    verdict,
)
from otafl.runs.result import Result


def same_world(one: Result, other: Result) -> bool:
    """Whether a seed means the same geometry, motion, channel, data, initial model and noise in both runs."""
    sections = ("data", "partition", "model", "cell", "mobility", "pathloss", "fading", "radio")
    made = [{**result.summary.get("sources", {}), "algorithm": None, "python": None} for result in (one, other)]
    return made[0] == made[1] and all(getattr(one.config, key) == getattr(other.config, key) for key in sections)


def comparison(results: Mapping[str, Result], level: float | None = None) -> str:
    """A table, and a sentence for every run but the first, with which it is compared.

    `level` is the test accuracy in percent for "rounds to reach"; by default 95 % of the middle run's, rounded down.

    >>> import otafl
    >>> small = otafl.load_config("quick", {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2})
    >>> results = {name: otafl.run(small.replace({"algorithm.name": name}), device="cpu") for name in ("opc", "fedavg")}
    >>> comparison(results).splitlines()[0].split()
    ['test', 'accuracy', '(%)', 'mean', 'over', 'rounds', 'to', 'failed']
    """
    if any("test_accuracy" not in result.metrics for result in results.values()):
        raise OtaflError("compare needs runs that record test accuracy; regression problems have none")
    last = {name: estimate(last_accuracy(result)) for name, result in results.items()}
    if level is None:
        level = float(np.floor(0.95 * np.median([value.mean for value in last.values()])))
    rows = [
        ("", "test accuracy (%)", "", "", "", "mean over", "rounds to", "failed"),
        ("method", "last model", "mean ± std", "95 % interval", "of", "all rounds", f"reach {level:g} %", "seeds"),
    ]
    for name, result in results.items():
        value = last[name]
        rows.append(
            (
                name,
                str(estimate(final_accuracy(result))),
                str(value),
                f"{value.low:.2f} … {value.high:.2f}" if value.num_seeds > 1 else "one seed",
                result.summary["averaged_over"],
                f"{float(mean_accuracy(result).mean()):.2f}",
                _reach(rounds_to_reach(result, level)),
                f"{len(result.diverged)} of {len(result.config.experiment.seeds)}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", "std and interval between seeds; a failed seed counts with 0 %"]
    devices = dict.fromkeys(str(result.summary["device"]) for result in results.values())
    if len(devices) > 1:
        lines.append(f"runs were made on {' and on '.join(devices)}: equal runs would differ in their last digits")
    for name, result in results.items():
        lines += [f"{name}: {note}" for note in result.notes]
    return "\n".join([*lines, *sentences(results)])


def sentences(results: Mapping[str, Result]) -> list[str]:
    """A verdict on every run against the first, corrected for their number."""
    base, reference = next(iter(results.items()))
    others = {name: result for name, result in results.items() if result is not reference}
    unpaired = {name: _unpaired(name, result, base, reference) for name, result in others.items()}
    paired = [base, *(name for name, why in unpaired.items() if why is None)]
    found = compared({name: last_accuracy(results[name]) for name in paired}, base)
    return [why or verdict(name, base, found[name]) for name, why in unpaired.items()]


def _reach(rounds: np.ndarray) -> str:
    missing = int(np.isnan(rounds).sum())
    if missing == len(rounds):
        return "never"
    middle = float(np.nanmedian(rounds)) if missing <= len(rounds) / 2 else np.nan
    note = f" ({missing} of {len(rounds)} never)" if missing else ""
    return f"{middle:.0f}{note}"


def _unpaired(name: str, result: Result, base: str, reference: Result) -> str | None:
    """The reason why two runs cannot be compared seed by seed; None if they can."""
    if result.config.experiment.seeds != reference.config.experiment.seeds:
        return f"{name} and {base}: other seeds, so differences are not paired"
    if not same_world(result, reference):
        return f"{name} and {base}: not the same world, so a seed is not the same draw for both; no paired difference"
    return None
