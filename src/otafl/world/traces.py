"""Recorded positions and channels: a table of (time_s, device, values), resampled at the rounds.

Files are CSV with a header line, or Parquet if pyarrow is installed. The resolved configuration contains the file's
digest, so a changed file makes a new run.

Knows: files, times, devices.
Does not know: what the values mean.
"""

import csv
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Gt
from numpy.typing import NDArray

from otafl.disk import content_of
from otafl.errors import ConfigError
from otafl.random import Streams

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded file and how it is read."""

    section: ClassVar[str]
    """Section of the configuration, for error messages."""

    file: str = ""
    """CSV or Parquet with the columns time_s, device and the values; times in seconds from round 0."""
    digest: str = ""
    """Digest of the file's content; filled in automatically, and checked if it is given."""
    round_s: Annotated[float, Gt(0)] = 8.0
    """Duration of a round; paper: 8 s."""
    interpolation: Literal["linear", "nearest"] = "linear"
    """Interpolation between two recorded times."""
    beyond: Literal["refuse", "hold", "repeat"] = "refuse"
    """After the last recorded time: refuse to run, hold the last value, or begin again after one more step."""

    def __post_init__(self) -> None:
        if not self.file:
            raise ConfigError(f"{self.section}.file: name the recorded file")
        try:
            found = hashlib.sha256(content_of(Path(self.file))).hexdigest()[:16]
        except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{self.section}.file = {self.file!r}: cannot be read ({why})") from error
        if self.digest not in ("", found):
            raise ConfigError(
                f"{self.section}.file = {self.file!r}: its content has changed (digest {found}, not {self.digest}); "
                f'put the old file back, or set {self.section}.digest = "" for a new run'
            )
        object.__setattr__(self, "digest", found)

    def on_rounds(self, columns: tuple[str, ...], num_devices: int, num_rounds: int, streams: Streams) -> Array:
        """Values of every round and device, [T, M, columns]."""
        times: Array = np.arange(num_rounds) * np.float64(self.round_s)
        table = self.chosen(columns, num_devices, streams)
        return np.stack([self._at(times, name, *rows) for name, rows in table.items()], axis=1)

    def chosen(self, columns: tuple[str, ...], num_devices: int, streams: Streams) -> dict[str, tuple[Array, Array]]:
        """Times and values of as many recorded devices as the cell has; if there are more, each seed draws its own."""
        table = self.recorded(columns)
        if len(table) < num_devices:
            raise ConfigError(
                f"{self.section}.file = {self.file!r}: has {len(table)} devices, cell.devices = {num_devices}"
            )
        names = sorted(table, key=_rank)
        if len(names) > num_devices:
            drawn = streams.at("recorded devices").permutation(len(names))[:num_devices]
            names = [names[i] for i in sorted(drawn)]
        return {name: table[name] for name in names}

    def recorded(self, columns: tuple[str, ...]) -> dict[str, tuple[Array, Array]]:
        """Times and values [N, columns] of every recorded device, by name."""
        return _table(self.file, self.digest, columns, self.section)

    def _at(self, times: Array, name: str, recorded: Array, values: Array) -> Array:
        first, last, rounding = recorded[0], recorded[-1], 1e-9 * self.round_s
        if first > times[0] + rounding:
            raise ConfigError(f"{self.section}.file = {self.file!r}: device {name} begins at {first:g} s, not at 0")
        if self.beyond == "repeat":
            step = float(np.median(np.diff(recorded))) if len(recorded) > 1 else self.round_s
            times = np.mod(times + rounding, last + step)
        elif times[-1] > last + rounding and self.beyond == "refuse":
            raise ConfigError(
                f"{self.section}.file = {self.file!r}: device {name} ends at {last:g} s, {len(times)} rounds need "
                f'{times[-1]:g} s; run fewer rounds, or set {self.section}.beyond = "hold" or "repeat"'
            )
        times = np.minimum(times, last)
        if self.interpolation == "linear":
            return np.stack([np.interp(times, recorded, column) for column in values.T], axis=-1)
        after = np.clip(np.searchsorted(recorded, times), 1, max(1, len(recorded) - 1))
        nearer = np.abs(times - recorded[after - 1]) <= np.abs(recorded[np.minimum(after, len(recorded) - 1)] - times)
        return np.asarray(values[np.where(nearer, after - 1, np.minimum(after, len(recorded) - 1))])


@lru_cache(maxsize=8)
def _table(file: str, digest: str, columns: tuple[str, ...], section: str) -> dict[str, tuple[Array, Array]]:
    """Times, in increasing order, and values [N, columns] of every device, by name."""
    where = f"{section}.file = {file!r}"
    rows = _parquet(file, where) if file.endswith(".parquet") else _csv(file, where)
    wanted = ("time_s", "device", *columns)
    missing = [name for name in wanted if name not in rows]
    if missing:
        raise ConfigError(f"{where}: has no column {', '.join(missing)}; it has {', '.join(rows) or 'none'}")
    numbers = {name: _numbers(rows[name], name, where) for name in wanted if name != "device"}
    found: dict[str, tuple[Array, Array]] = {}
    devices = np.array([str(name) for name in rows["device"]])
    if not len(devices):
        raise ConfigError(f"{where}: has no rows")
    for name in np.unique(devices):
        mine = devices == name
        order = np.argsort(numbers["time_s"][mine], kind="stable")
        times = numbers["time_s"][mine][order]
        if (np.diff(times) <= 0).any():
            twice = times[1:][np.diff(times) <= 0][0]
            raise ConfigError(f"{where}: device {name} has two rows at {twice:g} s")
        values = np.stack([numbers[column][mine][order] for column in columns], axis=-1)
        found[str(name)] = (times, values)
    return found


def _numbers(values: Any, name: str, where: str) -> Array:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        for i, value in enumerate(values):
            if isinstance(value, list | tuple | dict):
                raise ConfigError(f"{where}: {name} is not a column of numbers") from None
            try:
                float(value)
            except (TypeError, ValueError):
                raise ConfigError(f"{where}: row {i + 1}: {name} = {value!r} is not a number") from None
        raise
    if numbers.ndim != 1:
        raise ConfigError(f"{where}: {name} is not a column of numbers")
    if not np.isfinite(numbers).all():
        bad = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ConfigError(f"{where}: row {bad + 1}: {name} is not a finite number")
    return numbers


def _csv(file: str, where: str) -> dict[str, list[str]]:
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            lines = [(reader.line_num, [cell.strip() for cell in line]) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{where}: is not a CSV file ({error})") from error
    lines = [(number, line) for number, line in lines if any(line)]
    header = lines[0][1] if lines else []
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise ConfigError(f"{where}: has two columns {twice[0]!r}")
    for number, line in lines[1:]:
        if len(line) != len(header):
            raise ConfigError(f"{where}: line {number} has {len(line)} values, the header {len(header)}")
    return {name: [line[i] for _, line in lines[1:]] for i, name in enumerate(header)}


def _rank(name: str) -> tuple[int, int, str]:
    """Sort key: numbered devices first, by number, then the others by name."""
    return (0, int(name), "") if name.isdecimal() and len(name) < 20 else (1, 0, name)


def _parquet(file: str, where: str) -> dict[str, Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{where}: Parquet needs pyarrow: pip install 'otafl[parquet]', or use CSV") from error
    try:
        table = parquet.read_table(file)
    except Exception as error:  # pyarrow has its own exceptions
        raise ConfigError(f"{where}: is not a Parquet file ({str(error).splitlines()[0]})") from error
    return {name: table[name].to_pylist() for name in table.column_names}
