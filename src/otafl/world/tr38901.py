"""Path loss, line-of-sight probability and shadowing of 3GPP TR 38.901 (tables 7.4.1-1, 7.4.2-1, 7.5-6).

Line of sight and shadowing come from Gaussian fields along a device's path (Gudmundson), so that neither jumps from
round to round. A device sees the server where the field lies below the normal quantile of the line-of-sight
probability. Devices are outdoors, at heights up to 13 m.

Knows: where devices are, random streams.
Does not know: fading, how devices move, who transmits.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from scipy import special

from otafl.random import Streams
from otafl.units import SPEED_OF_LIGHT_MPS
from otafl.world.process import along_path

Array = NDArray[np.float64]
NEAREST_M = 10.0  # the formulas hold from here on


@dataclass(frozen=True)
class Scenario(ABC):
    """Common part of the scenarios; each adds its own formulas."""

    breakpoint_factor: ClassVar[float] = 4.0
    environment_m: ClassVar[float] = 1.0
    """Effective height of the surroundings, subtracted from both antenna heights in the breakpoint distance."""
    shadowing_m: ClassVar[tuple[float, float]]
    """Decorrelation distance of shadowing with and without line of sight."""

    carrier_hz: Annotated[float, Ge(0.5e9), Le(100e9)] = 2.4e9
    """Carrier frequency f_c; paper: 2.4 GHz."""
    server_height_m: Annotated[float, Gt(1)] = 25.0
    """Antenna height h_BS of the server."""
    device_height_m: Annotated[float, Ge(1.5), Le(13)] = 1.5
    """Antenna height h_UT of the devices."""
    los: Literal["random", "always", "never"] = "random"
    """Line of sight: with the scenario's probability, always, or never."""
    los_decorrelation_m: Annotated[float, Ge(0)] = 50.0
    """Decorrelation distance of the line of sight along a device's path."""
    shadowing: bool = True
    """Log-normal shadowing with the scenario's deviations; its median is 1, as in the tables."""

    @abstractmethod
    def los_prob(self, distance_m: Array) -> Array:
        """P(line of sight) at a distance on the ground."""

    @abstractmethod
    def loss_db(self, distance_m: Array) -> tuple[Array, Array]:
        """Path loss with and without line of sight."""

    @abstractmethod
    def shadowing_db(self, distance_m: Array) -> tuple[Array, Array]:
        """Deviations of the shadowing with and without line of sight."""

    def mean_gain(self, distance_m: Array) -> Array:
        """Λ without shadowing, averaged over whether there is line of sight."""
        seen, hidden = (10 ** (-loss / 10) for loss in self.loss_db(distance_m))
        prob = self._los_prob(distance_m)
        return np.asarray(prob * seen + (1 - prob) * hidden)

    def gains(self, positions_m: Array, streams: Streams) -> Array:
        """Λ of every round and device, [T, M]."""
        distance_m = np.hypot(positions_m[..., 0], positions_m[..., 1])
        seen = self.in_sight(positions_m, streams)
        loss = np.where(seen, *self.loss_db(distance_m))
        if self.shadowing:
            for deviation, decorrelation_m, name, here in zip(
                self.shadowing_db(distance_m), self.shadowing_m, ("in sight", "hidden"), (seen, ~seen), strict=True
            ):
                loss += here * deviation * along_path(positions_m, decorrelation_m, streams, f"shadowing, {name}")
        return np.asarray(10 ** (-loss / 10))

    def in_sight(self, positions_m: Array, streams: Streams) -> NDArray[np.bool_]:
        """Whether each device sees the server in each round, [T, M]."""
        field = along_path(positions_m, self.los_decorrelation_m, streams, "line of sight")
        seen = special.ndtr(field) < self._los_prob(np.hypot(positions_m[..., 0], positions_m[..., 1]))
        return np.asarray(seen)

    def _los_prob(self, distance_m: Array) -> Array:
        if self.los == "random":
            return self.los_prob(distance_m)
        return np.full(np.shape(distance_m), 1.0 if self.los == "always" else 0.0)

    def _distances(self, distance_m: Array) -> tuple[Array, Array, float, float]:
        """Distance on the ground and in space, breakpoint, f_c in GHz."""
        ground = np.maximum(distance_m, NEAREST_M)
        space = np.hypot(ground, self.server_height_m - self.device_height_m)
        heights = (self.server_height_m - self.environment_m) * (self.device_height_m - self.environment_m)
        breakpoint_m = self.breakpoint_factor * heights * self.carrier_hz / SPEED_OF_LIGHT_MPS
        return ground, space, breakpoint_m, self.carrier_hz / 1e9


@dataclass(frozen=True)
class _Urban(Scenario):
    """Formulas of both urban scenarios, which differ only in their constants."""

    los_m: ClassVar[float]
    """Decay distance of the line-of-sight probability."""
    near: ClassVar[tuple[float, float]]
    """Loss at 1 m and 1 GHz with line of sight, and its slope per decade up to the breakpoint."""
    heights: ClassVar[float]
    """Factor of the logarithm that contains the breakpoint, in the loss beyond it."""
    hidden: ClassVar[tuple[float, float, float, float]]
    """Without line of sight: loss, slope per decade of distance and of frequency, gain per metre of device height."""
    deviations_db: ClassVar[tuple[float, float]]

    def los_prob(self, distance_m: Array) -> Array:
        """P(line of sight) at a distance on the ground."""
        d = np.maximum(distance_m, 18.0)
        return np.asarray(18 / d + np.exp(-d / self.los_m) * (1 - 18 / d))

    def loss_db(self, distance_m: Array) -> tuple[Array, Array]:
        """Path loss with and without line of sight."""
        ground, space, far, ghz = self._distances(distance_m)
        rise, (at_one, slope) = self.server_height_m - self.device_height_m, self.near
        near_db = at_one + slope * np.log10(space) + 20 * np.log10(ghz)
        far_db = at_one + 40 * np.log10(space) + 20 * np.log10(ghz) - self.heights * np.log10(far**2 + rise**2)
        seen = np.where(ground <= far, near_db, far_db)
        loss, by_distance, by_frequency, by_height = self.hidden
        hidden = loss + by_distance * np.log10(space) + by_frequency * np.log10(ghz)
        return seen, np.maximum(seen, hidden - by_height * (self.device_height_m - 1.5))

    def shadowing_db(self, distance_m: Array) -> tuple[Array, Array]:
        """Deviations of the shadowing with and without line of sight."""
        seen, hidden = (np.full(np.shape(distance_m), deviation) for deviation in self.deviations_db)
        return seen, hidden


@dataclass(frozen=True)
class UMa(_Urban):
    """Urban macro cells: the server above the roofs."""

    shadowing_m: ClassVar[tuple[float, float]] = (37.0, 50.0)
    los_m: ClassVar[float] = 63.0
    near: ClassVar[tuple[float, float]] = (28.0, 22.0)
    heights: ClassVar[float] = 9.0
    hidden: ClassVar[tuple[float, float, float, float]] = (13.54, 39.08, 20.0, 0.6)
    deviations_db: ClassVar[tuple[float, float]] = (4.0, 6.0)


@dataclass(frozen=True)
class UMi(_Urban):
    """Urban micro cells: the server below the roofs."""

    shadowing_m: ClassVar[tuple[float, float]] = (10.0, 13.0)
    los_m: ClassVar[float] = 36.0
    near: ClassVar[tuple[float, float]] = (32.4, 21.0)
    heights: ClassVar[float] = 9.5
    hidden: ClassVar[tuple[float, float, float, float]] = (22.4, 35.3, 21.3, 0.3)
    deviations_db: ClassVar[tuple[float, float]] = (4.0, 7.82)

    server_height_m: Annotated[float, Gt(1)] = 10.0
    """Antenna height h_BS of the server."""


@dataclass(frozen=True)
class RMa(Scenario):
    """Rural macro cells: up to 10 km, few buildings."""

    breakpoint_factor: ClassVar[float] = 2 * np.pi
    environment_m: ClassVar[float] = 0.0
    shadowing_m: ClassVar[tuple[float, float]] = (37.0, 120.0)

    carrier_hz: Annotated[float, Ge(0.5e9), Le(30e9)] = 2.4e9
    """Carrier frequency f_c; paper: 2.4 GHz."""
    server_height_m: Annotated[float, Ge(10), Le(150)] = 35.0
    """Antenna height h_BS of the server."""
    device_height_m: Annotated[float, Ge(1), Le(10)] = 1.5
    """Antenna height h_UT of the devices."""
    building_height_m: Annotated[float, Ge(5), Le(50)] = 5.0
    """Average building height h."""
    street_width_m: Annotated[float, Ge(5), Le(50)] = 20.0
    """Average street width W."""

    def los_prob(self, distance_m: Array) -> Array:
        """P(line of sight) at a distance on the ground."""
        return np.exp(-np.maximum(np.asarray(distance_m) - 10, 0) / 1000)

    def loss_db(self, distance_m: Array) -> tuple[Array, Array]:
        """Path loss with and without line of sight."""
        ground, space, far, ghz = self._distances(distance_m)
        h, base = self.building_height_m, self.server_height_m

        def near_db(d: Array) -> Array:
            slope, offset = min(0.03 * h**1.72, 10), min(0.044 * h**1.72, 14.77)
            line = 20 * np.log10(40 * np.pi * d * ghz / 3) + slope * np.log10(d) - offset
            return np.asarray(line + 0.002 * np.log10(h) * d)

        beyond = near_db(np.asarray(far)) + 40 * np.log10(space / far)
        seen = np.where(ground <= far, near_db(space), beyond)
        hidden = (
            161.04
            - 7.1 * np.log10(self.street_width_m)
            + 7.5 * np.log10(h)
            - (24.37 - 3.7 * (h / base) ** 2) * np.log10(base)
            + (43.42 - 3.1 * np.log10(base)) * (np.log10(space) - 3)
            + 20 * np.log10(ghz)
            - (3.2 * np.log10(11.75 * self.device_height_m) ** 2 - 4.97)
        )
        return seen, np.maximum(seen, hidden)

    def shadowing_db(self, distance_m: Array) -> tuple[Array, Array]:
        """Deviations of the shadowing with and without line of sight; the former rises at the breakpoint."""
        ground, _, far, _ = self._distances(distance_m)
        return np.where(ground <= far, 4.0, 6.0), np.full(np.shape(distance_m), 8.0)
