"""Chooses hyper-parameters by one rule and budget for every method, on seeds and data that are not reported.

The axes of a sweep named in `[tune] over` are searched; every combination of the other axes gets its own choice:

    [tune]
    over = ["training.lr", "algorithm.gamma"]    # default: training.lr
    seeds = [100, 101, 102]                      # apart from the reported ones
    rounds = 100
    search = "grid"                              # or "halving" or "optuna"
    trials = 20                                  # optuna: evaluations per choice

The score is the mean over seeds of the validation accuracy after the last round, 0 where a seed diverged. Halving runs
the whole grid for a ninth of the rounds, the best third of it for a third, and the best third of these in full.
Optuna searches between the smallest and largest value of each axis, in logarithms where all are positive.

Knows: sweeps, studies, validation accuracy.
Does not know: methods.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from otafl import registry
from otafl.config.schema import as_toml
from otafl.disk import explained, put
from otafl.errors import ConfigError, OtaflError
from otafl.studies.conduct import conduct
from otafl.studies.study import Study
from otafl.studies.sweep import Case, Sweep

DEFAULTS: dict[str, Any] = {
    "over": ["training.lr"],
    "seeds": [100, 101, 102],
    "rounds": 100,
    "search": "grid",
    "trials": 20,
}
SEARCHES = ("grid", "halving", "optuna")


@dataclass(frozen=True)
class Point:
    """One configuration that was tried."""

    group: tuple[tuple[str, Any], ...]
    """The axes that are not searched, with their values."""
    values: tuple[tuple[str, Any], ...]
    """The searched axes, with their values."""
    rounds: int
    score: float
    """Validation accuracy in percent."""


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    points: tuple[Point, ...]
    chosen: Mapping[tuple[tuple[str, Any], ...], Point]
    """Group to its best point."""
    warnings: tuple[str, ...]
    status: int


def settings(sweep: Sweep, where: str) -> dict[str, Any]:
    """The section [tune] with its defaults, checked."""
    for key in sweep.tune:
        if key not in DEFAULTS:
            raise ConfigError(
                f"{where}: tune.{key}: unknown{registry.nearest(key, DEFAULTS)}; it has {', '.join(DEFAULTS)}"
            )
    chosen = {**DEFAULTS, **sweep.tune}
    if chosen["search"] not in SEARCHES:
        raise ConfigError(f"{where}: tune.search = {chosen['search']!r}: choose from {', '.join(SEARCHES)}")
    for key in ("over", "seeds"):
        if not isinstance(chosen[key], list) or not chosen[key]:
            raise ConfigError(f"{where}: tune.{key} = {chosen[key]!r}: give a list")
    for axis in chosen["over"]:
        if not isinstance(axis, str) or axis not in sweep.axes:
            raise ConfigError(f"{where}: tune.over: {axis!r} is no axis{registry.nearest(str(axis), sweep.axes)}")
    for key in ("rounds", "trials"):
        if not isinstance(chosen[key], int) or isinstance(chosen[key], bool) or chosen[key] < 1:
            raise ConfigError(f"{where}: tune.{key} = {chosen[key]!r}: must be a whole number above 0")
    if not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in chosen["seeds"]):
        raise ConfigError(f"{where}: tune.seeds = {chosen['seeds']!r}: give whole numbers")
    reported = {seed for case in sweep.cases for seed in case.config.experiment.seeds}
    shared = [seed for seed in chosen["seeds"] if seed in reported]
    if shared:
        raise ConfigError(
            f"{where}: tune.seeds: {shared[0]!r} is also in experiment.seeds; choose on seeds of their own"
        )
    return chosen


Axes = tuple[tuple[str, Any], ...]
"""Axes and their values."""


def _split(case: Case, over: Sequence[str]) -> tuple[Axes, Axes]:
    """Split a case's axes into those that are not searched and those that are."""
    items = [(axis, _hashable(value)) for axis, value in case.axes.items()]
    return tuple(item for item in items if item[0] not in over), tuple(item for item in items if item[0] in over)


def _hashable(value: Any) -> Any:
    """A hashable copy of an axis's value."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def tune(sweep: Sweep, folder: Path, where: str, **executor: Any) -> Tuned:
    """Carry out the search in a folder; runs that are there already are not made again."""
    chosen = settings(sweep, where)
    search: dict[str, Callable[[Sweep, Path, dict[str, Any], dict[str, Any]], tuple[list[Point], int]]] = {
        "grid": _grid,
        "halving": _halving,
        "optuna": _optuna,
    }
    points, status = search[chosen["search"]](sweep, folder, chosen, executor)
    best: dict[tuple[tuple[str, Any], ...], Point] = {}
    for point in points:
        if point.rounds == chosen["rounds"] and point.score > best.get(point.group, Point((), (), 0, -1.0)).score:
            best[point.group] = point
    warnings = tuple(warning for point in best.values() for warning in _edges(point, sweep))
    return Tuned(tuple(points), best, warnings, status)


def _tuning_case(case: Case, chosen: Mapping[str, Any], rounds: int, extra: Mapping[str, Any] | None = None) -> Case:
    keys = {
        "experiment.rounds": rounds,
        "experiment.eval_every": rounds,
        "experiment.seeds": list(chosen["seeds"]),
        "experiment.record": ["server", "validation"],
        **(extra or {}),
    }
    return Case({**case.axes, **(extra or {})}, case.config.replace(keys))


def _evaluate(
    cases: Sequence[Case], sweep: Sweep, folder: Path, chosen: dict[str, Any], rounds: int, executor: dict[str, Any]
) -> tuple[list[Point], int]:
    """Scores of some cases after some rounds."""
    part = replace(sweep, cases=tuple({case.config.digest: case for case in cases}.values()))
    study = Study(folder, part)
    outcome = conduct(study, **executor)
    if outcome.status > 128:  # stopped
        raise SystemExit(outcome.status)
    points = []
    for case in part.cases:
        summary = study.summary(case)
        if summary is None:
            continue
        if "validation_accuracy" not in summary:
            raise OtaflError(f"{study.place(case)}: has no validation accuracy; tuning needs a classification problem")
        mean = summary["validation_accuracy"]["mean"]
        diverged = bool(summary.get("diverged")) or mean is None or math.isnan(mean)
        points.append(Point(*_split(case, chosen["over"]), rounds, 0.0 if diverged else 100 * mean))
    return points, outcome.status


def _grid(sweep: Sweep, folder: Path, chosen: dict[str, Any], executor: dict[str, Any]) -> tuple[list[Point], int]:
    rounds = chosen["rounds"]
    cases = [_tuning_case(case, chosen, rounds) for case in sweep.cases]
    return _evaluate(cases, sweep, folder, chosen, rounds, executor)


def _halving(sweep: Sweep, folder: Path, chosen: dict[str, Any], executor: dict[str, Any]) -> tuple[list[Point], int]:
    """A ninth of the rounds for all, a third for the best third, all for the best ninth, per group."""
    points: list[Point] = []
    alive, status = list(sweep.cases), 0
    for share in (9, 3, 1):
        rounds = max(1, chosen["rounds"] // share)
        cases = [_tuning_case(case, chosen, rounds) for case in alive]
        found, code = _evaluate(cases, sweep, folder, chosen, rounds, executor)
        points, status = points + found, max(status, code)
        kept: set[tuple[Any, ...]] = set()
        for group in {point.group for point in found}:
            ranked = sorted((p for p in found if p.group == group), key=lambda p: -p.score)
            kept |= {(p.group, p.values) for p in ranked[: max(1, math.ceil(len(ranked) / 3))]}
        alive = [case for case in alive if _split(case, chosen["over"]) in kept]
    return points, status


def _optuna(sweep: Sweep, folder: Path, chosen: dict[str, Any], executor: dict[str, Any]) -> tuple[list[Point], int]:
    """Tree-structured Parzen estimator between the ends of each axis, per group, one evaluation after the other."""
    try:
        import optuna
    except ImportError as error:
        raise OtaflError("tune.search = \"optuna\" needs Optuna: pip install 'otafl[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    points: list[Point] = []
    status = 0
    groups: dict[tuple[Any, ...], Case] = {}
    for case in sweep.cases:
        groups.setdefault(_split(case, chosen["over"])[0], case)
    for case in groups.values():
        axes = [axis for axis in chosen["over"] if axis in case.axes]
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
        for _ in range(chosen["trials"]):
            trial = study.ask()
            extra = {axis: _suggest(trial, axis, list(sweep.axes[axis])) for axis in axes}
            found, code = _evaluate(
                [_tuning_case(case, chosen, chosen["rounds"], extra)], sweep, folder, chosen, chosen["rounds"], executor
            )
            status = max(status, code)
            if not found:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            points += found
            study.tell(trial, found[0].score)
    return points, status


def _suggest(trial: Any, axis: str, values: list[Any]) -> Any:
    if all(isinstance(value, float) for value in values):
        return float(f"{trial.suggest_float(axis, min(values), max(values), log=min(values) > 0):.4g}")
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return trial.suggest_int(axis, min(values), max(values))
    return trial.suggest_categorical(axis, values)


def _edges(point: Point, sweep: Sweep) -> list[str]:
    """A warning for every searched axis of numbers whose best value is its first or last."""
    found = []
    for axis, value in point.values:
        values = sweep.axes[axis]
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(values) > 2 and value in (min(numbers), max(numbers)):
            where = ", ".join(str(v) for _, v in point.group) or sweep.name
            found.append(
                f"{where}: the best {axis} = {value:g} is at the edge of its grid; extend it, for every method alike"
            )
    return found


def write(tuned: Tuned, sweep: Sweep, folder: Path) -> tuple[Path, Path]:
    """Write tuning.csv with every point, and chosen.toml with each group's best as overrides of a sweep file."""
    axes = list(sweep.axes)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*axes, "rounds", "validation_accuracy", "chosen"])
    for point in tuned.points:
        place = dict(point.group + point.values)
        mark = "yes" if tuned.chosen.get(point.group) == point else ""
        table.writerow([*(place.get(axis, "") for axis in axes), point.rounds, f"{point.score:.4f}", mark])
    lines = ["# Values chosen by 'otafl tune'; paste them into a sweep file.", ""]
    for group, point in tuned.chosen.items():
        lines.append(f"# validation accuracy {point.score:.2f} % after {point.rounds} rounds")
        lines.append("[[override]]")
        if group:
            lines.append(f"if = {{ {', '.join(f'{as_toml(a)} = {as_toml(v)}' for a, v in group)} }}")
        lines.append(f"set = {{ {', '.join(f'{as_toml(a)} = {as_toml(v)}' for a, v in point.values)} }}")
        lines.append("")
    paths = folder / "tuning.csv", folder / "chosen.toml"
    with explained(folder):
        put(paths[0], text.getvalue().encode())
        put(paths[1], "\n".join(lines).encode())
    return paths
