"""What curves are drawn over and budgets are given in: rounds, channel uses, airtime, energy, the world's own time.

Knows: columns of results, what they are called in print.
Does not know: figures, tables.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otafl import registry
from otafl.errors import ConfigError
from otafl.runs.result import Result

X_AXES = {"rounds": "round", "uses": "channel_uses", "seconds": "uplink_s", "joules": "energy_j", "time": "time_s"}
"""What -x may be, and the column it stands for; `time_s` is computed, the others are columns of metrics.csv."""
UNITS = {"round": "rounds", "channel_uses": "channel uses", "uplink_s": "s of airtime", "energy_j": "J", "time_s": "s"}


def column(result: Result, name: str, label: str, known: Sequence[str] = ()) -> NDArray[np.float64]:
    """A column [S, R] of a run; accuracies in percent, 0 from where a seed failed.

    Args:
        result: the run.
        name: a column of metrics.csv, or "round", or "time_s": seconds in the world, round_s for each round.
        label: what the run is called where it has no such column.
        known: columns to suggest then; default: the run's own.
    """
    rounds = np.tile(result.rounds.astype(np.float64), (len(result.config.experiment.seeds), 1))
    if name == "round":
        return rounds
    if name == "time_s":
        if result.config.round_s is None:
            raise ConfigError(f"{label}: its rounds have no length; only [mobility] or [fading] with round_s give one")
        return rounds * result.config.round_s
    if name not in result.metrics:
        known = known or list(result.metrics)
        raise ConfigError(f"{label}: has no column {name!r}{registry.nearest(name, known)}; it has {', '.join(known)}")
    values = result.metrics[name]
    return np.asarray(100 * np.nan_to_num(values)) if name.endswith("_accuracy") else values


class Budget(NamedTuple):
    """How much may be spent, for a comparison at equal airtime, energy or whatever grows with the rounds."""

    column: str
    most: float

    @staticmethod
    def parse(text: str) -> "Budget":
        """The budget that `column=value` means, for instance `uplink_s=600`, `joules=0.5` or `rounds=300`."""
        name, _, number = str(text).partition("=")
        try:
            most = float(number)
        except ValueError:
            most = np.nan
        if not name or not 0 <= most < np.inf:
            raise ConfigError(f"at {text!r}: give a column and how much may be spent, for instance uplink_s=600")
        return Budget(X_AXES.get(name.strip(), name.strip()), most)

    def __str__(self) -> str:
        return f"{self.most:g} {UNITS[self.column]}" if self.column in UNITS else f"{self.column} = {self.most:g}"

    def left_over(self, result: Result, label: str) -> bool:
        """Whether a run ended with less spent."""
        return bool(np.nanmax(column(result, self.column, label)[:, -1]) < self.most)

    def rows(self, result: Result, label: str) -> NDArray[np.intp]:
        """Each seed's last recorded row at which no more than this is spent, [S]."""
        spent = column(result, self.column, label, [*X_AXES, *X_AXES.values()])
        spent = np.where(np.isnan(spent), np.inf, spent)
        spent[:, 0] = np.where(np.isinf(spent[:, 0]), 0.0, spent[:, 0])  # the initial model costs nothing
        if (np.diff(np.where(np.isinf(spent), np.finfo(np.float64).max, spent), axis=1) < 0).any():
            raise ConfigError(f"at {self.column}: is no budget, since it does not only grow; take {', '.join(X_AXES)}")
        found: NDArray[np.intp] = (spent <= self.most).sum(axis=1) - 1
        if (found < 0).any():
            raise ConfigError(f"at {self}: even the initial model of {label} has more")
        return found


def averaged(rows: str) -> str:
    """What the rows of a summary mean for a figure or a table.

    >>> averaged("5 rows of rounds 60 to 100"), averaged("round 20")
    ('mean of rounds 60 to 100', 'after round 20')
    """
    several, _, rounds = rows.rpartition(" of ")
    return f"{'mean of' if several else 'after'} {rounds}"
