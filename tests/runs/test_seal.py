"""Finished runs are sealed: whatever happens to their files is noticed by everybody who reads them.

The matrix: every file of a finished run, damaged in every way, read by every verb. Never a traceback, never a number
that the run did not have.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import otafl
from otafl.core.metrics import EXPLODED
from otafl.disk import put
from otafl.errors import ConfigError, RunBusyError, RunDirectoryError
from otafl.report.compare import compare
from otafl.runs import directory as rundir
from otafl.runs.directory import MODELS, SEALED, RunDirectory, publish
from otafl.runs.result import Result, read_run
from otafl.simulation import run as fold
from otafl.simulation.run import Interrupted
from otafl.studies.conduct import conduct
from otafl.studies.study import Study
from otafl.studies.sweep import parse_sweep
from tests.conftest import TINY, TINY_GAMMA, make_config
from tests.runs.test_directory import EAGER, config, files_of, flip, run_until, unseal
from tests.test_bad_input import Shell, complaint, shell, tiny  # noqa: F401 - a fixture

FILES = (*SEALED, "summary.json")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def nan_weights(path: Path) -> None:
    save_file({name: value * torch.nan for name, value in load_file(path).items()}, path)


def with_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a byte": flip,
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a pipe": with_pipe,
    "a folder": with_folder,
    "nested": lambda path: path.write_text("[" * 100_000),
    "one more": lambda path: path.write_bytes(path.read_bytes() + b"0"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    keys = {**TINY, "algorithm.gamma": TINY_GAMMA}
    otafl.run(otafl.load_config("stationary", keys), out=folder)
    return folder


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_by_every_verb(shell: Shell, finished: Path, file: str, damage: str) -> None:  # noqa: F811
    if (file, damage) == (MODELS, "gone"):
        return  # the one thing that may be missing, below
    shutil.copytree(finished, "run")
    DAMAGES[damage](Path("run") / file)
    before = {path.name: path.stat().st_mtime_ns for path in Path("run").iterdir()}
    verbs = [["compare", "run"], ["report", "run"], ["theory", "quick", "run"], [*tiny(), "--out", "run"]]
    for verb in verbs:
        line = complaint(shell(*verb))
        assert "run" in line
    assert {path.name: path.stat().st_mtime_ns for path in Path("run").iterdir()} == before
    assert not Path("report.html").exists()


def test_a_run_without_its_models_has_its_numbers(shell: Shell, finished: Path) -> None:  # noqa: F811
    """They are most of what a run takes on a disk; only what needs them says that they are gone."""
    shutil.copytree(finished, "run")
    before = read_run("run")
    (Path("run") / MODELS).unlink()
    after = read_run("run")
    assert after.summary == before.summary
    assert all(np.array_equal(values, after.metrics[name], equal_nan=True) for name, values in before.metrics.items())
    assert after.params.shape == (0, before.params.shape[1])
    assert shell("compare", "run")[0] == shell("report", "run")[0] == 0
    assert "already complete" in "".join(shell(*tiny(), "--out", "run")[1:])
    assert "models were deleted" in complaint(shell("theory", "run/config.toml", "run"))
    (Path("run") / MODELS).symlink_to("nowhere")
    assert "has changed" in complaint(shell("compare", "run"))


def test_a_cut_configuration_does_not_make_another_method_of_it(shell: Shell, tmp_path: Path) -> None:  # noqa: F811
    """SCA's numbers under FedOAG's name, as a default would have it."""
    otafl.run(make_config("sca"), out=tmp_path / "sca")
    text = (tmp_path / "sca" / "config.toml").read_text()
    for sealed in (True, False):
        (tmp_path / "sca" / "config.toml").write_text(text)
        if not sealed:
            unseal(tmp_path / "sca")
        (tmp_path / "sca" / "config.toml").write_text(text[: text.index("[algorithm]")])
        line = complaint(shell("compare", str(tmp_path / "sca")))
        assert "config.toml" in line


@pytest.mark.parametrize("sealed", [True, False])
def test_weights_that_are_no_numbers_are_not_a_result(finished: Path, tmp_path: Path, sealed: bool) -> None:
    shutil.copytree(finished, tmp_path / "run")
    if not sealed:
        unseal(tmp_path / "run")
    nan_weights(tmp_path / "run" / "model.safetensors")
    if sealed:
        with pytest.raises(RunDirectoryError, match=r"model\.safetensors has changed since the run finished"):
            read_run(tmp_path / "run")
        return
    result = read_run(tmp_path / "run")  # nobody can tell what it was, but it is no success
    assert result.status == "failed"
    assert set(result.diverged) == {0, 1}


def test_an_unsealed_run_is_read_and_marked(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    unseal(tmp_path / "run")
    result = read_run(tmp_path / "run")
    assert any(note.startswith("unsealed") for note in result.notes)
    assert np.array_equal(result.metrics["test_loss"], read_run(finished).metrics["test_loss"])
    assert "unsealed" in str(compare({"a": result}))


@pytest.mark.parametrize("content", ['{"status": "complete"}', "[" * 100_000, '{"status": "complete", "diverged": 3}'])
def test_a_sweep_says_which_run_is_damaged(tmp_path: Path, content: str) -> None:
    keys = {**TINY, "algorithm.gamma": TINY_GAMMA, "experiment.seeds": [0]}
    sweep = parse_sweep({"set": keys, "axes": {"training.lr": [0.1, 0.05]}}, "test", "lr")
    study = Study(tmp_path, sweep)
    assert conduct(study, "cpu", quiet=True).status == 0
    first, second = sweep.cases
    (study.place(first) / "summary.json").write_text(content)
    outcome = conduct(study, "cpu", quiet=True)
    assert outcome.status == 1
    assert set(outcome.errors) == {first.folder}
    assert "damaged" in outcome.errors[first.folder] or "cannot be read" in outcome.errors[first.folder]
    table = (tmp_path / "table.csv").read_text()
    assert "complete" in next(line for line in table.splitlines() if second.folder in line)


class TestFailures:
    """A seed that has exploded is no result, whatever its last accuracy says."""

    def result(self, accuracy: list[list[float]], failed: dict[int, int]) -> Result:
        values = np.array(accuracy)
        config = make_config(
            overrides={"experiment.seeds": [0, 1, 2], "experiment.rounds": 20, "experiment.eval_every": 10}
        )
        summary = {"averaged_over": "2 rows of rounds 10 to 20", "device": "CPU, 1 thread"}
        return Result(config, np.array([0, 10, 20]), {"test_accuracy": values}, torch.zeros(3, 1), failed, summary)

    def test_they_count_with_zero_in_means_intervals_and_verdicts(self) -> None:
        from otafl.report.statistics import estimate, last_accuracy, paired_difference, rounds_to_reach

        whole = self.result([[0.1, 0.8, 0.8], [0.1, 0.8, 0.8], [0.1, 0.8, 0.8]], {})
        nan = np.nan
        lost = self.result([[0.1, 0.9, 0.9], [0.1, 0.9, 0.9], [0.1, 0.9, nan]], {2: 15})
        assert last_accuracy(lost).tolist() == [90.0, 90.0, 0.0]
        assert estimate(last_accuracy(lost)).mean == pytest.approx(60.0)
        assert paired_difference(lost, whole).mean == pytest.approx(-20.0)
        assert np.isnan(rounds_to_reach(lost, 50.0)).tolist() == [False, False, True]
        text = str(compare({"whole": whole, "lost": lost}))
        assert "1 of 3" in text
        assert "lost is better" not in text  # as the survivors alone would have it
        assert "3 seeds cannot separate lost and whole" in text

    def test_an_exploded_model_is_a_failure(self) -> None:
        """Finite to the end, and far beyond anything that was learnt."""
        config = make_config(
            "fedavg", {"training.lr": 1e4, "training.lr_schedule": "constant", "experiment.rounds": 40}
        )
        result = otafl.run(config)
        assert result.status == "failed"
        assert set(result.diverged) == {0, 1}
        calm = otafl.run(config.replace({"training.lr": 0.1}))
        assert calm.status == "complete"
        assert float(calm.params.abs().max()) < 100 < EXPLODED

    def test_a_loss_that_is_not_finite_in_the_last_rows_is_a_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of one seed, at the end; earlier, it is none where the seed has recovered."""
        from otafl.engine.objective import Objective

        real, rows = Objective.evaluate, iter([None, 1, None, 0])

        def evaluate(objective: Any, *arguments: Any) -> Any:
            scores, lost = real(objective, *arguments), next(rows)
            if lost is not None:
                scores.loss[lost] = torch.inf
            return scores

        monkeypatch.setattr(Objective, "evaluate", evaluate)
        keys = {"experiment.rounds": 120, "experiment.eval_every": 40}
        result = otafl.run(make_config("fedavg", keys), out=tmp_path / "run")
        assert result.status == "failed"
        assert result.diverged == {0: 120}
        assert result.summary["test_loss"]["mean"] is None
        again = read_run(tmp_path / "run")
        assert again.diverged == result.diverged
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_every_row_says_what_it_averages_and_the_last_value(shell: Shell) -> None:  # noqa: F811
    """Runs of other lengths, and short ones, whose mean is one over the whole curve."""
    for rounds, out in ((80, "long"), (5, "short")):
        sets = (f"experiment.rounds={rounds}", "experiment.eval_every=5", "experiment.seeds=[0,1,2]")
        assert shell(*tiny(*sets), "--out", out)[0] in (0, 3)
    status, out, _ = shell("compare", "long", "short")
    assert status == 0
    long, short = (next(line for line in out.splitlines() if word in line) for word in ("35 to 80", "round 5 "))
    for line, folder in ((long, "long"), (short, "short")):
        result = read_run(folder)
        final = 100 * np.nan_to_num(result.metrics["test_accuracy"][:, -1])
        assert f"{final.mean():.2f} ± {final.std(ddof=1):.2f}" in line
    assert "10 rows of rounds 35 to 80" in long
    shown = shell(
        *tiny("experiment.rounds=80", "experiment.eval_every=5", "experiment.seeds=[0,1,2]"), "--out", "long"
    )[1]
    assert "at the end" in shown
    assert "over 10 rows of rounds 35 to 80" in shown


class TestContinuing:
    def test_other_threads_or_versions_are_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        chosen = config(**EAGER)
        run_until(tmp_path / "run", 6, chosen)
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            result = otafl.run(chosen, out=tmp_path / "run")
        finally:
            torch.set_num_threads(threads)
        text = f"continued from round 6 with other versions or threads (device CPU, {threads} thread"
        assert text in caplog.text
        assert result.summary["continued"][0].startswith(text)
        assert any(note.startswith(text) for note in read_run(tmp_path / "run").notes)

    def test_nothing_is_said_where_nothing_changed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        chosen = config(**EAGER)
        run_until(tmp_path / "run", 6, chosen)
        assert "continued" not in otafl.run(chosen, out=tmp_path / "run").summary
        assert "continued" not in caplog.text

    @pytest.mark.parametrize("last", [1, 2, 4, 6])
    def test_columns_of_a_methods_own_have_one_order(self, tmp_path: Path, last: int) -> None:
        """Interrupted before the first row, which comes after five rounds, and after it."""
        keys = {"experiment.rounds": 12, "experiment.eval_every": 5, "experiment.checkpoint_s": 1e-9}
        chosen = make_config("fedoag-plus", {**keys, "algorithm.gamma": "adaptive"})
        otafl.run(chosen, out=tmp_path / "whole")
        run_until(tmp_path / "parts", last, chosen)
        otafl.run(chosen, out=tmp_path / "parts")
        assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")

    def test_the_same_checkpoint_damaged_twice_is_no_dead_end(self, tmp_path: Path) -> None:
        chosen = config(**EAGER)
        otafl.run(chosen, out=tmp_path / "whole")
        for _ in range(3):
            run_until(tmp_path / "parts", 6, chosen)
            newest = max((tmp_path / "parts" / "checkpoint").glob("0*"))
            flip(newest / "state.safetensors")
        otafl.run(chosen, out=tmp_path / "parts")
        assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")

    def test_who_waited_while_another_finished_does_not_begin_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The directory is not there when this process looks, and finished when it wants to begin."""
        place, real = tmp_path / "run", fold.Simulation
        done: list[Result] = []

        def slow(*arguments: Any, **keys: Any) -> Any:
            if not done:
                done.append(None)  # type: ignore[arg-type]
                done[0] = otafl.run(config(), out=place)
            return real(*arguments, **keys)

        monkeypatch.setattr(fold, "Simulation", slow)
        again = otafl.run(config(), out=place, observer=lambda *_: pytest.fail("ran again"))
        assert "nothing was run" in again.notes[0]
        assert torch.equal(again.params, done[0].params)

    def test_a_reader_takes_no_lock(self, tmp_path: Path) -> None:
        run_until(tmp_path / "run", 6, config(**EAGER))
        os.unlink(tmp_path / "run" / "run.lock")
        with pytest.raises(RunDirectoryError, match="has not finished"):
            read_run(tmp_path / "run")
        assert not (tmp_path / "run" / "run.lock").exists()


class TestLinks:
    @pytest.mark.parametrize("name", ["run.lock", "log.txt", "metrics.csv"])
    def test_no_link_is_followed_to_write(self, tmp_path: Path, name: str) -> None:
        victim = tmp_path / "thesis.tex"
        victim.write_text("all my work")
        run_until(tmp_path / "run", 6, config(**EAGER))
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name).symlink_to(victim)
        with contextlib.suppress(RunDirectoryError):  # a file that is replaced needs no refusal
            otafl.run(config(**EAGER), out=tmp_path / "run")
        assert victim.read_text() == "all my work"

    @pytest.mark.parametrize("name", ["run.lock", "log.txt"])
    def test_a_pipe_is_refused_at_once(self, tmp_path: Path, name: str) -> None:
        run_until(tmp_path / "run", 6, config(**EAGER))
        with_pipe(tmp_path / "run" / name)
        started = time.monotonic()
        with pytest.raises(RunDirectoryError):
            otafl.run(config(**EAGER), out=tmp_path / "run")
        assert time.monotonic() - started < 20


class TestPlaces:
    def test_a_linked_checkpoint_folder_is_refused(self, tmp_path: Path) -> None:
        """What lies where the link leads stays as it is."""
        run_until(tmp_path / "run", 6, config(**EAGER))
        foreign = tmp_path / "years"
        shutil.move(tmp_path / "run" / "checkpoint", foreign)
        for year in ("2022", "2023"):
            (foreign / year).mkdir()
        before = sorted(path.name for path in foreign.iterdir())
        (tmp_path / "run" / "checkpoint").symlink_to(foreign)
        with pytest.raises(RunDirectoryError, match="is a symbolic link"):
            otafl.run(config(**EAGER), out=tmp_path / "run")
        assert sorted(path.name for path in foreign.iterdir()) == before

    def test_nothing_is_put_inside_a_run(self, finished: Path, tmp_path: Path) -> None:
        shutil.copytree(finished, tmp_path / "run")
        with pytest.raises(RunDirectoryError, match="is inside the run directory"):
            otafl.run(config(), out=tmp_path / "run" / "checkpoint" / "mine")
        keys = {**TINY, "algorithm.gamma": TINY_GAMMA}
        study = Study(tmp_path / "run", parse_sweep({"set": keys, "axes": {"training.lr": [0.1]}}, "t", "t"))
        with pytest.raises(RunDirectoryError, match="is inside the run directory"):
            conduct(study, "cpu", quiet=True)

    def test_a_report_replaces_plain_files_only(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "target")
        os.mkfifo(tmp_path / "pipe")
        for name in ("link", "pipe"):
            with pytest.raises(RunDirectoryError, match="is there already and no plain file"):
                publish(tmp_path / name, b"x")

    def test_fresh_beside_the_folder_one_is_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        assert fold.fresh_directory(Path()) == tmp_path / "here-2"
        with pytest.raises(ConfigError, match="nothing can be beside"):
            fold.fresh_directory(Path("/"))


@pytest.mark.parametrize("wrong", ["7.5", "inf", ""])
def test_an_unsealed_run_with_impossible_numbers_is_refused(finished: Path, tmp_path: Path, wrong: str) -> None:
    shutil.copytree(finished, tmp_path / "run")
    unseal(tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    cells = lines[-1].split(",")
    cells[lines[0].split(",").index("test_accuracy")] = wrong
    (tmp_path / "run" / "metrics.csv").write_text("\n".join([*lines[:-1], ",".join(cells)]) + "\n")
    with pytest.raises(RunDirectoryError, match="impossible test_accuracy"):
        read_run(tmp_path / "run")


def test_a_summary_without_its_seal_is_damaged(finished: Path, tmp_path: Path) -> None:
    """It is not one of an older version."""
    shutil.copytree(finished, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for key in ("seal", "sha256"):
        del summary[key]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(RunDirectoryError, match=r"summary\.json has changed"):
        read_run(tmp_path / "run")


DATA_PLUGIN = """
import dataclasses
import numpy as np
import otafl

@otafl.register_dataset("from-a-file")
@dataclasses.dataclass(frozen=True)
class FromAFile:
    file: str = ""

    def load(self, num_devices):
        features = np.load(self.file)
        split = otafl.Split(features, (np.arange(len(features)) % 2).astype(np.int64))
        return otafl.Dataset(split, split, None, 2)
"""


def test_a_sweep_does_not_keep_results_of_other_data(tmp_path: Path) -> None:
    from otafl import registry

    (tmp_path / "data_plugin.py").write_text(DATA_PLUGIN)
    registry.load_plugin(tmp_path / "data_plugin.py")
    values = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    np.save(tmp_path / "d.npy", values)
    keys = {k: v for k, v in TINY.items() if not k.startswith("data.")}
    keys |= {"data.name": "from-a-file", "data.file": str(tmp_path / "d.npy"), "algorithm.gamma": TINY_GAMMA}
    sweep = parse_sweep({"set": keys, "axes": {"training.lr": [0.1]}}, "t", "t")
    try:
        assert conduct(Study(tmp_path / "s", sweep), "cpu", quiet=True).status == 0
        assert conduct(Study(tmp_path / "s", sweep), "cpu", quiet=True).status == 0
        np.save(tmp_path / "d.npy", values + 1)
        outcome = conduct(Study(tmp_path / "s", sweep), "cpu", quiet=True)
        assert outcome.status == 1
        assert "was made with other data" in next(iter(outcome.errors.values()))
    finally:
        registry._registered["datasets"].pop("from-a-file")
        registry._plugin_files.pop(str(tmp_path / "data_plugin.py"))


class TestPublishing:
    @pytest.mark.parametrize("name", rundir.RUN_FILES)
    def test_never_over_a_file_of_a_run(self, finished: Path, name: str) -> None:
        before = (finished / name).read_bytes()
        with pytest.raises(RunDirectoryError, match="is a file of a run"):
            publish(finished / name, b"something else")
        assert (finished / name).read_bytes() == before

    def test_a_figure_writes_no_table_over_a_runs_own(self, shell: Shell, finished: Path) -> None:  # noqa: F811
        shutil.copytree(finished, "run")
        status, _, err = shell("theory", "run/config.toml", "run", "--out", "run/metrics.png")
        assert status == 2
        assert "metrics.csv: is a file of a run" in err.splitlines()[-1]
        assert Path("run/metrics.csv").read_bytes() == (finished / "metrics.csv").read_bytes()
        line = complaint(shell("report", "run", "-o", "run/summary.json"))
        assert "is a file of a run" in line
        read_run("run")

    def test_a_full_disk_leaves_no_half_report(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from otafl import disk

        publish(tmp_path / "report.html", b"the old one")

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(disk.os, "fsync", full)
        with pytest.raises(RunDirectoryError, match="the disk is full"):
            publish(tmp_path / "report.html", b"x" * 10_000)
        monkeypatch.undo()
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
        assert (tmp_path / "report.html").read_bytes() == b"the old one"


def test_two_sweeps_at_once(tmp_path: Path) -> None:
    """The second is told so, and the first one's files are whole."""
    keys = {**TINY, "algorithm.gamma": TINY_GAMMA, "experiment.seeds": [0]}
    study = Study(tmp_path, parse_sweep({"set": keys, "axes": {"training.lr": [0.1, 0.05]}}, "test", "lr"))
    with study.prepared():
        with pytest.raises(RunBusyError, match=f"is worked on by process {os.getpid()}"):
            conduct(study, "cpu", quiet=True)
        json.loads((tmp_path / "sweep.json").read_text())
    assert conduct(study, "cpu", quiet=True).status == 0


def test_files_of_two_writers_do_not_mix(tmp_path: Path) -> None:
    """Each content is whole, whoever comes last."""
    contents = [bytes([number]) * 100_000 for number in range(4)]

    def write(content: bytes) -> None:
        for _ in range(10):
            put(tmp_path / f"file-{content[0] % 2}", content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.read_bytes() for path in tmp_path.iterdir()} <= set(contents)


def test_the_numbers_of_a_sweep_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    """Threads of a run are its own, so the same bytes come out of one worker and of two."""
    from otafl.studies.conduct import Executor

    keys = {**TINY, "algorithm.gamma": TINY_GAMMA, "experiment.seeds": [0], "model.hidden": [300], "data.features": 300,
            "training.precision": "float32", "training.batch_size": 64}  # fmt: skip
    found = []
    for workers in (1, 2):
        study = Study(
            tmp_path / str(workers), parse_sweep({"set": keys, "axes": {"training.lr": [0.1, 0.05]}}, "t", "t")
        )
        assert conduct(study, "cpu", Executor(workers=workers), quiet=True).status == 0
        found.append([files_of(study.place(case)) for case in study.sweep.cases])
        assert {read_run(study.place(case)).summary["device"] for case in study.sweep.cases} == {"CPU, 1 thread"}
    assert found[0] == found[1]


def test_interrupting_a_fresh_run_says_where_it_is(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assert shell(*tiny(), "--out", "run")[0] == 0

    def stop(*arguments: Any, **keys: Any) -> Any:
        raise Interrupted(2, 3)

    monkeypatch.setattr(fold, "_fold", stop)
    status, _, err = shell(*tiny(), "--out", "run", "--fresh")
    assert status == 130
    assert "continue it with --out run-2, without --fresh" in err


def test_a_directory_of_another_process_is_busy(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", config()) as directory:
        directory.create()
        with pytest.raises(RunBusyError):
            otafl.run(config(), out=tmp_path / "run")
