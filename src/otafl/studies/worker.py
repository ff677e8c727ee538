"""A worker process: reads runs from its standard input, a JSON line each, and reports on its standard output.

In:  {"config": a resolved configuration as TOML, "out": run directory, "device": "auto", "threads": 1, "plugins": []}
Out: {"progress": rounds done}, then {"done": status} or {"error": line} or {"stopped": round}

It ends with its parent, after a checkpoint.

Knows: how to run a configuration.
Does not know: what else is running.
"""

import ctypes
import json
import os
import signal
import sys
import time
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
        task = json.loads(line)
        tell(carry_out(task, tell))


def carry_out(task: dict[str, Any], tell: Any) -> dict[str, Any]:
    """Run one configuration; returns the last report."""
    import torch

    from otafl.config.schema import Config
    from otafl.errors import OtaflError, RunBusyError, is_out_of_memory
    from otafl.registry import in_a_line, load_plugin
    from otafl.simulation.run import Interrupted, run

    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    told = 0.0

    def observer(done: int, row: Any) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= SECONDS_BETWEEN_REPORTS:
            tell({"progress": done})
            told = now

    patience = time.monotonic() + BUSY_PATIENCE_S
    try:
        for file in task.get("plugins", ()):
            load_plugin(file)
        while True:
            try:
                config = Config.from_toml(task["config"])
                result = run(config, out=task["out"], device=task["device"], observer=observer)
                return {"done": result.status}
            except RunBusyError:  # another worker may still write its last checkpoint
                if time.monotonic() > patience:
                    raise
                time.sleep(0.2)
    except Interrupted as stop:
        return {"stopped": stop.round}
    except OtaflError as error:
        return {"error": str(error)}
    except Exception as error:
        if is_out_of_memory(error):
            return {"error": "not enough memory; give it fewer seeds or devices, or run fewer at once (--workers)"}
        import traceback

        traceback.print_exc()  # a bug: the other runs go on
        return {"error": f"{in_a_line(error)} (a bug: the traceback is in workers.log)"}


def _die_with_parent() -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before prctl
        sys.exit(1)


if __name__ == "__main__":
    main()
