"""Sweep files, and sweeps that are killed, disturbed and repeated."""

import csv
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from otafl.config.schema import as_toml
from otafl.errors import ConfigError
from otafl.studies.conduct import Executor, conduct
from otafl.studies.examples import EXAMPLES
from otafl.studies.study import Study
from otafl.studies.sweep import Sweep, load_sweep, parse_sweep
from tests.conftest import TINY

SMALL = {key: value for key, value in TINY.items() if key != "experiment.name"} | {"experiment.seeds": [0]}


def sweep(content: dict[str, Any]) -> Sweep:
    return parse_sweep({"set": SMALL, **content}, "test.toml", "test")


def test_axes_make_every_combination() -> None:
    asked = sweep({"axes": {"base": ["stationary", "mixed"], "training": {"lr": [0.1, 0.2]}, "cell.devices": [3, 4]}})
    assert len(asked.cases) == 8
    assert {case.config.training.lr for case in asked.cases} == {0.1, 0.2}
    assert {case.config.mobility.name for case in asked.cases} == {"static", "bounded-waypoint"}
    assert asked.cases[0].label == "stationary, lr 0.1, devices 3"
    assert len({case.folder for case in asked.cases}) == 8


def test_values_of_several_keys_overrides_and_dropped_axes() -> None:
    asked = sweep(
        {
            "axes": {
                "method": [
                    {"label": "small", "algorithm": {"name": "fedoag", "gamma": 1e-10}},
                    {"label": "sca", "algorithm.name": "sca"},
                ],
                "training.lr": [0.1, 0.2],
                "algorithm.theta": [1, 2],
            },
            "override": [
                {"if": {"method": "sca"}, "set": {"algorithm.omega": 0.5}, "drop": ["training.lr"]},
                {"drop": ["algorithm.theta"]},
            ],
        }
    )
    assert [case.label for case in asked.cases] == ["small, lr 0.1", "small, lr 0.2", "sca"]
    assert asked.cases[2].config.algorithm.spec.omega == 0.5
    assert asked.cases[2].config.training.lr == 0.1  # the default: its axis was dropped
    assert asked.cases[0].config.algorithm.spec.gamma == 1e-10


def test_axes_that_apply_only_where_an_override_says_so() -> None:
    asked = sweep(
        {
            "axes": {"algorithm.name": ["fedavg", "sca", "fedoag"], "training.lr": [0.1, 0.2]},
            "override": [
                {"if": {"algorithm.name": "sca"}, "axes": {"algorithm.omega": [0.1, 0.2, 0.3]}},
                {"if": {"algorithm.name": "fedoag"}, "axes": {"algorithm.gamma": [1e-10]}, "drop": ["training.lr"]},
            ],
        }
    )
    assert [case.label for case in asked.cases[:3]] == ["fedavg, lr 0.1", "fedavg, lr 0.2", "sca, lr 0.1, omega 0.1"]
    assert len(asked.cases) == 2 + 6 + 1
    assert asked.cases[-1].label == "fedoag, gamma 1e-10"
    assert asked.axes["algorithm.omega"] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"axis": {}}, "axis: unknown .did you mean 'axes'"),
        ({"axes": {"training.lr": 0.1}}, "give a list of values"),
        ({"axes": {"training.lr": []}}, "give a list of values"),
        ({"axes": {"training.lr": [0.1, 0.1]}}, "named twice"),
        ({"axes": {"experiment.seeds": [[0], [1]]}}, "seeds are one batch"),
        ({"axes": {"rate": [0.1]}}, "name a key as section.key"),
        ({"axes": {"rate": [{"training.lr": 0.1}]}}, "needs a label"),
        ({"axes": {"training.lr": [0.1]}, "override": [{"if": {"training.lt": 0.1}}]}, "is no axis .did you mean"),
        ({"axes": {"training.lr": [0.1]}, "override": [{"wenn": {}}]}, "an override has if, set, drop, axes"),
        ({"axes": {"training.lr": ["fast"]}}, "run fast: training.lr"),
        ({"axes": {"training.lr": [0.1]}, "override": [{"axes": {"training.lr": [0.2]}}]}, "is an axis of all runs"),
        ({"override": [{"axes": {"algorithm.gamma": []}}]}, "give a list of values"),
        ({"axes": {f"{section}.x": list(range(400)) for section in ("cell", "radio")}}, "more than 100000 runs"),
        ({"axes": {"algorithm.name": ["fedog"]}}, "did you mean"),
        ({"base": 3}, "must be a preset"),
        ({"name": "a/b"}, "use letters"),
    ],
)
def test_mistakes_get_one_line(content: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        sweep(content)


def test_a_key_of_an_axis_cannot_be_set_from_outside() -> None:
    """Its labels, in the table and in directories' names, would be those of the file."""
    axes = {"training.lr": [0.05, 0.1], "who": [{"label": "a", "algorithm.name": "sca"}]}
    content = {"set": SMALL, "axes": axes}
    for key, value, line in (
        ("training.lr", 0.3, "training.lr: is an axis of this sweep"),
        ("algorithm.name", "fedavg", "algorithm.name: is set by the axis 'who'"),
    ):
        with pytest.raises(ConfigError, match=line):
            parse_sweep(content, "t.toml", "t", overrides={key: value})
    assert len(parse_sweep(content, "t.toml", "t", overrides={"training.local_steps": 2}).cases) == 2


def test_axes_of_the_world_are_told_apart_from_methods() -> None:
    axes = {"training.lr": [0.05, 0.1], "cell.radius_m": [500.0, 900.0], "base": ["stationary", "mixed"]}
    assert sweep({"axes": axes}).worlds == ["cell.radius_m", "base"]
    assert sweep({"axes": {"cell.radius_m": [500.0, 900.0]}}).worlds == []  # nothing to compare within a world
    several = [
        {"label": "a", "algorithm.name": "sca"},
        {"label": "b", "algorithm.name": "beamforming", "radio.antennas": 4},
    ]
    assert sweep({"axes": {"base": ["stationary", "mixed"], "method": several}}).worlds == ["base"]


def test_a_file_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_sweep(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("axes = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_sweep(tmp_path / "bad.toml")


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "table.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "wall_s"} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_sweep_is_idempotent_and_a_changed_configuration_is_another_run(tmp_path: Path) -> None:
    asked = sweep({"axes": {"training.lr": [0.05, 0.1]}})
    study = Study(tmp_path / "study", asked)
    assert conduct(study, device="cpu", quiet=True).status == 0
    first = {path: path.stat().st_mtime_ns for path in (study.folder / "runs").glob("*/metrics.csv")}
    assert len(first) == 2
    assert conduct(study, device="cpu", quiet=True).status == 0
    assert {path: path.stat().st_mtime_ns for path in (study.folder / "runs").glob("*/metrics.csv")} == first
    other = sweep({"axes": {"training.lr": [0.05, 0.1]}, "set": {**SMALL, "training.local_steps": 2}})
    assert conduct(Study(study.folder, other), device="cpu", quiet=True).status == 0
    assert len(list((study.folder / "runs").iterdir())) == 4
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in first.items())
    table = rows(study.folder)
    assert [row["training.lr"] for row in table] == ["0.05", "0.1"]
    assert {row["status"] for row in table} == {"complete"}


@pytest.mark.slow
def test_one_run_that_fails_leaves_the_others_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A directory that another configuration made is refused in one line; the other runs are done; status 1."""
    asked = sweep({"axes": {"training.lr": [0.05, 0.1]}})
    study = Study(tmp_path / "study", asked)
    place = study.place(asked.cases[0])
    place.mkdir(parents=True)
    (place / "config.toml").write_text("[experiment]\n")
    outcome = conduct(study, device="cpu", quiet=True)
    assert outcome.status == 1
    assert "another configuration" in outcome.errors[asked.cases[0].folder]
    table = rows(study.folder)
    assert [row["status"] for row in table] == ["failed", "complete"]
    assert "another configuration" in table[0]["error"]
    shown = capfd.readouterr().err
    assert "1 of 2 runs failed" in shown
    assert "Traceback" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2])
def test_a_worker_without_memory_fails_alone(together: int, tmp_path: Path) -> None:
    asked = sweep({"axes": {"model.hidden": [[5], [10**6, 10**6]]}})
    executor = Executor(workers=1, together=together)
    outcome = conduct(Study(tmp_path / "study", asked), device="cpu", executor=executor, quiet=True)
    assert outcome.status == 1
    assert ["memory" in line for line in outcome.errors.values()] == [True]
    assert [row["status"] for row in rows(tmp_path / "study")] == ["complete", "failed"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot be written"):
        conduct(Study(tmp_path / "file" / "study", sweep({})), device="cpu", quiet=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path: Path) -> None:
    """Files may not grow beyond 100 kB: the large model cannot be stored, the other run is; later it goes on."""
    keys = "\n".join(f'"{key}" = {as_toml(value)}' for key, value in SMALL.items() if key != "model.hidden")
    (tmp_path / "sweep.toml").write_text(
        f'base = "stationary"\n[set]\n{keys}\n[axes]\n"model.hidden" = [[5], [5000]]\n'
    )
    command = [sys.executable, "-m", "otafl.cli", "sweep", "sweep.toml", "--device", "cpu", "--workers", "1"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    full = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limit, check=False, timeout=120
    )
    assert full.returncode == 1
    assert "the disk is full" in full.stderr
    assert "Traceback" not in full.stderr
    folder = tmp_path / "sweeps" / "sweep"
    assert [row["status"] for row in rows(folder)] == ["complete", "failed"]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert again.returncode == 0, again.stderr
    assert [row["status"] for row in rows(folder)] == ["complete", "complete"]


KILLED = """
base = "stationary"
[set]
{keys}
[axes]
"algorithm.name" = ["fedoag", "ota-fedavg", "sca", "fedpbc"]
"training.lr" = [0.02, 0.05, 0.1]
"training.local_steps" = [1, 2]
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in ("metrics.csv", "devices.csv", "model.safetensors", "config.toml")
        for path in sorted((folder / "runs").glob(f"*/{name}"))
    }


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_sweep_killed_ten_times_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """24 runs; kill -9 on the parent or on a worker, in which three take turns, at random moments; the same bytes."""
    keys = SMALL | {"experiment.rounds": 700, "experiment.eval_every": 70, "experiment.checkpoint_s": 0.05}
    lines = "\n".join(f'"{key}" = {as_toml(value)}' for key, value in keys.items())
    (tmp_path / "sweep.toml").write_text(KILLED.format(keys=lines))
    command = [sys.executable, "-m", "otafl.cli", "sweep", "sweep.toml", "--device", "cpu", "--workers", "2", "--out"]

    def start(out: str) -> subprocess.Popen[bytes]:
        turns = ("--together", "3") if out == "parts" else ()
        whole = [*command, out, *turns]
        return subprocess.Popen(whole, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start("whole").wait(timeout=300) == 0
    moments, kills = random.Random(3), 0
    process = start("parts")
    while kills < 10:
        time.sleep(moments.uniform(1.5, 4.0))
        if process.poll() is not None:
            break
        victims = children(process.pid)
        if victims and moments.random() < 0.5:
            os.kill(moments.choice(victims), signal.SIGKILL)
        else:
            process.kill()
            process.wait()
            process = start("parts")
        kills += 1
    process.wait(timeout=300)
    assert kills == 10
    assert start("parts").wait(timeout=300) == 0
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert len(whole) == 4 * 24
    assert whole == parts
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "ray"])
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(executor: str, tmp_path: Path) -> None:
    if executor == "ray":
        pytest.importorskip("ray")
    keys = SMALL | {"experiment.rounds": 20_000, "experiment.eval_every": 20_000}
    lines = "\n".join(f'"{key}" = {as_toml(value)}' for key, value in keys.items())
    (tmp_path / "sweep.toml").write_text(KILLED.format(keys=lines))
    command = [sys.executable, "-m", "otafl.cli", "sweep", "sweep.toml", "--device", "cpu", "--workers", "1"]
    command += ["--executor", executor]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runs = tmp_path / "sweeps" / "sweep" / "runs"
    patience = time.monotonic() + 300  # Ray takes minutes to start on a busy machine
    while not list(runs.glob("*/metrics.csv")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < patience, "no run has begun"
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in shown
    assert list(runs.glob("*/checkpoint/*/state.safetensors"))


FILES = [*sorted(Path("recipes").glob("*.toml")), *EXAMPLES.values()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_and_examples_are_sweeps_whose_runs_are_all_valid(path: Path) -> None:
    """Every configuration of a file is checked when it is loaded; every searched axis is one of its axes."""
    from otafl.registry import load_plugin
    from otafl.studies.tune import settings

    for plugin in ("recipes/far_class.py",):
        load_plugin(plugin)
    asked = load_sweep(path)
    assert len(asked.cases) > 1
    if asked.tune:
        assert set(settings(asked, str(path))["over"]) <= set(asked.axes)


def test_directories_tell_minus_from_plus() -> None:
    power = [{"label": f"{sign}10 dBm", "radio.tx_power_dbm": dbm} for sign, dbm in (("−", -10.0), ("", 10.0))]
    names = [case.folder for case in sweep({"axes": {"power": power}}).cases]
    assert [name.rpartition("-")[0] for name in names] == ["minus_10_dBm", "10_dBm"]


CROWDED = """
import os
from dataclasses import dataclass
from pathlib import Path

import torch

import otafl
from otafl.algorithms.fedavg import FedAvg


@otafl.register_algorithm("crowded")
@dataclass(frozen=True)
class Crowded(FedAvg):
    '''Has no room beside another worker.'''

    never: bool = False
    '''Has none alone either.'''

    def init(self, problem):
        parent = os.getppid()
        workers = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if len(workers) > 1 or self.never:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().init(problem)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_runs_that_find_no_memory_beside_others_are_tried_again_by_fewer_workers(tmp_path: Path) -> None:
    """Four workers, then two, then one; what has no room alone fails, and nothing else does."""
    (tmp_path / "crowded.py").write_text(CROWDED)
    lines = "\n".join(f'"{key}" = {as_toml(value)}' for key, value in SMALL.items())
    sections = '[axes]\n"training.lr" = [0.02, 0.05, 0.1, 0.2]\n"algorithm.never" = [false, true]\n'
    drop = '[[override]]\nif = { "training.lr" = [0.02, 0.05, 0.1] }\ndrop = ["algorithm.never"]\n'
    (tmp_path / "sweep.toml").write_text(f'[set]\n"algorithm.name" = "crowded"\n{lines}\n{sections}{drop}')
    command = [sys.executable, "-m", "otafl.cli", "sweep", "sweep.toml", "--device", "cpu", "--workers", "4"]
    done = subprocess.run([*command, "--plugin", "crowded.py"], cwd=tmp_path, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert "5 runs found no memory beside other runs; tried again by 2 workers" in said
    assert "tried again by one worker" in said
    assert done.returncode == 1
    assert "1 of 5 runs failed" in said
    states = {(row["training.lr"], row["status"]) for row in rows(tmp_path / "sweeps" / "sweep")}
    assert {lr for lr, status in states if status == "complete"} == {"0.02", "0.05", "0.1", "0.2"}
