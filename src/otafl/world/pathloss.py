"""Mean channel gain as a function of distance, and shadowing along a device's path.

Knows: where devices are, random streams.
Does not know: fading, how devices move, who transmits.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from otafl.random import Streams
from otafl.units import SPEED_OF_LIGHT_MPS, db_to_linear
from otafl.world.fading import unit_log_normal
from otafl.world.process import along_path


class PathLoss(Protocol):
    """A law of mean power gain over distance.

    A law that depends on more than distance also has `gains(positions_m, streams)`, which gives Λ of every round and
    device [T, M] for positions [T, M, 2] and is then used instead.
    """

    def mean_gain(self, distance_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Λ = E|h|² at each distance, linear."""
        ...


@dataclass(frozen=True, kw_only=True)
class Shadowed(ABC):
    """Log-normal shadowing that changes along a device's path; it is part of Λ, so whoever knows Λ knows it."""

    shadowing_db: Annotated[float, Ge(0), Le(50)] = 0.0
    """Standard deviation of the shadowing, whose mean power is 1; 0: no shadowing (paper)."""
    decorrelation_m: Annotated[float, Ge(0)] = 50.0
    """Distance travelled over which its correlation falls to 1/e (Gudmundson); 0: a fresh value in every round."""

    @abstractmethod
    def mean_gain(self, distance_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Λ without shadowing."""

    def gains(self, positions_m: NDArray[np.float64], streams: Streams) -> NDArray[np.float64]:
        """Λ of every round and device, [T, M]."""
        gain = self.mean_gain(np.hypot(positions_m[..., 0], positions_m[..., 1]))
        if self.shadowing_db == 0:
            return gain
        field = along_path(positions_m, self.decorrelation_m, streams, "shadowing")
        return gain * unit_log_normal(self.shadowing_db, field)


@dataclass(frozen=True)
class LogDistance(Shadowed):
    """Log-distance law Λ(D) = 10^(−reference_db/10) · (max(D, D_0)/D_0)^(−exponent)."""

    reference_db: float = 50.0
    """Loss PL_ref at the reference distance; paper: 50 dB."""
    reference_m: Annotated[float, Gt(0)] = 1.0
    """Reference distance D_0; nearer devices are treated as if they were at D_0; paper: 1 m."""
    exponent: Annotated[float, Gt(0)] = 3.5
    """Path-loss exponent n; paper: 3.5."""
    carrier_hz: Annotated[float, Gt(0)] = 2.4e9
    """Carrier frequency f_c; this law does not use it, other models may; paper: 2.4 GHz."""

    def mean_gain(self, distance_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Λ = E|h|² at each distance, linear."""
        ratio = np.maximum(distance_m, self.reference_m) / self.reference_m
        return db_to_linear(-self.reference_db) * ratio**-self.exponent


@dataclass(frozen=True)
class FreeSpace(Shadowed):
    """Friis' law, Λ(D) = (λ/(4π max(D, 1 m)))²."""

    carrier_hz: Annotated[float, Gt(0)] = 2.4e9
    """Carrier frequency f_c; paper: 2.4 GHz."""

    def mean_gain(self, distance_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Λ = E|h|² at each distance, linear."""
        wavelength_m = SPEED_OF_LIGHT_MPS / self.carrier_hz
        return np.asarray((wavelength_m / (4 * np.pi * np.maximum(distance_m, 1.0))) ** 2)
