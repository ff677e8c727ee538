"""Carries out runs on this machine, in worker processes that are replaced when they die.

Knows: studies, worker processes.
Does not know: what the runs are about.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from otafl import registry
from otafl.signals import caught_signals
from otafl.studies.study import Study
from otafl.studies.sweep import Case

MOST_DEATHS = 3  # deaths of workers with the same run
POLL_S = 0.2


@dataclass
class Board:
    """The state of a study; `changed` is called after every change."""

    total: int
    changed: Callable[["Board"], None] = lambda board: None
    finished: int = 0
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Label of a run to its rounds done and its total rounds."""
    errors: dict[str, str] = field(default_factory=dict)
    """Run directory to its error."""
    messages: deque[str] = field(default_factory=deque)
    """Lines that are not printed yet."""

    def advance(self, case: Case, rounds: int) -> None:
        """Note how many rounds of a run are done."""
        self.running[case.label] = (rounds, case.config.experiment.rounds)
        self.changed(self)

    def settle(self, case: Case, report: Mapping[str, Any]) -> None:
        """Note how a run ended, from its worker's last report."""
        self.running.pop(case.label, None)
        if "error" in report:
            self.errors[case.folder] = report["error"]
            self.messages.append(f"{case.label}: {report['error']}")
        elif "done" in report:
            self.finished += 1
            if report["done"] != "complete":
                self.messages.append(f"{case.label}: a seed diverged; see runs/{case.folder}/summary.json")
        self.changed(self)


class Stopped(Exception):
    """A signal stopped the study; every run has a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class _Worker:
    """A worker process and the cases it runs."""

    def __init__(self, log: IO[bytes], threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "otafl.studies.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,  # so that Ctrl-C reaches the parent only
        )
        self.cases: dict[str, Case] = {}
        """The cases that it has not finished, by their folders."""
        self._rest = b""

    def give(self, cases: dict[str, Case], task: dict[str, Any]) -> None:
        self.cases = cases
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died, which the end of its output shows
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Kill the process if it still runs, and close its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def reports(self) -> list[dict[str, Any]] | None:
        """The reports since the last call; None if its output has ended."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]


def carry_out(
    study: Study, cases: list[Case], board: Board, workers: int, device: str, threads: int, together: int = 1
) -> None:
    """Run the cases, by several workers, each `together` at a time; errors are noted, and other runs go on.

    Runs that find no memory beside others are tried again afterwards, by half as many workers.
    """
    workers = min(workers, len(cases))
    while cases:
        cases = _carry_out(study, cases, board, workers, device, threads, together)
        workers, together = max(1, min(workers, len(cases)) // 2), 1
        if cases:
            them = f"{len(cases)} runs" if len(cases) > 1 else cases[0].label
            by = f"{workers} workers" if workers > 1 else "one worker"
            board.messages.append(f"{them} found no memory beside other runs; tried again by {by}")


def _carry_out(
    study: Study, cases: list[Case], board: Board, workers: int, device: str, threads: int, together: int
) -> list[Case]:
    """Run the cases; returns those for which there was no memory beside others."""
    cramped: list[Case] = []
    waiting = deque([cases[i : i + together] for i in range(0, len(cases), together)])
    deaths = dict.fromkeys((case.folder for case in cases), 0)
    selector = selectors.DefaultSelector()
    crew: list[_Worker] = []

    def assign(worker: _Worker) -> None:
        if not waiting or stop:
            return
        given = {case.folder: case for case in waiting.popleft()}
        runs = {name: {"config": case.config.to_toml(), "out": str(study.place(case))} for name, case in given.items()}
        plugins = registry.plugin_files()
        worker.give(given, {"runs": runs, "device": device, "threads": threads, "plugins": plugins})
        for case in given.values():
            board.advance(case, 0)

    def hire(log: IO[bytes]) -> None:
        worker = _Worker(log, threads)
        crew.append(worker)
        assert worker.process.stdout is not None
        selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        assign(worker)

    def settle(worker: _Worker, report: dict[str, Any]) -> None:
        if "progress" in report:
            board.advance(worker.cases[report["run"]], report["progress"])
            return
        case = worker.cases.pop(report["run"])
        if report.get("cramped") and workers > 1:
            cramped.append(case)
            report = {}
        board.settle(case, report)
        if not worker.cases:
            assign(worker)

    def bury(worker: _Worker, log: IO[bytes]) -> None:
        assert worker.process.stdout is not None
        selector.unregister(worker.process.stdout)
        status = worker.process.wait()
        worker.close()
        crew.remove(worker)
        if not worker.cases or stop:
            return
        cause = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if status == -signal.SIGKILL:
            cause += " (out of memory?)"
        for case in worker.cases.values():
            deaths[case.folder] += 1
            if deaths[case.folder] < MOST_DEATHS:
                board.messages.append(f"{case.label}: its worker was {cause}; it is continued by another")
                waiting.appendleft([case])
            else:
                line = f"its worker was {cause}, {MOST_DEATHS} times; run fewer at once (--workers) or a smaller case"
                board.settle(case, {"error": line})
        hire(log)

    try:
        with caught_signals() as stop, open(study.folder / "workers.log", "ab") as log:
            for _ in range(min(workers, len(waiting))):
                hire(log)
            while any(worker.cases for worker in crew) and not stop:
                for key, _ in selector.select(POLL_S):
                    worker = key.data
                    reports = worker.reports()
                    if reports is None:
                        bury(worker, log)
                    for report in reports or []:
                        settle(worker, report)
            _dismiss(crew, bool(stop))
    finally:
        for worker in crew:
            worker.close()
        selector.close()
    if stop:
        raise Stopped(stop[0])
    return cramped


def _dismiss(crew: list[_Worker], interrupted: bool, patience_s: float = 60.0) -> None:
    """End the workers; busy ones write a checkpoint first."""
    for worker in crew:
        assert worker.process.stdin is not None
        if interrupted:
            worker.process.terminate()
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.close()
    until = time.monotonic() + patience_s
    for worker in crew:
        try:
            worker.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
