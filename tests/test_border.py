"""Where the world outside begins: homes, paths, streams, downloads, memory, clusters. One line, and nothing waits."""

import gzip
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import otafl
from otafl.errors import ConfigError, DataError
from otafl.runs.result import read_run
from otafl.simulation import memory
from otafl.world import files
from otafl.world.cifar import DOWNLOADS
from otafl.world.files import MNIST_FILES
from tests.conftest import TINY, TINY_GAMMA, make_config
from tests.test_bad_input import Shell, complaint, shell, tiny  # noqa: F401 - a fixture


class TestNoHome:
    """Containers: no HOME, and a user that nobody knows."""

    @pytest.fixture(autouse=True)
    def nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HOME", "OTAFL_DATA", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)

        def home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", home)

    @pytest.mark.parametrize("verb", [["data", "list"], ["doctor"], ["list"]])
    def test_verbs_answer(self, shell: Shell, verb: list[str]) -> None:  # noqa: F811
        assert shell(*verb)[0] == 0

    def test_a_run_needs_no_home(self, shell: Shell) -> None:  # noqa: F811
        assert shell(*tiny(), "--out", "run")[0] == 0
        line = complaint(shell(*tiny("data.name=mnist")))
        assert "otafl data get mnist" in line


@pytest.mark.parametrize("place", ["x" * 300, "/proc/1/root/nowhere\0", "a-file"])
def test_data_that_cannot_be_looked_at(shell: Shell, monkeypatch: pytest.MonkeyPatch, place: str) -> None:  # noqa: F811
    Path("a-file").write_text("x")
    real = os.environ.get

    def get(name: str, default: Any = None) -> Any:
        return place if name == "OTAFL_DATA" else real(name, default)

    monkeypatch.setattr(files.os.environ, "get", get)
    line = complaint(shell(*tiny("data.name=mnist")))
    assert "OTAFL_DATA" in line


def test_a_folder_that_nobody_may_enter(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Root may enter any, so the refusal is made by hand."""

    def is_file(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    assert "cannot be read (Permission denied)" in complaint(shell(*tiny("data.name=mnist")))


LONG = "x" * 300
LINES: dict[tuple[str, ...], str] = {
    ("compare", LONG): "cannot be read (File name too long)",
    ("report", LONG): "cannot be read (File name too long)",
    ("theory", "quick", LONG): "File name too long",
    ("compare", "none", "--level", "nan"): "--level nan: give an accuracy in percent",
    ("compare", "none", "--level", "-5"): "--level -5: give an accuracy in percent",
    ("run", "quick", "--seeds", "5-3,1"): "5-3 names no seed; write it as 3-5",
    ("run", "quick", "--seeds", "1,4-0"): "4-0 names no seed",
    ("run", LONG): "cannot be read (File name too long)",
    ("sweep", "none.toml"): "no such file",
}


@pytest.mark.parametrize("arguments", LINES, ids=lambda arguments: " ".join(arguments)[:40])
def test_one_line(shell: Shell, arguments: tuple[str, ...]) -> None:  # noqa: F811
    assert LINES[arguments] in complaint(shell(*arguments))


@pytest.mark.parametrize("option", [["--cpus", "nan"], ["--cpus", "inf"], ["--cpus", "0"], ["--gpus", "nan"]])
def test_cpus_that_are_no_number(shell: Shell, option: list[str]) -> None:  # noqa: F811
    Path("s.toml").write_text("[axes]\n'training.lr' = [0.1]\n")
    assert "give what one run needs" in complaint(shell("sweep", "s.toml", *option))


def test_a_bug_is_one_line_and_a_log(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from otafl.config import schema as config

    def broken(*arguments: Any) -> Any:
        raise KeyError("nobody expected this")

    monkeypatch.setattr(config, "load_config", broken)
    status, out, err = shell("run", "quick")
    assert status == 70
    assert not out
    found = re.fullmatch(r"otafl: a bug: KeyError: 'nobody expected this'; the traceback is in (\S+\.log)\n", err)
    assert found is not None, err
    text = Path(found.group(1)).read_text()
    assert "Traceback" in text
    assert "'run', 'quick'" in text
    Path(found.group(1)).unlink()


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full", ">/dev/full", ">/dev/full 2>/dev/full"])
def test_closed_and_full_streams_do_not_stop_a_run(tmp_path: Path, streams: str) -> None:
    keys = {**TINY, "algorithm.gamma": TINY_GAMMA}
    sets = " ".join(f"--set '{key}={json.dumps(value)}'" for key, value in keys.items())
    command = f"{sys.executable} -m otafl run stationary {sets} --out run {streams}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "complete"
    assert done.returncode == (2 if ">/dev/full" in streams.replace("2>/dev/full", "") else 0), done
    assert "Traceback" not in done.stdout + done.stderr
    assert read_run(tmp_path / "run").status == "complete"


class TestDownloads:
    @pytest.fixture
    def endless(self) -> Iterator[str]:
        """A server that never ends its answer; at /slow it sends a byte now and then."""

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                try:
                    for _ in range(2_000):
                        self.wfile.write(b"x" if "slow" in self.path else b"x" * 65_536)
                        if "slow" in self.path:
                            time.sleep(0.02)
                except OSError:
                    pass

            def log_message(self, *arguments: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        server.server_close()
        thread.join()

    def test_an_endless_answer_is_cut(self, endless: str) -> None:
        with pytest.raises(DataError, match="sends more than the 1000000 bytes"):
            files.downloaded(f"{endless}file", 1_000_000, time.monotonic() + 60)

    def test_a_slow_answer_is_given_up(self, endless: str) -> None:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            files.downloaded(f"{endless}slow", 1_000_000, started + 0.3)
        assert time.monotonic() - started < 5

    def test_the_way_stays_encrypted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Answer(io.BytesIO):
            url = "http://elsewhere/file"

        monkeypatch.setattr(files.urllib.request, "urlopen", lambda *arguments, **keys: Answer(b"x"))
        with pytest.raises(DataError, match="not encrypted"):
            files.downloaded("https://here/file", 100, time.monotonic() + 5)

    def test_mirrors_are_encrypted(self) -> None:
        assert all(mirror.startswith("https://") for entry in DOWNLOADS.values() for mirror in entry.mirrors)

    def test_a_gzip_bomb_is_not_inflated(self, tmp_path: Path) -> None:
        bomb = tmp_path / "train-labels-idx1-ubyte.gz"
        with gzip.open(bomb, "wb", compresslevel=9) as file:
            for _ in range(64):
                file.write(bytes(2**22))
        tracemalloc.start()
        with pytest.raises(DataError, match="damaged or not mnist"):
            MNIST_FILES._verified("train-labels-idx1-ubyte", bomb)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4e6  # of 256 MB

    def test_sizes_are_those_of_the_files(self, mnist: Path) -> None:
        for file, path in (MNIST_FILES.locate() or {}).items():
            assert len(MNIST_FILES._verified(file, path)) == MNIST_FILES.size(file)


TOO_LARGE = {
    "rounds × seeds × devices": (
        {"experiment.rounds": 10**6, "cell.devices": 100, "data.train_images": 500},
        "channels.*lower experiment.rounds",
    ),
    "a model per device": (
        {"model.hidden": [3000, 3000], "cell.devices": 200, "data.train_images": 1000},
        "models.*lower experiment.seeds",
    ),
    "one model": ({"algorithm.name": "fedavg", "model.hidden": [50_000, 50_000]}, "models|local training"),
    "batches": (
        {"training.local_steps": 10**5, "training.batch_size": 1000},
        "local training.*lower training.batch_size",
    ),
    "hidden units": (
        {"model.hidden": [10**6], "training.batch_size": 500, "cell.devices": 50, "algorithm.name": "vanilla"},
        "local training|models",
    ),
    "data": ({"data.features": 10**5, "data.train_images": 10**5}, "data.*lower data.features"),
    "a quadratic": (
        {"data.name": "quadratic", "data.dimension": 10**8, "model.name": "point"},
        "data|models",
    ),
    "antennas": (
        {"experiment.rounds": 10**5, "cell.devices": 100, "radio.antennas": 128, "data.train_images": 500},
        "channels",
    ),
    "a CNN": (
        {"data.name": "digits", "model.name": "cnn", "model.channels": [512, 512], "training.batch_size": 10**4},
        "local training",
    ),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_memory_is_estimated_before_it_is_taken(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Over five gibibytes, refused with the number and what to lower, and nothing of that size is touched."""
    keys, text = TOO_LARGE[case]
    dropped = {key.split(".")[0] for key in keys if key.endswith(".name")}
    base = {k: v for k, v in {**TINY, "algorithm.gamma": TINY_GAMMA}.items() if k.split(".")[0] not in dropped}
    config = otafl.load_config("stationary", {**base, **keys})
    monkeypatch.setattr(memory, "free_bytes", lambda: 5.0 * memory.GIB)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=rf"needs about [\d.]+ GiB of memory.*({text})"):
        otafl.run(config, device="cpu")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6


def test_what_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's own setting, five seeds of 800 rounds, on a laptop of eight gibibytes."""
    monkeypatch.setattr(memory, "free_bytes", lambda: 6.0 * memory.GIB)
    for algorithm in ("fedoag", "fedavg", "sca", "fedoag-plus", "vanilla"):
        config = otafl.load_config("stationary", {"algorithm.name": algorithm})
        memory.refuse_too_large(config, otafl.simulation.run.choose_device("cpu"))


MEASURED = {
    "channels": {"experiment.rounds": 2000, "cell.devices": 600, "data.train_images": 3000, "training.local_steps": 1,
                 "training.batch_size": 1, "experiment.eval_every": 2000},
    "models": {"model.hidden": [3000], "data.features": 300, "cell.devices": 60, "data.train_images": 500,
               "experiment.rounds": 3},
    "data": {"data.features": 2000, "data.train_images": 30_000, "experiment.rounds": 2, "cell.devices": 4,
             "training.precision": "float32"},
    "training": {"algorithm.name": "fedavg", "model.hidden": [2000], "data.features": 500, "cell.devices": 60,
                 "training.batch_size": 40, "training.local_steps": 5, "experiment.rounds": 2,
                 "data.train_images": 3000},
}  # fmt: skip
MEASURE = """
import json, re, sys
from pathlib import Path
import torch, otafl
torch.set_num_threads(1)
from otafl.simulation.memory import estimate
from tests.conftest import make_config
keys = json.loads(sys.argv[1])
name = keys.pop("algorithm.name", "fedoag")
otafl.run(make_config(name))
def peak():  # of this process; getrusage begins with the peak of the process that started this one
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
config = make_config(name, keys)
expected = sum(part.size for part in estimate(config))
if "experiment.rounds" in keys and keys["experiment.rounds"] > 100:
    otafl.simulation.build.Simulation(config, torch.device("cpu"))
else:
    otafl.run(config, device="cpu")
print(json.dumps([expected, peak() - before]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED)
def test_the_estimate_is_near_what_is_taken(case: str) -> None:
    """Within a factor: too little lets a run die, too much refuses what would fit."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", MEASURE, json.dumps(MEASURED[case])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    expected, measured = json.loads(done.stdout.splitlines()[-1])
    assert measured > 50e6  # of that size, its measurement means something
    assert 0.7 < expected / measured < 2.5


def test_free_memory_is_a_number() -> None:
    assert 1e7 < memory.free_bytes() < 1e14


class TestRay:
    NODES = ({"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": True, "Resources": {"CPU": 1.0, "GPU": 1.0}})

    def test_what_no_node_has_is_refused(self) -> None:
        from otafl.studies.ray import _check_resources

        nodes: list[dict[str, Any]] = list(self.NODES)
        _check_resources(nodes, 2.0, 0.0)
        _check_resources(nodes, 1.0, 0.5)
        with pytest.raises(ConfigError, match="--cpus 64: no node of the cluster has more than 2 CPUs"):
            _check_resources(nodes, 64.0, 0.0)
        with pytest.raises(ConfigError, match="--gpus 2: no node"):
            _check_resources(nodes, 1.0, 2.0)
        with pytest.raises(ConfigError, match="no single node of the cluster has both"):
            _check_resources(nodes, 2.0, 1.0)
        with pytest.raises(ConfigError, match="--cpus 1: no node"):
            _check_resources([{"Alive": False, "Resources": {"CPU": 8.0}}], 1.0, 0.0)

    @pytest.mark.slow
    def test_a_sweep_that_could_never_begin_says_so(self, shell: Shell) -> None:  # noqa: F811
        keys = {**TINY, "algorithm.gamma": TINY_GAMMA}
        lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in keys.items()]
        Path("s.toml").write_text("\n".join(["[set]", *lines, "[axes]", '"training.lr" = [0.1]']))
        started = time.monotonic()
        status, _, err = shell("sweep", "s.toml", "--executor", "ray", "--cpus", "999")
        assert status == 2
        assert "--cpus 999: no node of the cluster has more than" in err
        assert time.monotonic() - started < 120


def test_config_and_python_interface(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes the path of a directory, not a int"):
        otafl.run(make_config(), out=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not valid TOML"):
        otafl.Config.from_toml("x =")
    with pytest.raises(ConfigError, match="more than 64 bits"):
        otafl.load_config("stationary", {"experiment.eval_every": 10**5000})
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(ConfigError, match="lists within lists"):
        otafl.load_config("stationary", {"model.hidden": deep})
    odd = os.fsdecode(b"trace-\xff.csv")
    (tmp_path / odd).write_text("time_s,device,x_m,y_m\n0,0,1,1\n")
    with pytest.raises(ConfigError, match=r"mobility\.file: is no valid UTF-8"):
        otafl.load_config("stationary", {"mobility.name": "trace", "mobility.file": str(tmp_path / odd)})
    os.mkfifo(tmp_path / "trace.csv")
    with pytest.raises(ConfigError, match="not a regular file"):
        otafl.load_config("stationary", {"mobility.name": "trace", "mobility.file": str(tmp_path / "trace.csv")})
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="not a regular file"):
        otafl.load_config(tmp_path / "config.toml")


@pytest.mark.parametrize("column", [[[1.0, 2.0]] * 3, [[1.0]] * 3, [[]] * 3])
def test_a_column_of_lists_in_a_parquet_file(tmp_path: Path, column: list[Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = {"time_s": [0.0, 8.0, 16.0], "device": ["0"] * 3, "x_m": column, "y_m": [1.0] * 3}
    parquet.write_table(pyarrow.table(table), tmp_path / "t.parquet")
    keys = {"mobility.name": "trace", "mobility.file": str(tmp_path / "t.parquet"), "cell.devices": 1}
    with pytest.raises(ConfigError, match="x_m is not a column of numbers"):
        otafl.run(make_config(overrides={**keys, "experiment.rounds": 2}))


def test_tuning_over_lists(tmp_path: Path) -> None:
    """An axis whose values are lists, searched and not."""
    from otafl.studies.sweep import parse_sweep
    from otafl.studies.tune import tune

    keys = {**{k: v for k, v in TINY.items() if k != "model.hidden"}, "algorithm.gamma": TINY_GAMMA}
    for over in (["training.lr"], ["model.hidden"]):
        content = {"set": keys, "axes": {"model.hidden": [[5], [6]], "training.lr": [0.1, 0.2]},
                   "tune": {"rounds": 2, "seeds": [7], "over": over}}  # fmt: skip
        found = tune(parse_sweep(content, "t", "t"), tmp_path / over[0], "t", device="cpu", quiet=True)
        assert len(found.points) == 4
    for wrong in ({"over": [[1]]}, {"seeds": [[1]]}):
        sweep = parse_sweep({"set": keys, "axes": {"training.lr": [0.1]}, "tune": wrong}, "t", "t")
        with pytest.raises(ConfigError):
            tune(sweep, tmp_path / "wrong", "t", device="cpu", quiet=True)
    with pytest.raises(ConfigError, match="is no axis"):
        parse_sweep({"axes": {"training.lr": [0.1]}, "override": [{"drop": [[1]]}]}, "t", "t")
