"""The command line as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from otafl import registry
from otafl.cli import parse_seeds

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
QUICK = ["run", "quick", "--set", "data.name=digits", "--set", "experiment.rounds=3", "--device", "cpu"]


def otafl(*arguments: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "otafl.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, check=False, env={**ENVIRONMENT, **extra}, timeout=300
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["list", "algorithms"],
        ["reproduce", "table1"],
        ["run", "--help"],
        ["--version"],
        ["data", "list"],
    ],
)
def test_quick_answers_import_nothing_heavy(arguments: list[str]) -> None:
    """What keeps help and list within half a second: neither torch nor pydantic, scipy or matplotlib."""
    script = (
        "import sys, otafl.cli\n"
        f"sys.argv = ['otafl', *{arguments!r}]\n"
        "try: otafl.cli.main()\n"
        "except SystemExit as done: code = done.code\n"
        "heavy = {'torch', 'scipy', 'matplotlib', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {code}' if heavy or code else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_list_shows_everything() -> None:
    shown = otafl("list").stdout
    for kind in registry.BUILTIN:
        for name in registry.BUILTIN[kind]:  # other tests of this process may have registered more
            assert f"  {name} " in shown
    assert "stationary" in shown


@pytest.mark.slow
def test_run_prints_a_summary_and_the_same_command_finds_it(tmp_path: Path) -> None:
    first = otafl(*QUICK, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("quick-")
    assert "test accuracy" in first.stdout
    assert "complete: runs/quick-" in first.stdout
    second = otafl(*QUICK, cwd=tmp_path)
    assert second.returncode == 0
    said, rest = second.stdout.split("\n", 1)
    assert said.startswith("already complete (")
    assert rest == first.stdout


@pytest.mark.slow
def test_resolved_file_runs_again_to_the_same_numbers(tmp_path: Path) -> None:
    assert otafl(*QUICK, "--out", "one", cwd=tmp_path).returncode == 0
    assert otafl("run", "one/config.toml", "--device", "cpu", "--out", "two", cwd=tmp_path).returncode == 0
    assert (tmp_path / "one/metrics.csv").read_bytes() == (tmp_path / "two/metrics.csv").read_bytes()


@pytest.mark.slow
def test_divergence_is_status_3_and_says_so(tmp_path: Path) -> None:
    done = otafl(*QUICK, "--set", "training.lr=1e30", "--set", "algorithm.name=fedavg", cwd=tmp_path)
    assert done.returncode == 3
    assert "seed 0 diverged after round 1: training.lr = 1e+30 is too large" in done.stderr
    assert "failed: runs/" in done.stdout
    assert otafl(*QUICK, "--set", "training.lr=1e30", "--set", "algorithm.name=fedavg", cwd=tmp_path).returncode == 3


@pytest.mark.slow
def test_interrupt_saves_and_continues(tmp_path: Path) -> None:
    """Ctrl-C: a checkpoint, status 130, and the same command goes on."""
    arguments = [*QUICK, "--set", "experiment.rounds=150", "--out", "run"]
    command = [sys.executable, "-m", "otafl.cli", *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        metrics = tmp_path / "run" / "metrics.csv"
        if metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped by SIGINT after round" in err
    assert "the same command continues" in err
    done = otafl(*arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert "continues from round" in (tmp_path / "run" / "log.txt").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "complete"


def test_doctor_names_versions_devices_and_data(mnist: Path) -> None:
    done = otafl("doctor")
    assert done.returncode == 0
    for word in ("torch", "CUDA", "data", "mnist        verified"):
        assert word in done.stdout


def test_data_get_verifies_what_is_there(mnist: Path) -> None:
    done = otafl("data", "get", "mnist")
    assert done.returncode == 0
    assert f"mnist: verified in {mnist}" in done.stdout
    assert "digits needs no files" in otafl("data", "get", "digits").stdout


def test_seeds() -> None:
    assert parse_seeds("0-3") == [0, 1, 2, 3]
    assert parse_seeds("7") == [7]
    assert parse_seeds("0,5-6,9") == [0, 5, 6, 9]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["compare", "nowhere"], "nowhere: no such folder"),
        (["report", "nowhere"], "nowhere: no such folder"),
        (["sweep", "nowhere.toml"], "nowhere.toml: no such file"),
        (["tune", "nowhere.toml"], "nowhere.toml: no such file"),
        (["reproduce", "figg1"], "did you mean 'fig1'"),
        (["reproduce", "fig1", "--out", "sweep.toml/x"], "cannot be written"),
        (["reproduce", "fig1", "--out", ""], "--out is empty"),
        (["theory", "quick", "--set", "algorithm.name=sca", "--set", "data.name=digits"], "the analysis is FedOAG's"),
        (["sweep", "sweep.toml", "--executor", "slurm"], "choose from local, ray"),
        (["sweep", "sweep.toml", "--workers", "0"], "at least 1"),
        (["sweep", "sweep.toml", "--out", ""], "--out is empty"),
    ],
)
def test_mistakes_in_studies_get_one_line_and_write_nothing(tmp_path: Path, arguments: list[str], line: str) -> None:
    (tmp_path / "sweep.toml").write_text('[axes]\n"training.lr" = [0.1]\n')
    done = otafl(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert line in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.toml"]
