"""Finds the runs that were named, and gives each a short label that tells it from the others.

A run may be named by its directory, by a folder of run directories, or by the folder of a sweep, whose axes then give
the labels.

Knows: run directories, sweeps' folders.
Does not know: what is done with the results.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from otafl import registry
from otafl.config.schema import Config
from otafl.disk import content_of, readable
from otafl.errors import ConfigError, OtaflError, RunDirectoryError, say
from otafl.runs.result import Result, read_run

RARELY_TOLD = {"experiment.name", "experiment.seeds", "experiment.checkpoint_s", "training.engine"}
RARELY_TOLD |= {"data.digest", "model.digest"}
WORLD = {"data", "cell", "mobility", "pathloss", "fading", "radio", "imperfect"}
"""Sections that say where a method is tried, not what it does."""
LONGEST = 48  # characters of a label that is made from keys; beyond it the directory's name is one
Runs = str | Path | Result | Iterable[str | Path | Result] | Mapping[str, str | Path | Result]
"""One run or several: directories, folders of them, sweeps' folders, results, or any of these by label."""


@dataclass(frozen=True)
class Named:
    """A run and its label."""

    label: str
    result: Result
    path: Path | None = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Axis of its sweep to its value or label there; empty if it belongs to none."""

    def named(self, label: str) -> "Named":
        """The same run under another label."""
        return replace(self, label=label)

    def known(self) -> list[str]:
        """Its axes and the keys of its configuration."""
        return [*self.axes, *_flat(self.result.config)]

    def find(self, axis: str) -> Any:
        """Its value on an axis, or of a key of its configuration; None if it has neither."""
        if axis in self.axes:
            return self.axes[axis]
        if axis in ("base", "name"):
            return self.result.config.experiment.name
        return _flat(self.result.config).get(axis)

    def value(self, axis: str) -> Any:
        """Its value on an axis, or of a key of its configuration, one of which it must have."""
        found = self.find(axis)
        if found is None and axis not in self.known():
            raise ConfigError(f"{self.label}: has no axis or key {axis!r}{registry.nearest(axis, self.known())}")
        return found


def collect(runs: Runs, labels: Sequence[str] | None = None) -> list[Named]:
    """Read the runs that were named; a sweep's come in the order of its file.

    Args:
        runs: what was named.
        labels: a label for each, in their order; default: what tells them apart.
    """
    if isinstance(runs, Mapping):
        labels = list(runs) if labels is None else labels
        runs = list(runs.values())
    elif isinstance(runs, str | Path | Result):
        runs = [runs]
    runs = list(runs)
    for one in runs:
        if not isinstance(one, str | Path | Result):
            raise ConfigError(f"runs: a {type(one).__name__} is no run; name directories, or give results")
    found = [run for one in runs for run in ([Named("", one)] if isinstance(one, Result) else _read(Path(one)))]
    once: dict[Any, Named] = {}
    for run in found:  # a directory that is named twice is one run
        once.setdefault(id(run) if run.path is None else run.path.resolve(), run)
    found = list(once.values())
    if not found:
        raise OtaflError("name at least one run directory")
    labels = labels_of(found) if labels is None else checked_labels(labels, len(found))
    return [run.named(label) for run, label in zip(found, labels, strict=True)]


def checked_labels(labels: Sequence[str], count: int, what: str = "runs") -> Sequence[str]:
    """Labels that were given, one for each of `count` runs, no two alike."""
    if len(labels) != count:
        raise ConfigError(f"{len(labels)} labels for {count} {what}; give one for each, in their order")
    if len(set(labels)) < len(labels):
        raise ConfigError(f"two {what} have the label {next(w for w in labels if list(labels).count(w) > 1)!r}")
    return labels


def read_runs(runs: Runs, labels: Sequence[str] | None = None) -> dict[str, Result]:
    """Read several finished runs: label to result.

    Args:
        runs: run directories, folders of them, or sweeps' folders.
        labels: a label for each, in their order; default: what tells them apart.

    Returns:
        Results by label, a sweep's in the order of its file.

    >>> import otafl, tempfile
    >>> small = {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2}
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = otafl.run(otafl.load_config("quick", small), f"{place}/one", "cpu")
    ...     list(otafl.read_runs(place, ["ours"]))
    ['ours']
    """
    return {run.label: run.result for run in collect(runs, labels)}


def expand(path: Path) -> list[Path]:
    """The run directories that a path stands for."""
    with readable(path):
        if not path.exists():
            raise RunDirectoryError(f"{path}: no such folder")
        if (path / "config.toml").exists():
            return [path]
        sweep = _sweep_of(path)
        if sweep is not None:
            places = [path / "runs" / folder for folder in sweep["runs"]]
            found = [place for place in places if _finished(place)]
            if found and len(found) < len(places):
                say(f"otafl: {path}: {len(places) - len(found)} of {len(places)} runs have not finished; left out")
        else:
            folder = path / "runs" if (path / "runs").is_dir() else path
            inside = sorted(folder.iterdir()) if folder.is_dir() else []
            found = [
                place for place in inside if (place / "config.toml").exists() and (place / "summary.json").exists()
            ]
            if not found and folder == path:
                return [path]  # reading it says what is wrong
    if not found:
        raise RunDirectoryError(f"{path}: has no runs")
    return found


def _finished(place: Path) -> bool:
    try:
        return bool(json.loads(content_of(place / "summary.json"))["status"] != "running")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sweep_of(folder: Path) -> dict[str, Any] | None:
    """What a sweep's folder says of its axes and runs."""
    try:
        content = json.loads(content_of(folder / "sweep.json"))
        return content if isinstance(content["runs"], dict) and isinstance(content["axes"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(path: Path) -> list[Named]:
    found = []
    for place in expand(path):
        sweep = _sweep_of(place.parent.parent) or {"runs": {}}
        axes = sweep["runs"].get(place.name, {})
        found.append(Named("", read_run(place), place, axes if isinstance(axes, dict) else {}))
    return found


def labels_of(runs: Sequence[Named]) -> list[str]:
    """A short label for every run: its values on a sweep's axes, or its method and the keys that tell it from others.

    Directory names stand in where that would be long; a number is added where two labels are equal.
    """
    labels = [_on_axes(run, runs) if run.axes else "" for run in runs]
    if not all(labels) or len(set(labels)) < len(labels):
        labels = names([run.result.config for run in runs])
        labels = [
            run.path.name if len(label) > LONGEST and run.path is not None else label
            for label, run in zip(labels, runs, strict=True)
        ]
    return [label if labels.count(label) == 1 else f"{label} #{i}" for i, label in enumerate(labels)]


def without_axis(runs: Sequence[Named], axis: str) -> list[Named]:
    """The runs without one of their axes."""
    return [replace(run, axes={key: value for key, value in run.axes.items() if key != axis}) for run in runs]


def along(runs: Sequence[Named], axis: str) -> list[Named]:
    """The runs without an axis or key, and without axes of their sweep that only say in other words what it is."""
    said = {
        other: {(repr(run.axes.get(other)), repr(run.find(axis))) for run in runs} for run in runs for other in run.axes
    }
    same = {other for other, pairs in said.items() if len({value for value, _ in pairs}) == len(pairs)}
    same = same if len({repr(run.find(axis)) for run in runs}) > 1 else set()
    for other in same | {axis}:
        runs = without_axis(runs, other)
    return list(runs)


def _on_axes(run: Named, runs: Sequence[Named]) -> str:
    """A run's values on the axes on which the runs differ."""
    axes = list(dict.fromkeys(axis for other in runs for axis in other.axes))
    told = [axis for axis in axes if len({repr(other.axes.get(axis)) for other in runs}) > 1] or axes[:1]
    return ", ".join(word(axis, run.axes[axis], axes) for axis in told if axis in run.axes)


def word(key: str, value: Any, among: Iterable[str]) -> str:
    """A value as a part of a label; if it is no word, with its key's name, and its section where that is ambiguous."""
    if isinstance(value, str):
        return value
    name = key.partition(".")[2] or key
    if sum((other.partition(".")[2] or other) == name for other in among) > 1:
        name = key
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{name} {text}"


def _flat(config: Config) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.to_dict().items() for key, value in keys.items()}


def differences(configs: Sequence[Config]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """For every configuration the keys in which they differ, and the keys that all share."""
    flat = [_flat(config) for config in configs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    shared = {key: flat[0][key] for key in keys if all(values.get(key) == flat[0].get(key) for values in flat)}
    own = [{key: values[key] for key in keys if key in values and key not in shared} for values in flat]
    return own, shared


def names(configs: Sequence[Config]) -> list[str]:
    """For every run its method, and the keys that tell it from others: of the world, or from others of that method.

    Keys that only one of two classes has, because their sections' names differ, are not told: the names are.
    """
    own, _ = differences(configs)
    methods = [config.algorithm.name for config in configs]
    labels = []
    for config, keys in zip(configs, own, strict=True):
        same = [other for other, method in zip(own, methods, strict=True) if method == config.algorithm.name]
        told = []
        for key, value in keys.items():
            section, _, rest = key.partition(".")
            others = own if section in WORLD else same
            if rest != "name":
                others = [other for other in others if other.get(f"{section}.name") == keys.get(f"{section}.name")]
            if key != "algorithm.name" and key not in RARELY_TOLD and any(other.get(key) != value for other in others):
                told.append(key)
        words = [word(key, keys[key], told) if not isinstance(keys[key], str) else str(keys[key]) for key in told]
        labels.append(", ".join([config.algorithm.name, *words]))
    return labels
