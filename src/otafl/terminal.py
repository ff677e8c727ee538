"""How far work has come, shown on a terminal.

Knows: terminals.
Does not know: what the work is.
"""

import contextlib
import sys
import time
from typing import Any

from otafl.errors import say

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


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
