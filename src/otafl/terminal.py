"""What a run shows on a terminal: progress, and its results at the end.

Knows: how progress and results are shown.
Does not know: commands and their options.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otafl.errors import say

if TYPE_CHECKING:
    from otafl.config.schema import Config
    from otafl.runs.result import Result

SECONDS_BETWEEN_LINES = 15.0  # progress lines where there is no terminal


def headline(config: "Config") -> str:
    """One line about the run that is about to start."""
    seeds = ", ".join(map(str, config.experiment.seeds))
    return (
        f"{config.algorithm.name} on {config.data.name}: {config.experiment.rounds} rounds, "
        f"{config.cell.devices} devices, seeds {seeds}"
    )


class Progress:
    """Shows progress as a bar on a terminal, elsewhere by a line from time to time; called after every round."""

    def __init__(self, config: "Config", headline: str) -> None:
        self._headline = headline
        self._total = config.experiment.rounds
        self._accuracy = ""
        self._started = self._printed = time.monotonic()
        self._first: int | None = None
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def _begin(self) -> None:
        say(self._headline)
        if sys.stderr.isatty():
            from rich import progress as rich_progress
            from rich.console import Console

            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("round"),
                rich_progress.MofNCompleteColumn(),
                rich_progress.BarColumn(),
                rich_progress.TextColumn("{task.fields[accuracy]}"),
                rich_progress.TimeRemainingColumn(),
                rich_progress.TextColumn("left"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("run", total=self._total, accuracy="")
            self._bar.start()

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, row: Any) -> None:
        """Show that `done` rounds are done."""
        if self._first is None:
            self._first = done
            self._begin()
        if row is not None and "test_accuracy" in row:
            values = row["test_accuracy"]
            self._accuracy = f"test accuracy {100 * sum(values) / len(values):.1f} %"
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):  # a terminal that has gone
                self._bar.update(self._task, completed=done, accuracy=self._accuracy)
            return
        now = time.monotonic()
        if now - self._printed >= SECONDS_BETWEEN_LINES and done > self._first:
            left_s = (now - self._started) / (done - self._first) * (self._total - done)
            say(f"round {done}/{self._total}  {self._accuracy}  {left_s:.0f} s left")
            self._printed = now


def print_summary(result: "Result", out: Path) -> None:
    """Print a run's results, and where they are stored."""
    summary = result.summary
    for note in result.notes:
        print(note)
    for name, label, factor, unit in (
        ("test_accuracy", "test accuracy", 100.0, " %"),
        ("mean_accuracy", "accuracy of the mean model", 100.0, " %"),
        ("validation_accuracy", "validation accuracy", 100.0, " %"),
        ("test_loss", "test loss", 1.0, ""),
    ):
        entry = summary.get(name)
        if entry is None or entry["mean"] is None:
            continue
        count = len(summary["seeds"])
        failed = f", {len(result.diverged)} failed with 0" if result.diverged else ""
        seeds = "1 seed" if count == 1 else f"mean ± std of {count} seeds{failed}"
        last, whole = (_spread(part, factor) for part in (entry["final"], entry))
        print(f"{label:<28} {last}{unit} at the end; {whole}{unit} over {summary['averaged_over']}  ({seeds})")
    if "num_active" in summary:
        print(f"{'active devices per round':<28} {summary['num_active']:.2f}")
    print(f"{'time':<28} {summary['wall_s']:.1f} s on {summary['device']}")
    for seed, entry in summary.get("diverged", {}).items():
        say(f"otafl: seed {seed} diverged after round {entry['round']}: {entry['cause']}")
    print(f"{summary['status']}: {out}")


def _spread(entry: Any, factor: float) -> str:
    spread = f" ± {factor * entry['std']:.3g}" if entry["std"] is not None else ""
    return f"{factor * entry['mean']:.4g}{spread}"
