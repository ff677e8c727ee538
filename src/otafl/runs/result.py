"""The result of a run: its rows and its summary, how they become files and are read back.

Knows: columns, seeds, run directories.
Does not know: the loop over rounds, methods.
"""

import html
import importlib
import platform
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from otafl import registry
from otafl._version import __version__
from otafl.config.schema import Config, digest_of, read_config
from otafl.core.metrics import EXPLODED
from otafl.disk import content_of, readable
from otafl.errors import ConfigError, OtaflError, RunDirectoryError
from otafl.registry import in_a_line
from otafl.runs.directory import MODELS, stored_summary
from otafl.runs.table import Recorder

LAST_ROUNDS = 50  # over which accuracies are averaged, as in the paper
FEW_ACTIVE = 0.2  # share of devices below which the cause of divergence may be that hardly anybody is heard
ACCURACIES = ("test_accuracy", "validation_accuracy", "mean_accuracy")


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a run: what `otafl.run` returns, and `otafl.read_run` reads back from a run directory.

    >>> import otafl
    >>> small = {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2}
    >>> result = otafl.run(otafl.load_config("quick", small), device="cpu")
    >>> result.rounds.tolist(), result.status, len(result.params)
    ([0, 2], 'complete', 2)
    """

    config: Config
    """The configuration that was run."""
    rounds: NDArray[np.int64]
    """Recorded rounds r, [R]: a row describes the model after r rounds, so the first is 0, the initial model."""
    metrics: Mapping[str, NDArray[np.float64]]
    """Column name to values [S, R]; NaN where there is none. Accuracies are shares, 0 to 1. `otafl.core.metrics` has
    the columns."""
    params: Tensor
    """Last server model x^T, [S, P]; that of a seed that diverged has exploded or is not finite. [0, P] if the file was
    deleted, which leaves everything else of a run."""
    diverged: Mapping[int, int]
    """Failed seeds: seed to the round after which its model had exploded, or its test loss was not finite."""
    summary: Mapping[str, Any]
    """What summary.json has: each score's mean and standard deviation over seeds, versions, wall time in s. Scores are
    means over the last recorded rounds, r > T − 50; a failed seed counts with an accuracy of 0."""
    notes: tuple[str, ...] = ()
    """Remarks, for instance that γ was scaled to the model, or that another version made a run that was read."""

    @property
    def status(self) -> str:
        """Either "complete", or "failed" if a seed diverged; the other seeds are complete then, too."""
        return str(self.summary["status"])

    def __repr__(self) -> str:
        seeds = len(self.config.experiment.seeds)
        told = f"{self.config.algorithm.name} on {self.config.data.name}, {self.config.experiment.rounds} rounds"
        score = self.summary.get("test_accuracy", {}).get("mean")
        level = "" if score is None else f", test accuracy {100 * score:.2f} %"
        failed = f", {len(self.diverged)} of them failed" if self.diverged else ""
        return f"<Result: {told}, {seeds} seed{'s' if seeds > 1 else ''}{failed}{level}>"

    def _repr_html_(self) -> str:
        scores = []
        for name in ACCURACIES:
            entry = self.summary.get(name)
            if entry is None:
                continue
            for when, part in (("last model", entry["final"]), (self.summary["averaged_over"], entry)):
                spread = "" if part["std"] is None else f" ± {100 * part['std']:.2f}"
                scores.append((f"{name.replace('_', ' ')}, {when}", f"{100 * part['mean']:.2f}{spread} %"))
        rows = [("run", repr(self)[9:-1]), *scores, ("recorded rounds", str(len(self.rounds)))]
        cells = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
        return f"<table>{cells}</table>"

    def to_pandas(self) -> Any:
        """A pandas DataFrame with what metrics.csv has: a row per seed and recorded round, a column per quantity."""
        seeds = self.config.experiment.seeds
        columns: dict[str, Any] = {
            "seed": np.repeat(seeds, len(self.rounds)),
            "round": np.tile(self.rounds, len(seeds)),
        }
        columns |= {name: values.reshape(-1) for name, values in self.metrics.items()}
        return pandas().DataFrame(columns)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """The same for other libraries, for instance `polars.from_dataframe(result)`; needs pyarrow."""
        return self.to_pandas().__arrow_c_stream__(requested_schema)

    def plot(self, x: str = "rounds", y: str = "test_accuracy", **options: Any) -> Any:
        """Draw a column; the same as `otafl.plot(result, x, y, ...)`.

        Args:
            x: "rounds", "uses", "seconds", "joules", "time", or a column.
            y: a column of metrics.csv.
            options: further arguments of `otafl.plot`.

        Returns:
            A picture that shows itself in a notebook and has `save(path)`.
        """
        return importlib.import_module("otafl").plot(self, x, y, **options)


def pandas() -> Any:
    """The package pandas, which only tables for notebooks need."""
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise OtaflError("data frames need pandas: pip install 'otafl[notebook]'") from error


def versions() -> dict[str, str]:
    """Versions on which the last digits of results may depend."""
    return {
        "otafl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def failures(
    config: Config,
    rounds: NDArray[np.int64],
    metrics: Mapping[str, NDArray[np.float64]],
    params: Tensor,
    diverged: Mapping[int, int],
) -> dict[int, int]:
    """Failed seeds: those that diverged, and those that end with an exploded model or a loss that is not finite."""
    failed = dict(diverged)
    late = np.flatnonzero(rounds > first_averaged(config))
    for s, seed in enumerate(config.experiment.seeds):
        if seed in failed:
            continue
        lost = late[~np.isfinite(metrics["test_loss"][s, late])]
        if len(lost):
            failed[seed] = int(rounds[lost[0]])
        elif not bool((params[s : s + 1].abs() <= EXPLODED).all()):
            failed[seed] = config.experiment.rounds
    return {seed: failed[seed] for seed in config.experiment.seeds if seed in failed}


def first_averaged(config: Config) -> int:
    """Accuracies are averaged over the recorded rounds after this one: T − 50, or 0 in a shorter run."""
    return max(0, config.experiment.rounds - LAST_ROUNDS)


def summary_scores(
    config: Config,
    rounds: NDArray[np.int64],
    metrics: Mapping[str, NDArray[np.float64]],
    diverged: Mapping[int, int],
) -> dict[str, Any]:
    """The part of a summary that follows from the rows; a failed seed counts with an accuracy of 0."""
    seeds = config.experiment.seeds
    late = np.flatnonzero(rounds > first_averaged(config))
    scores: dict[str, Any] = {"averaged_over": averaged_over(config)}
    for name in (*ACCURACIES, "test_loss"):
        if name not in metrics:
            continue
        scores[name] = {}
        for place, columns in ((scores[name], late), (scores[name].setdefault("final", {}), late[-1:])):
            per_seed = {
                str(seed): float(metrics[name][s, columns].mean())
                for s, seed in enumerate(seeds)
                if seed not in diverged
            }
            values = np.array([*per_seed.values(), *(0.0 for _ in diverged)])
            known = name in ACCURACIES or not diverged
            place["mean"] = float(values.mean()) if known else None
            place["std"] = float(values.std(ddof=1)) if known and len(values) > 1 else None
            place["per_seed"] = per_seed
    active, spans = metrics["num_active"][:, 1:], np.diff(rounds)
    if np.isfinite(active).any():
        scores["num_active"] = float(np.nansum(active * spans) / (np.isfinite(active) * spans).sum())
    if diverged:
        cause = _cause(config, scores.get("num_active"), min(diverged.values()))
        scores["diverged"] = {str(seed): {"round": r, "cause": cause} for seed, r in diverged.items()}
    return scores


def averaged_over(config: Config) -> str:
    """The rows over which a summary averages accuracies, in words."""
    first, last, every = first_averaged(config) + 1, config.experiment.rounds, config.experiment.eval_every
    rows = [r for r in range(first, last + 1) if r % every == 0 or r == last]
    return f"round {last}" if len(rows) == 1 else f"{len(rows)} rows of rounds {rows[0]} to {last}"


def overlong(config: Config, rounds: NDArray[np.int64], metrics: Mapping[str, NDArray[np.float64]]) -> tuple[str, ...]:
    """A note if the uplink of a round, as a mean between two rows, takes longer than a round lasts in the world."""
    if config.round_s is None or "uplink_s" not in metrics or len(rounds) < 2:
        return ()
    each = np.diff(metrics["uplink_s"], axis=1) / np.diff(rounds)
    longest = float(np.nan_to_num(each).max())
    if longest <= config.round_s:
        return ()
    return (
        f"the uplink of a round takes {longest:.3g} s, and a round lasts {config.round_s:g} s (round_s): the channel "
        "would change meanwhile; a smaller model, more bandwidth or longer rounds",
    )


def _cause(config: Config, num_active: float | None, first: int) -> str:
    """The most likely causes of divergence, which was first seen after a round, in words."""
    causes = [f"training.lr = {config.training.lr:g} is too large"]
    if first <= 1 and config.algorithm.name not in registry.BUILTIN["algorithms"]:
        causes = ["the method itself makes values that are not finite ('otafl check' tells)", *causes]
    gamma, asked = getattr(config.algorithm.spec, "gamma", None), config.cell.cohort or config.cell.devices
    if isinstance(gamma, float) and num_active is not None and num_active < FEW_ACTIVE * asked:
        causes.append(f"algorithm.gamma = {gamma:g} is too high: {num_active:.3g} of {asked} devices are heard")
    elif isinstance(gamma, float) and config.radio.noise_var_j > 0:
        causes.append(f"algorithm.gamma = {gamma:g} lets too much receiver noise in")
    if not config.imperfect.none:
        causes.append("[imperfect] disturbs too much")
    return ", or ".join(causes)


@cache
def current_commit() -> str | None:
    """Git commit of the source tree, if the package runs from one."""
    source = Path(__file__).resolve().parent
    if not any((parent / ".git").exists() for parent in source.parents[:3]):
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(source), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def read_run(path: str | Path) -> Result:
    """Read the result of a finished run directory and verify its files; writes nothing and takes no lock.

    Args:
        path: the run directory, the `out` of `run`.

    Returns:
        Configuration, recorded quantities, last models and summary, as `run` returned them.

    Raises:
        RunDirectoryError: it is no run directory, has not finished, or its files are damaged or have changed.

    >>> import otafl, tempfile
    >>> small = {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2}
    >>> with tempfile.TemporaryDirectory() as place:
    ...     done = otafl.run(otafl.load_config("quick", small), place, "cpu")
    ...     bool((otafl.read_run(place).params == done.params).all())
    True
    """
    path = Path(path)
    file = path / "config.toml"
    with readable(path):
        if not file.exists():
            raise RunDirectoryError(f"{path}: is not a run directory (no config.toml)")
        summary = stored_summary(path)
    if summary is None or summary["status"] == "running":
        raise RunDirectoryError(
            f"{path}: has not finished; continue it with 'otafl run {path}/config.toml --out {path}'"
        )
    try:
        text = content_of(file).decode()
        if not summary["sealed"] and digest_of(tomllib.loads(text)) != summary["config"]:
            raise ValueError("config.toml is not that of the run")
        config = read_config(file)
        recorder = Recorder(config.experiment.seeds, None)
        recorder.restore(content_of(path / "metrics.csv").decode())
        rounds, metrics = recorder.arrays()
        diverged = {int(seed): int(entry["round"]) for seed, entry in summary.get("diverged", {}).items()}
        _check_rows(config, rounds, metrics, diverged)
        models = load_file(path / MODELS) if (path / MODELS).exists() else {}
        stored = [models[f"seed_{seed}"] for seed in config.experiment.seeds] if models or not summary["sealed"] else []
        params = torch.stack(stored) if stored else torch.empty(0, summary["num_params"])
        diverged = failures(config, rounds, metrics, params, diverged)
        known = isinstance(summary["wall_s"], int | float) and isinstance(summary["device"], str)
        if not known or params.shape[1] != summary["num_params"]:
            raise ValueError("summary.json and model.safetensors do not belong together")
        scores = summary_scores(config, rounds, metrics, diverged)
        notes = (*_notes(path, summary), *overlong(config, rounds, metrics))
    except ConfigError as error:
        raise RunDirectoryError(f"{path}: cannot be read here: {error}") from error
    except Exception as error:
        raise RunDirectoryError(
            f"{path}: is complete but cannot be read ({in_a_line(error)}); delete it and run again"
        ) from error
    old = ("test_accuracy", "test_loss", "validation_accuracy", "mean_accuracy", "num_active", "diverged", "continued")
    kept = {key: value for key, value in summary.items() if summary["sealed"] or key not in old}
    summary = {**kept, **scores, "status": "failed" if diverged else "complete"}
    return Result(config, rounds, metrics, params, diverged, summary, notes)


def finished_on(path: Path, summary: Mapping[str, Any]) -> str:
    """When a run finished."""
    if "finished" in summary:
        return str(summary["finished"]).replace("T", " ").removesuffix("+00:00") + " UTC"
    changed = datetime.fromtimestamp((path / "summary.json").stat().st_mtime, UTC)
    return changed.isoformat(" ", timespec="seconds").removesuffix("+00:00") + " UTC"


def _notes(path: Path, summary: Mapping[str, Any]) -> tuple[str, ...]:
    """What a reader of a stored run should know."""
    notes = []
    if not summary["sealed"]:
        notes.append("unsealed: made by a version of otafl that kept no digests, so its files cannot be verified")
    made, commit = summary["versions"]["otafl"], summary.get("commit")
    if made != __version__ or (commit and current_commit() and commit != current_commit()):
        words = [
            f"{version} ({c[:8]})" if c else version for version, c in ((made, commit), (__version__, current_commit()))
        ]
        notes.append(f"made by otafl {words[0]}; this is {words[1]}")
    python = summary.get("sources", {}).get("python")
    if python is not None and not platform.python_version().startswith(f"{python}."):
        notes.append(f"made under Python {python}: whether its plug-ins have changed since cannot be told")
    return (*notes, *(summary.get("continued", ()) if summary["sealed"] else ()))


def _check_rows(
    config: Config,
    rounds: NDArray[np.int64],
    metrics: Mapping[str, NDArray[np.float64]],
    diverged: Mapping[int, int],
) -> None:
    """Raise ValueError if a seed that did not diverge lacks rows or has an impossible accuracy."""
    last, every = config.experiment.rounds, config.experiment.eval_every
    expected = [r for r in range(last + 1) if r % every == 0 or r == last]
    living = [s for s, seed in enumerate(config.experiment.seeds) if seed not in diverged]
    if living and (rounds.tolist() != expected or np.isnan(metrics["staleness_max"][living]).any()):
        raise ValueError("metrics.csv lacks rows")
    if not set(diverged) <= set(config.experiment.seeds):
        raise ValueError("summary.json names other seeds")
    for name in ACCURACIES:
        accuracy = metrics.get(name, np.zeros((len(config.experiment.seeds), 1)))[living]
        if not ((accuracy >= 0) & (accuracy <= 1)).all():
            raise ValueError(f"metrics.csv has an impossible {name}")
