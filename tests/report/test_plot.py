"""Labels, comparison tables and figures of runs: as a reader meets them."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import otafl
from otafl.errors import ConfigError, OtaflError
from otafl.report.plot import _printed, _styles, plot
from otafl.report.runs import collect
from otafl.report.statistics import last_accuracy
from otafl.studies.conduct import conduct
from otafl.studies.study import Study
from otafl.studies.sweep import parse_sweep
from tests.conftest import TINY, make_config, simulate

SWEEP: dict[str, Any] = {
    "name": "two",
    "set": {**TINY, "experiment.rounds": 4},
    "axes": {
        "method": [
            {"label": "ours", "algorithm.name": "fedoag-zero"},
            {"label": "ideal", "algorithm.name": "fedavg"},
        ],
        "cell.radius_m": [500.0, 1500.0],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("two") / "study"
    assert conduct(Study(place, parse_sweep(SWEEP, "two.toml", "two")), "cpu", quiet=True).status == 0
    return place


def test_labels_are_values_on_the_axes_in_the_files_order(folder: Path) -> None:
    wanted = ["ours, radius_m 500", "ours, radius_m 1500", "ideal, radius_m 500", "ideal, radius_m 1500"]
    assert [run.label for run in collect(folder)] == wanted
    one = [place for place in (folder / "runs").iterdir() if "500" in place.name and "1500" not in place.name]
    assert sorted(run.label for run in collect(one)) == ["ideal", "ours"]  # what they share is not told
    assert len(collect(folder / "runs")) == 4  # a folder of runs, too
    assert [run.label for run in collect(one[:1], ["mine"])] == ["mine"]
    assert len(collect([folder, *one])) == 4  # a run that is named twice is one run
    with pytest.raises(ConfigError, match="1 labels for 4 runs"):
        collect(folder, ["a"])
    with pytest.raises(ConfigError, match="two runs have the label 'a'"):
        collect(folder, ["a", "a", "b", "c"])


def test_a_sweep_that_has_not_finished_is_compared_as_far_as_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(folder, tmp_path / "part")
    shutil.rmtree(next((tmp_path / "part" / "runs").iterdir()))
    assert len(collect(tmp_path / "part")) == 3
    assert "1 of 4 runs have not finished" in capsys.readouterr().err


def test_groups_have_baselines_and_one_family_of_tests(folder: Path) -> None:
    table = otafl.compare(folder, per="cell.radius_m", baseline="ideal")
    assert [(row.group, row.label) for row in table.rows] == [
        ("cell.radius_m = 500", "ours"),
        ("cell.radius_m = 500", "ideal"),
        ("cell.radius_m = 1500", "ours"),
        ("cell.radius_m = 1500", "ideal"),
    ]
    pairs = [row.gap for row in table.rows]
    assert pairs[1] is None
    assert pairs[3] is None
    assert pairs[0] is not None
    assert pairs[0].family == 2
    with pytest.raises(ConfigError, match=r"did you mean 'ideal'"):
        otafl.compare(folder, per="cell.radius_m", baseline="idael")
    with pytest.raises(ConfigError, match=r"no axis or key 'cell.radius'.*radius_m"):
        otafl.compare(folder, per="cell.radius")
    both = otafl.compare(folder, per=["cell.radius_m", "method"])
    assert [row.group for row in both.rows] == [
        f"cell.radius_m = {radius}, {method}" for method in ("ours", "ideal") for radius in (500, 1500)
    ]
    with pytest.raises(ConfigError, match="a int is no run"):
        otafl.compare([1, 2])  # type: ignore[list-item]
    alone = otafl.compare(folder)
    assert any("not the same world, [cell] differ" in line for line in alone.verdicts)


def test_intervals_need_three_seeds_and_stay_between_0_and_100() -> None:
    from otafl.report.compare import Row
    from otafl.report.statistics import Estimate

    def row(value: Estimate) -> Row:
        return Row("", "a", None, value, value, "", 0.0, "", None)  # type: ignore[arg-type]

    assert row(Estimate(99.0, 3.0, 4.0, 5)).interval == "95.00 … 100.00"
    assert row(Estimate(1.0, 3.0, 4.0, 5)).interval == "0.00 … 5.00"
    assert row(Estimate(50.0, 3.0, 27.0, 2)).interval == "2 seeds"


@pytest.mark.parametrize(("x", "column"), [("rounds", "round"), ("uses", "channel_uses"), ("joules", "energy_j")])
@pytest.mark.parametrize("suffix", [".pdf", ".png", ".svg"])
def test_figures_have_the_numbers_beside_them(folder: Path, tmp_path: Path, x: str, column: str, suffix: str) -> None:
    runs = otafl.read_runs(folder)
    label, result = next(iter(runs.items()))
    file, numbers = plot({label: result}, x=x).save(tmp_path / f"a{suffix}")
    assert file.stat().st_size > 1000
    with numbers.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    across = result.rounds if column == "round" else result.metrics[column].mean(0)
    assert [float(row[column]) for row in rows] == pytest.approx(np.asarray(across, dtype=float), rel=1e-6)
    mean = 100 * result.metrics["test_accuracy"].mean(0)
    assert [float(row["test_accuracy_mean"]) for row in rows] == pytest.approx(mean, abs=1e-3)


def test_what_a_run_does_not_have_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = plot(folder, x="joules")  # error-free training spends none
    assert {row[0] for row in picture.numbers[1:]} == {"ours, radius_m 500", "ours, radius_m 1500"}
    assert capsys.readouterr().err.count("left out") == 2
    for options, line in (
        ({"y": "test_acuracy"}, "did you mean 'test_accuracy'"),
        ({"x": "hours"}, "-x hours: no column, no axis and no key"),
        ({"x": "cell.radius"}, "did you mean 'cell.radius_m'"),
        ({"at": "rounds=2"}, "is for figures over an axis"),
        ({"width": "triple"}, "choose from single, double"),
    ):
        with pytest.raises(ConfigError, match=line):
            plot(folder, **options)
    with pytest.raises(ConfigError, match=r"ends in .pdf, .png or .svg"):
        picture.save("figure.gif")


def test_points_over_an_axis(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A point is the mean over seeds of what `compare` shows, at the end or at a budget."""
    runs = {(run.axes["method"], run.axes["cell.radius_m"]): run.result for run in collect(folder)}

    def points(**options: Any) -> dict[tuple[str, Any], float]:
        picture = plot(folder, **options)
        return {(label, float(x) if x[0].isdigit() else x): float(mean) for label, x, mean, *_ in picture.numbers[1:]}

    found = points(x="cell.radius_m")
    assert found == {key: pytest.approx(last_accuracy(run).mean(), abs=1e-3) for key, run in runs.items()}
    found = points(x="cell.radius_m", at="rounds=2")
    assert found == {
        key: pytest.approx(100 * run.metrics["test_accuracy"][:, run.rounds == 2].mean(), abs=1e-3)
        for key, run in runs.items()
    }
    found = points(x="method", y="energy_j")  # words beside each other; what only grows has its last value
    assert found["radius_m 500", "ours"] == pytest.approx(runs["ours", 500.0].metrics["energy_j"][:, -1].mean(), 1e-4)
    plot(folder, x="cell.radius_m", at="joules=1e9")
    assert "4 of 4 runs had not spent 1e+09 J at their end" in capsys.readouterr().err
    plot(folder, x="cell.devices")
    assert "cell.devices is 4 in every run that has it: the figure has one column" in capsys.readouterr().err
    assert [row[0] for row in plot(folder, x="cell.radius_m", labels=["a", "b"]).numbers[1:]] == ["a", "a", "b", "b"]
    with pytest.raises(ConfigError, match="4 labels for 2 curves"):
        plot(folder, x="cell.radius_m", labels=["a", "b", "c", "d"])


def test_a_run_without_the_key_holds_everywhere() -> None:
    small = make_config("fedoag", {"experiment.rounds": 2})
    runs = [otafl.run(small.replace({"algorithm.gamma": gamma}), device="cpu") for gamma in (1e-7, 1e-10)]
    runs.append(otafl.run(small.replace({"algorithm.name": "fedavg"}), device="cpu"))
    picture = plot(runs, x="algorithm.gamma")
    assert [row[:2] for row in picture.numbers[1:]] == [("fedoag", "1e-10"), ("fedoag", "1e-07"), ("fedavg", "")]
    shapes = plot(runs, x="model.hidden").numbers[1:]  # a list, the same for all
    assert {row[1] for row in shapes} == {"[5]"}
    adaptive = otafl.run(small.replace({"algorithm.gamma": "adaptive"}), device="cpu")
    rows = plot([*runs, adaptive], x="algorithm.gamma").numbers[1:]
    assert [row[:2] for row in rows[2:]] == [("fedavg", ""), ("fedoag, gamma adaptive", "")]
    (axes,) = picture.figure.axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "γ"
    assert len(set(np.ravel(axes.lines[-1].get_ydata()))) == 1


def test_many_curves_have_different_styles() -> None:
    small = make_config("fedoag", {"experiment.rounds": 1})
    result = otafl.run(small, device="cpu")
    other = otafl.run(small.replace({"algorithm.name": "fedavg"}), device="cpu")
    assert len(set(_styles([result, other] * 10))) == 20


def test_labels_in_print() -> None:
    assert _printed("fedoag-zero, gamma 1e-09") == "FedOAG-zero, γ = 1e-09"
    assert _printed("radius_m 500, tx_power_dbm 10.0") == "radius 500 m, transmit power 10.0 dBm"
    assert _printed("my method") == "my method"


def test_results_show_themselves_in_notebooks(folder: Path) -> None:
    result = next(iter(otafl.read_runs(folder).values()))
    assert repr(result).startswith("<Result: fedoag-zero on synthetic, 4 rounds, ")
    assert "<table>" in result._repr_html_()
    assert "<table>" in otafl.compare(folder)._repr_html_()
    assert result.plot()._repr_png_()[:4] == b"\x89PNG"
    frame = result.to_pandas()
    assert list(frame.columns[:3]) == ["seed", "round", "test_accuracy"]
    assert len(frame) == len(result.config.experiment.seeds) * len(result.rounds)
    seed = result.config.experiment.seeds[-1]
    assert frame[frame["seed"] == seed]["test_accuracy"].to_numpy() == pytest.approx(
        result.metrics["test_accuracy"][-1]
    )
    assert set(otafl.compare(folder).to_pandas()["run"]) == {run.label for run in collect(folder)}
    polars = pytest.importorskip("polars")
    assert polars.from_dataframe(result).shape == frame.shape


def test_regression_has_no_accuracy_to_compare() -> None:
    from tests.conftest import make_quadratic

    result = otafl.run(make_quadratic("fedavg", {"experiment.rounds": 2}), device="cpu")
    with pytest.raises(OtaflError, match="regression"):
        otafl.compare(result)
    assert plot(result, y="test_loss", log=True).numbers


def test_failed_seeds_stay_where_they_failed_on_every_axis() -> None:
    """A curve over cost falls to 0 % where its seeds failed; it does not end, and it is not left out."""
    small = make_config("ota-fedavg", {"experiment.rounds": 6, "training.lr": 0.1})
    result = otafl.run(small, device="cpu")
    for failing in ([1], [0, 1]):
        metrics = {name: values.copy() for name, values in result.metrics.items()}
        for values in metrics.values():
            values[failing, 3:] = np.nan
        broken = dataclasses.replace(result, metrics=metrics)
        for x in ("joules", "seconds", "uses", "rounds"):
            rows = plot(broken, x=x).numbers[1:]
            where, mean = ([float(row[k]) for row in rows] for k in (1, 2))
            assert len(rows) == 7
            assert where == sorted(where)
            assert mean[-1] == pytest.approx(0 if len(failing) == 2 else 50 * metrics["test_accuracy"][0, -1], abs=1e-3)


def test_labels_of_worlds_and_of_classes_with_other_keys() -> None:
    """What differs in the world is told for every method; keys that only one law has are not, its name is."""
    from otafl.report.runs import names

    rician = {"fading.name": "rician", "fading.k_factor": 3.0}
    one, two = make_config("fedoag"), make_config("fedoag", rician)
    assert names([one, two]) == ["fedoag, rayleigh", "fedoag, rician"]
    assert names([two, make_config("fedoag", {**rician, "fading.k_factor": 9.0})]) == [
        "fedoag, k_factor 3",
        "fedoag, k_factor 9",
    ]
    assert names([one, make_config("sca", rician)]) == ["fedoag, rayleigh", "sca, rician"]
    assert names([one, make_config("sca", {"training.lr": 0.3})]) == ["fedoag", "sca"]


def test_other_worlds_are_compared_unpaired_and_powers_paired() -> None:
    """Power changes no draw of a seed; Welch's interval is that of scipy."""
    from scipy.stats import ttest_ind

    keys = {"experiment.seeds": [0, 1, 2]}
    one = otafl.run(make_config("ota-fedavg", keys), device="cpu")
    loud = otafl.run(make_config("ota-fedavg", {**keys, "radio.tx_power_dbm": 40.0}), device="cpu")
    assert otafl.compare({"one": one, "loud": loud}).rows[1].gap is not None
    ours, theirs = (simulate(run.config) for run in (one, loud))
    for mine, other in zip(ours.worlds, theirs.worlds, strict=True):
        assert np.array_equal(mine.coeff, other.coeff)
    assert bool((ours.sampler.at(3) == theirs.sampler.at(3)).all())
    assert bool((ours.air.noise((0, 1, 2), "uplink", 3, 5) == theirs.air.noise((0, 1, 2), "uplink", 3, 5)).all())
    far = otafl.run(make_config("ota-fedavg", {**keys, "cell.radius_m": 2000.0}), device="cpu")
    table = otafl.compare({"one": one, "far": far})
    assert table.rows[1].gap is None
    interval = ttest_ind(last_accuracy(far), last_accuracy(one), equal_var=False).confidence_interval(0.95)
    gap, half = (interval.high + interval.low) / 2, (interval.high - interval.low) / 2
    said = f"far minus one: {gap:+.2f} ± {half:.2f} points (unpaired, Welch, 95 %: not the same world, [cell] differ)"
    assert table.verdicts == (said,)


def test_the_label_over_an_axis_says_which_rounds_a_point_is_of(folder: Path) -> None:
    def label(**options: Any) -> str:
        return str(plot(folder, x="cell.radius_m", **options).figure.axes[0].get_ylabel())

    assert label() == "test accuracy (%)\nmean of rounds 1 to 4"
    assert label(at="rounds=2") == "test accuracy (%)\nafter 2 rounds"
    assert label(y="energy_j") == "radio energy of all devices (J)"  # of the end, not of some rounds


def test_a_logarithmic_axis_cannot_begin_at_zero(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a logarithmic axis has no such place"):
        plot(folder, log=True, bottom=0.0)


def test_ticks_surround_what_is_drawn(folder: Path) -> None:
    """No curve ends above the last tick."""
    for y in ("test_accuracy", "test_loss", "energy_j"):
        (axes,) = plot(folder, y=y).figure.axes
        low, high = axes.dataLim.intervaly
        ticks = [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1] + 1e-12]
        assert ticks[-1] >= high
        assert axes.get_ylim()[1] <= (100 if y == "test_accuracy" else np.inf)
        assert y == "test_accuracy" or axes.get_ylim()[0] <= low


def test_many_words_stand_below_one_another() -> None:
    """And values to the right: the first on top, with the same numbers as beside each other."""
    small = make_config("ota-fedavg", {"experiment.rounds": 2, "experiment.seeds": [0, 1, 2]})
    run = otafl.run(small, device="cpu")
    names = [f"long-name-{i}" for i in range(16)]
    runs = [dataclasses.replace(run, config=run.config.replace({"experiment.name": name})) for name in names]
    picture = plot(runs, x="experiment.name", bottom=0.0)
    (axes,) = picture.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert axes.yaxis_inverted()
    assert axes.get_xlabel().startswith("test accuracy (%)")
    assert axes.get_ylabel() == "name"
    assert axes.get_xlim()[0] == 0.0
    few = plot(runs[:2], x="experiment.name")
    assert few.figure.axes[0].get_ylabel().startswith("test accuracy (%)")
    assert [row[2] for row in picture.numbers[1:3]] == [row[2] for row in few.numbers[1:3]]
    assert picture.figure.get_size_inches()[1] > few.figure.get_size_inches()[1]


def test_logarithmic_axes_have_usual_numbers_and_no_round_0(folder: Path) -> None:
    (axes,) = plot(folder, y="energy_j", log=True, log_x=True).figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert np.isnan(axes.lines[0].get_xdata()[0])
    assert np.isfinite(axes.lines[0].get_xdata()[1:]).all()
    assert axes.xaxis.get_major_formatter()(2.0, 0) == "2"
    assert plot(folder, log_x=True).numbers == plot(folder).numbers
    with pytest.raises(ConfigError, match="-x method: has words, for which --log-x has no place"):
        plot(folder, x="method", log_x=True)
    quiet = otafl.run(make_config("ota-fedavg", {"radio.tx_power_dbm": -10.0, "experiment.rounds": 2}), device="cpu")
    with pytest.raises(ConfigError, match="values of 0 or less"):
        plot(quiet, x="radio.tx_power_dbm", log_x=True)
