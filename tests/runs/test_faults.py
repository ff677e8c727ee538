"""A fault at every file operation of a run, a report and a sweep's table: one line, nothing lost, the same in the end.

Every call that touches the file system while a run starts, checkpoints, finishes or is read again is made to fail
once: with a full disk, a refusal, an input/output error, or the death of the process there. The same command must
then end with the same bytes. `OTAFL_FAULTS=all` tries every error at every call; by default each call gets one.
"""

import builtins
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import otafl
from otafl import disk
from otafl.errors import OtaflError
from otafl.runs import directory as rundir
from otafl.runs.result import read_run
from tests.conftest import make_config

ERRORS = {"full": 28, "refused": 13, "broken": 5, "read-only": 30}
ALL = os.environ.get("OTAFL_FAULTS") == "all"
KEYS = {"experiment.rounds": 6, "experiment.eval_every": 4, "experiment.checkpoint_s": 1e-9, "experiment.seeds": [0]}
CONFIG = make_config(overrides=KEYS)
TOUCHING = {
    (os, "open"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"), (os, "scandir"),
    (os, "fstat"), (os, "stat"), (os, "truncate"),
    (shutil, "rmtree"), (rundir, "save_file"), (rundir, "save"), (rundir, "load_file"),
}  # fmt: skip


class Killed(BaseException):
    """The end of the process, there."""


class Faults:
    """Counts the calls that touch a folder, and lets one of them fail."""

    def __init__(self, folder: Path, number: int | None, error: Exception | type[Killed] | None) -> None:
        self._folder, self._number, self._error = str(folder), number, error
        self.calls = 0

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keys: Any) -> Any:
            if any(self._folder in str(part) for part in arguments if isinstance(part, str | os.PathLike)):
                self.calls += 1
                if self.calls == self._number:
                    assert self._error is not None
                    if keys.get("ignore_errors") and self._error is not Killed:
                        return None  # of a tree that cannot be removed
                    raise self._error
            return real(*arguments, **keys)

        return call


@contextmanager
def faults(
    monkeypatch: pytest.MonkeyPatch, folder: Path, number: int | None = None, error: Any = None
) -> Iterator[Faults]:
    """While inside, one call that touches the folder fails."""
    counter = Faults(folder, number, error)
    with monkeypatch.context() as patch:
        for module, name in TOUCHING:
            patch.setattr(module, name, counter.wrap(getattr(module, name)))
        real_open = builtins.open
        for module in (disk, rundir):
            patch.setattr(module, "open", counter.wrap(real_open), raising=False)
        yield counter


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in rundir.SEALED}


def count(monkeypatch: pytest.MonkeyPatch, folder: Path, action: Callable[[], Any]) -> int:
    with faults(monkeypatch, folder) as counter:
        action()
    return counter.calls


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    otafl.run(CONFIG, out=folder)
    return folder


def plan(calls: int) -> list[tuple[int, str]]:
    kinds = [*ERRORS, "killed"]
    return [(n, kind) for n in range(1, calls + 1) for i, kind in enumerate(kinds) if ALL or n % len(kinds) == i]


def fault(kind: str) -> Any:
    return Killed if kind == "killed" else OSError(ERRORS[kind], os.strerror(ERRORS[kind]))


@pytest.mark.slow
def test_a_fault_at_every_file_operation_of_a_run(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(monkeypatch, tmp_path, lambda: otafl.run(CONFIG, out=tmp_path / "counted"))
    assert calls > 100
    for number, kind in plan(calls):
        out = tmp_path / f"run-{number}-{kind}"
        with faults(monkeypatch, tmp_path, number, fault(kind)):
            try:
                otafl.run(CONFIG, out=out)
            except (OtaflError, Killed):
                pass
            except Exception as error:
                raise AssertionError(f"call {number}, {kind}") from error
        otafl.run(CONFIG, out=out)
        assert files(out) == files(whole), (number, kind)
        read_run(out)
        shutil.rmtree(out)


@pytest.mark.slow
def test_a_fault_at_every_file_operation_of_reading(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run that cannot be read just now is not run again, and not changed."""
    shutil.copytree(whole, tmp_path / "run")
    actions: list[Callable[[], Any]] = [
        lambda: read_run(tmp_path / "run"),
        lambda: otafl.run(CONFIG, out=tmp_path / "run", observer=lambda *_: pytest.fail("ran again")),
    ]
    for action in actions:
        for number, kind in plan(count(monkeypatch, tmp_path, action)):
            with faults(monkeypatch, tmp_path, number, fault(kind)):
                try:
                    action()
                except (OtaflError, Killed):
                    pass
                except Exception as error:
                    raise AssertionError(f"call {number}, {kind}") from error
            assert files(tmp_path / "run") == files(whole), (number, kind)
            assert {p.name for p in (tmp_path / "run").iterdir()} == {p.name for p in whole.iterdir()}


def test_a_fault_at_every_file_operation_of_a_report(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old report or the new one, and nothing between."""
    target = tmp_path / "report.html"

    def report() -> None:
        rundir.publish(target, b"the new one")

    for number, kind in plan(count(monkeypatch, tmp_path, report)):
        target.write_bytes(b"the old one")
        with faults(monkeypatch, tmp_path, number, fault(kind)), suppress(OtaflError, Killed):
            report()
        assert target.read_bytes() in (b"the old one", b"the new one")
        if kind != "killed":
            assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
        for left in tmp_path.glob(".*"):
            left.unlink()


def test_the_faults_reach_the_calls() -> None:
    """The table above names what the modules use; a new way to touch a file belongs there."""
    assert safetensors.torch.save_file is rundir.save_file
    source = Path(rundir.__file__).read_text() + Path(disk.__file__).read_text()
    others = ("os.rename", "os.link", "os.symlink", "os.remove", "shutil.move", "shutil.copy")
    assert not [word for word in others if word in source]
