"""The run directory: contract, interruption and resume, damage, locks."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import otafl
from otafl.config.schema import digest_of, resolve
from otafl.errors import RunDirectoryError
from otafl.runs import directory as rundir
from otafl.runs.directory import RunDirectory
from otafl.runs.result import read_run
from otafl.simulation.run import Interrupted
from tests.conftest import make_config

ROUNDS = 12


def config(**overrides: Any) -> otafl.Config:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return make_config("fedoag", {"experiment.rounds": ROUNDS, "experiment.eval_every": 5, **keys})


class Stop(Exception):
    """What a test raises to end a run without a checkpoint, as a kill would."""


def run_until(out: Path, last: int, chosen: otafl.Config) -> None:
    """Run with a checkpoint after every round and end abruptly after `last` rounds."""

    def observer(done: int, row: Any) -> None:
        if done > last:
            raise Stop

    with pytest.raises(Stop):
        otafl.run(chosen, out=out, observer=observer)


EAGER = {"experiment__checkpoint_s": 1e-9}  # a checkpoint after every round


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_contract_of_the_files(tmp_path: Path) -> None:
    chosen = config(experiment__record=["server", "mean", "consensus", "validation"])
    result = otafl.run(chosen, out=tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "config.toml", "metrics.csv", "devices.csv", "summary.json", "model.safetensors", "log.txt", "run.lock"
    }  # fmt: skip
    assert resolve(tomllib.loads((tmp_path / "run" / "config.toml").read_text()), {}) == chosen

    rows = table(tmp_path / "run" / "metrics.csv")
    assert [(int(r["seed"]), int(r["round"])) for r in rows] == [(s, r) for r in (0, 5, 10, 12) for s in (0, 1)]
    first = "seed round test_accuracy test_loss validation_accuracy validation_loss mean_accuracy mean_loss num_active"
    assert list(rows[0])[:9] == first.split()
    for row in rows:
        s, r = int(row["seed"]), result.rounds.tolist().index(int(row["round"]))
        for name, values in result.metrics.items():
            value = float(row[name]) if row[name] else math.nan
            assert value == pytest.approx(values[s, r], nan_ok=True, rel=1e-15)
    assert all(row["num_active"] == "" for row in rows[:2])  # round 0: no round has been yet

    devices = table(tmp_path / "run" / "devices.csv")
    assert len(devices) == 2 * 4
    assert sum(int(row["images"]) for row in devices if row["seed"] == "0") == 200
    uploads = sum(int(row["uploads"]) for row in devices if row["seed"] == "1")
    spans = np.diff(result.rounds)
    assert uploads == pytest.approx(float((result.metrics["num_active"][1, 1:] * spans).sum()))
    energy_j = sum(float(row["energy_j"]) for row in devices if row["seed"] == "1")
    assert energy_j == pytest.approx(result.metrics["energy_j"][1, -1])

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "complete"
    late = 100 * result.metrics["test_accuracy"][:, result.rounds > 0].mean(1)
    assert 100 * summary["test_accuracy"]["mean"] == pytest.approx(late.mean())
    assert 100 * summary["test_accuracy"]["std"] == pytest.approx(late.std(ddof=1))
    assert {"wall_s", "rounds_per_s", "device", "versions", "commit"} <= summary.keys()
    models = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(torch.stack([models["seed_0"], models["seed_1"]]), result.params)


def test_accuracy_is_averaged_over_the_last_fifty_rounds() -> None:
    result = otafl.run(config(experiment__rounds=120, experiment__eval_every=10))
    late = result.metrics["test_accuracy"][:, result.rounds > 70]
    assert late.shape[1] == 5
    assert result.summary["test_accuracy"]["mean"] == pytest.approx(late.mean(1).mean())


def test_a_complete_run_is_read_and_not_repeated(tmp_path: Path) -> None:
    first = otafl.run(config(), out=tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir() if path.name != "run.lock"}
    again = otafl.run(config(), out=tmp_path / "run", observer=lambda done, row: pytest.fail("ran again"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert torch.equal(first.params, again.params)
    for name in first.metrics:
        assert np.array_equal(first.metrics[name], again.metrics[name], equal_nan=True)


def files_of(folder: Path) -> tuple[bytes, bytes, bytes]:
    return tuple((folder / n).read_bytes() for n in ("metrics.csv", "model.safetensors", "devices.csv"))  # type: ignore[return-value]


@pytest.mark.parametrize("algorithm", ["fedoag", "ota-fedavg", "fedavg"])
def test_resumed_run_is_the_same_to_the_byte(tmp_path: Path, algorithm: str) -> None:
    """Interrupted three times, between rows and at rows."""
    chosen = make_config(algorithm, {"experiment.rounds": ROUNDS, "experiment.eval_every": 5,
                                     "experiment.checkpoint_s": 1e-9})  # fmt: skip
    otafl.run(chosen, out=tmp_path / "whole")
    for last in (3, 5, 9):
        run_until(tmp_path / "parts", last, chosen)
        running = json.loads((tmp_path / "parts" / "summary.json").read_text())
        assert running == {"status": "running", "sources": {}}
    otafl.run(chosen, out=tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    log = (tmp_path / "parts" / "log.txt").read_text()
    assert re.findall(r"continues from round (\d+)", log) == ["3", "5", "9"]
    assert not (tmp_path / "parts" / "checkpoint").exists()


def test_half_a_line_after_the_last_checkpoint_is_cut(tmp_path: Path) -> None:
    chosen = config(**EAGER)
    otafl.run(chosen, out=tmp_path / "whole")
    run_until(tmp_path / "parts", 6, chosen)
    with open(tmp_path / "parts" / "metrics.csv", "a") as file:
        file.write("0,7,0.12")
    otafl.run(chosen, out=tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


DAMAGES = {
    "flipped byte": lambda folder: flip(folder / "state.safetensors"),
    "truncated state": lambda folder: os.truncate(folder / "state.safetensors", 100),
    "half-written header": lambda folder: os.truncate(folder / "checkpoint.json", 40),
    "edited header": lambda folder: edit(folder / "checkpoint.json", '"round": 6', '"round": 5'),
    "missing state": lambda folder: (folder / "state.safetensors").unlink(),
    "damaged metrics": lambda folder: flip(folder / "metrics.csv"),
    "empty header": lambda folder: (folder / "checkpoint.json").write_text("[]"),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_noticed_and_the_previous_one_used(tmp_path: Path, damage: str) -> None:
    chosen = config(**EAGER)
    otafl.run(chosen, out=tmp_path / "whole")
    run_until(tmp_path / "parts", 6, chosen)
    kept = sorted((tmp_path / "parts" / "checkpoint").iterdir())
    assert [folder.name for folder in kept] == ["00000005", "00000006"]
    DAMAGES[damage](kept[-1])
    otafl.run(chosen, out=tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    log = (tmp_path / "parts" / "log.txt").read_text()
    assert "checkpoint 00000006 is damaged" in log
    assert "continues from round 5" in log


def test_no_valid_checkpoint_left_stops_and_overwrites_nothing(tmp_path: Path) -> None:
    chosen = config(**EAGER)
    run_until(tmp_path / "run", 6, chosen)
    for folder in (tmp_path / "run" / "checkpoint").iterdir():
        flip(folder / "state.safetensors")
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    with pytest.raises(
        RunDirectoryError, match=r"no valid checkpoint is left.*delete that folder to start from round 0"
    ):
        otafl.run(chosen, out=tmp_path / "run")
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before


def test_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    run_until(tmp_path / "one", 6, config(**EAGER))
    run_until(tmp_path / "other", 6, config(training__lr=0.01, **EAGER))
    shutil.rmtree(tmp_path / "one" / "checkpoint")
    shutil.copytree(tmp_path / "other" / "checkpoint", tmp_path / "one" / "checkpoint")
    with pytest.raises(RunDirectoryError, match="belongs to another configuration"):
        otafl.run(config(**EAGER), out=tmp_path / "one")


def test_second_process_is_locked_out(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", config()) as directory:
        directory.create()
        with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
            otafl.run(config(), out=tmp_path / "run")


def test_signal_writes_a_checkpoint_and_the_same_call_continues(tmp_path: Path) -> None:
    chosen = config()
    otafl.run(chosen, out=tmp_path / "whole")

    def observer(done: int, row: Any) -> None:
        if done == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="SIGTERM after round 7"):
        otafl.run(chosen, out=tmp_path / "parts", observer=observer)
    otafl.run(chosen, out=tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("when", ["metrics", "checkpoint", "model"])
def test_full_disk_is_one_line_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    chosen = config(**EAGER)
    otafl.run(chosen, out=tmp_path / "whole")
    run_until(tmp_path / "parts", 3, chosen)

    def full(*args: Any, **keys: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if when == "metrics":
            real = open
            patch.setattr(
                rundir,
                "open",
                lambda p, *a, **k: full() if a[:1] == ("a",) and "csv" in str(p) else real(p, *a, **k),
                raising=False,
            )
        else:
            patch.setattr(rundir, {"checkpoint": "save_file", "model": "save"}[when], full)
        with pytest.raises(RunDirectoryError, match="the disk is full; nothing recorded is lost"):
            otafl.run(chosen, out=tmp_path / "parts")
    otafl.run(chosen, out=tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_diverging_seed_stops_alone(tmp_path: Path) -> None:
    """One seed blows up: its rows end, the others go on unchanged, the summary names round and cause."""
    import dataclasses

    from otafl.algorithms.ota_fedavg import OTAFedAvg

    if "test-bomb" not in otafl.registry._registered["algorithms"]:

        @otafl.register_algorithm("test-bomb")
        @dataclasses.dataclass(frozen=True)
        class Bomb(OTAFedAvg):
            def step(self, state: Any, round: Any) -> Any:  # noqa: A002
                after, info = super().step(state, round)
                scale = torch.ones(len(after.params), 1, dtype=after.params.dtype)
                if round.t == 6:
                    scale[1] = math.inf
                return dataclasses.replace(after, params=after.params * scale), info

    keys = {"experiment.rounds": ROUNDS, "experiment.seeds": [0, 1, 2], "algorithm.gamma": 1e-12}
    bomb = make_config("fedavg", {"algorithm.name": "test-bomb", **keys})
    result = otafl.run(bomb, out=tmp_path / "bomb")
    calm = otafl.run(make_config("ota-fedavg", keys))
    assert result.status == "failed"
    assert result.diverged == {1: 7}
    rows = table(tmp_path / "bomb" / "metrics.csv")
    assert max(int(row["round"]) for row in rows if row["seed"] == "1") == 6
    assert max(int(row["round"]) for row in rows if row["seed"] == "2") == ROUNDS
    for s in (0, 2):
        assert torch.equal(result.params[s], calm.params[s])
    summary = json.loads((tmp_path / "bomb" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["diverged"]["1"]["round"] == 7
    assert "training.lr" in summary["diverged"]["1"]["cause"]
    assert set(summary["test_accuracy"]["per_seed"]) == {"0", "2"}
    alive = list(summary["test_accuracy"]["per_seed"].values())
    assert summary["test_accuracy"]["mean"] == pytest.approx(sum(alive) / 3)  # the failed seed counts with 0
    assert summary["test_loss"]["mean"] is None
    again = otafl.run(bomb, out=tmp_path / "bomb")
    assert again.diverged == {1: 7}


def test_real_divergence_says_so() -> None:
    result = otafl.run(make_config("fedavg", {"training.lr": 1e30, "training.local_steps": 50}))
    assert result.status == "failed"
    assert set(result.diverged) == {0, 1}
    assert result.summary["test_accuracy"]["mean"] == 0.0
    assert result.rounds[-1] < 5  # nothing is left to run


KILLER = """
import json, os, random, signal, sys, time
import torch
import otafl.cli, otafl.simulation.run
torch.set_num_threads(1)
torch.func.vmap(torch.func.grad(torch.sum))(torch.ones(1, 1))  # imports what every child would import anew
step = otafl.simulation.run.Simulation.step
def unhurried(self, state, t):  # a fast machine must not be done before the last kill
    time.sleep(0.02)
    return step(self, state, t)
otafl.simulation.run.Simulation.step = unhurried
out, command, kills, seed = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
moments, draw = [], random.Random(seed)
while True:
    child = os.fork()
    if child == 0:
        sys.argv = ["otafl", *command, "--out", out]
        otafl.cli.main()
    if len(moments) < kills:
        time.sleep(draw.uniform(0.02, 0.9))
        moments.append(time.time())
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(json.dumps({"moments": moments, "status": os.waitstatus_to_exitcode(status)}))
"""


TWO_COLUMNS = """
import dataclasses
import otafl
from otafl.algorithms.ota_fedavg import OTAFedAvg

@otafl.register_algorithm("two-columns")
@dataclasses.dataclass(frozen=True)
class TwoColumns(OTAFedAvg):
    def step(self, state, round):
        after, info = super().step(state, round)
        extra = {"zeal": after.params.double().norm(dim=-1), "age": after.params.double().sum(-1)}
        return after, dataclasses.replace(info, extra=extra)
"""
SMALL: dict[str, Any] = {"model.hidden": [64], "training.lr": 0.1, "training.clip": math.inf}
KILLED: dict[str, dict[str, Any]] = {
    "fedoag": {"algorithm.name": "fedoag", **SMALL},
    "fedoag-plus": {"algorithm.name": "fedoag-plus", "algorithm.gamma": "adaptive", **SMALL},
    "plug-in": {"algorithm.name": "two-columns", **SMALL},
    "CNN": {
        "algorithm.name": "fedoag",
        "radio.noise_dbm_hz": -203.0,
        "model.name": "cnn",
        "model.channels": [3],
        "training.local_steps": 2,
        "cell.devices": 6,
        "training.lr": 0.01,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("what", KILLED)
def test_twenty_kills_change_nothing(tmp_path: Path, what: str) -> None:
    """Kill -9 at twenty random moments, each followed by the same command: identical files, little repeated.

    The first row comes late, so that kills hit the run before it, too.
    """
    interval_s = 0.3
    (tmp_path / "columns.py").write_text(TWO_COLUMNS)
    command = ["run", "quick", "--device", "cpu", "--plugin", str(tmp_path / "columns.py")]
    chosen = {"experiment.rounds": 300, "experiment.eval_every": 140, "data.name": "digits", **KILLED[what]}
    for key, value in {**chosen, "experiment.checkpoint_s": interval_s}.items():
        command += ["--set", f"{key}={'inf' if value == math.inf else json.dumps(value)}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def drive(out: Path, kills: int) -> dict[str, Any]:
        arguments = [sys.executable, "-c", KILLER, str(out), json.dumps(command), str(kills), "7"]
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=540, check=False)
        report: dict[str, Any] = json.loads(done.stderr.strip().splitlines()[-1])
        return report

    assert drive(tmp_path / "whole", 0)["status"] == 0
    report = drive(tmp_path / "killed", 20)
    assert report["status"] == 0
    assert len(report["moments"]) == 20
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")

    log = (tmp_path / "killed" / "log.txt").read_text().splitlines()
    stamps = [(datetime.fromisoformat(line.split(" ", 1)[0]).timestamp(), line) for line in log]
    marks = [when for when, line in stamps if "checkpoint after" in line or "starts" in line or "continues" in line]
    continued = [int(line.rsplit(" ", 1)[1]) for _, line in stamps if "continues" in line]
    assert len(set(continued)) >= 6  # the kills hit the run at many different rounds
    assert min(continued) < 140  # and before its first row
    for moment in report["moments"]:
        earlier = [when for when in marks if when <= moment]
        if earlier:  # work since the last mark is what is repeated; the rest is for a slow round and the writing
            assert moment - max(earlier) <= interval_s + 0.8


def unseal(folder: Path) -> None:
    """Make a finished run one of an older version, which kept no digests but that of its configuration."""
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("seal", "sha256", "sources", "finished"):
        del summary[key]
    summary["config"] = digest_of(tomllib.loads((folder / "config.toml").read_text()))
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_run_made_before_a_key_existed_is_still_read(tmp_path: Path) -> None:
    """Keys that a newer version has besides do not make a finished directory another's; other values do."""
    config = make_config(overrides={"experiment.checkpoint_s": 1e-9})
    before = otafl.run(config, out=tmp_path / "run", device="cpu")
    stored = tmp_path / "run" / "config.toml"
    text = stored.read_text()
    start = text.index("[imperfect]")
    older = text[:start] + text[text.index("[algorithm]", start) :]
    assert older != text
    stored.write_text(older)
    unseal(tmp_path / "run")
    assert np.array_equal(read_run(tmp_path / "run").metrics["test_loss"], before.metrics["test_loss"])
    unfinished = tmp_path / "unfinished"
    run_until(unfinished, 3, config)
    (unfinished / "config.toml").write_text(older)
    for header in unfinished.glob("checkpoint/*/checkpoint.json"):
        content = json.loads(header.read_text())
        content.pop("seal")
        content["config"] = digest_of(tomllib.loads(older))
        header.write_text(json.dumps(rundir._sealed(content)))
    assert torch.equal(otafl.run(config, out=unfinished, device="cpu").params, before.params)
    stored.write_text(older.replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(RunDirectoryError, match="another configuration"):
        otafl.run(config, out=tmp_path / "run", device="cpu")
