"""What is shown on a terminal: how far work has come, and the results of a run.

Knows: terminals, how progress and results are shown.
Does not know: commands and their options, what the work is.
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

SECONDS_BETWEEN_LINES = 15.0  # where there is no terminal


class Live:
    """How far some work has come: a bar on a terminal, elsewhere a line from time to time."""

    def __init__(self, total: int, unit: str) -> None:
        """`total` units of work, for instance rounds."""
        self._total, self._unit = total, unit
        self._started = self._printed = time.monotonic()
        self._first: float | None = None
        self._bar: Any = None

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: float, text: str) -> None:
        """Show that `done` units are done, parts counted, and some text."""
        if self._first is None:
            self._first = done
            self._bar = self._new_bar() if sys.stderr.isatty() else None
        here, now = done - self._first, time.monotonic()
        left_s = (now - self._started) / here * (self._total - done) if here > 0 else 0.0
        begun = here > 0.01 * self._total and now - self._started > 2  # before that, nobody can tell
        left = f"{_duration(left_s)} left" if begun else ""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):  # a terminal that has gone
                self._bar.update(self._task, completed=done, shown=f"{int(done)}/{self._total}", text=text, left=left)
        elif now - self._printed >= SECONDS_BETWEEN_LINES and here > 0:
            say(f"{self._unit} {int(done)}/{self._total}  {text}  {left}")
            self._printed = now

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            say(line)

    def _new_bar(self) -> Any:
        from rich import progress
        from rich.console import Console

        names = ("{task.fields[shown]}", None, "{task.fields[text]}", "{task.fields[left]}")
        columns = [progress.BarColumn() if name is None else progress.TextColumn(name) for name in names]
        console = Console(stderr=True)
        bar = progress.Progress(progress.TextColumn(self._unit), *columns, console=console, transient=True)
        self._task = bar.add_task("", total=self._total, shown="", text="", left="")
        bar.start()
        return bar


class Progress(Live):
    """The progress of a run, called after every round; the headline comes when the run really begins."""

    def __init__(self, config: "Config", headline: str) -> None:
        super().__init__(config.experiment.rounds, "round")
        self._headline, self._accuracy = headline, ""

    def __enter__(self) -> "Progress":
        return self

    def __call__(self, done: int, row: Any) -> None:
        """Show that `done` rounds are done."""
        if self._first is None:
            say(self._headline)
        if row is not None and "test_accuracy" in row:
            values = row["test_accuracy"]
            self._accuracy = f"test accuracy {100 * sum(values) / len(values):.1f} %"
        self.show(done, self._accuracy)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def headline(config: "Config") -> str:
    """One line about the run that is about to start."""
    seeds = ", ".join(map(str, config.experiment.seeds))
    return (
        f"{config.algorithm.name} on {config.data.name}: {config.experiment.rounds} rounds, "
        f"{config.cell.devices} devices, seeds {seeds}"
    )


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
