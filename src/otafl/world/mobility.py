"""How devices move from round to round.

Knows: first positions, the cell's radius, random streams.
Does not know: channels, who transmits.
"""

from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from otafl.errors import ConfigError
from otafl.random import Streams


class Mobility(Protocol):
    """A law of motion."""

    def positions(
        self, start_m: NDArray[np.float64], cell_radius_m: float, num_rounds: int, streams: Streams
    ) -> NDArray[np.float64]:
        """Positions during every round, [T, M, 2]; round 0 is at `start_m` [M, 2].

        The first rounds must not depend on `num_rounds`.
        """
        ...


@dataclass(frozen=True)
class Static:
    """Devices stay where they were placed (the paper's stationary regime)."""

    def positions(
        self, start_m: NDArray[np.float64], cell_radius_m: float, num_rounds: int, streams: Streams
    ) -> NDArray[np.float64]:
        """The same positions in every round, [T, M, 2]."""
        return np.broadcast_to(start_m, (num_rounds, *start_m.shape))


@dataclass(frozen=True)
class BoundedWaypoint:
    """The paper's bounded random waypoint: legs to uniform points of each device's own territory.

    A step never passes the waypoint; the next leg starts in the next round. A speed drawn near 0 leaves a
    device nearly still for long: that is the paper's model with v_min = 0.
    """

    speed_mps: tuple[float, float] = (0.0, 2.5)
    """[v_min, v_max], drawn uniformly per leg; paper: 0 to 2.5 m/s."""
    territory_m: Annotated[float, Ge(0)] = 50.0
    """r_local, radius of the territory around the first position; paper: 50 m."""
    round_s: Annotated[float, Gt(0)] = 8.0
    """τ, duration of a round; paper: 8 s."""
    moving_fraction: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share of devices that move, drawn per seed; the paper's mixed regime: 0.5."""

    def __post_init__(self) -> None:
        low, high = self.speed_mps
        if not 0 <= low <= high < np.inf:
            raise ConfigError(f"mobility.speed_mps = {list(self.speed_mps)}: give [min, max] with 0 <= min <= max")

    def positions(
        self, start_m: NDArray[np.float64], cell_radius_m: float, num_rounds: int, streams: Streams
    ) -> NDArray[np.float64]:
        """Positions during every round, [T, M, 2]."""
        num_devices = len(start_m)
        movers = streams.at("movers").permutation(num_devices) < round(self.moving_fraction * num_devices)
        track = np.empty((num_rounds, num_devices, 2))
        here = start_m.copy()
        waypoint_m, speed_mps = self._draw_leg(start_m, cell_radius_m, 0, streams)
        leg = np.zeros(num_devices, dtype=np.int64)  # number of each device's present leg
        for t in range(num_rounds):
            track[t] = here
            ahead_m = waypoint_m - here
            distance_m = np.hypot(ahead_m[:, 0], ahead_m[:, 1])
            step_m = speed_mps * self.round_s
            arrived = movers & (step_m >= distance_m)
            travelled = np.divide(step_m, distance_m, out=np.ones(num_devices), where=step_m < distance_m)
            here = np.where(movers[:, None], here + travelled[:, None] * ahead_m, here)
            leg += arrived
            for number in np.unique(leg[arrived]):
                next_waypoint_m, next_speed_mps = self._draw_leg(start_m, cell_radius_m, int(number), streams)
                starts = arrived & (leg == number)
                waypoint_m[starts], speed_mps[starts] = next_waypoint_m[starts], next_speed_mps[starts]
        return track

    def _draw_leg(
        self, start_m: NDArray[np.float64], cell_radius_m: float, leg: int, streams: Streams
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Waypoint [M, 2] and speed [M] of every device's leg with this number."""
        uniform = streams.at("mobility", leg).random((3, len(start_m)))
        radius_m = self.territory_m * np.sqrt(uniform[0])
        angle = 2 * np.pi * uniform[1]
        waypoint_m = start_m + np.stack([radius_m * np.cos(angle), radius_m * np.sin(angle)], axis=-1)
        outside = np.hypot(waypoint_m[:, 0], waypoint_m[:, 1]) / cell_radius_m
        waypoint_m /= np.maximum(outside, 1.0)[:, None]  # clipped to the cell's edge along the radius
        low, high = self.speed_mps
        return waypoint_m, low + (high - low) * uniform[2]
