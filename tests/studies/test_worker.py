"""Runs of a task: each ends for itself, is tried again where that may help, and none is begun after a signal."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from otafl.errors import ConfigError
from otafl.runs.directory import RunDirectory
from otafl.simulation import run as module
from otafl.studies import worker
from tests.conftest import make_config


def task(folder: Path, *names: str, rounds: int = 4, device: str = "cpu") -> dict[str, Any]:
    config = make_config("ota-fedavg", {"experiment.rounds": rounds}).to_toml()
    return {"runs": {name: {"config": config, "out": str(folder / name)} for name in names}, "device": device}


def ends(job: dict[str, Any], told: Any = None) -> dict[str, dict[str, Any]]:
    """The last report of every run, each of which has one."""
    found: dict[str, dict[str, Any]] = {}

    def tell(message: dict[str, Any]) -> None:
        if "progress" in message:
            if told is not None:
                told(message)
            return
        assert message["run"] not in found
        found[message["run"]] = {key: value for key, value in message.items() if key != "run"}

    worker.carry_out(job, tell)
    return found


def test_a_run_without_memory_beside_others_is_tried_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a round, once at set-up; only the second of two simulations that are there at a time fails."""
    real, alive = module.Simulation, []

    class Cramped(real):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **keys: Any) -> None:
            super().__init__(*arguments, **keys)
            alive.append(self)
            self.second = len(alive) == 2

        def step(self, state: Any, t: int) -> Any:
            if self.second and t == 2:
                return self._guarded("step", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
            return super().step(state, t)

    monkeypatch.setattr(module, "Simulation", Cramped)
    assert ends(task(tmp_path, "a", "b")) == {"a": {"done": "complete"}, "b": {"done": "complete"}}
    assert len(alive) == 3
    alive[:] = [None, None]  # alone, or the third: it fails for good
    alive.pop()
    assert "memory is full" in ends(task(tmp_path, "c"))["c"]["error"]


def test_a_busy_run_is_tried_again_however_long_its_neighbour_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BUSY_PATIENCE_S", 0.5)
    job = task(tmp_path, "busy", "long")
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        config = make_config("ota-fedavg", {"experiment.rounds": 4})
        with RunDirectory.open(tmp_path / "busy", config):
            held.set()
            leave.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    real, rounds = module.Simulation.step, []

    def slow(self: Any, state: Any, t: int) -> Any:
        rounds.append(t)
        if len(rounds) <= 4:
            time.sleep(0.25)
        if len(rounds) == 4:
            leave.set()
            holder.join()
        return real(self, state, t)

    monkeypatch.setattr(module.Simulation, "step", slow)
    assert ends(job) == {"busy": {"done": "complete"}, "long": {"done": "complete"}}


def test_nothing_is_begun_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a run that waits to be tried alone, nor the set-up of others."""
    real, made = module.Simulation, []

    def simulation(*arguments: Any, **keys: Any) -> Any:
        made.append(1)
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            raise module.TooLargeError("it does not fit")
        return real(*arguments, **keys)

    monkeypatch.setattr(module, "Simulation", simulation)
    found = ends(task(tmp_path, "a", "large", "c"))
    assert found == {"a": {"stopped": 1}, "large": {"stopped": 0}, "c": {"stopped": 0}}
    assert len(made) == 2


def test_an_error_before_the_first_turn_is_told_for_every_run(tmp_path: Path) -> None:
    found = ends(task(tmp_path, "a", "b", device="tpu"))
    assert all("choose auto, cpu or cuda" in end["error"] for end in found.values())
    assert set(found) == {"a", "b"}
    with pytest.raises(ConfigError):
        module.run_in_turns([], "tpu")
