"""Chooses hyper-parameters by one rule and budget for every method, on seeds and data that are not reported.

The axes of a sweep named in `[tune] over` are searched; every combination of the other axes gets its own choice:

    [tune]
    over = ["training.lr", "algorithm.gamma"]    # default: training.lr
    where = { "cell.radius_m" = 1500.0 }         # search in these runs only; their choice is for all radii
    seeds = [100, 101, 102]                      # apart from the reported ones
    rounds = 100
    eval_every = 100                             # default: only after the last round
    at = "seconds=20"                            # score what is reached within a budget (eval_every = 1 by default)
    search = "grid"                              # or "turns", "halving" or "optuna"
    trials = 20                                  # optuna: evaluations per choice

The score is the validation accuracy of the last rounds (of the last 50, as far as they are recorded), or of the last
recorded model within the budget, mean over seeds, where a seed that failed counts with 0.
Turns searches the first axis together with each of the others, one after the other: an axis has the first of its values
until its turn, and what was chosen for it afterwards.
Halving runs the whole grid for a ninth of the rounds, the best third of it for a third, and the best third of these in
full. Optuna searches between the smallest and largest value of each axis, in logarithms where all are positive.
A combination with a single point has nothing to choose and is not run.

Knows: sweeps, studies, validation accuracy.
Does not know: methods.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from otafl import registry
from otafl.config.schema import as_toml
from otafl.disk import explained, put
from otafl.errors import ConfigError, OtaflError
from otafl.report.axes import Budget
from otafl.report.statistics import accuracy_in
from otafl.runs.result import read_run
from otafl.studies.conduct import conduct
from otafl.studies.study import Study
from otafl.studies.sweep import Case, Sweep

DEFAULTS: dict[str, Any] = {
    "over": ["training.lr"],
    "where": {},
    "seeds": [100, 101, 102],
    "rounds": 100,
    "eval_every": None,
    "at": None,
    "search": "grid",
    "trials": 20,
}
SEARCHES = ("grid", "turns", "halving", "optuna")


@dataclass(frozen=True)
class Point:
    """One configuration that was tried."""

    group: tuple[tuple[str, Any], ...]
    """The axes that are not searched, with their values."""
    values: tuple[tuple[str, Any], ...]
    """The searched axes, with their values."""
    rounds: int
    score: float
    """Validation accuracy in percent; NaN for a combination with a single point."""
    keys: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The keys that the searched axes set."""


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    points: tuple[Point, ...]
    chosen: Mapping[tuple[tuple[str, Any], ...], Point]
    """Group to its best point."""
    warnings: tuple[str, ...]
    status: int
    after: str = ""
    """The budget after which points are scored, in words; "" for their number of rounds."""


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
    if chosen["at"] is not None:
        chosen["at"] = Budget.parse(str(chosen["at"]))
        if chosen["search"] == "halving":
            raise ConfigError(f'{where}: tune.search = "halving" stops runs by rounds, not by tune.at; take "grid"')
    if chosen["eval_every"] is None:
        chosen["eval_every"] = chosen["rounds"] if chosen["at"] is None else 1
    if not isinstance(chosen["where"], dict) or not set(chosen["where"]) <= set(sweep.axes):
        raise ConfigError(f"{where}: tune.where = {chosen['where']!r}: name axes, and the value that each has")
    for key in ("over", "seeds"):
        if not isinstance(chosen[key], list) or not chosen[key]:
            raise ConfigError(f"{where}: tune.{key} = {chosen[key]!r}: give a list")
    for axis in chosen["over"]:
        if not isinstance(axis, str) or axis not in sweep.axes:
            raise ConfigError(f"{where}: tune.over: {axis!r} is no axis{registry.nearest(str(axis), sweep.axes)}")
        if axis in chosen["where"]:
            raise ConfigError(f"{where}: tune.where: {axis} is searched; it cannot be fixed, too")
    for key in ("rounds", "eval_every", "trials"):
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
Found = tuple[list[Point], int]
"""Points, and the exit status of their runs."""


def _split(case: Case, chosen: Mapping[str, Any]) -> tuple[Axes, Axes]:
    """Split a case's axes into those that tell groups apart, and those that are searched."""
    items = [(axis, _hashable(value)) for axis, value in case.axes.items() if axis not in chosen["where"]]
    over = chosen["over"]
    return tuple(item for item in items if item[0] not in over), tuple(item for item in items if item[0] in over)


def _hashable(value: Any) -> Any:
    """A hashable copy of an axis's value."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def tune(sweep: Sweep, folder: Path, where: str, **executor: Any) -> Tuned:
    """Carry out the search in a folder; runs that are there already are not made again."""
    chosen = settings(sweep, where)
    groups = _searched(sweep, where, chosen)
    best = {group: _point(cases[0], chosen, math.nan) for group, cases in groups.items() if len(cases) == 1}
    part = replace(sweep, cases=tuple(case for group in groups if group not in best for case in groups[group]))
    search: dict[str, Callable[[Sweep, Path, dict[str, Any], dict[str, Any]], Found]] = {
        "grid": _grid,
        "turns": _turns,
        "halving": _halving,
        "optuna": _optuna,
    }
    points, status = search[chosen["search"]](part, folder, chosen, executor) if part.cases else ([], 0)
    for point in _scored(points):
        before = best.get(point.group)
        if point.rounds == chosen["rounds"] and (before is None or point.score > before.score):
            best[point.group] = point
    warnings = (
        *(warning for group in best for warning in _edges(best[group], groups[group], sweep.name)),
        *(warning for group in groups for warning in _unknown(group, points, sweep.name)),
    )
    after = "" if chosen["at"] is None else str(chosen["at"])
    return Tuned(tuple(points), {group: best[group] for group in groups if group in best}, warnings, status, after)


def plan(sweep: Sweep, where: str) -> str:
    """How many runs the search takes, in words."""
    chosen = settings(sweep, where)
    groups = [cases for cases in _searched(sweep, where, chosen).values() if len(cases) > 1]
    runs, rounds = 0, 0
    for cases in groups:
        if chosen["search"] == "grid":
            stages = [(len(cases), 1)]
        elif chosen["search"] == "optuna":
            stages = [(chosen["trials"], 1)]
        elif chosen["search"] == "halving":
            third = math.ceil(len(cases) / 3)
            stages = [(len(cases), 9), (third, 3), (math.ceil(third / 3), 1)]
        else:  # each turn but the first begins with points that are known
            sizes = [len(_values(cases, axis)) or 1 for axis in chosen["over"]]
            stages = [(sizes[0] * (1 + sum(number - 1 for number in sizes[1:])), 1)]
        runs += sum(number for number, _ in stages)
        rounds += sum(number * max(1, chosen["rounds"] // share) for number, share in stages)
    seeds = len(chosen["seeds"])
    return f"{len(groups)} choices, {runs} runs: {rounds * seeds:,} rounds of a seed; nothing was run"


def _searched(sweep: Sweep, where: str, chosen: Mapping[str, Any]) -> dict[Axes, list[Case]]:
    """The cases that are searched, by the choice that they are for."""
    fixed = chosen["where"].items()
    here = [case for case in sweep.cases if all(case.axes.get(axis, value) == value for axis, value in fixed)]
    if not here:
        raise ConfigError(f"{where}: tune.where = {chosen['where']!r}: no run has these values")
    return _grouped(here, chosen)


def _grouped(cases: Iterable[Case], chosen: Mapping[str, Any]) -> dict[Axes, list[Case]]:
    """The cases among which each choice is made."""
    groups: dict[Axes, list[Case]] = {}
    for case in cases:
        groups.setdefault(_split(case, chosen)[0], []).append(case)
    return groups


def _values(cases: Sequence[Case], axis: str) -> list[Any]:
    """The values that an axis has in some cases, in their order."""
    return list(dict.fromkeys(_hashable(case.axes[axis]) for case in cases if axis in case.axes))


def _point(case: Case, chosen: Mapping[str, Any], score: float) -> Point:
    keys = {key: value for axis, part in case.keys.items() if axis in chosen["over"] for key, value in part.items()}
    return Point(*_split(case, chosen), chosen["rounds"], score, keys)


def _tuning_case(case: Case, chosen: Mapping[str, Any], rounds: int, extra: Mapping[str, Any] | None = None) -> Case:
    keys = {
        "experiment.rounds": rounds,
        "experiment.eval_every": min(rounds, chosen["eval_every"]),
        "experiment.seeds": list(chosen["seeds"]),
        "experiment.record": ["server", "validation"],
        **(extra or {}),
    }
    set_by = {**case.keys, **{axis: {axis: value} for axis, value in (extra or {}).items()}}
    return Case({**case.axes, **(extra or {})}, case.config.replace(keys), set_by)


def _evaluate(
    cases: Sequence[Case], sweep: Sweep, folder: Path, chosen: dict[str, Any], rounds: int, executor: dict[str, Any]
) -> Found:
    """Scores of some cases after some rounds; NaN for runs that failed with an error, which tells nothing."""
    part = replace(sweep, cases=tuple({case.config.digest: case for case in cases}.values()))
    study = Study(folder, part)
    outcome = conduct(study, **executor)
    if outcome.status > 128:  # stopped
        raise SystemExit(outcome.status)
    points = []
    for case in part.cases:
        summary = study.summary(case)
        if summary is None:
            points.append(replace(_point(case, chosen, math.nan), rounds=rounds))
            continue
        if "validation_accuracy" not in summary:
            raise OtaflError(f"{study.place(case)}: has no validation accuracy; tuning needs a classification problem")
        score = 100 * summary["validation_accuracy"]["mean"]
        if chosen["at"] is not None:
            result = read_run(study.place(case))
            rows = chosen["at"].rows(result, str(study.place(case)))
            score = float(accuracy_in(result, rows, "validation_accuracy").mean())
        points.append(replace(_point(case, chosen, score), rounds=rounds))
    return points, outcome.status


def _grid(sweep: Sweep, folder: Path, chosen: dict[str, Any], executor: dict[str, Any]) -> Found:
    rounds = chosen["rounds"]
    cases = [_tuning_case(case, chosen, rounds) for case in sweep.cases]
    return _evaluate(cases, sweep, folder, chosen, rounds, executor)


def _turns(sweep: Sweep, folder: Path, chosen: dict[str, Any], executor: dict[str, Any]) -> Found:
    """The first axis together with each of the others in turn, per group."""
    first, *others = chosen["over"]
    groups = _grouped(sweep.cases, chosen)
    here = {
        group: {axis: _values(cases, axis)[0] for axis, _ in _split(cases[0], chosen)[1]}
        for group, cases in groups.items()
    }
    points: dict[tuple[Axes, Axes], Point] = {}
    status = 0
    for turn in range(max(1, len(others))):
        asked: list[Case] = []
        for group, cases in groups.items():
            knobs = [axis for axis in others if axis in here[group]]
            if turn < max(1, len(knobs)):
                fixed = {k: v for k, v in here[group].items() if k != first and k not in knobs[turn : turn + 1]}
                asked += [c for c in cases if all(_hashable(c.axes[axis]) == value for axis, value in fixed.items())]
        if not asked:  # nobody has so many knobs
            break
        cases = [_tuning_case(case, chosen, chosen["rounds"]) for case in asked]
        found, code = _evaluate(cases, sweep, folder, chosen, chosen["rounds"], executor)
        status = max(status, code)
        points |= {(point.group, point.values): point for point in found}
        for group in groups:
            scores = [point for point in _scored(found) if point.group == group]
            if scores:
                here[group] = dict(max(scores, key=lambda point: point.score).values)
    return list(points.values()), status


def _halving(sweep: Sweep, folder: Path, chosen: dict[str, Any], executor: dict[str, Any]) -> Found:
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
            ranked = sorted((p for p in _scored(found) if p.group == group), key=lambda p: -p.score)
            kept |= {(p.group, p.values) for p in ranked[: max(1, math.ceil(len(ranked) / 3))]}
        alive = [case for case in alive if _split(case, chosen) in kept]
    return points, status


def _optuna(sweep: Sweep, folder: Path, chosen: dict[str, Any], executor: dict[str, Any]) -> Found:
    """Tree-structured Parzen estimator between the ends of each axis, per group, one evaluation after the other."""
    try:
        import optuna
    except ImportError as error:
        raise OtaflError("tune.search = \"optuna\" needs Optuna: pip install 'otafl[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    points: list[Point] = []
    status = 0
    for cases in _grouped(sweep.cases, chosen).values():
        case = cases[0]
        axes = [axis for axis in chosen["over"] if axis in case.axes]
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
        for _ in range(chosen["trials"]):
            trial = study.ask()
            extra = {axis: _suggest(trial, axis, _values(cases, axis)) for axis in axes}
            found, code = _evaluate(
                [_tuning_case(case, chosen, chosen["rounds"], extra)], sweep, folder, chosen, chosen["rounds"], executor
            )
            status = max(status, code)
            points += found
            if _scored(found):
                study.tell(trial, found[0].score)
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return points, status


def _suggest(trial: Any, axis: str, values: list[Any]) -> Any:
    if all(isinstance(value, float) for value in values):
        return float(f"{trial.suggest_float(axis, min(values), max(values), log=min(values) > 0):.4g}")
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return trial.suggest_int(axis, min(values), max(values))
    return trial.suggest_categorical(axis, values)


def _scored(points: Iterable[Point]) -> list[Point]:
    """The points whose runs have a score."""
    return [point for point in points if not math.isnan(point.score)]


def _unknown(group: Axes, points: Sequence[Point], name: str) -> list[str]:
    """A warning if runs of a choice failed with an error: then it is not the choice that was asked for."""
    mine = [point for point in points if point.group == group]
    failed = len(mine) - len(_scored(mine))
    where = ", ".join(str(v) for _, v in group) or name
    return (
        [f"{where}: {failed} of {len(mine)} points failed and have no score; the choice is not final"] if failed else []
    )


def _edges(point: Point, cases: Sequence[Case], name: str) -> list[str]:
    """A warning for every searched axis of numbers whose best value is the least or the greatest finite one tried."""
    found = []
    for axis, value in point.values:
        values = _values(cases, axis)
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(values) > 2 and value in (min(numbers), max(numbers)) and math.isfinite(value):
            where = ", ".join(str(v) for _, v in point.group) or name
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
        table.writerow(
            [
                *(place.get(axis, "") for axis in axes),
                point.rounds,
                "" if math.isnan(point.score) else f"{point.score:.4f}",
                mark,
            ]
        )
    lines = ["# Values chosen by 'otafl tune'; 'otafl sweep FILE --chosen' takes them.", ""]
    for group, point in tuned.chosen.items():
        told = f"validation accuracy {point.score:.2f} % after {tuned.after or f'{point.rounds} rounds'}"
        lines.append("# nothing to choose" if math.isnan(point.score) else f"# {told}")
        lines.append("[[override]]")
        if group:
            lines.append(f"if = {{ {', '.join(f'{as_toml(a)} = {as_toml(v)}' for a, v in group)} }}")
        lines.append(f"set = {{ {', '.join(f'{as_toml(a)} = {as_toml(v)}' for a, v in point.keys.items())} }}")
        lines.append("")
    paths = folder / "tuning.csv", folder / "chosen.toml"
    with explained(folder):
        put(paths[0], text.getvalue().encode())
        put(paths[1], "\n".join(lines).encode())
    return paths
