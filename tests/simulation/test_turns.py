"""Runs that take turns in one process are the runs alone, and end each for itself."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import otafl
from otafl.errors import RunDirectoryError
from otafl.runs.result import Result
from otafl.simulation.run import Interrupted, Turn, run_in_turns
from tests.conftest import make_config

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("fedoag", {}),
    ("fedoag", {"training.lr": 0.05, "experiment.rounds": 3}),
    ("ota-fedavg", {"model.hidden": [7], "experiment.eval_every": 2}),
    ("fedavg", {"training.precision": "float32"}),
]
FILES = ("config.toml", "metrics.csv", "devices.csv", "model.safetensors")


def turns_in(folder: Path) -> list[Turn]:
    return [Turn(make_config(name, keys), folder / str(i)) for i, (name, keys) in enumerate(FORMS)]


def content(place: Path) -> list[bytes]:
    return [(place / name).read_bytes() for name in FILES]


def test_each_has_the_bytes_that_it_has_alone(tmp_path: Path) -> None:
    turns = turns_in(tmp_path / "together")
    run_in_turns(turns, "cpu")
    for i, turn in enumerate(turns):
        otafl.run(turn.config, tmp_path / "alone" / str(i), "cpu")
        assert content(tmp_path / "alone" / str(i)) == content(turn.out)
        assert isinstance(turn.outcome, Result)
        assert turn.outcome.status == "complete"
    again = turns_in(tmp_path / "together")
    run_in_turns(again, "cpu")
    for turn in again:
        assert isinstance(turn.outcome, Result)
        assert turn.outcome.notes[0].startswith("already complete")


def test_they_really_take_turns(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    turns = turns_in(tmp_path)
    for i, turn in enumerate(turns):
        turn.observer = lambda done, row, i=i: seen.append((done, i))  # type: ignore[misc]
    run_in_turns(turns, "cpu")
    expected = [(done, i) for done in range(6) for i, turn in enumerate(turns) if done <= turn.config.experiment.rounds]
    assert seen == expected


def test_an_error_ends_its_own_run_only(tmp_path: Path) -> None:
    turns = turns_in(tmp_path)
    turns[1].out.mkdir(parents=True)
    (turns[1].out / "config.toml").write_text("[experiment]\n")

    def breaks(done: int, row: Any) -> None:
        if done == 2:
            raise ZeroDivisionError("in round 2")

    turns[2].observer = breaks
    run_in_turns(turns, "cpu")
    assert isinstance(turns[1].outcome, RunDirectoryError)
    assert isinstance(turns[2].outcome, ZeroDivisionError)
    assert [turn.outcome.status for turn in turns if isinstance(turn.outcome, Result)] == ["complete", "complete"]


@pytest.mark.parametrize("when", [0, 2])
def test_a_signal_stops_all_after_a_checkpoint_and_they_go_on_as_if_undisturbed(tmp_path: Path, when: int) -> None:
    turns = turns_in(tmp_path / "stopped")

    def stops(done: int, row: Any) -> None:
        if done == when:
            os.kill(os.getpid(), signal.SIGTERM)

    turns[1].observer = stops
    run_in_turns(turns, "cpu")
    assert all(isinstance(turn.outcome, Interrupted) for turn in turns)
    again = turns_in(tmp_path / "stopped")
    run_in_turns(again, "cpu")
    for i, turn in enumerate(again):
        otafl.run(turn.config, tmp_path / "whole" / str(i), "cpu")
        assert content(tmp_path / "whole" / str(i)) == content(turn.out)
