"""A worker process: reads tasks from its standard input, a JSON line each, and reports on its standard output.

In:  {"runs": {name: {"config": a resolved configuration as TOML, "out": run directory}}, "device": "auto",
      "threads": 1, "plugins": []}
Out: for each run {"run": name, "progress": rounds done}, then {"run": name, and "done": status or "error": line or
     "stopped": round}, with "cramped" if memory was full; several runs of a task take turns

It ends with its parent, after a checkpoint.

Knows: how to run a configuration.
Does not know: what else is running.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_REPORTS = 0.5
BUSY_PATIENCE_S = 60.0


def main() -> None:
    """Serve until the input ends."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that what a plug-in prints is not read as a report

    def tell(message: dict[str, Any]) -> None:
        try:
            out.write(json.dumps(message) + "\n")
            out.flush()
        except BrokenPipeError:  # the parent is gone
            os.kill(os.getpid(), signal.SIGTERM)

    for line in sys.stdin:
        carry_out(json.loads(line), tell)


def carry_out(task: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Carry out the runs of a task; `tell` gets every report."""
    import torch

    from otafl.config.schema import Config
    from otafl.errors import RunBusyError
    from otafl.registry import load_plugin
    from otafl.simulation.run import Turn, cramped, run_in_turns

    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    patience: dict[str, float] = {}  # of runs that were busy: until when
    waiting = [list(task["runs"])]  # names of the runs that take turns
    while waiting:
        turns: dict[str, Turn] = {}
        stopped = 0
        for name in waiting.pop(0):
            try:
                for file in task.get("plugins", ()):
                    load_plugin(file)
                run = task["runs"][name]
                turns[name] = Turn(Config.from_toml(run["config"]), Path(run["out"]), _observer(name, tell))
            except Exception as error:
                tell({"run": name, **_report(error)})
        try:
            stopped = run_in_turns(list(turns.values()), task["device"])
        except Exception as error:
            for turn in turns.values():
                turn.outcome = turn.outcome or error
        together = len(turns)
        outcomes = {name: turn.outcome for name, turn in turns.items()}
        turns.clear()
        while outcomes:
            name, outcome = next(iter(outcomes.items()))
            busy = isinstance(outcome, RunBusyError)  # another worker may still write its last checkpoint
            if busy and time.monotonic() < patience.setdefault(name, time.monotonic() + BUSY_PATIENCE_S):
                waiting.append([name])
            elif cramped(outcome) and together > 1:
                waiting.append([name])  # alone it may find room
            else:
                tell({"run": name, **_report(outcome), **({"cramped": True} if cramped(outcome) else {})})
            del outcomes[name], outcome  # with all that it holds
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # what this process keeps, others cannot have
            gc.collect()
            torch.cuda.empty_cache()
        if stopped:
            for name in (name for names in waiting for name in names):
                tell({"run": name, "stopped": 0})
            return
        if waiting and waiting[0][0] in patience:
            time.sleep(0.2)


def _observer(name: str, tell: Callable[[dict[str, Any]], None]) -> Callable[[int, Any], None]:
    """Tells now and then how far a run is."""
    told = 0.0

    def observe(done: int, row: Any) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= SECONDS_BETWEEN_REPORTS:
            tell({"run": name, "progress": done})
            told = now

    return observe


def _report(outcome: Any) -> dict[str, Any]:
    """How a run ended."""
    from otafl.errors import OtaflError, is_out_of_memory
    from otafl.registry import in_a_line
    from otafl.simulation.run import Interrupted

    if isinstance(outcome, Interrupted):
        return {"stopped": outcome.round}
    if isinstance(outcome, OtaflError):
        return {"error": str(outcome)}
    if not isinstance(outcome, Exception):
        return {"done": outcome.status}
    if is_out_of_memory(outcome):
        return {"error": "not enough memory; give it fewer seeds or devices, or run fewer at once (--workers)"}
    traceback.print_exception(outcome)  # a bug: the other runs go on
    return {"error": f"{in_a_line(outcome)} (a bug: the traceback is in workers.log)"}


def _die_with_parent() -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before prctl
        sys.exit(1)


if __name__ == "__main__":
    main()
