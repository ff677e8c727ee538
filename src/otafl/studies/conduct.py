"""Carry out a study: do what is missing, show how it goes in one place, write the table.

Knows: studies, executors.
Does not know: configurations' meaning.
"""

import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otafl.errors import ConfigError, say
from otafl.studies.local import Board, Stopped, carry_out
from otafl.studies.study import Study

SECONDS_BETWEEN_LINES = 10.0
FAILED_STATUS = 1
EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class Outcome:
    """What became of a study."""

    table: Path
    errors: dict[str, str]
    status: int
    """0, 1 where a run failed, 128 + the signal where it was stopped."""


@dataclass(frozen=True)
class Executor:
    """Where runs are carried out."""

    name: str = "local"
    """local: worker processes on this machine; ray: tasks on a Ray cluster."""
    workers: int | None = None
    """local: runs at a time; None is one per core, or one on a GPU."""
    address: str | None = None
    """ray: the cluster; None starts one on this machine."""
    cpus: float = 1.0
    """CPUs of a run, and so its threads: its last digits depend on these, and on nothing else here."""
    gpus: float = 0.0
    """ray: GPUs of a run, or a fraction of one."""

    def __post_init__(self) -> None:
        if self.name not in EXECUTORS:
            raise ConfigError(f"--executor {self.name}: choose from {', '.join(EXECUTORS)}")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: at least 1")
        if not (0 < self.cpus < math.inf and 0 <= self.gpus < math.inf):
            raise ConfigError("--cpus and --gpus: give what one run needs")

    @property
    def threads(self) -> int:
        """Threads of a run."""
        return max(1, int(self.cpus))

    def workers_on(self, device: str) -> int:
        """Runs at a time on this machine."""
        from otafl.simulation.run import choose_device

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        alone = choose_device(device).type == "cuda"
        return self.workers or (1 if alone else max(1, cores // self.threads))


def conduct(study: Study, device: str = "auto", executor: Executor | None = None, quiet: bool = False) -> Outcome:
    """Do what is missing of a study."""
    with study.prepared():
        return _conduct(study, device, executor or Executor(), quiet)


def _conduct(study: Study, device: str, executor: Executor, quiet: bool) -> Outcome:
    cases = study.missing()
    total = len(study.sweep.cases)
    show = _Show(quiet, total, total - len(cases))
    board = Board(total, show)
    board.finished = total - len(cases)
    if not quiet:
        done = f", {board.finished} of them done before" if board.finished else ""
        say(f"{study.sweep.name}: {total} runs{done} → {study.folder}")
    status = 0
    try:
        if cases and executor.name == "ray":
            from otafl.studies import ray

            ray.carry_out(study, cases, board, executor.address, device, executor.cpus, executor.gpus)
        elif cases:
            carry_out(study, cases, board, executor.workers_on(device), device, executor.threads)
    except Stopped as stop:
        status = 128 + stop.number
        left = total - board.finished
        say(f"otafl: {stop}, {left} of {total} runs left; the same command continues")
    finally:
        show.close()
    table = study.write_table(board.errors)
    if board.errors and not status:
        status = FAILED_STATUS
        say(
            f"otafl: {len(board.errors)} of {total} runs failed (column error of {table}); "
            "the same command tries them again"
        )
    return Outcome(table, board.errors, status)


class _Show:
    """A line that is kept up to date on a terminal, a line now and then elsewhere."""

    def __init__(self, quiet: bool, total: int, before: int) -> None:
        self._quiet, self._total, self._before = quiet, total, before
        self._started = time.monotonic()
        self._printed = 0.0
        self._bar: Any = None

    def __call__(self, board: Board) -> None:
        while board.messages:
            self._print(f"otafl: {board.messages.popleft()}")
        now = time.monotonic()
        if self._quiet or (now - self._printed < SECONDS_BETWEEN_LINES and not sys.stderr.isatty()):
            return
        self._printed = now
        if sys.stderr.isatty():
            self._live().update(self._line(board))
        else:
            say(self._line(board))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            say(line)

    def _live(self) -> Any:
        if self._bar is None:
            from rich.console import Console
            from rich.status import Status

            self._bar = Status("", console=Console(stderr=True))
            self._bar.start()
        return self._bar

    def _line(self, board: Board) -> str:
        parts = sum(done / max(1, rounds) for done, rounds in board.running.values())
        here = board.finished - self._before + parts
        left_s = (
            (time.monotonic() - self._started) / here * (self._total - board.finished - parts) if here > 0.02 else 0
        )
        left = f", {_duration(left_s)} left" if here > 0.02 else ""
        running = "; ".join(f"{label} {done}/{rounds}" for label, (done, rounds) in list(board.running.items())[:3])
        return f"{board.finished}/{self._total} runs{left}  {running}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
