"""The run directory: files of a fixed form, which other tools can read and which survive a killed process.

    config.toml         fully resolved; running it again gives the same run
    metrics.csv         tidy, one row per seed and recorded round
    devices.csv         one row per seed and device, at the end
    summary.json        status running | complete | failed, accuracies, times, versions, digests of the files above and
                        of the model, and a checksum of itself
    model.safetensors   x^T per seed, at the end
    log.txt             what happened when
    checkpoint/ROUND/   state.safetensors, metrics.csv, checkpoint.json: the two newest, checksummed

Files are written under a temporary name and then renamed, so that they appear whole or not at all; only log.txt and a
running metrics.csv grow by lines. Reading takes no lock, and writing follows no symbolic link.

Knows: the files of a run.
Does not know: what the numbers mean.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from otafl.config.schema import Config, digest_of
from otafl.disk import content_of, explained, locked, no_links, put, readable, sha256, sync, write
from otafl.errors import OtaflError, RunDirectoryError

CHECKPOINT_FORMAT = 1
KEPT_CHECKPOINTS = 2
MODELS = "model.safetensors"
SEALED = ("config.toml", "metrics.csv", "devices.csv", MODELS)
"""Files whose digests are stored in a finished run's summary."""
ARRAYS = "arrays"
"""Key among a run's sources for the digest of the data that a plug-in loaded."""
RUN_FILES = (*SEALED, "summary.json", "log.txt", "run.lock")


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on."""

    round: int
    elapsed_s: float
    tensors: dict[str, Tensor]
    metrics: str
    """Content of metrics.csv up to here."""
    made_with: Mapping[str, str]
    """Versions, compute device and threads."""
    continued: tuple[str, ...] = ()
    """Notes on rounds from which the run continued with other versions or threads: its last digits may differ."""


class RunDirectory:
    """A run's directory, in which only one process at a time may work."""

    def __init__(self, path: Path, config: Config, sources: Mapping[str, str]) -> None:
        self.path, self._config, self._sources = path, config, dict(sources)
        self._digests = {config.digest}  # of this configuration, as this and older versions write it
        self._lock: IO[str] | None = None

    @staticmethod
    @contextlib.contextmanager
    def open(path: Path, config: Config, sources: Mapping[str, str] | None = None) -> Iterator["RunDirectory"]:
        """Open a new directory, or one of the same configuration, which is locked if unfinished; refuse any other.

        `sources` are the digests of plug-ins and data, a part of a run's identity. A new directory is not made yet.
        """
        directory = RunDirectory(path, config, sources or {})
        with explained(path):
            if directory._is_ours() and directory.finished() is None:
                directory._take_lock()
        try:
            yield directory
        finally:
            if directory._lock is not None:
                directory._lock.close()

    def create(self) -> None:
        """Make and lock the directory, unless that is done; another process may have finished the run meanwhile."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._take_lock()
            if not self._is_ours():
                put(self.path / "config.toml", self._config.to_toml().encode())

    def _is_ours(self) -> bool:
        """True if the directory exists with this configuration, False if it is new or empty; any other is refused."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise RunDirectoryError(f"{path}: is a file; give a directory with --out")
        if not path.exists():
            refuse_inside_a_run(path)
        entries = {entry.name for entry in path.iterdir()} if path.exists() else set()
        entries -= {"run.lock", *(name for name in entries if name.startswith(".") and name.endswith(".tmp"))}
        if "config.toml" not in entries:
            if entries:
                raise RunDirectoryError(f"{path}: is not a run directory (no config.toml); choose another with --out")
            return False
        stored = content_of(path / "config.toml").decode(errors="replace")
        if stored != self._config.to_toml() and not self._resolves_alike(stored):
            raise RunDirectoryError(
                f"{path}: was made by another configuration ({_difference(stored, self._config.to_toml())}); "
                "choose another directory with --out"
            )
        return True

    def _resolves_alike(self, stored: str) -> bool:
        """Whether a stored configuration equals this one, apart from keys that did not exist when it was written."""
        try:
            alike = Config.from_toml(stored) == self._config
        except (OtaflError, ValueError, RecursionError):
            return False
        if alike:
            self._digests.add(digest_of(tomllib.loads(stored)))
        return alike

    def _take_lock(self) -> None:
        self._lock = locked(self.path / "run.lock", f"{self.path}: is in use", "choose another --out")

    def log(self, message: str) -> None:
        """Append a line with the time to log.txt."""
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._append("log.txt", f"{stamp} {message}\n")

    def append_metrics(self, text: str) -> None:
        """Add lines to metrics.csv."""
        self._append("metrics.csv", text)

    def _append(self, name: str, text: str) -> None:
        with explained(self.path), open(self.path / name, "a", encoding="utf-8", opener=no_links) as file:
            file.write(text)

    def write(self, name: str, content: str) -> None:
        """Write a text file, whole or not at all."""
        with explained(self.path):
            put(self.path / name, content.encode())

    def write_model(self, params: Mapping[str, Tensor]) -> None:
        """Write model.safetensors, whole or not at all."""
        with explained(self.path):
            put(self.path / MODELS, save(dict(params)))

    def begin(self) -> None:
        """Write a summary that says that the run is going on, with the digests of its plug-ins and data."""
        self.write("summary.json", json.dumps({"status": "running", "sources": self._sources}) + "\n")

    def finished(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None if it is unfinished; a run with other plug-ins or data is refused."""
        summary = stored_summary(self.path)
        if summary is not None:
            self._check_sources(summary.get("sources"))
        return None if summary is None or summary["status"] == "running" else summary

    def _check_sources(self, stored: Mapping[str, str] | None) -> None:
        """Refuse a run made with other plug-ins or data; code digests of another Python cannot be compared and pass."""
        other = same_sources(stored, self._sources)
        if other is not None:
            raise RunDirectoryError(
                f"{self.path}: was made with {other}; run anew beside it with --fresh, or choose another --out"
            )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final summary with the digests of the files, then delete the checkpoints."""
        with explained(self.path):
            digests = {name: sha256(self.path / name) for name in SEALED}
        whole = _without_nan({**summary, "sources": self._sources, "sha256": digests})
        self.write("summary.json", json.dumps(_sealed(whole), indent=2, allow_nan=False) + "\n")
        shutil.rmtree(self.path / "checkpoint", ignore_errors=True)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, and keep the two newest."""
        with explained(self.path):
            self._save_checkpoint(checkpoint)

    def _save_checkpoint(self, checkpoint: Checkpoint) -> None:
        folder = self.path / "checkpoint"
        _checkpoint_folders(folder)  # refuses a link
        temporary = folder / ".incomplete"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            save_file(checkpoint.tensors, temporary / "state.safetensors")
            sync(temporary / "state.safetensors")
            write(temporary / "metrics.csv", checkpoint.metrics.encode())
            header: dict[str, Any] = {
                "format": CHECKPOINT_FORMAT,
                "config": self._config.digest,
                "sources": self._sources,
                "round": checkpoint.round,
                "elapsed_s": checkpoint.elapsed_s,
                "made_with": dict(checkpoint.made_with),
                "continued": list(checkpoint.continued),
                "sha256": {name: sha256(temporary / name) for name in ("state.safetensors", "metrics.csv")},
            }
            write(temporary / "checkpoint.json", json.dumps(_sealed(header), indent=2).encode())
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        place = folder / f"{checkpoint.round:08d}"
        shutil.rmtree(place, ignore_errors=True)
        os.replace(temporary, place)
        for old in _checkpoint_folders(folder)[KEPT_CHECKPOINTS:]:
            shutil.rmtree(old, ignore_errors=True)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest valid checkpoint, or None if there are none; damaged ones are logged and skipped.

        Raises:
            RunDirectoryError: a checkpoint belongs to another run, or all checkpoints are damaged.
        """
        problems: list[tuple[Path, Exception]] = []
        with readable(self.path):
            folders = _checkpoint_folders(self.path / "checkpoint")
        for folder in folders:
            try:
                checkpoint = self._read_checkpoint(folder)
            except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
                problems.append((folder, error))
                continue
            for damaged, reason in problems:
                self.log(f"checkpoint {damaged.name} is damaged ({reason}); it is passed over")
                with explained(self.path):
                    shutil.rmtree(damaged.with_suffix(".damaged"), ignore_errors=True)
                    os.replace(damaged, damaged.with_suffix(".damaged"))
            return checkpoint
        if problems:
            reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in problems)
            raise RunDirectoryError(
                f"{self.path / 'checkpoint'}: no valid checkpoint is left ({reasons}); restore one, or delete that "
                "folder to start from round 0"
            )
        return None

    def _read_checkpoint(self, folder: Path) -> Checkpoint:
        header = json.loads(content_of(folder / "checkpoint.json"))
        if not isinstance(header, dict):
            raise ValueError("checkpoint.json is not a header")
        if _sealed({key: value for key, value in header.items() if key != "seal"}) != header:
            raise ValueError("checkpoint.json does not match its own checksum")
        if header["config"] not in self._digests or header["format"] != CHECKPOINT_FORMAT:
            raise RunDirectoryError(
                f"{folder}: belongs to another configuration or version of otafl; delete it, or choose another --out"
            )
        self._check_sources(header.get("sources"))
        for name, digest in header["sha256"].items():
            if sha256(folder / name) != digest:
                raise ValueError(f"{name} does not match its checksum")
        tensors = {name: value.clone() for name, value in load_file(folder / "state.safetensors").items()}
        metrics = (folder / "metrics.csv").read_text(encoding="utf-8")
        before = header.get("made_with", {}), tuple(header.get("continued", ()))
        return Checkpoint(header["round"], header["elapsed_s"], tensors, metrics, *before)


def same_sources(stored: Mapping[str, str] | None, now: Mapping[str, str]) -> str | None:
    """What differs between a stored run's plug-ins or data and the present ones; None if nothing, or if unknown."""
    if stored is None:
        return None
    same_python = stored.get("python") == now.get("python")
    for what in sorted({*stored, *now} - {"python"}):
        if stored.get(what) != now.get(what) and (same_python or what == ARRAYS):
            return "other data" if what == ARRAYS else f"another version of the plug-in in [{what}]"
    return None


def refuse_inside_a_run(path: Path) -> None:
    """Refuse a folder inside a run directory."""
    for above in path.absolute().parents:
        if (above / "config.toml").exists() and ((above / "run.lock").exists() or (above / "summary.json").exists()):
            raise RunDirectoryError(f"{path}: is inside the run directory {above}; choose another place")


def stored_summary(path: Path) -> dict[str, Any] | None:
    """Read the summary of a run directory and verify a finished run's files; None if there is no summary yet.

    The key `sealed` tells whether the files could be verified: older versions of otafl stored no digests.

    Raises:
        RunDirectoryError: the summary, or a file whose digest it holds, is damaged or missing.
    """
    file = path / "summary.json"
    with readable(path):
        if not file.is_symlink() and not file.exists():
            if (path / MODELS).exists():
                raise RunDirectoryError(
                    f"{path}: has a final model but no summary.json; delete the directory to run again"
                )
            return None
    try:
        summary = json.loads(content_of(file))
        if summary["status"] not in ("running", "complete", "failed"):
            raise ValueError("no status")
        if not isinstance(summary.get("sources", {}), dict):
            raise TypeError("no sources")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path}: summary.json is damaged; delete it to continue an unfinished run, or the directory to run again"
        ) from error
    if summary["status"] == "running":
        return dict(summary)
    sealed = not {"seal", "sha256", "sources", "finished"}.isdisjoint(summary)
    wrong = _first_damaged(path, summary) if sealed else None
    if wrong is not None:
        raise RunDirectoryError(f"{path}: {wrong} has changed since the run finished; restore it, or delete the run")
    return {**summary, "sealed": sealed}


def _first_damaged(path: Path, summary: dict[str, Any]) -> str | None:
    """The first file of a sealed run that has changed, or None; models may be deleted, to save room."""
    digests = summary.get("sha256")
    seal = {key: value for key, value in summary.items() if key != "seal"}
    if not isinstance(digests, dict) or set(digests) != set(SEALED) or _sealed(seal) != summary:
        return "summary.json"
    for name, digest in digests.items():
        try:
            if sha256(path / name) != digest:
                return str(name)
        except OSError:
            if name != MODELS or (path / name).is_symlink() or (path / name).exists():
                return str(name)
    return None


def publish(path: Path, content: bytes) -> Path:
    """Write a report or figure, whole or not at all, and never over a file of a run; returns its path."""
    folder = path.resolve().parent
    within = "checkpoint" in folder.parts and any((above / "config.toml").exists() for above in folder.parents)
    if within or (path.name in RUN_FILES and (folder / "config.toml").exists()):
        raise RunDirectoryError(f"{path}: is a file of a run; choose another place")
    with explained(path):
        if (path.exists() or path.is_symlink()) and (path.is_symlink() or not path.is_file()):
            raise RunDirectoryError(f"{path}: is there already and no plain file; choose another place")
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, content)
    return path


def _checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    if folder.is_symlink():
        raise RunDirectoryError(f"{folder}: is a symbolic link; put the folder itself there")
    if not folder.is_dir():
        return []
    named = (entry for entry in folder.iterdir() if re.fullmatch(r"\d{8}", entry.name))
    return sorted((entry for entry in named if entry.is_dir() and not entry.is_symlink()), reverse=True)


def _sealed(header: dict[str, Any]) -> dict[str, Any]:
    """The header with a checksum of itself."""
    return header | {"seal": hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()}


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _difference(stored: str, wanted: str) -> str:
    """First key in which two resolved configurations differ."""
    section = ""
    old, new = stored.splitlines(), set(wanted.splitlines())
    for line in old:
        if line.startswith("["):
            section = line.strip("[]")
        elif line and line not in new:
            return f"there {section}.{line}"
    return "a key is missing there"
