"""Carries out a study: runs what is missing, shows progress, writes the table.

Knows: studies, executors.
Does not know: what the runs are about.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from otafl.errors import ConfigError, say
from otafl.studies.local import Board, Stopped, carry_out
from otafl.studies.study import Study
from otafl.terminal import Live

FAILED_STATUS = 1
EXECUTORS = ("local", "ray")


@dataclass(frozen=True)
class Outcome:
    """How a study ended."""

    table: Path
    errors: dict[str, str]
    status: int
    """Exit status: 0, 1 if a run failed, 128 + signal number if it was stopped."""


@dataclass(frozen=True)
class Executor:
    """How and where runs are carried out."""

    name: str = "local"
    """"local" for worker processes on this machine, "ray" for tasks on a Ray cluster."""
    workers: int | None = None
    """Worker processes, for "local"; None is one per core, or one on a GPU."""
    together: int = 1
    """Runs of a worker at a time, in turns: several overlap on a GPU."""
    address: str | None = None
    """Address of the Ray cluster; None starts one on this machine."""
    cpus: float = 1.0
    """CPUs of a run, and so its number of threads, on which its last digits depend."""
    gpus: float = 0.0
    """GPUs of a run, or a fraction of one, for "ray"."""

    def __post_init__(self) -> None:
        if self.name not in EXECUTORS:
            raise ConfigError(f"--executor {self.name}: choose from {', '.join(EXECUTORS)}")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: at least 1")
        if self.together < 1:
            raise ConfigError(f"--together {self.together}: at least 1")
        if not (0 < self.cpus < math.inf and 0 <= self.gpus < math.inf):
            raise ConfigError("--cpus and --gpus: give what one run needs")

    @property
    def threads(self) -> int:
        """Threads of a run."""
        return max(1, int(self.cpus))

    def workers_on(self, device: str) -> int:
        """Worker processes on this machine."""
        from otafl.simulation.build import choose_device

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        alone = choose_device(device).type == "cuda"
        return self.workers or (1 if alone else max(1, cores // self.threads))


def conduct(study: Study, device: str = "auto", executor: Executor | None = None, quiet: bool = False) -> Outcome:
    """Run what is missing of a study."""
    with study.prepared():
        return _conduct(study, device, executor or Executor(), quiet)


def _conduct(study: Study, device: str, executor: Executor, quiet: bool) -> Outcome:
    cases = study.missing()
    total = len(study.sweep.cases)
    live = Live(total, "runs")
    board = Board(total, lambda board: _show(live, quiet, board))
    board.finished = total - len(cases)
    if not quiet:
        done = f", {board.finished} of them done before" if board.finished else ""
        say(f"{study.sweep.name}: {total} runs{done} → {study.folder}")
    status = 0
    try:
        with live:
            if cases and executor.name == "ray":
                from otafl.studies import ray

                ray.carry_out(study, cases, board, executor.address, device, executor.cpus, executor.gpus)
            elif cases:
                workers = executor.workers_on(device)
                carry_out(study, cases, board, workers, device, executor.threads, executor.together)
    except Stopped as stop:
        status = 128 + stop.number
        left = total - board.finished
        say(f"otafl: {stop}, {left} of {total} runs left; the same command continues")
    table = study.write_table(board.errors)
    if board.errors and not status:
        status = FAILED_STATUS
        say(
            f"otafl: {len(board.errors)} of {total} runs failed (column error of {table}); "
            "the same command tries them again"
        )
    return Outcome(table, board.errors, status)


def _show(live: Live, quiet: bool, board: Board) -> None:
    """Show messages that came in and, unless `quiet`, which runs are under way."""
    while board.messages:
        live.say(f"otafl: {board.messages.popleft()}")
    if not quiet:
        parts = sum(done / max(1, rounds) for done, rounds in board.running.values())
        running = [f"{label} {done}/{rounds}" for label, (done, rounds) in list(board.running.items())[:3]]
        live.show(board.finished + parts, "; ".join(running))
