"""Measured channels from a file: their mean gains serve as path loss, the rest as fading.

A file has the columns time_s, device and h, as re and im or as magnitude (linear). Choose both sections with the same
file. Then Λ_i is the mean of |h_i|² over the recorded rows, and √Λ_i g_i^t is the measured channel.

Knows: files, times, devices.
Does not know: positions, thresholds, who transmits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from otafl.errors import ConfigError
from otafl.random import Streams
from otafl.world.process import check_shared
from otafl.world.traces import Recording


@dataclass(frozen=True)
class _Measured(Recording):
    values: Literal["complex", "magnitude"] = "magnitude"
    """Columns re and im, or magnitude (linear amplitudes, not decibels)."""
    interpolation: Literal["linear", "nearest"] = "nearest"
    """Between two recorded times; "linear" loses power where channels change from row to row."""

    def check_world(self, sections: Mapping[str, Any]) -> None:
        """Both sections are the same recording."""
        pairs = [sections[section].spec for section in ("pathloss", "fading")]
        if (
            not all(isinstance(spec, _Measured) for spec in pairs)
            or len({(spec.file, spec.values, spec.round_s) for spec in pairs}) > 1
        ):
            raise ConfigError(
                'a measured channel needs "measured" in [pathloss] and [fading], with the same file, values and round_s'
            )
        check_shared(self, sections)

    @property
    def _columns(self) -> tuple[str, ...]:
        return ("re", "im") if self.values == "complex" else ("magnitude",)

    def _mean_powers(self, num_devices: int, streams: Streams) -> NDArray[np.float64]:
        """Λ of the chosen devices, over all their recorded rows, [M]."""
        rows = self.chosen(self._columns, num_devices, streams)
        if self.values == "magnitude" and any((values < 0).any() for _, values in rows.values()):
            raise ConfigError(
                f"{self.section}.file = {self.file!r}: a magnitude is negative; give linear amplitudes, not dB"
            )
        powers = np.array([(values**2).sum(-1).mean() for _, values in rows.values()])
        for name, power in zip(rows, powers, strict=True):
            if power <= 0:
                raise ConfigError(f"{self.section}.file = {self.file!r}: device {name} has channel 0 in every row")
        return powers


@dataclass(frozen=True)
class MeasuredGain(_Measured):
    """Mean gains of a measured channel; [fading] must be "measured" with the same file."""

    section: ClassVar[str] = "pathloss"

    def mean_gain(self, distance_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Raise ConfigError: a measured channel has no law of distance."""
        raise ConfigError('pathloss.name = "measured" has no law of distance')

    def gains(self, positions_m: NDArray[np.float64], streams: Streams) -> NDArray[np.float64]:
        """Λ_i in every round, [T, M]."""
        shape = positions_m.shape[:2]
        return np.broadcast_to(self._mean_powers(shape[1], streams), shape).copy()


@dataclass(frozen=True)
class MeasuredFading(_Measured):
    """A measured channel scaled to unit mean power; [pathloss] must be "measured" with the same file."""

    section: ClassVar[str] = "fading"
    pooled: ClassVar[bool] = True
    """All devices share one distribution in `exceed_prob`."""

    def coefficients(self, positions_m: NDArray[np.float64], streams: Streams) -> NDArray[np.complex128]:
        """Each device's channel with unit mean power, [T, M]."""
        num_rounds, num_devices = positions_m.shape[:2]
        found = self.on_rounds(self._columns, num_devices, num_rounds, streams)
        h = found[..., 0] + 1j * (found[..., 1] if self.values == "complex" else 0.0)
        return np.asarray(h / np.sqrt(self._mean_powers(num_devices, streams)))

    def exceed_prob(self, power: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of all recorded rows whose power, divided by their device's mean power, is at least `power`."""
        levels = self.recorded_powers()
        return 1 - np.searchsorted(levels, power, side="left") / len(levels)

    def recorded_powers(self) -> NDArray[np.float64]:
        """Unit-mean powers of all recorded rows, sorted."""
        powers = [(values**2).sum(-1) for _, values in self.recorded(self._columns).values()]
        return np.sort(np.concatenate([power / power.mean() for power in powers]))
