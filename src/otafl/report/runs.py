"""Finds the run directories that were named, and gives runs names that tell them apart.

Knows: run directories, sweeps' folders.
Does not know: what is done with the results.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from otafl.config.schema import Config
from otafl.disk import readable
from otafl.errors import OtaflError, RunDirectoryError

RARELY_TOLD = {"experiment.name", "experiment.seeds", "experiment.checkpoint_s", "training.engine"}
RARELY_TOLD |= {"data.digest", "model.digest"}


def expand(paths: Iterable[str | Path]) -> list[Path]:
    """The run directories that paths name; the folder of a sweep stands for all its runs."""
    found: list[Path] = []
    for path in map(Path, paths):
        with readable(path):
            if not (path / "runs").is_dir() or (path / "config.toml").exists():
                found.append(path)
                continue
            runs = sorted(folder for folder in (path / "runs").iterdir() if (folder / "summary.json").exists())
        if not runs:
            raise RunDirectoryError(f"{path}: has no runs")
        found += runs
    if not found:
        raise OtaflError("name at least one run directory")
    return found


def differences(configs: list[Config]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """For every configuration the keys in which they differ, and the keys that all share."""
    flat = [
        {f"{section}.{key}": value for section, keys in config.to_dict().items() for key, value in keys.items()}
        for config in configs
    ]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    shared = {key: flat[0][key] for key in keys if all(values.get(key) == flat[0].get(key) for values in flat)}
    own = [{key: values[key] for key in keys if key in values and key not in shared} for values in flat]
    return own, shared


def names(configs: list[Config]) -> list[str]:
    """A name for every run: its method, and the keys that tell it from others of that method."""
    own, _ = differences(configs)
    methods = [config.algorithm.name for config in configs]
    labels = []
    for config, keys in zip(configs, own, strict=True):
        same = [other for other, method in zip(own, methods, strict=True) if method == config.algorithm.name]
        told = [config.algorithm.name]
        for key, value in keys.items():
            if key == "algorithm.name" or key in RARELY_TOLD:
                continue
            if any(other.get(key) != value for other in same):
                word = f"{value:g}" if isinstance(value, float) else str(value)
                told.append(f"{key.split('.')[1]} {word}")
        labels.append(", ".join(told))
    return [label if labels.count(label) == 1 else f"{label} #{i}" for i, label in enumerate(labels)]
