"""The rows of metrics.csv: written as a run goes on, and parsed again.

Knows: columns, seeds, the file's format.
Does not know: what the columns mean.
"""

import csv
import io
import math

import numpy as np
from numpy.typing import NDArray

from otafl.core.metrics import COLUMNS, INTEGER_COLUMNS, Rows
from otafl.runs.directory import RunDirectory


class Recorder:
    """Collects recorded rows in memory and, if there is a directory, in metrics.csv."""

    def __init__(self, seeds: tuple[int, ...], directory: RunDirectory | None) -> None:
        self._seeds, self._directory = seeds, directory
        self.rounds: list[int] = []
        self.rows: list[Rows] = []
        self._columns: list[str] | None = None
        self.text = ""

    def add(self, r: int, columns: Rows, alive: list[bool]) -> None:
        """Record x^r; a seed that is not alive has no row."""
        row = {
            name: [v if a else math.nan for v, a in zip(values, alive, strict=True)] for name, values in columns.items()
        }
        self.rounds.append(r)
        self.rows.append(row)
        if r == 0:  # held back until the first round has shown which columns the method adds
            return
        self.write_first()
        self._write(self._lines(r, row, alive))

    def write_first(self) -> None:
        """Write the header and row 0, unless that is done."""
        if self._columns is None:
            self._columns = _ordered(self.rows[-1])
            header = ",".join(["seed", "round", *self._columns]) + "\n"
            self._write(header + self._lines(0, self.rows[0], [True] * len(self._seeds)))

    def _write(self, text: str) -> None:
        self.text += text
        if self._directory is not None:
            self._directory.append_metrics(text)

    def _lines(self, r: int, row: Rows, alive: list[bool]) -> str:
        assert self._columns is not None
        lines = [
            ",".join([str(seed), str(r), *(_number(name, row.get(name), s) for name in self._columns)])
            for s, seed in enumerate(self._seeds)
            if alive[s]
        ]
        return "".join(line + "\n" for line in lines)

    def restore(self, text: str) -> None:
        """Continue from the content of an earlier metrics.csv."""
        self.rounds, self.rows, self._columns = _parse(text, self._seeds)
        self.text = text

    def arrays(self) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
        """Recorded rounds [R] and columns [S, R]."""
        blank = [math.nan] * len(self._seeds)
        names = _ordered({name: [] for row in self.rows for name in row})
        values = {name: np.array([row.get(name, blank) for row in self.rows]).T for name in names}
        return np.array(self.rounds), values


def _ordered(row: Rows) -> list[str]:
    """Column names in the order of COLUMNS, then the method's own columns by name."""
    return [name for name in COLUMNS if name in row] + sorted(name for name in row if name not in COLUMNS)


def _number(name: str, values: list[float] | None, s: int) -> str:
    if values is None or math.isnan(values[s]):
        return ""
    return str(int(values[s])) if name in INTEGER_COLUMNS else repr(values[s])


def _parse(text: str, seeds: tuple[int, ...]) -> tuple[list[int], list[Rows], list[str] | None]:
    """Rounds, rows and columns of the content of a metrics.csv."""
    table = list(csv.reader(io.StringIO(text)))
    if not table:
        return [], [], None
    columns = table[0][2:]
    rounds: list[int] = []
    rows: list[Rows] = []
    place = {str(seed): s for s, seed in enumerate(seeds)}
    for seed, r, *values in table[1:]:
        if not rounds or rounds[-1] != int(r):
            rounds.append(int(r))
            rows.append({name: [math.nan] * len(seeds) for name in columns})
        for name, value in zip(columns, values, strict=True):
            rows[-1][name][place[seed]] = float(value) if value else math.nan
    return rounds, rows, columns
