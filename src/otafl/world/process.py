"""Gaussian processes over rounds, from which fading and shadowing are built.

Draws are addressed by round, so that the first rounds do not depend on how many follow.

Knows: positions, random streams.
Does not know: which fading law is built from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from otafl.errors import ConfigError
from otafl.random import Streams
from otafl.units import SPEED_OF_LIGHT_MPS

WAVES = 128  # number of arriving waves in Clarke's model
CHUNK = 64  # rounds of Clarke's model computed at once, for 30 devices


def independent(positions_m: NDArray[Any], streams: Streams, name: str) -> NDArray[np.complex128]:
    """Samples of CN(0, 1), independent over rounds and devices, [T, M]."""
    parts = np.empty((*positions_m.shape[:2], 2))
    for t in range(len(parts)):
        streams.at(name, t).standard_normal(out=parts[t])
    mixed: NDArray[np.complex128] = np.sqrt(0.5) * (parts[..., 0] + 1j * parts[..., 1])
    return mixed


def steps_m(positions_m: NDArray[np.float64]) -> NDArray[np.float64]:
    """Metres that every device moved since the round before, [T, M]; 0 in the first."""
    moved = np.diff(positions_m, axis=0, prepend=positions_m[:1])
    return np.hypot(moved[..., 0], moved[..., 1])


def along_path(
    positions_m: NDArray[np.float64], decorrelation_m: float, streams: Streams, name: str
) -> NDArray[np.float64]:
    """Samples of N(0, 1) with correlation e^{−d/decorrelation} after d metres of a device's path (Gudmundson), [T, M].

    Devices are independent of each other; a device that stands still keeps its value. A decorrelation distance of 0
    gives a fresh value in every round.
    """
    if decorrelation_m > 0:
        kept = np.exp(-steps_m(positions_m) / decorrelation_m)
        kept[0] = 0.0
    else:
        kept = np.zeros(positions_m.shape[:2])
    values = np.empty(kept.shape)
    here = np.zeros(kept.shape[1])
    for t in range(len(kept)):
        if (kept[t] < 1).any():
            fresh = streams.at(name, t).standard_normal(len(here))
            here = kept[t] * here + np.sqrt(1 - kept[t] ** 2) * fresh
        values[t] = here
    return values


def check_shared(fading: object, sections: Mapping[str, Any]) -> None:
    """Refuse a fading law whose `round_s` or `carrier_hz` is another than that of mobility or path loss."""
    for section, key in (("mobility", "round_s"), ("pathloss", "carrier_hz")):
        mine, other = getattr(fading, key, None), getattr(sections[section].spec, key, None)
        if mine is not None and other is not None and other != mine:
            raise ConfigError(
                f"fading.{key} = {mine:g}, but {section}.{key} = {other:g}: they are one; make them agree"
            )


def round_length_s(mobility: object, fading: object) -> float | None:
    """Seconds that a round lasts in the world: `round_s` of the motion, else of the fading; None if neither has one."""
    length: float | None = getattr(mobility, "round_s", getattr(fading, "round_s", None))
    return length


@dataclass(frozen=True, kw_only=True)
class Scattering:
    """How waves from many directions add up, and how fast their sum changes from round to round."""

    memory: Literal["independent", "autoregressive", "clarke"] = "independent"
    """Memory between rounds: none (paper), a given `correlation`, or Clarke's model with the Doppler of the motion."""
    correlation: Annotated[float, Ge(0), Le(1)] = 0.9
    """Correlation of successive rounds, if the memory is autoregressive."""
    scatter_doppler_hz: Annotated[float, Ge(0)] = 0.02
    """Smallest Doppler frequency, from moving surroundings; without it a device that stands still keeps its channel."""
    carrier_hz: Annotated[float, Gt(0)] = 2.4e9
    """f_c of Clarke's model; paper: 2.4 GHz."""
    round_s: Annotated[float, Gt(0)] = 8.0
    """Duration of a round, for `scatter_doppler_hz`; paper: 8 s."""

    def check_world(self, sections: Mapping[str, Any]) -> None:
        """Clarke's model has one round's duration and one carrier with the motion and the path loss."""
        if self.memory == "clarke":
            check_shared(self, sections)

    def scattered(
        self, positions_m: NDArray[np.float64], streams: Streams, name: str = "fading"
    ) -> NDArray[np.complex128]:
        """Samples of CN(0, 1) for every round and device with this memory, [T, M]."""
        if self.memory == "independent":
            return independent(positions_m, streams, name)
        if self.memory == "autoregressive":
            fresh = independent(positions_m, streams, name)
            for t in range(1, len(fresh)):
                fresh[t] = self.correlation * fresh[t - 1] + np.sqrt(1 - self.correlation**2) * fresh[t]
            return fresh
        return self._clarke(positions_m, streams, name)

    def _clarke(self, positions_m: NDArray[np.float64], streams: Streams, name: str) -> NDArray[np.complex128]:
        """Waves from all directions with Gaussian amplitudes; E[g_t g*_{t+k}] = J₀(2π · wavelengths travelled).

        The mean is over seeds: one device's power, averaged over a long run, is 1 ± 0.09, as its waves stay the same.
        """
        num_rounds, num_devices = positions_m.shape[:2]
        rng = streams.at(f"{name} waves")
        parts = rng.standard_normal((2, num_devices, WAVES))
        amplitude = (parts[0] + 1j * parts[1]) * np.sqrt(0.5 / WAVES)
        turn = rng.random((num_devices, 1))
        along = np.cos(2 * np.pi * (np.arange(WAVES) + turn) / WAVES)
        moved = steps_m(positions_m) * self.carrier_hz / SPEED_OF_LIGHT_MPS
        moved[1:] = np.maximum(moved[1:], self.scatter_doppler_hz * self.round_s)
        phase = 2 * np.pi * np.cumsum(moved, axis=0)
        result = np.empty((num_rounds, num_devices), dtype=np.complex128)
        chunk = max(1, CHUNK * 30 // num_devices)
        for start in range(0, num_rounds, chunk):
            part = slice(start, start + chunk)
            result[part] = (amplitude * np.exp(1j * phase[part, :, None] * along)).sum(-1)
        return result
