"""A sweep file: a base configuration and axes, and the runs that it asks for.

    name = "gamma"                                   # default: the file's name
    base = "stationary"                              # a preset or a configuration file
    set = { "experiment.rounds" = 200 }              # on top of the base, for all

    [axes]                                           # every combination is a run
    base = ["stationary", "mixed"]                   # an axis over bases
    "algorithm.name" = ["fedoag", "sca"]             # an axis over a key
    "algorithm.gamma" = [3e-10, 1e-9]
    rate = [{ label = "slow", "training.lr" = 0.01 }, { label = "fast", "training.lr" = 0.1 }]   # several keys at once

    [[override]]                                     # where a run's axes match `if`
    if = { "algorithm.name" = "sca" }
    set = { "training.lr" = 0.03 }
    drop = ["algorithm.gamma"]                       # this axis does not apply there: one run instead of several
    axes = { "algorithm.omega" = [0.01, 0.1] }       # and this one applies only there

Seeds are not an axis, since all seeds of a run are one batch (`experiment.seeds`).

Knows: sweep files, configurations.
Does not know: how runs are carried out.
"""

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otafl import registry
from otafl.config.schema import Config, load_config
from otafl.disk import content_of
from otafl.errors import ConfigError
from otafl.report.runs import WORLD, word
from otafl.runs.identity import name_hash
from otafl.studies.examples import EXAMPLES

TOP_LEVEL = ("name", "base", "set", "axes", "override", "tune")
OVERRIDE = ("if", "set", "drop", "axes")
BASE = "base"
CHOSEN = "chosen by otafl tune"
"""Key of a sweep's content under which a file of choices and its overrides are handed on."""
MOST_RUNS = 100_000


@dataclass(frozen=True)
class Case:
    """One run of a sweep."""

    axes: Mapping[str, Any]
    """Axis to the value or label of this run, without axes that do not apply."""
    config: Config
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Axis to the keys that its value sets."""

    @property
    def label(self) -> str:
        """Its values on the axes, to be shown."""
        return (
            ", ".join(word(axis, value, self.axes) for axis, value in self.axes.items()) or self.config.experiment.name
        )

    @property
    def folder(self) -> str:
        """Name of its run directory."""
        slug = "-".join(_word(value) for value in self.axes.values()) or self.config.experiment.name
        slug = slug.replace("−", "minus ")
        safe = "".join(c if c.isalnum() or c in "-_.+=" else "_" for c in slug).strip("._-")[:80]
        return f"{safe}-{name_hash(self.config)}"


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file, resolved to runs."""

    name: str
    cases: tuple[Case, ...]
    axes: Mapping[str, Sequence[Any]]
    """Axis to its values or labels."""
    tune: Mapping[str, Any] = field(default_factory=dict)
    """The section [tune], for `otafl tune`."""

    @property
    def worlds(self) -> list[str]:
        """The axes that change nothing but the world; none if all do."""
        others = {axis for case in self.cases for axis, keys in case.keys.items() if {*map(_section, keys)} - WORLD}
        found = [axis for axis in self.axes if axis not in others]
        return found if len(found) < len(self.axes) else []


def load_sweep(path: str | Path, overrides: Mapping[str, Any] | None = None, chosen: str | Path | None = None) -> Sweep:
    """Read a sweep file.

    Args:
        path: the file, or the name of an example: see `EXAMPLES`.
        overrides: keys that change every run, on top of everything else.
        chosen: a file that `otafl tune` wrote for this sweep; searched axes then have their chosen values only.

    Returns:
        The sweep, with every run's configuration checked.
    """
    path = EXAMPLES.get(str(path), Path(path))
    content = _content(path, "see 'otafl sweep --help' for what a sweep file is")
    if chosen is not None:
        rules = _content(Path(chosen), "'otafl tune' writes it").get("override", [])
        content = _with_chosen(content, rules, str(path), str(chosen))
    return parse_sweep(content, str(path), path.stem, path.parent, overrides)


def searched(content: Mapping[str, Any]) -> list[Any]:
    """The axes that the section [tune] of a sweep searches, as they stand there."""
    section = content.get("tune", {})
    over = section.get("over", ["training.lr"]) if isinstance(section, dict) else []
    return over if isinstance(over, list) else []


def _content(path: Path, hint: str) -> dict[str, Any]:
    try:
        return tomllib.loads(content_of(path).decode())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file{registry.nearest(str(path), EXAMPLES)}; {hint}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _with_chosen(content: Mapping[str, Any], rules: Any, where: str, chosen: str) -> dict[str, Any]:
    """The content of a sweep file without the axes that were searched, and with what was chosen for each run."""
    over = searched(content)

    def kept(axes: Any) -> Any:
        return {k: v for k, v in _flat(axes, f"{where}: axes").items() if k not in over}

    def rest(rule: Any) -> Any:
        if not isinstance(rule, dict):
            return rule
        rule = dict(rule)
        if "axes" in rule:
            rule["axes"] = kept(rule["axes"])
        if isinstance(rule.get("drop"), list):
            rule["drop"] = [axis for axis in rule["drop"] if axis not in over]
        return rule

    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules) or not rules:
        raise ConfigError(f"{chosen}: has no choices; it is a file that 'otafl tune' wrote")
    own = content.get("override", [])
    own = [rest(rule) for rule in own] if isinstance(own, list) else own
    return {**content, "axes": kept(content.get("axes", {})), "override": own, CHOSEN: (chosen, rules)}


def parse_sweep(
    content: Mapping[str, Any],
    where: str,
    default_name: str,
    folder: Path = Path(),
    overrides: Mapping[str, Any] | None = None,
) -> Sweep:
    """The sweep that a file's content describes; paths of base files are relative to `folder`."""
    for key in content:
        if key not in (*TOP_LEVEL, CHOSEN):
            raise ConfigError(
                f"{where}: {key}: unknown{registry.nearest(key, TOP_LEVEL)}; a sweep has {', '.join(TOP_LEVEL)}"
            )
    name = content.get("name", default_name)
    if not isinstance(name, str) or not name or not all(c.isalnum() or c in "-_." for c in name) or name[0] == ".":
        raise ConfigError(f"{where}: name = {name!r}: use letters, digits, '-', '_' and '.'")
    axes = _axes(content.get("axes", {}), where)
    rules = _overrides(content.get("override", []), axes, where)
    source, choices = content.get(CHOSEN, ("", []))
    choices = _overrides(choices, {axis: [] for axis in _all_axes(axes, rules)}, source)
    fixed = _flat(content.get("set", {}), f"{where}: set")
    base = content.get("base", "stationary")

    cases: dict[str, Case] = {}
    for place in list(_places(axes, rules, where)):  # before any is checked, so that too many are refused at once
        here, keys, set_by = base, dict(fixed), {}
        for axis, value in place.items():
            if axis == BASE:
                here = value
                continue
            set_by[axis] = (
                {k: v for k, v in value.items() if k != "label"} if isinstance(value, Mapping) else {axis: value}
            )
            keys |= set_by[axis]
        for rule in rules:
            if rule.matches(place):
                keys |= rule.set
        told = ", ".join(word(axis, _label(value), place) for axis, value in place.items()) or "base"
        chosen = [rule for rule in choices if rule.matches(place)]
        if source and not chosen:
            raise ConfigError(f"{source}: has no choice for {told}; run 'otafl tune {where}' again")
        for rule in chosen:
            keys |= rule.set
        for axis, own in set_by.items():
            for key in own.keys() & (overrides or {}).keys():
                what = "is an axis of this sweep" if key == axis else f"is set by the axis {axis!r}"
                raise ConfigError(f"--set {key}: {what}; change the file, since its labels would be wrong")
        keys |= overrides or {}
        try:
            config = load_config(_base(here, folder), keys)
        except ConfigError as error:
            raise ConfigError(f"{where}, run {told}: {error}") from error
        labels = {axis: _label(value) for axis, value in place.items()}
        cases.setdefault(config.digest, Case(labels, config, set_by))
    tune = content.get("tune", {})
    if not isinstance(tune, dict):
        raise ConfigError(f"{where}: write tune as a section, [tune]")
    return Sweep(
        name, tuple(cases.values()), {a: list(map(_label, v)) for a, v in _all_axes(axes, rules).items()}, tune
    )


def _places(axes: Mapping[str, list[Any]], rules: Sequence["_Override"], where: str) -> Iterator[dict[str, Any]]:
    """Every combination of the axes that apply together, each as axis to value."""
    number = 0
    for point in itertools.product(*axes.values()):
        place = dict(zip(axes, point, strict=True))
        here = [rule for rule in rules if rule.matches(place)]
        dropped = {axis for rule in here for axis in rule.drop}
        more = {axis: values for rule in here for axis, values in rule.axes.items()}
        outer = {axis: value for axis, value in place.items() if axis not in dropped}
        for inner in itertools.product(*more.values()):
            number += 1
            if number > MOST_RUNS:
                raise ConfigError(f"{where}: more than {MOST_RUNS} runs in one sweep")
            yield outer | dict(zip(more, inner, strict=True))


def _all_axes(axes: Mapping[str, list[Any]], rules: Sequence["_Override"]) -> dict[str, list[Any]]:
    """All axes, also those that apply only to some runs, with all their values."""
    found = dict(axes)
    for rule in rules:
        for axis, values in rule.axes.items():
            before = found.get(axis, [])
            found[axis] = before + [value for value in values if value not in before]
    return found


@dataclass(frozen=True)
class _Override:
    when: Mapping[str, Any]
    set: Mapping[str, Any]
    drop: tuple[str, ...]
    axes: Mapping[str, list[Any]]

    def matches(self, place: Mapping[str, Any]) -> bool:
        """Whether a run on these values has those of `if`."""
        for axis, wanted in self.when.items():
            if axis not in place:
                return False
            allowed = wanted if isinstance(wanted, list) else [wanted]
            if place[axis] not in allowed and _label(place[axis]) not in allowed:
                return False
        return True


def _axes(section: Any, where: str) -> dict[str, list[Any]]:
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: write axes as a section, [axes]")
    axes = {}
    for axis, values in _flat(section, f"{where}: axes").items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: axes: {axis} = {values!r}: give a list of values")
        if axis == "experiment.seeds":
            raise ConfigError(f"{where}: axes: seeds are one batch within a run; put experiment.seeds under set")
        plain = "." in axis or axis == BASE
        checked = []
        for value in values:
            if isinstance(value, dict):
                value = _flat(value, f"{where}: axes: {axis}")
                if not isinstance(value.get("label"), str):
                    raise ConfigError(f"{where}: axes: {axis}: a value of several keys needs a label")
            elif not plain:
                raise ConfigError(
                    f"{where}: axes: {axis}: name a key as section.key, 'base', or give values of several keys"
                )
            checked.append(value)
        labels = [_word(_label(value)) for value in checked]
        if len(set(labels)) != len(labels):
            raise ConfigError(f"{where}: axes: {axis}: a value is named twice")
        axes[axis] = checked
    return axes


def _overrides(rules: Any, axes: Mapping[str, list[Any]], where: str) -> list[_Override]:
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise ConfigError(f"{where}: write overrides as [[override]]")
    found = []
    for rule in rules:
        for key in rule:
            if key not in OVERRIDE:
                raise ConfigError(f"{where}: override: {key}: unknown; an override has {', '.join(OVERRIDE)}")
        when = _flat(rule.get("if", {}), f"{where}: override: if")
        drop = rule.get("drop", [])
        if not isinstance(drop, list):
            raise ConfigError(f"{where}: override: drop = {drop!r}: give a list of axes")
        for axis in [*when, *drop]:
            if not isinstance(axis, str) or axis not in axes:
                raise ConfigError(f"{where}: override: {axis!r} is no axis{registry.nearest(str(axis), axes)}")
        more = _axes(rule.get("axes", {}), f"{where}: override")
        for axis in more:
            if axis in axes or axis == BASE:
                raise ConfigError(
                    f"{where}: override: axes: {axis} is an axis of all runs; change it there, or drop it"
                )
        found.append(_Override(when, _flat(rule.get("set", {}), f"{where}: override: set"), tuple(drop), more))
    return found


def _flat(section: Any, where: str, prefix: str = "") -> dict[str, Any]:
    """Turn nested tables into dotted keys: `algorithm.gamma = …` and `"algorithm.gamma" = …` mean the same."""
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: must be a table of keys")
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            flat |= _flat(value, where, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _section(key: str) -> str:
    return key.partition(".")[0]


def _base(source: Any, folder: Path) -> str | Path:
    from otafl.config.presets import PRESETS

    if not isinstance(source, str):
        raise ConfigError(f"base = {source!r}: must be a preset's name or a path")
    return source if source in PRESETS else folder / source


def _label(value: Any) -> Any:
    return value["label"] if isinstance(value, Mapping) else value


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
