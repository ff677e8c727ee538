"""A run is its configuration, the code of its plug-ins and their data: none of them can change behind its name."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import otafl
from otafl import registry
from otafl.errors import RunDirectoryError
from otafl.runs import identity
from tests.conftest import TINY, TINY_GAMMA
from tests.test_bad_input import Shell, complaint, shell  # noqa: F401 - a fixture

METHOD = '''
"""A method of the user's own."""
import dataclasses
import otafl
from otafl.algorithms.ota_fedavg import OTAFedAvg

SIGN = 1.0
NAMES = frozenset({"alpha", "beta", "gamma", "delta"})


def turned(values, factor=1.0):
    return values * factor * SIGN


@otafl.register_algorithm("own-method")
@dataclasses.dataclass(frozen=True)
class Own(OTAFedAvg):
    """Does what it does."""

    strength: float = 1.0

    def step(self, state, round):
        # a comment
        after, info = super().step(state, round)
        moved = state.params + turned(after.params - state.params)
        return dataclasses.replace(after, params=moved if "alpha" in NAMES else state.params), info


class Another:
    """Not used by the method."""

    def step(self):
        return 1
'''


def loaded(folder: Path, source: str, name: str = "own_method") -> ModuleType:
    """The module of a source text, as an import would make it."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        registry._registered["algorithms"].pop("own-method", None)
    return module


def digest(folder: Path, source: str) -> str:
    return identity.code_digest(loaded(folder, source).Own)


MATTERS = {
    "a sign": ("SIGN = 1.0", "SIGN = -1.0"),
    "a function it calls": ("values * factor", "values / factor"),
    "a default": ("factor=1.0", "factor=2.0"),
    "its own code": ("state.params + turned", "state.params - turned"),
    "a set it looks at": ('"alpha", "beta"', '"beta"'),
    "its base": ("OTAFedAvg)", "object)"),
}
ODD = METHOD.replace(
    "SIGN = 1.0\n",
    """SIGN = 1.0
import functools, logging
import numpy as np
import torch

ACTIVATION = torch.relu
GENERATOR = np.random.default_rng(0)
PIPELINE = {"first": torch.abs, "second": torch.neg}
COUNTS = {"calls": 0}
log = logging.getLogger(__name__)


class Scaler:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def apply(self, values):
        return values * self.factor


SCALE = Scaler(2.0).apply
TABLE = np.array([1.0, 2.0, 3.0])


def traced(function):
    @functools.wraps(function)
    def call(*arguments):
        COUNTS["calls"] += 1
        log.debug("called")
        return 1.0 * function(*arguments)

    return call


@traced
def odd(values):
    from math import floor
    return SCALE(ACTIVATION(values)) * TABLE[0] * GENERATOR.random() * len(PIPELINE) * floor(1.5)

""",
).replace("moved = state.params + turned(", "moved = state.params + 0 * odd(state.params) + turned(")
ODD_MATTERS = {
    "a library's function": ("ACTIVATION = torch.relu", "ACTIVATION = torch.exp"),
    "a generator's seed": ("default_rng(0)", "default_rng(1)"),
    "the order of a pipeline": (
        '"first": torch.abs, "second": torch.neg',
        '"second": torch.neg, "first": torch.abs',
    ),
    "the object of a bound method": ("Scaler(2.0)", "Scaler(3.0)"),
    "a method of a helper class": ("values * self.factor", "values / self.factor"),
    "a decorator": ("return 1.0 * function", "return 2.0 * function"),
    "an array": ("[1.0, 2.0, 3.0]", "[1.5, 2.0, 3.0]"),
    "an import within a function": ("from math import floor", "from math import ceil as floor"),
}
DOES_NOT_MATTER = {
    "a comment": ("# a comment", "# another comment"),
    "an empty line": ("SIGN = 1.0", "\n\n\nSIGN = 1.0"),
    "another class": ("return 1\n", "return 2\n"),
    "the module's docstring": ("A method of the user's own.", "Something else."),
}


@pytest.mark.parametrize("what", MATTERS)
def test_what_is_executed_is_in_the_digest(tmp_path: Path, what: str) -> None:
    old, new = MATTERS[what]
    assert old in METHOD
    assert digest(tmp_path, METHOD.replace(old, new)) != digest(tmp_path, METHOD)


@pytest.mark.parametrize("what", ODD_MATTERS)
def test_whatever_it_reaches_is_in_the_digest(tmp_path: Path, what: str) -> None:
    old, new = ODD_MATTERS[what]
    assert old in ODD
    assert digest(tmp_path, ODD.replace(old, new)) != digest(tmp_path, ODD)


def test_what_happens_in_a_process_is_not(tmp_path: Path) -> None:
    """Loggers, counters and used generators: the digest is that of the text."""
    before = digest(tmp_path, ODD)
    module = loaded(tmp_path, ODD)
    module.COUNTS["calls"] = 7
    module.log.setLevel("DEBUG")
    module.GENERATOR.random()
    assert identity.code_digest(module.Own) == before


def test_modules_that_import_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And helpers that are imported within a method only, whether or not that has happened yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source = METHOD.replace("# a comment", "from ring_one import value").replace("factor * SIGN", "factor * SIGN")
    found = []
    for number in (1, 1, 2):
        (tmp_path / "ring_one.py").write_text("import ring_two\ndef value():\n    return ring_two.NUMBER\n")
        (tmp_path / "ring_two.py").write_text(f"import ring_one\nNUMBER = {number}\n")
        for name in ("ring_one", "ring_two"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        found.append(digest(tmp_path, source))
    assert found[0] == found[1] != found[2]


def test_an_array_that_is_loaded_at_import_counts(tmp_path: Path) -> None:
    """Whose text does not change when its file does."""
    source = METHOD.replace("SIGN = 1.0", f"import numpy as np\nSIGN = np.load({str(tmp_path / 'table.npy')!r})")
    found = []
    for value in (1.0, 1.0, -1.0):
        np.save(tmp_path / "table.npy", np.array([value]))
        found.append(digest(tmp_path, source))
    assert found[0] == found[1] != found[2]


def test_a_file_that_changed_after_it_was_loaded_is_refused(tmp_path: Path) -> None:
    """Its text would be another than what is executed."""
    from otafl.errors import PluginError

    file = tmp_path / "own_method.py"
    file.write_text(METHOD)
    registry.load_plugin(file)
    cls = registry._registered["algorithms"].pop("own-method")
    file.write_text(METHOD.replace("SIGN = 1.0", "SIGN = -1.00"))
    try:
        with pytest.raises(PluginError, match="has changed since it was loaded"):
            identity.code_digest(cls)
    finally:
        registry._plugin_files.pop(str(file))


def test_code_without_a_source_is_refused() -> None:
    from otafl.errors import PluginError

    space: dict[str, Any] = {"__name__": "prompt"}
    exec("class Typed:\n    def step(self):\n        return 1\n", space)
    with pytest.raises(PluginError, match="its source cannot be found"):
        identity.code_digest(space["Typed"])


def test_a_notebooks_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of one cell, a function and a number of others."""
    import linecache

    def digest_of(factor: str, other: str) -> str:
        notebook = ModuleType("notebook_of_a_test")
        monkeypatch.setitem(sys.modules, "notebook_of_a_test", notebook)
        cells = {
            "<cell 1>": f"def scaled(values):\n    return {factor} * values\n",
            "<cell 2>": f"def other():\n    return {other}\n",
            "<cell 3>": "class Own:\n    def step(self, values):\n        return scaled(values)\n",
        }
        for name, text in cells.items():
            linecache.cache[name] = (len(text), None, text.splitlines(True), name)
            exec(compile(text, name, "exec"), vars(notebook))
        return identity.code_digest(notebook.Own)

    assert digest_of("1.0", "1") == digest_of("1.0", "2")
    assert digest_of("1.0", "1") != digest_of("2.0", "1")


@pytest.mark.parametrize("what", DOES_NOT_MATTER)
def test_what_is_not_executed_is_not(tmp_path: Path, what: str) -> None:
    old, new = DOES_NOT_MATTER[what]
    assert old in METHOD
    assert digest(tmp_path / "other folder", METHOD.replace(old, new)) == digest(tmp_path, METHOD)


def test_a_helper_module_is_a_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for number in (1, 1, 2):
        (tmp_path / "beside_it.py").write_text(f"FACTOR = {number}.0\ndef factor():\n    return FACTOR\n")
        sys.modules.pop("beside_it", None)
        source = METHOD.replace("import otafl\n", "import otafl\nimport beside_it\n", 1)
        found.append(digest(tmp_path, source.replace("factor * SIGN", "factor * beside_it.factor()")))
    assert found[0] == found[1] != found[2]


def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever order sets have, and whether the code was compiled now or read from a cache."""
    (tmp_path / "own_method.py").write_text(METHOD)
    script = "import own_method; from otafl.runs.identity import code_digest; print(code_digest(own_method.Own))"
    found = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
        )
        found.add(done.stdout.strip())
    assert len(found) == 1
    assert re.fullmatch("[0-9a-f]{64}", found.pop())


def arguments(*more: str) -> list[str]:
    keys = {**TINY, "algorithm.name": "own-method", "algorithm.gamma": TINY_GAMMA}
    return ["run", "stationary", *(part for k, v in keys.items() for part in ("--set", f"{k}={json.dumps(v)}")), *more]


@pytest.fixture
def plugin(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Runs the command line with the plug-in's file, read anew each time as a new process would."""

    def run(source: str, *more: str) -> tuple[int, str, str]:
        Path("own.py").write_text(source)
        monkeypatch.setattr(registry, "_plugin_files", {})
        registry._registered["algorithms"].pop("own-method", None)
        return shell(*arguments("--plugin", "own.py", *more))

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield run
    registry._registered["algorithms"].pop("own-method", None)


def test_an_edited_plugin_does_not_return_the_old_result(plugin: Any) -> None:
    edited = METHOD.replace("SIGN = 1.0", "SIGN = -1.0")
    assert plugin(METHOD, "--out", "run")[0] == 0
    before = Path("run/metrics.csv").read_bytes()
    status, out, _ = plugin(METHOD, "--out", "run")
    assert status == 0
    assert re.search(r"already complete \(20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC\), nothing was run", out)
    line = complaint(plugin(edited, "--out", "run"))
    assert "was made with another version of the plug-in in [algorithm]" in line
    assert "--fresh" in line
    assert Path("run/metrics.csv").read_bytes() == before
    status, out, _ = plugin(edited, "--out", "run", "--fresh")
    assert status == 0
    assert "complete: run-2" in out
    assert "nothing was run" not in out
    assert Path("run-2/metrics.csv").read_bytes() != before
    assert Path("run/metrics.csv").read_bytes() == before


def test_an_edited_plugin_has_a_default_directory_of_its_own(plugin: Any) -> None:
    assert plugin(METHOD)[0] == 0
    assert plugin(METHOD.replace("# a comment", "# none"))[0] == 0
    assert len(list(Path("runs").iterdir())) == 1
    assert plugin(METHOD.replace("SIGN = 1.0", "SIGN = -1.0"))[0] == 0
    assert len(list(Path("runs").iterdir())) == 2


def test_an_edited_plugin_does_not_continue_an_old_checkpoint(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from otafl.simulation import run as fold

    eager = ("--set", "experiment.checkpoint_s=1e-9", "--out", "run")
    real = fold.Simulation.step

    def step(simulation: Any, state: Any, t: int) -> Any:
        if t == 3:
            raise KeyboardInterrupt
        return real(simulation, state, t)

    with monkeypatch.context() as patch:
        patch.setattr(fold.Simulation, "step", step)
        assert plugin(METHOD, *eager)[0] == 130
    edited = METHOD.replace("SIGN = 1.0", "SIGN = -1.0")
    assert "another version of the plug-in" in complaint(plugin(edited, *eager))
    Path("run/summary.json").unlink()  # the checkpoint itself says it, too
    assert "another version of the plug-in" in complaint(plugin(edited, *eager))
    assert plugin(METHOD, *eager)[0] == 0
    assert "continues from round 3" in Path("run/log.txt").read_text()


class Arrays:
    """A plug-in's data, which a test changes."""

    features = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)


@pytest.fixture
def own_data() -> Any:
    import dataclasses

    @otafl.register_dataset("own-arrays")
    @dataclasses.dataclass(frozen=True)
    class OwnArrays:
        def load(self, num_devices: int) -> otafl.Dataset:
            from tests.runs.test_identity import Arrays

            targets = (np.arange(80) % 2).astype(np.int64)
            split = otafl.Split(Arrays.features, targets)
            return otafl.Dataset(split, split, None, 2)

    yield OwnArrays
    registry._registered["datasets"].pop("own-arrays")


@pytest.mark.usefixtures("own_data")
def test_changed_arrays_are_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {k: v for k, v in TINY.items() if not k.startswith("data.")}
    config = otafl.load_config("stationary", {**keys, "data.name": "own-arrays", "algorithm.gamma": TINY_GAMMA})
    first = otafl.run(config, out=tmp_path / "run")
    again = otafl.run(config, out=tmp_path / "run")
    assert "nothing was run" in again.notes[0]
    changed = Arrays.features.copy()
    changed[3, 2] += np.float32(1e-3)
    monkeypatch.setattr(Arrays, "features", changed)
    with pytest.raises(RunDirectoryError, match="was made with other data"):
        otafl.run(config, out=tmp_path / "run")
    fresh = otafl.run(config, out=tmp_path / "run", fresh=True)
    assert (tmp_path / "run-2" / "summary.json").exists()
    assert not np.array_equal(fresh.metrics["test_loss"], first.metrics["test_loss"])


@pytest.mark.usefixtures("own_data")
def test_arrays_changed_in_place_are_seen_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps a copy of a plug-in's arrays from one run to the next."""
    keys = {k: v for k, v in TINY.items() if not k.startswith("data.")}
    config = otafl.load_config("stationary", {**keys, "data.name": "own-arrays", "algorithm.gamma": TINY_GAMMA})
    mine = Arrays.features.copy()
    monkeypatch.setattr(Arrays, "features", mine)
    before = otafl.run(config).metrics["test_loss"]
    mine *= 2
    doubled = otafl.run(config).metrics["test_loss"]
    monkeypatch.setattr(Arrays, "features", mine.copy())
    assert np.array_equal(doubled, otafl.run(config).metrics["test_loss"])
    assert not np.array_equal(doubled, before)


def test_a_run_of_another_version_is_read_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from otafl.runs import result
    from tests.conftest import make_config

    otafl.run(make_config(), out=tmp_path / "run")
    monkeypatch.setattr(result, "__version__", "9.9.9")
    again = otafl.run(make_config(), out=tmp_path / "run")
    assert any(note.startswith("made by otafl ") and "this is 9.9.9" in note for note in again.notes)
