"""Comparing, tuning and reproducing."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import otafl
from otafl.errors import ConfigError, OtaflError
from otafl.papers.fedoag import experiments as paper
from otafl.report.compare import compare
from otafl.report.runs import differences, expand, names
from otafl.report.statistics import Comparison, Estimate, estimate, mean_accuracy, rounds_to_reach, verdict
from otafl.runs.result import Result, read_run
from otafl.studies import tune
from otafl.studies.sweep import parse_sweep
from tests.conftest import TINY, make_config

SMALL = {key: value for key, value in TINY.items() if key != "experiment.name"}


def made_up(accuracy: list[list[float]], name: str = "fedoag") -> Result:
    """A result with these accuracies of each seed at rounds 0, 10, 20 and on."""
    values = np.array(accuracy)
    config = make_config(
        name, {"experiment.seeds": list(range(len(values))), "experiment.rounds": 10 * (values.shape[1] - 1)}
    )
    rounds = 10 * np.arange(values.shape[1])
    summary = {"status": "complete", "averaged_over": "2 rows", "num_active": 1.0, "device": "CPU, 1 thread"}
    failed = {seed: 10 for seed, row in enumerate(values) if np.isnan(row).any()}
    return Result(config, rounds, {"test_accuracy": values}, None, failed, summary)  # type: ignore[arg-type]


def test_statistics_of_curves() -> None:
    result = made_up([[0.1, 0.5, 0.9], [0.1, 0.2, 0.3]])
    assert rounds_to_reach(result, 50.0)[0] == 10
    assert np.isnan(rounds_to_reach(result, 50.0)[1])
    assert mean_accuracy(result) == pytest.approx([50.0, 20.0])
    # Student's t with 4 degrees of freedom: 2.776 · 1.5811/√5
    value = estimate(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert (value.mean, value.std, value.half_width) == pytest.approx((3.0, 1.58114, 1.96324), rel=1e-5)


def test_verdicts() -> None:
    gap = Estimate(2.0, 1.0, 0.5, 5)
    assert "A is better than B by 2.00 ± 0.50" in verdict("A", "B", Comparison(gap, 0.01, 1))
    assert "B is better than A by 2.00 ± 0.50" in verdict("A", "B", Comparison(gap._replace(mean=-2.0), 0.01, 1))
    unsure = verdict("A", "B", Comparison(gap, 0.07, 4))
    assert unsure.startswith("5 seeds cannot separate A and B: A is ahead by 2.00 ± 0.50 points")
    assert "p = 0.07 after Holm's correction for 4 comparisons" in unsure
    assert "one seed cannot" in verdict("A", "B", Comparison(Estimate(3.0, np.nan, np.nan, 1), np.nan, 1))


def test_comparison_is_paired_only_in_the_same_world() -> None:
    one = made_up([[0.1, 0.80], [0.1, 0.90], [0.1, 0.85]])
    other = made_up([[0.1, 0.70], [0.1, 0.80], [0.1, 0.76]], "ota-fedavg")
    text = str(compare({"a": one, "b": other}))
    assert "a is better than b by 9.67 ± 1.43" in text  # 4.303 · 0.577/√3
    assert "p = 0.0012)" in text
    assert "correction" not in text  # one comparison needs none
    moved = Result(one.config.replace({"cell.radius_m": 900.0}), one.rounds, one.metrics, one.params, {}, one.summary)
    assert "not the same world" in str(compare({"a": one, "b": moved}))
    fewer = made_up([[0.1, 0.8]])
    assert "other seeds" in str(compare({"a": one, "b": fewer}))


def test_runs_are_named_by_what_tells_them_apart() -> None:
    configs = [
        make_config("fedoag"),
        make_config("fedoag", {"training.lr": 0.05}),
        make_config("sca", {"training.lr": 0.05}),
    ]
    assert names(configs) == ["fedoag, lr 0.1", "fedoag, lr 0.05", "sca"]
    own, shared = differences(configs)
    assert "training.lr" not in shared
    assert shared["cell.devices"] == 4
    assert own[2]["algorithm.name"] == "sca"


def test_read_back_and_mistakes(tmp_path: Path) -> None:
    config = make_config("fedoag")
    result = otafl.run(config, out=tmp_path / "run")
    again = read_run(tmp_path / "run")
    assert np.array_equal(again.metrics["test_accuracy"], result.metrics["test_accuracy"])
    with pytest.raises(OtaflError, match="is not a run directory"):
        read_run(tmp_path)
    (tmp_path / "study" / "runs").mkdir(parents=True)
    with pytest.raises(OtaflError, match="has no runs"):
        expand(tmp_path / "study")


def tuning_sweep(section: dict[str, Any]) -> Any:
    keys = {**SMALL, "data.validation_images": 40} if "data.validation_images" in SMALL else SMALL
    axes = {"algorithm.name": ["fedavg", "sca"], "training.lr": [1e-6, 0.1, 0.2], "algorithm.omega": [0.01, 1.0]}
    rule = [{"if": {"algorithm.name": "fedavg"}, "drop": ["algorithm.omega"]}]
    return parse_sweep({"set": keys, "axes": axes, "override": rule, "tune": section}, "t.toml", "t")


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"search": "random"}, "choose from grid, turns, halving, optuna"),
        ({"where": {"cell.radius": 1.0}}, "name axes, and the value"),
        ({"where": {"training.lr": 0.1}}, "it cannot be fixed, too"),
        ({"where": {"algorithm.name": "opc"}}, "no run has these values"),
        ({"eval_every": 0}, "whole number above 0"),
        ({"over": ["training.lt"]}, "is no axis"),
        ({"round": 3}, "did you mean 'rounds'"),
        ({"rounds": 0}, "whole number above 0"),
        ({"trials": True}, "whole number above 0"),
        ({"seeds": 5}, "tune.seeds = 5: give a list"),
        ({"over": 3}, "tune.over = 3: give a list"),
        ({"seeds": [100, 1]}, "1 is also in experiment.seeds"),
        ({"at": "hours"}, "give a column and how much"),
        ({"at": "seconds=3", "search": "halving"}, "stops runs by rounds"),
    ],
)
def test_tuning_mistakes(section: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        tune.tune(tuning_sweep(section), tmp_path, "t.toml")


@pytest.mark.slow
@pytest.mark.parametrize("search", ["grid", "turns", "halving", "optuna"])
def test_tuning_chooses_by_validation_accuracy_on_its_own_seeds(search: str, tmp_path: Path) -> None:
    section = {
        "over": ["training.lr", "algorithm.omega"],
        "rounds": 9,
        "seeds": [100, 101],
        "search": search,
        "trials": 3,
    }
    asked = tuning_sweep(section)
    found = tune.tune(asked, tmp_path / "tune", "t.toml", device="cpu", quiet=True)
    assert found.status == 0
    assert len(found.chosen) == 2
    for group, best in found.chosen.items():
        assert best.score == max(p.score for p in found.points if p.group == group and p.rounds == 9)
    counts = {"grid": 3 + 6, "turns": 3 + 6, "halving": (3 + 6) + (1 + 2) + (1 + 1), "optuna": 6}
    assert len(found.points) == counts[search]
    runs = len(list((tmp_path / "tune" / "runs").iterdir()))
    assert tune.plan(asked, "t.toml").startswith(f"2 choices, {runs} runs: ")
    for run in (tmp_path / "tune" / "runs").iterdir():
        assert set(read_run(run).config.experiment.seeds) == {100, 101}
    table, chosen = tune.write(found, asked, tmp_path / "tune")
    with open(table, newline="") as file:
        assert sum(row["chosen"] == "yes" for row in csv.DictReader(file)) == 2
    assert chosen.read_text().count("[[override]]") == 2


def test_tuning_at_a_budget(tmp_path: Path) -> None:
    """The score is that of the last recorded model within the budget, a seed at a time, not that of the end."""
    section = {"over": ["training.lr"], "rounds": 4, "seeds": [100, 101], "at": "joules=5e-8"}
    asked = tuning_sweep({**section, "where": {"algorithm.name": "sca", "algorithm.omega": 1.0}})
    found = tune.tune(asked, tmp_path, "t.toml", device="cpu", quiet=True)
    assert len(found.points) == 3
    scores = []
    for run in (tmp_path / "runs").iterdir():
        result = read_run(run)
        assert list(result.rounds) == [0, 1, 2, 3, 4]
        spent, accuracy = result.metrics["energy_j"], 100 * result.metrics["validation_accuracy"]
        last = [max(r for r in range(5) if r == 0 or spent[s, r] <= 5e-8) for s in range(2)]
        assert last == [2, 1]
        scores.append(float(np.mean([accuracy[s, r] for s, r in enumerate(last)])))
    assert sorted(point.score for point in found.points) == pytest.approx(sorted(scores))
    _, chosen = tune.write(found, asked, tmp_path)
    assert "% after 5e-08 J" in chosen.read_text()


@pytest.mark.parametrize("search", ["grid", "turns", "halving"])
def test_a_choice_among_points_of_which_some_failed_is_not_final(
    search: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ended with an error, full memory for instance, has no score; that is no reason to prefer others."""

    def summary(_: Any, case: Any) -> Any:
        lr = case.config.training.lr
        return None if (case.axes["algorithm.name"], lr) == ("sca", 0.2) else {"validation_accuracy": {"mean": lr}}

    monkeypatch.setattr(tune, "conduct", lambda study, **executor: SimpleNamespace(status=1))
    monkeypatch.setattr(tune.Study, "summary", summary)
    over = ["training.lr", "algorithm.omega"]
    asked = tuning_sweep({"over": over, "rounds": 1, "seeds": [100], "search": search})
    found = tune.tune(asked, tmp_path, "t.toml", device="cpu", quiet=True)
    assert found.status == 1
    (warning,) = (warning for warning in found.warnings if "failed" in warning)
    assert warning.startswith("sca: ")
    assert "no score; the choice is not final" in warning
    best = {dict(group)["algorithm.name"]: dict(point.values)["training.lr"] for group, point in found.chosen.items()}
    assert best["sca"] != 0.2
    table, chosen = tune.write(found, asked, tmp_path)
    assert "nan" not in table.read_text() + chosen.read_text()


def test_a_best_value_at_the_edge_is_pointed_out() -> None:
    asked = tuning_sweep({})
    point = tune.Point((("algorithm.name", "sca"),), (("training.lr", 0.2), ("algorithm.omega", 1.0)), 100, 50.0)
    (warning,) = tune._edges(point, asked.cases, "t")  # two values of ω are no grid to have an edge
    assert "sca: the best training.lr = 0.2 is at the edge" in warning
    assert not tune._edges(tune.Point((), (("training.lr", 0.1),), 100, 50.0), asked.cases, "t")
    clips = parse_sweep({"set": SMALL, "axes": {"training.clip": [1.0, 2.0, math.inf]}}, "t.toml", "t").cases
    edge, endless = (tune.Point((), (("training.clip", clip),), 100, 50.0) for clip in (1.0, math.inf))
    assert tune._edges(edge, clips, "t")
    assert not tune._edges(endless, clips, "t")  # there is nothing beyond


TURNS: dict[str, Any] = {
    "set": {**SMALL, "experiment.seeds": [0]},
    "axes": {
        "cell.radius_m": [500.0, 1500.0],
        "method": [
            {"label": "SCA", "algorithm.name": "sca"},
            {"label": "BB", "algorithm.name": "bb-interior"},
            {"label": "ideal", "algorithm.name": "fedavg", "training.lr": 0.2},
        ],
        "training.lr": [0.1, 0.2, 0.3],
    },
    "override": [
        {"if": {"method": "SCA"}, "axes": {"algorithm.omega": [0.01, 1.0]}},
        {
            "if": {"method": "BB"},
            "axes": {"algorithm.truncation": [1.0, 2.0], "algorithm.interior_radius_m": [1500.0, 900.0, 700.0]},
        },
        {"if": {"method": "ideal"}, "drop": ["training.lr"]},
    ],
    "tune": {
        "over": ["training.lr", "algorithm.omega", "algorithm.truncation", "algorithm.interior_radius_m"],
        "where": {"cell.radius_m": 1500.0},
        "search": "turns",
        "rounds": 4,
        "seeds": [100],
    },
}


def test_turns_choose_each_knob_with_the_rate_and_a_sweep_takes_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made-up scores whose best point is known: (η_0, knob) = (0.2, second value), radius 900 m."""
    import tomllib

    from otafl.studies.sweep import _with_chosen

    asked = parse_sweep(TURNS, "t.toml", "t")
    assert len(asked.cases) == 2 * (3 * 2 + 3 * 2 * 3 + 1)
    tried: list[dict[str, Any]] = []

    def scored(cases: Any, sweep: Any, folder: Path, chosen: Any, rounds: int, executor: Any) -> Any:
        points = []
        for case in cases:
            tried.append(dict(case.axes))
            value = 50.0 - 100 * abs(case.axes["training.lr"] - 0.2)
            value += case.axes.get("algorithm.omega", 0.0) + case.axes.get("algorithm.truncation", 0.0)
            value += case.axes.get("algorithm.interior_radius_m") == 900.0
            points.append(tune._point(case, chosen, value))
        return points, 0

    monkeypatch.setattr(tune, "_evaluate", scored)
    found = tune.tune(asked, tmp_path, "t.toml", device="cpu", quiet=True)
    assert {axes["cell.radius_m"] for axes in tried} == {1500.0}
    runs = {tuple(axes.items()) for axes in tried}
    assert (
        tune.plan(asked, "t.toml") == f"2 choices, {len(runs)} runs: {4 * len(runs)} rounds of a seed; nothing was run"
    )
    bb = [axes for axes in tried if axes["method"] == "BB"]
    assert len(bb) == 3 * 2 + 3 * 3  # not 3 · 2 · 3
    assert all(axes["algorithm.interior_radius_m"] == 1500.0 for axes in bb[:6])
    assert all(axes["algorithm.truncation"] == 2.0 for axes in bb[6:])
    assert not [axes for axes in tried if axes["method"] == "ideal"]  # nothing to choose
    _, file = tune.write(found, asked, tmp_path)
    rules = tomllib.loads(file.read_text())["override"]
    report = parse_sweep(_with_chosen(TURNS, rules, "t.toml", "chosen.toml"), "t.toml", "t")
    assert len(report.cases) == 2 * 3  # both radii
    values = {case.axes["method"]: (case.config.training.lr, case.config.algorithm.spec) for case in report.cases}
    assert values["SCA"][0] == values["BB"][0] == values["ideal"][0] == 0.2
    assert values["SCA"][1].omega == 1.0
    assert (values["BB"][1].truncation, values["BB"][1].interior_radius_m) == (2.0, 900.0)
    with pytest.raises(ConfigError, match="no choice for"):
        parse_sweep(_with_chosen(TURNS, rules[:1], "t.toml", "chosen.toml"), "t.toml", "t")


def test_figures_need_the_papers_runs() -> None:
    """15 cells of figure 2, nine values of γ, and no run twice."""
    sweep, wanted = paper.sweep_of(
        figures := ["fig2", "fig3", "fig5"], {name: paper.needs(name, False) for name in figures}
    )
    assert len(wanted["fig2"]) == 15
    assert [need.config.algorithm.spec.gamma for need in wanted["fig3"]] == list(paper.GAMMAS)
    assert len(sweep.cases) == 15 + 9 - 1  # FedOAG at its chosen γ is in both
    assert {case.config.experiment.rounds for case in sweep.cases} == {800}
    assert {case.config.experiment.seeds for case in sweep.cases} == {tuple(range(10))}
    for need in wanted["fig2"]:
        assert need.config.data.name == "mnist"


def test_quick_is_a_reduction_that_hears_the_same_devices() -> None:
    full, quick = (paper.needs("fig3", q)[4].config for q in (False, True))
    assert quick.experiment.rounds == 100
    assert quick.model.spec.hidden == (128,)
    size = 784 * 128 + 128 + 128 * 10 + 10 if quick.data.name == "mnist" else 64 * 128 + 128 + 128 * 10 + 10
    ratio = quick.algorithm.spec.gamma / full.algorithm.spec.gamma
    assert ratio == pytest.approx((size / 814_090) ** 0.5, rel=1e-3)
