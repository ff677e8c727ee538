"""A user's mistakes: each one clear line, status 2, nothing overwritten.

Groups: configuration, data files, output directory, resume, command line, plug-ins that misbehave.
"""

import dataclasses
import gzip
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import otafl
from otafl import cli, registry
from otafl.runs import directory as rundir
from otafl.runs.directory import RunDirectory
from otafl.world.data import _pictures
from tests.conftest import TINY, TINY_GAMMA
from tests.runs.test_directory import unseal

Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Run the command line in an empty folder: exit status, standard output, standard error."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    _pictures.cache_clear()  # a new command remembers no images

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["otafl", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        text = capsys.readouterr()
        return int(caught.value.code or 0), text.out, text.err

    return run


def tiny(*sets: str) -> list[str]:
    """Arguments of a run of the tiny configuration; where a section's name is chosen, its other keys are left out."""
    chosen = {text.split(".", 1)[0] for text in sets if ".name=" in text and not text.startswith("experiment")}
    keys = {**TINY, "algorithm.gamma": TINY_GAMMA}
    values = [f"{key}={json.dumps(value)}" for key, value in keys.items() if key.split(".", 1)[0] not in chosen]
    return ["run", "stationary", *(part for text in [*values, *sets] for part in ("--set", text))]


def complaint(answer: tuple[int, str, str], started: bool = False) -> str:
    """The one line of an answer with status 2; a run that had started has said so in two lines before."""
    status, out, err = answer
    assert status == 2, (out, err)
    lines = err.splitlines()[2 if started else 0 :]
    assert len(lines) == 1, err
    assert lines[0].startswith("otafl: ")
    assert "Traceback" not in err + out
    assert "pydantic" not in err
    return lines[0]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


CONFIGURATION = {
    "training.lrr=0.1": r"training\.lrr: unknown key \(did you mean 'lr'\?\)",
    "trainig.lr=0.1": r"trainig: unknown section \(did you mean 'training'\?\)",
    "training.lr=abc": r'training\.lr = "abc": should be a valid number',
    "training.lr=-0.1": r"training\.lr = -0\.1: should be greater than 0",
    "training.lr=nan": r"training\.lr = nan: must be a finite number",
    "training.lr=inf": r"training\.lr = inf: must be a finite number",
    "training.batches=per_epoch": r"training\.batches = \"per_epoch\": should be 'per_step' or 'per_round'",
    "training.local_steps=2.5": r"training\.local_steps = 2\.5: should be a valid integer",
    "training.local_steps=true": r"training\.local_steps = true: should be a valid integer",
    "algorithm.gamma=0": r"algorithm\.gamma = 0: should be greater than or equal to",
    "algorithm.gamma=nan": r"algorithm\.gamma = nan",
    "algorithm.gamma=[1e-9]": r"algorithm\.gamma = \[1e-09\]: should be a valid number",
    "algorithm.name=fedog": r"algorithm\.name: nothing is named 'fedog' \(did you mean 'fedoag'\?\)",
    "algorithm.name=3": r"algorithm\.name = 3: must be a string",
    "radio.tx_power_dbm=inf": r"radio\.tx_power_dbm = inf",
    "radio.bandwidth_hz=-1e6": r"radio\.bandwidth_hz = -1000000\.0: should be greater than 0",
    "radio.noise_dbm_hz=inf": r"radio\.noise_dbm_hz = inf: give a density in dBm/Hz, or -inf",
    "radio.noise_convention=n0/3": r"radio\.noise_convention = \"n0/3\": should be 'n0' or 'n0/2'",
    "cell.devices=0": r"cell\.devices = 0: should be greater than or equal to 1",
    "cell.devices=500": r"cell\.devices = 500: the data set has only 200 training images",
    "cell.radius_m=-3": r"cell\.radius_m = -3: should be greater than 0",
    "cell.placement=given": r"cell\.positions_m has 0 positions for 4 devices",
    "cell.positions_m=[[1,2]]": r"cell\.positions_m is only used with",
    "experiment.seeds=[]": r"experiment\.seeds = \[\]",
    "experiment.seeds=[1,1]": r"experiment\.seeds = \[1, 1\]: a seed is named twice",
    "experiment.seeds=[-1]": r"experiment\.seeds\[0\] = -1",
    "experiment.rounds=0": r"experiment\.rounds = 0",
    'experiment.record=["everything"]': r"experiment\.record\[0\] = \"everything\"",
    "experiment.name=../up": r"experiment\.name = '\.\./up': use letters",
    "data.dirichlet_alpha=0": r"data\.dirichlet_alpha = 0: should be greater than 0",
    "model.hidden=[0]": r"model\.hidden\[0\] = 0",
    "model.name=cnn": r"cnn.*the data set has no images",
    "model.name=point": r'"point" is for data\.name = "quadratic"',
    "fading.name=rayleih": r"fading\.name: nothing is named 'rayleih' \(did you mean 'rayleigh'\?\)",
    "fading.k=3": r"fading\.k: unknown key",
    "mobility.name=bounded-waypoint,mobility.speed_mps=[3.0,1.0]": r"mobility\.speed_mps = \[3\.0, 1\.0\]: give",
    "mobility.name=bounded-waypoint,mobility.moving_fraction=1.5": r"mobility\.moving_fraction = 1\.5",
}


@pytest.mark.parametrize("sets", CONFIGURATION)
def test_configuration(shell: Shell, sets: str) -> None:
    line = complaint(shell(*tiny(*re.split(r",(?=\w+\.\w+=)", sets))))
    assert re.search(CONFIGURATION[sets], line), line
    assert not list(Path.cwd().rglob("metrics.csv"))  # nothing was run


def test_configuration_files(shell: Shell) -> None:
    Path("bad.toml").write_text("[training\nlr = 1")
    assert "bad.toml: not valid TOML" in complaint(shell("run", "bad.toml"))
    Path("top.toml").write_text("training = 3")
    assert "training = 3: write it as a section" in complaint(shell("run", "top.toml"))
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml: cannot be read" in complaint(shell("run", "binary.toml"))
    assert "no such file or preset (did you mean 'stationary'?)" in complaint(shell("run", "stationry"))
    Path("folder").mkdir()
    assert "folder: cannot be read" in complaint(shell("run", "folder"))
    Path("nested.toml").write_text("[training.inner]\nlr = 1")
    assert "training.inner: unknown key" in complaint(shell("run", "nested.toml"))


def test_validation_without_a_validation_set(shell: Shell, mnist: Path) -> None:
    answer = shell("run", "stationary", "--set", "data.train_images=60000", "--set", 'experiment.record=["validation"]')
    assert '"validation" needs a validation set' in complaint(answer)


@pytest.fixture
def broken_mnist(tmp_path: Path, mnist: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data directory with links to the good files, of which tests replace one."""
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for path in mnist.glob("*ubyte*"):
        (folder / path.name).symlink_to(path)
    monkeypatch.setenv("OTAFL_DATA", str(tmp_path / "data"))
    _pictures.cache_clear()
    yield folder
    _pictures.cache_clear()


def replace_labels(folder: Path, content: bytes) -> Path:
    path = next(folder.glob("train-labels-idx1-ubyte*"))
    path.unlink()
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(content)
    return path


DATA_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: next(folder.glob("t10k-images*")).unlink(), "files not found in .*otafl data get mnist"),
    "truncated gzip": (
        lambda folder: replace_labels(folder, gzip.compress(bytes(1000))[:-5]),
        "train-labels.*cannot be read .*delete it",
    ),
    "not gzip": (lambda folder: replace_labels(folder, b"hello"), "train-labels.*cannot be read .*delete it"),
    "wrong checksum": (
        lambda folder: replace_labels(folder, gzip.compress(bytes(60_008))),
        "train-labels.*damaged or not mnist .MD5.*delete it",
    ),
    "empty": (lambda folder: replace_labels(folder, b""), "train-labels.*(cannot be read|damaged)"),
    "directory in place of a file": (
        lambda folder: (next(folder.glob("train-labels*")).unlink(), (folder / "train-labels-idx1-ubyte.gz").mkdir()),
        "files not found in",
    ),
}


@pytest.mark.parametrize("case", DATA_FILES)
def test_data_files(shell: Shell, broken_mnist: Path, case: str) -> None:
    damage, line = DATA_FILES[case]
    damage(broken_mnist)
    assert re.search(line, complaint(shell("run", "stationary", "--device", "cpu")))
    assert not list(Path.cwd().rglob("metrics.csv"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\0\0\x08\x01\0\0\0\x05abc", "truncated idx file"),
        (b"\0\0\x0d\x01\0\0\0\x01abcd", "not an idx file of unsigned bytes"),
        (b"\0\0\x08\x03\0\0", "truncated idx file"),
        (b"", "not an idx file"),
        (b"\0\0\x08\x01\0\0\0\x02abc", "truncated idx file"),
    ],
)
def test_idx_content(content: bytes, line: str) -> None:
    from otafl.errors import DataError
    from otafl.world.files import parse_idx

    with pytest.raises(DataError, match=line):
        parse_idx(content, Path("x"))


def test_offline_get_fails_fast_with_the_four_files(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from otafl.world import files

    monkeypatch.setenv("OTAFL_DATA", str(tmp_path / "none"))
    offline = dataclasses.replace(files.MNIST_FILES, mirrors=("http://127.0.0.1:9/",), npm_package=None)
    monkeypatch.setitem(files.DOWNLOADS, "mnist", offline)
    line = complaint(shell("data", "get", "mnist"))
    assert all(f"{name}.gz" in line for name in files.MNIST_FILES.md5)
    assert str(tmp_path / "none" / "mnist") in line


class TestOutputDirectory:
    def test_made_by_another_configuration(self, shell: Shell) -> None:
        assert shell(*tiny(), "--out", "run")[0] == 0
        before = snapshot(Path("run"))
        line = complaint(shell(*tiny("training.lr=0.03"), "--out", "run"))
        assert "was made by another configuration (there training.lr = 0.1)" in line
        assert snapshot(Path("run")) == before

    def test_not_a_run_directory(self, shell: Shell) -> None:
        Path("thesis").mkdir()
        Path("thesis/chapter.tex").write_text("all my work")
        assert "is not a run directory" in complaint(shell(*tiny(), "--out", "thesis"))
        assert [p.name for p in Path("thesis").iterdir()] == ["chapter.tex"]

    def test_is_a_file(self, shell: Shell) -> None:
        Path("file").write_text("x")
        assert "is a file" in complaint(shell(*tiny(), "--out", "file"))
        assert Path("file").read_text() == "x"
        assert "cannot be written" in complaint(shell(*tiny(), "--out", "file/below"))

    def test_unwritable(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        """Root may write anywhere, so a kernel folder that refuses even root stands for a read-only one."""
        assert "cannot be written" in complaint(shell(*tiny(), "--out", "/proc/otafl-run"))

    def test_locked(self, shell: Shell) -> None:
        from otafl.config.schema import load_config

        config = load_config("stationary", {**TINY, "algorithm.gamma": TINY_GAMMA})
        with RunDirectory.open(Path("run"), config) as directory:
            directory.create()
            assert f"in use by process {os.getpid()}" in complaint(shell(*tiny(), "--out", "run"))

    def test_full_disk(self, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(rundir, "save", full)
        assert "the disk is full" in complaint(shell(*tiny(), "--out", "run"), started=True)
        monkeypatch.undo()

    def test_damaged_config(self, shell: Shell) -> None:
        assert shell(*tiny(), "--out", "run")[0] == 0
        Path("run/config.toml").write_bytes(b"\xff\xff garbage")
        assert "made by another configuration" in complaint(shell(*tiny(), "--out", "run"))

    def test_complete_but_damaged(self, shell: Shell) -> None:
        assert shell(*tiny(), "--out", "run")[0] == 0
        Path("run/model.safetensors").write_bytes(b"short")
        assert "model.safetensors has changed since the run finished" in complaint(shell(*tiny(), "--out", "run"))


class TestResume:
    @staticmethod
    def arguments() -> list[str]:
        return [*tiny("experiment.checkpoint_s=1e-9"), "--out", "run"]

    def damage_all(self, name: str, content: bytes) -> None:
        for folder in Path("run/checkpoint").iterdir():
            (folder / name).write_bytes(content)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("state.safetensors", b"damaged"),
            ("checkpoint.json", b'{"format": 1, "rou'),
            ("checkpoint.json", b"null"),
            ("metrics.csv", b"seed,round\n"),
        ],
    )
    def test_damaged_or_half_written(self, shell: Shell, tmp_path: Path, name: str, content: bytes) -> None:
        self.interrupt(shell)
        self.damage_all(name, content)
        before = {k: v for k, v in snapshot(Path("run")).items() if k not in ("log.txt", "run.lock")}
        assert "no valid checkpoint is left" in complaint(shell(*self.arguments()))
        assert {k: v for k, v in snapshot(Path("run")).items() if k not in ("log.txt", "run.lock")} == before

    def test_foreign(self, shell: Shell) -> None:
        self.interrupt(shell)
        for folder in Path("run/checkpoint").iterdir():
            header = json.loads((folder / "checkpoint.json").read_text())
            header.pop("seal")
            header["config"] = "0" * 64
            from otafl.runs.directory import _sealed

            (folder / "checkpoint.json").write_text(json.dumps(_sealed(header)))
        assert "belongs to another configuration" in complaint(shell(*self.arguments()))

    def test_undamaged_continues(self, shell: Shell) -> None:
        self.interrupt(shell)
        assert shell(*self.arguments())[0] == 0
        assert "continues from round 3" in Path("run/log.txt").read_text()

    def interrupt(self, shell: Shell) -> None:
        """End a run abruptly after three rounds."""
        from otafl.simulation import run as fold

        real = fold.Simulation.step

        def step(simulation: Any, state: Any, t: int) -> Any:
            if t == 3:
                raise KeyboardInterrupt
            return real(simulation, state, t)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fold.Simulation, "step", step)
            assert shell(*self.arguments())[0] == 130


COMMAND_LINE = {
    ("rnu",): "No such command 'rnu'",
    ("run", "--foo"): "No such option: --foo",
    ("run", "quick", "--set", "training.lr"): "write section.key=value",
    ("run", "quick", "--set", "lr=3"): "name a key as section.key",
    ("run", "quick", "--set", "training.lr=[1"): "neither a TOML value nor a plain word",
    ("run", "quick", "--set", "training.lr=0,1"): "for a decimal write 0.1",
    ("run", "quick", "--set", "model.hidden=64"): r"a list, [64]",
    ("run", "quick", "--seeds", "a-b"): "write seeds as 0-4 or 0,2,5",
    ("run", "quick", "--seeds", "4-0"): "names no seed",
    ("run", "quick", "--device", "tpu"): "choose auto, cpu or cuda",
    ("run", "quick", "--out", ""): "--out is empty",
    ("run", "quick", "extra"): "unexpected extra argument",
    ("list", "algorithm"): "did you mean 'algorithms'?",
    ("data", "get", "minst"): "did you mean 'mnist'?",
    ("data", "get"): "Missing argument",
    ("data", "frob"): "No such command 'frob'",
}


@pytest.mark.parametrize("arguments", COMMAND_LINE)
def test_command_line(shell: Shell, arguments: tuple[str, ...]) -> None:
    assert COMMAND_LINE[arguments] in complaint(shell(*arguments))
    assert not list(Path.cwd().iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_where_there_is_none(shell: Shell) -> None:
    assert "torch sees no CUDA device here" in complaint(shell(*tiny(), "--device", "cuda"))


@dataclasses.dataclass(frozen=True)
class Plain:
    params: Tensor


@dataclasses.dataclass(frozen=True)
class Base:
    """A method that does nothing, from which the misbehaving ones start."""

    knowledge: ClassVar[Any] = otafl.Knowledge(device=frozenset({"h"}))

    def init(self, problem: Any) -> Any:
        return Plain(problem.initial)

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        return state, otafl.Info(active=round.device.h.abs() > 0)

    @staticmethod
    def everyone(round: Any) -> Tensor:  # noqa: A002
        active: Tensor = round.device.h.abs() > 0
        return active


def misbehave(**methods: Any) -> type:
    return dataclasses.dataclass(frozen=True)(type("Mine", (Base,), {"__module__": "mine", **methods}))


def raising(self: Any, state: Any, round: Any) -> Any:  # noqa: A002
    raise ZeroDivisionError("oh dear\nsecond line")


PLUGINS: dict[str, tuple[type, str]] = {
    "too-loud": (
        misbehave(
            step=lambda self, state, round: (  # noqa: A006
                state,
                otafl.Info(Base.everyone(round)),
                round.uplink(round.train(state.params), 1e6 * round.device.h, Base.everyone(round)),
            )[:2]
        ),
        r"seed \d, round 0, device \d sent .* times the energy limit",
    ),
    "peeks": (
        misbehave(step=lambda self, state, round: (state, otafl.Info(round.server.h.abs() > 0))),  # noqa: A006
        "reads h at the server but does not declare it",
    ),
    "asks-for-nonsense": (
        misbehave(step=lambda self, state, round: (state, otafl.Info(round.device.weather > 0))),  # noqa: A006
        "the device view has no 'weather'",
    ),
    "raises": (misbehave(step=raising), "step of round 0 failed: ZeroDivisionError: oh dear"),
    "wrong-shape": (
        misbehave(step=lambda self, state, round: (Plain(state.params[:, :3]), otafl.Info(Base.everyone(round)))),  # noqa: A006
        r"step\(\) must give a dataclass with `params` of shape",
    ),
    "wrong-dtype": (
        misbehave(step=lambda self, state, round: (Plain(state.params.half()), otafl.Info(Base.everyone(round)))),  # noqa: A006
        "turned the model from torch.float64 into torch.float16",
    ),
    "no-info": (misbehave(step=lambda self, state, round: state), r"step\(\) must return \(state, otafl\.Info\)"),  # noqa: A006
    "bad-mask": (
        misbehave(step=lambda self, state, round: (state, otafl.Info(torch.ones(3)))),  # noqa: A006
        "Info.active must be a boolean mask",
    ),
    "no-state": (misbehave(init=lambda self, problem: 3), r"init\(\) must give a dataclass"),
    "no-knowledge": (misbehave(knowledge=None), "declare `knowledge"),
    "bad-report": (
        misbehave(step=lambda self, state, round: round.report(torch.ones(2), torch.ones(2, 4))),  # noqa: A006
        r"report\(\) needs a boolean mask",
    ),
    "bad-uplink": (
        misbehave(step=lambda self, state, round: round.uplink(round.train(state.params), 3.0, None)),  # noqa: A006
        r"uplink\(\) needs plain tensors, got a float",
    ),
}


@pytest.mark.parametrize("case", PLUGINS)
def test_algorithms_that_misbehave(shell: Shell, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    cls, expected = PLUGINS[case]
    monkeypatch.setitem(registry._registered["algorithms"], case, cls)
    started = case not in ("no-state", "no-knowledge")
    line = complaint(shell(*tiny(f"algorithm.name={case}")), started)
    assert re.search(expected, line), line


@dataclasses.dataclass(frozen=True)
class World:
    """Returns whatever it was given, in every role."""

    value: ClassVar[Any] = None

    def positions(self, *args: Any) -> Any:
        return self.value

    coefficients = load = build = mean_gain = positions

    def exceed_prob(self, power: Any) -> Any:
        return power


WORLDS: list[tuple[str, str, Any, str]] = [
    ("mobility", "mobility", np.zeros((2, 2)), r"Mine: returned \(2, 2\), must be an array of shape \(5, 4, 2\)"),
    ("fading", "fading", np.full((5, 4), np.nan), "fading Mine: returned values that are not finite"),
    ("fading", "fading", "hello", "fading Mine: returned str, must be an array"),
    ("pathloss", "pathloss", np.zeros((5, 4)), "a mean gain is not positive"),
    ("data", "datasets", 7, r"load\(\) returned int, not a Dataset"),
    ("model", "models", "net", r"build\(\) returned str, must be an nn\.Module"),
    ("model", "models", nn.Sequential(nn.Linear(9, 3)), "cannot be trained on features of shape"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "kind", "value", "line"), WORLDS)
def test_worlds_that_misbehave(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, section: str, kind: str, value: Any, line: str
) -> None:
    cls = dataclasses.dataclass(frozen=True)(type("Mine", (World,), {"__module__": "mine", "value": value}))
    monkeypatch.setitem(registry._registered[kind], "mine", cls)
    found = complaint(shell(*tiny(f"{section}.name=mine")))
    assert re.search(line, found), found


def test_taken_and_foreign_names() -> None:
    from otafl.errors import PluginError

    with pytest.raises(PluginError, match="the name 'fedoag' is taken"):
        otafl.register_algorithm("fedoag")(Base)


def test_data_set_with_wrong_labels(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    split = otafl.Split(np.zeros((9, 2), dtype=np.float32), np.full(9, 5))
    data = otafl.Dataset(train=split, test=split, validation=None, num_classes=3)
    cls = dataclasses.dataclass(frozen=True)(type("Mine", (World,), {"__module__": "mine", "value": data}))
    monkeypatch.setitem(registry._registered["datasets"], "mine", cls)
    assert "labels outside 0 … 2" in complaint(shell("run", "stationary", "--set", "data.name=mine"))


def shout(round: Any, updates: Any, scale: Any = 1.0) -> Any:  # noqa: A002
    """Send without inverting: far above the limit."""
    return round.uplink(updates, scale * torch.ones_like(round.device.h), Base.everyone(round))


def quiet_norms(self: Any, state: Any, round: Any) -> Any:  # noqa: A002
    """Writes into the norms it was given before it sends."""
    updates = round.train(state.params)
    updates.norms(Base.everyone(round)).zero_()
    shout(round, updates)
    return state, otafl.Info(Base.everyone(round))


def wrapping_dtype(self: Any, state: Any, round: Any) -> Any:  # noqa: A002
    """A scale whose square wraps to 0 in its own type."""
    scale = torch.full(round.device.h.shape, 2**32, dtype=torch.int64)
    round.uplink(round.train(state.params), scale, Base.everyone(round))
    return state, otafl.Info(Base.everyone(round))


KEPT: list[Any] = []


def kept_round(self: Any, state: Any, round: Any) -> Any:  # noqa: A002
    """Sends through the instruments of an earlier round, which nobody would count."""
    KEPT.append(round)
    if round.t:
        shout(KEPT[0], round.train(state.params))
    return state, otafl.Info(~Base.everyone(round))


MORE_PLUGINS: dict[str, tuple[type, str]] = {
    "quiet-norms": (misbehave(step=quiet_norms), "times the energy limit"),
    "wrapping-dtype": (misbehave(step=wrapping_dtype), "times the energy limit"),
    "kept-round": (misbehave(step=kept_round), r"uplink\(\) of round 0 was called after that round"),
    "reports-the-model": (
        misbehave(step=lambda self, state, round: round.report(state.params, state.params > 0)),  # noqa: A006
        r"report\(\) needs a boolean mask of shape \(2, 4\)",
    ),
    "complex-report": (
        misbehave(step=lambda self, state, round: round.report(round.device.h, Base.everyone(round))),  # noqa: A006
        "one real value per device",
    ),
    "short-mask": (
        misbehave(step=lambda self, state, round: round.train(state.params, Base.everyone(round)[0])),  # noqa: A006
        r"train\(\) needs a boolean mask of shape \(2, 4\)",
    ),
    "overflows": (
        misbehave(
            step=lambda self, state, round: (  # noqa: A006
                state,
                otafl.Info(Base.everyone(round)),
                round.uplink(round.train(state.params), 1e170 / round.device.h, Base.everyone(round)),
            )[:2]
        ),
        "sends what has no finite energy",
    ),
    "own-signal": (
        misbehave(step=lambda self, state, round: round.uplink(object(), round.device.h, Base.everyone(round))),  # noqa: A006
        r"uplink\(\) sends what train\(\) returned or otafl.Vectors, not a object",
    ),
    "forges-accuracy": (
        misbehave(
            step=lambda self, state, round: (  # noqa: A006
                state, otafl.Info(Base.everyone(round), extra={"test_accuracy": torch.ones(2)})
            )
        ),
        "'test_accuracy' cannot be the name of a column",
    ),
    "breaks-the-table": (
        misbehave(
            step=lambda self, state, round: (  # noqa: A006
                state, otafl.Info(Base.everyone(round), extra={"a,b": torch.ones(2)})
            )
        ),
        "'a,b' cannot be the name of a column",
    ),
    "late-column": (
        misbehave(
            step=lambda self, state, round: (  # noqa: A006
                state, otafl.Info(~Base.everyone(round), extra={"late": torch.ones(2)} if round.t else {})
            )
        ),
        "the same columns in every round",
    ),
    "wide-bound": (
        misbehave(step=lambda self, state, round: (state, otafl.Info(Base.everyone(round), torch.ones(2, 4)))),  # noqa: A006
        "norm_bound must be a tensor with one value per seed",
    ),
    "no-mask": (
        misbehave(step=lambda self, state, round: (state, otafl.Info(None))),  # noqa: A006
        "Info.active must be a boolean mask",
    ),
    "leaves": (misbehave(step=lambda self, state, round: sys.exit(0)), "step of round 0 failed: SystemExit"),  # noqa: A006
}  # fmt: skip


@pytest.mark.parametrize("case", MORE_PLUGINS)
def test_algorithms_that_cheat_or_break_the_record(shell: Shell, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    cls, expected = MORE_PLUGINS[case]
    monkeypatch.setitem(registry._registered["algorithms"], case, cls)
    line = complaint(shell(*tiny(f"algorithm.name={case}")), started=True)
    assert re.search(expected, line), line


def test_writing_into_a_view_does_not_change_the_channel() -> None:
    from tests.conftest import make_config, simulate

    round_ = simulate(make_config()).round_at(0)
    before = round_.device.h
    round_.device.h.fill_(1.0)
    assert torch.equal(round_.device.h, before)
    assert torch.equal(round_._channel.coeff, before)


@dataclasses.dataclass
class Thawed:
    def exceed_prob(self, power: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Needy:
    folder: Path = Path("x")


@dataclasses.dataclass(frozen=True)
class Picky:
    k: float = 1.0

    def __post_init__(self) -> None:
        raise ValueError("k must be even")


@pytest.mark.parametrize(
    ("cls", "line"),
    [
        (Thawed, r"must be a class decorated with @dataclass\(frozen=True\)"),
        (Needy(), r"must be a class decorated with @dataclass\(frozen=True\)"),
        (Needy, "has a value that TOML does not have"),
        (Picky, "Picky failed: ValueError: k must be even"),
    ],
)
def test_classes_that_cannot_be_a_section(shell: Shell, monkeypatch: pytest.MonkeyPatch, cls: Any, line: str) -> None:
    monkeypatch.setitem(registry._registered["fading"], "mine", cls)
    found = complaint(shell(*tiny("fading.name=mine")))
    assert re.search(line, found), found


SPLIT = otafl.Split(np.zeros((9, 2), dtype=np.float32), np.zeros(9, dtype=np.int64))
GOOD = otafl.Dataset(train=SPLIT, test=SPLIT, validation=None, num_classes=3)
DATASETS: list[tuple[Any, str]] = [
    (dataclasses.replace(GOOD, train=None), "train must be a Split"),
    (dataclasses.replace(GOOD, train=otafl.Split([[1.0]], SPLIT.targets)), "train must be a Split of NumPy arrays"),
    (dataclasses.replace(GOOD, test=otafl.Split(SPLIT.features, SPLIT.targets.astype(">i4"))), "int64"),
    (dataclasses.replace(GOOD, test=otafl.Split(SPLIT.features[:, :1], SPLIT.targets)), "another shape than train"),
    (dataclasses.replace(GOOD, loss="hinge"), "loss 'hinge' is none of"),
    (dataclasses.replace(GOOD, num_classes="3"), "num_classes must be an int"),
    (dataclasses.replace(GOOD, owners=np.zeros(9, dtype=np.int64)), "owners must name a device"),
    (dataclasses.replace(GOOD, owners=np.arange(9)), "owners must name a device"),
    (dataclasses.replace(GOOD, train=otafl.Split(SPLIT.features[:0], SPLIT.targets[:0])), "at least one"),
    (dataclasses.replace(GOOD, train=otafl.Split(SPLIT.features * np.nan, SPLIT.targets)), "not finite"),
]


@pytest.mark.parametrize(("data", "line"), DATASETS)
def test_data_sets_that_misbehave(shell: Shell, monkeypatch: pytest.MonkeyPatch, data: Any, line: str) -> None:
    cls = dataclasses.dataclass(frozen=True)(type("Mine", (World,), {"__module__": "mine", "value": data}))
    monkeypatch.setitem(registry._registered["datasets"], "mine", cls)
    found = complaint(shell(*tiny("data.name=mine")))
    assert line in found, found


@pytest.mark.parametrize("content", ['{"sta', "", "[]", '{"status": "done"}', "null"])
def test_damaged_summary_is_not_run_over(shell: Shell, content: str) -> None:
    assert shell(*tiny(), "--out", "run")[0] == 0
    Path("run/summary.json").write_text(content)
    before = snapshot(Path("run"))
    assert "summary.json is damaged" in complaint(shell(*tiny(), "--out", "run"))
    assert snapshot(Path("run")) == before


def test_lost_pieces_of_a_finished_run(shell: Shell) -> None:
    assert shell(*tiny(), "--out", "run")[0] == 0
    summary = Path("run/summary.json").read_text()
    for broken in ('{"status": "complete"}', '{"status": "complete", "wall_s": 1, "test_loss": 3}',
                   '{"status": "failed", "diverged": [1]}'):  # fmt: skip
        Path("run/summary.json").write_text(broken)
        assert "is complete but cannot be read" in complaint(shell(*tiny(), "--out", "run"))
    Path("run/summary.json").write_text(summary)
    rows = Path("run/metrics.csv").read_text().splitlines(keepends=True)
    Path("run/metrics.csv").write_text("".join(rows[:-2]))
    assert "metrics.csv has changed since the run finished" in complaint(shell(*tiny(), "--out", "run"))
    unseal(Path("run"))
    assert "metrics.csv lacks rows" in complaint(shell(*tiny(), "--out", "run"))
    Path("run/metrics.csv").write_text("".join(rows))
    assert "unsealed" in shell(*tiny(), "--out", "run")[1]
    damaged = json.loads(summary) | {"num_active": 30.0}
    Path("run/summary.json").write_text(json.dumps(damaged))
    assert "summary.json has changed since the run finished" in complaint(shell(*tiny(), "--out", "run"))
    Path("run/summary.json").write_bytes(b"\xff\xfe")
    assert "summary.json is damaged" in complaint(shell(*tiny(), "--out", "run"))
    Path("run/summary.json").write_text("[" * 100_000)
    assert "summary.json is damaged" in complaint(shell(*tiny(), "--out", "run"))
    Path("loop").symlink_to("loop")
    assert "loop: cannot be written" in complaint(shell(*tiny(), "--out", "loop"))
    Path("run/summary.json").unlink()
    assert "has a final model but no summary.json" in complaint(shell(*tiny(), "--out", "run"))


def test_what_cannot_be_run_leaves_nothing_and_does_not_block_the_directory(shell: Shell) -> None:
    complaint(shell(*tiny("cell.devices=500"), "--out", "run"))
    assert not Path("run").exists()
    Path("run").mkdir()
    Path("run/.config.toml.tmp").write_text("half")  # as a kill while it was written would leave it
    Path("run/run.lock").write_text("")
    assert shell(*tiny(), "--out", "run")[0] == 0


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        ("radio.tx_power_dbm=1e5", "radio.tx_power_dbm = 100000.0: gives an energy of inf"),
        ("radio.tx_power_dbm=-1e5", "gives an energy of 0.0"),
        ("radio.noise_dbm_hz=1e5", "radio.noise_dbm_hz = 100000.0"),
        ("pathloss.reference_db=-1e5", "pathloss LogDistance: returned values that are not finite"),
        ("training.lr=1e308", "training.lr = 1e+308"),
        ("algorithm.gamma=1e-45", "algorithm.gamma = 1e-45"),
        ("training.batch_size=1000000000", "training.batch_size"),
        ("experiment.rounds=1000000000000", "experiment.rounds"),
        ("model.hidden=[1000000000]", "model.hidden[0]"),
        ("training.lr=" + "[" * 5000, "neither a TOML value nor a plain word"),
        ("training.l\nr=3", "write section.key=value"),
        ("training.lr=0.1\nx=3", "write section.key=value"),
        ("algorithm.gamma=" + "9" * 5000, "algorithm.gamma"),
    ],
)
def test_extremes(shell: Shell, sets: str, line: str) -> None:
    assert line in complaint(shell(*tiny(sets)))


def test_too_much_memory_is_one_line(shell: Shell) -> None:
    answer = shell(*tiny("data.name=synthetic", "data.train_images=100000000", "data.features=1000000"))
    assert "GiB of memory" in complaint(answer)


def test_python_interface_refuses_other_types() -> None:
    with pytest.raises(otafl.OtaflError, match="takes a Config, a preset's name or the path"):
        otafl.run(None)  # type: ignore[arg-type]
