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

Seeds are not an axis, since all seeds of a run are one batch (`experiment.seeds`).

Knows: sweep files, configurations.
Does not know: how runs are carried out.
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otafl import registry
from otafl.config.schema import Config, load_config
from otafl.disk import content_of
from otafl.errors import ConfigError
from otafl.runs.identity import name_hash

TOP_LEVEL = ("name", "base", "set", "axes", "override", "tune")
BASE = "base"
MOST_RUNS = 100_000


@dataclass(frozen=True)
class Case:
    """One run of a sweep."""

    axes: Mapping[str, Any]
    """Axis to the value or label of this run, without axes that do not apply."""
    config: Config

    @property
    def label(self) -> str:
        """Its values on the axes, to be shown."""
        return ", ".join(_word(value) for value in self.axes.values()) or self.config.experiment.name

    @property
    def folder(self) -> str:
        """Name of its run directory."""
        slug = "-".join(_word(value) for value in self.axes.values()) or self.config.experiment.name
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


def load_sweep(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep file; `overrides` change every run on top of everything else."""
    path = Path(path)
    try:
        content = tomllib.loads(content_of(path).decode())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; see 'otafl sweep --help' for what a sweep file is") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_sweep(content, str(path), path.stem, path.parent, overrides)


def parse_sweep(
    content: Mapping[str, Any],
    where: str,
    default_name: str,
    folder: Path = Path(),
    overrides: Mapping[str, Any] | None = None,
) -> Sweep:
    """The sweep that a file's content describes; paths of base files are relative to `folder`."""
    for key in content:
        if key not in TOP_LEVEL:
            raise ConfigError(
                f"{where}: {key}: unknown{registry.nearest(key, TOP_LEVEL)}; a sweep has {', '.join(TOP_LEVEL)}"
            )
    name = content.get("name", default_name)
    if not isinstance(name, str) or not name or not all(c.isalnum() or c in "-_." for c in name) or name[0] == ".":
        raise ConfigError(f"{where}: name = {name!r}: use letters, digits, '-', '_' and '.'")
    axes = _axes(content.get("axes", {}), where)
    rules = _overrides(content.get("override", []), axes, where)
    fixed = _flat(content.get("set", {}), f"{where}: set")
    base = content.get("base", "stationary")

    cases: dict[str, Case] = {}
    number = 1
    for values in axes.values():
        number *= len(values)
    if number > MOST_RUNS:
        raise ConfigError(f"{where}: {number} runs; at most {MOST_RUNS} in one sweep")
    for point in itertools.product(*axes.values()):
        place = dict(zip(axes, point, strict=True))
        labels = {axis: _label(value) for axis, value in place.items()}
        here, keys = base, dict(fixed)
        rules_here = [rule for rule in rules if rule.matches(place, labels)]
        dropped = {axis for rule in rules_here for axis in rule.drop}
        for axis, value in place.items():
            if axis in dropped:
                continue
            if axis == BASE:
                here = value
            elif isinstance(value, Mapping):
                keys |= {key: item for key, item in value.items() if key != "label"}
            else:
                keys[axis] = value
        for rule in rules_here:
            keys |= rule.set
        keys |= overrides or {}
        try:
            config = load_config(_base(here, folder), keys)
        except ConfigError as error:
            raise ConfigError(f"{where}, run {', '.join(map(_word, labels.values())) or 'base'}: {error}") from error
        kept = {axis: label for axis, label in labels.items() if axis not in dropped}
        cases.setdefault(config.digest, Case(kept, config))
    tune = content.get("tune", {})
    if not isinstance(tune, dict):
        raise ConfigError(f"{where}: write tune as a section, [tune]")
    return Sweep(
        name, tuple(cases.values()), {axis: [_label(v) for v in values] for axis, values in axes.items()}, tune
    )


@dataclass(frozen=True)
class _Override:
    when: Mapping[str, Any]
    set: Mapping[str, Any]
    drop: tuple[str, ...]

    def matches(self, place: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
        for axis, wanted in self.when.items():
            allowed = wanted if isinstance(wanted, list) else [wanted]
            if place[axis] not in allowed and labels[axis] not in allowed:
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
            if key not in ("if", "set", "drop"):
                raise ConfigError(f"{where}: override: {key}: unknown; an override has if, set and drop")
        when = _flat(rule.get("if", {}), f"{where}: override: if")
        drop = rule.get("drop", [])
        if not isinstance(drop, list):
            raise ConfigError(f"{where}: override: drop = {drop!r}: give a list of axes")
        for axis in [*when, *drop]:
            if not isinstance(axis, str) or axis not in axes:
                raise ConfigError(f"{where}: override: {axis!r} is no axis{registry.nearest(str(axis), axes)}")
        found.append(_Override(when, _flat(rule.get("set", {}), f"{where}: override: set"), tuple(drop)))
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


def _base(source: Any, folder: Path) -> str | Path:
    from otafl.config.presets import PRESETS

    if not isinstance(source, str):
        raise ConfigError(f"base = {source!r}: must be a preset's name or a path")
    return source if source in PRESETS else folder / source


def _label(value: Any) -> Any:
    return value["label"] if isinstance(value, Mapping) else value


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
