"""The folder of a study: which runs are done, which are missing, and one table of all.

    sweep.json        the axes and, per run directory, its place on them
    runs/LABEL-HASH/  run directories
    table.csv         one row per run and seed
    workers.log       what workers wrote on their standard error

Knows: cases, run directories.
Does not know: how runs are carried out.
"""

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otafl.disk import explained, locked, put
from otafl.errors import RunDirectoryError
from otafl.runs.directory import refuse_inside_a_run, same_sources
from otafl.runs.identity import is_plugin, sources
from otafl.runs.result import read_run
from otafl.studies.sweep import Case, Sweep
from otafl.world.data import Dataset, load_dataset

COLUMNS = ("status", "test_accuracy", "test_loss", "validation_accuracy", "num_active", "wall_s", "directory", "error")


@dataclass(frozen=True)
class Study:
    """The folder of a sweep."""

    folder: Path
    sweep: Sweep
    _loaded: dict[Any, Dataset] = field(default_factory=dict, repr=False)
    """Data that plug-ins have loaded."""

    def place(self, case: Case) -> Path:
        """The run directory of a case."""
        return self.folder / "runs" / case.folder

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Make the folder, write sweep.json, and lock the folder inside the `with` block."""
        index = {
            "name": self.sweep.name,
            "axes": self.sweep.axes,
            "runs": {case.folder: dict(case.axes) for case in self.sweep.cases},
        }
        with explained(self.folder):
            refuse_inside_a_run(self.folder / "runs")
            (self.folder / "runs").mkdir(parents=True, exist_ok=True)
            lock = locked(self.folder / "sweep.lock", f"{self.folder}: is worked on", "choose another --out")
        with lock:
            with explained(self.folder):
                put(self.folder / "sweep.json", (json.dumps(index, indent=1) + "\n").encode())
            yield

    def summary(self, case: Case) -> Mapping[str, Any] | None:
        """The summary of a finished run with verified files; None if there is none, or if its data were others."""
        try:
            summary = read_run(self.place(case)).summary
        except RunDirectoryError:
            return None
        return summary if same_sources(summary.get("sources"), self._sources(case)) is None else None

    def _sources(self, case: Case) -> Mapping[str, str]:
        """Digests of a case's plug-ins and of the data they load, which is loaded once."""
        key = (case.config.data, case.config.cell.devices)
        if is_plugin(case.config.data.spec) and key not in self._loaded:
            self._loaded[key] = load_dataset(case.config.data.name, case.config.data.spec, case.config.cell.devices)
        return sources(case.config, self._loaded.get(key))

    def missing(self) -> list[Case]:
        """The cases without a finished run."""
        return [case for case in self.sweep.cases if self.summary(case) is None]

    def plan(self) -> str:
        """Every run with its place on the axes, and whether it is there."""
        missing = self.missing()
        lines = [f"{'missing' if case in missing else 'done':<8} {case.label}" for case in self.sweep.cases]
        seeds = sum(len(case.config.experiment.seeds) for case in missing)
        rounds = sum(case.config.experiment.rounds * len(case.config.experiment.seeds) for case in missing)
        work = f"{len(missing)} of {len(lines)} runs are missing: {seeds} seeds, {rounds:,} rounds of a seed"
        return "\n".join([*lines, "", f"{work}; nothing was run"])

    def write_table(self, errors: Mapping[str, str]) -> Path:
        """Write table.csv, a row per run and seed; `errors` maps run directories to what went wrong."""
        axes = list(self.sweep.axes)
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow([*axes, "seed", *COLUMNS])
        for case in self.sweep.cases:
            summary = self.summary(case)
            where = [case.axes.get(axis, "") for axis in axes]
            for index, seed in enumerate(case.config.experiment.seeds):
                table.writerow([*where, seed, *self._cells(case, summary, index, errors.get(case.folder, ""))])
        path = self.folder / "table.csv"
        with explained(self.folder):
            put(path, text.getvalue().encode())
        return path

    def _cells(self, case: Case, summary: Mapping[str, Any] | None, index: int, error: str) -> list[Any]:
        directory = f"runs/{case.folder}"
        if summary is None:
            return ["failed" if error else "missing", "", "", "", "", "", directory, error]
        seed = str(case.config.experiment.seeds[index])
        diverged = seed in summary.get("diverged", {})

        def per_seed(name: str) -> Any:
            value = summary.get(name, {}).get("per_seed", {}).get(seed)
            return "" if value is None else repr(value)

        values = [per_seed(name) for name in ("test_accuracy", "test_loss", "validation_accuracy")]
        status = "diverged" if diverged else "complete"
        return [status, *values, summary.get("num_active", ""), summary["wall_s"], directory, ""]
