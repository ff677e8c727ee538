"""How devices move from round to round.

Knows: first positions, the cell's radius, random streams.
Does not know: channels, who transmits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Protocol

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from otafl.errors import ConfigError
from otafl.random import Streams
from otafl.world.traces import Recording

Array = NDArray[np.float64]
Leg = tuple[Array, Array]
"""Waypoints [M, 2] and speeds [M]."""


class Mobility(Protocol):
    """A law of motion."""

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """Positions during every round, [T, M, 2]; round 0 is at `start_m` [M, 2] unless the law has its own places.

        The first rounds must not depend on `num_rounds`.
        """
        ...


@dataclass(frozen=True)
class Static:
    """Devices stay where they were placed (the paper's stationary regime)."""

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """The same positions in every round, [T, M, 2]."""
        return np.broadcast_to(start_m, (num_rounds, *start_m.shape))


@dataclass(frozen=True, kw_only=True)
class _Walking:
    """What walking laws share."""

    speed_mps: tuple[float, float] = (0.5, 2.5)
    """[v_min, v_max], drawn uniformly per leg; with v_min = 0 ever more devices would come to a halt."""
    round_s: Annotated[float, Gt(0)] = 8.0
    """Duration of a round; paper: 8 s."""

    def __post_init__(self) -> None:
        low, high = self.speed_mps
        if not 0 <= low <= high < np.inf:
            raise ConfigError(f"mobility.speed_mps = {list(self.speed_mps)}: give [min, max] with 0 <= min <= max")

    def _speeds(self, uniform: Array) -> Array:
        low, high = self.speed_mps
        return low + (high - low) * uniform


@dataclass(frozen=True)
class BoundedWaypoint(_Walking):
    """The paper's bounded random waypoint: legs to uniform points of each device's own territory.

    A step never passes the waypoint; the next leg starts in the next round. A speed drawn near 0 leaves a
    device nearly still for long: that is the paper's model with v_min = 0.
    """

    speed_mps: tuple[float, float] = (0.0, 2.5)
    """[v_min, v_max], drawn uniformly per leg; paper: 0 to 2.5 m/s."""
    territory_m: Annotated[float, Ge(0)] = 50.0
    """r_local, radius of the territory around the first position; paper: 50 m."""
    moving_fraction: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share of devices that move, drawn per seed; the paper's mixed regime: 0.5."""

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """Positions during every round, [T, M, 2]."""
        movers = streams.at("movers").permutation(len(start_m)) < round(self.moving_fraction * len(start_m))
        legs = partial(self._draw_leg, start_m, cell_radius_m, streams)
        return _walk(start_m, legs, self.round_s, num_rounds, movers)

    def _draw_leg(self, start_m: Array, cell_radius_m: float, streams: Streams, number: int) -> Leg:
        """Everybody's next waypoint [M, 2], and the speed to it [M]."""
        uniform = streams.at("mobility", number).random((3, len(start_m)))
        waypoint_m = start_m + _in_disc(uniform[:2], self.territory_m)
        outside = np.hypot(waypoint_m[:, 0], waypoint_m[:, 1]) / cell_radius_m
        waypoint_m /= np.maximum(outside, 1.0)[:, None]  # clipped to the cell's edge along the radius
        return waypoint_m, self._speeds(uniform[2])


@dataclass(frozen=True)
class RandomWaypoint(_Walking):
    """Random waypoint over the whole cell: straight legs to uniform points; in the long run the middle is fuller."""

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """Positions during every round, [T, M, 2]."""

        def leg(number: int) -> Leg:
            uniform = streams.at("mobility", number).random((3, len(start_m)))
            return _in_disc(uniform[:2], cell_radius_m), self._speeds(uniform[2])

        return _walk(start_m, leg, self.round_s, num_rounds)


@dataclass(frozen=True)
class RandomDirection(_Walking):
    """Straight motion with random turns, reflected at the cell's edge; in the long run uniform over the cell."""

    turn_prob: Annotated[float, Ge(0), Le(1)] = 0.1
    """Probability of a new direction and speed in a round."""

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """Positions during every round, [T, M, 2]."""
        track = np.empty((num_rounds, *start_m.shape))
        here, velocity = start_m.copy(), np.zeros_like(start_m)
        for t in range(num_rounds):
            track[t] = here
            uniform = streams.at("mobility", t).random((3, len(start_m)))
            turns = (uniform[0] < self.turn_prob) | (t == 0)
            fresh = self._speeds(uniform[1])[:, None] * _unit(2 * np.pi * uniform[2])
            velocity = np.where(turns[:, None], fresh, velocity)
            here, velocity = _reflected(here, velocity, self.round_s, cell_radius_m)
        return track


@dataclass(frozen=True)
class GaussMarkov:
    """Gauss–Markov motion: velocity keeps a share of itself from round to round; reflected at the cell's edge."""

    memory: Annotated[float, Ge(0), Le(1)] = 0.85
    """Memory α of the velocity: 0 is a random walk, 1 is straight motion."""
    speed_mps: Annotated[float, Ge(0)] = 1.5
    """Root mean square speed."""
    round_s: Annotated[float, Gt(0)] = 8.0
    """Duration of a round; paper: 8 s."""

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """Positions during every round, [T, M, 2]."""
        track = np.empty((num_rounds, *start_m.shape))
        here, velocity = start_m.copy(), np.zeros_like(start_m)
        spread = self.speed_mps / np.sqrt(2)
        for t in range(num_rounds):
            track[t] = here
            fresh = spread * streams.at("mobility", t).standard_normal(start_m.shape)
            velocity = self.memory * velocity + np.sqrt(1 - self.memory**2) * fresh if t else fresh
            here, velocity = _reflected(here, velocity, self.round_s, cell_radius_m)
        return track


@dataclass(frozen=True)
class Road(_Walking):
    """Vehicles on a straight road through the cell, each at its own speed; those that leave return at the other end."""

    speed_mps: tuple[float, float] = (8.0, 14.0)
    """[v_min, v_max], drawn uniformly per vehicle."""
    offset_m: Annotated[float, Ge(0)] = 100.0
    """Distance of the road from the server."""
    lanes: Annotated[int, Ge(1), Le(10**6)] = 4
    """Number of lanes, 3.5 m apart, with alternating directions."""

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """Positions during every round, [T, M, 2]; first places are on the road, uniform along it."""
        farthest = self.offset_m + 3.5 * (self.lanes - 1)
        if farthest >= cell_radius_m:
            raise ConfigError(
                f"mobility.offset_m = {self.offset_m:g}: the road must cross the cell of {cell_radius_m:g} m"
            )
        uniform = streams.at("mobility").random((3, len(start_m)))
        half = np.sqrt(cell_radius_m**2 - farthest**2)
        lane = np.minimum((uniform[1] * self.lanes).astype(np.int64), self.lanes - 1)
        speed = self._speeds(uniform[2]) * np.where(lane % 2 == 0, 1.0, -1.0)
        along = half * (2 * uniform[0] - 1) + np.arange(num_rounds)[:, None] * self.round_s * speed
        across = np.broadcast_to(self.offset_m + 3.5 * lane, along.shape)
        return np.stack([np.mod(along + half, 2 * half) - half, across], axis=-1)


@dataclass(frozen=True)
class Hotspots(_Walking):
    """Crowds: each device walks within a hot spot and now and then goes to another one."""

    hotspots: Annotated[int, Ge(1), Le(10**6)] = 4
    """Number of hot spots; each seed places them uniformly in the cell."""
    hotspot_m: Annotated[float, Gt(0)] = 80.0
    """Radius of a hot spot."""
    leave_prob: Annotated[float, Ge(0), Le(1)] = 0.05
    """Probability that a leg goes to a newly drawn hot spot."""

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """Positions during every round, [T, M, 2]; first places are in the hot spots."""
        if self.hotspot_m >= cell_radius_m:
            raise ConfigError(f"mobility.hotspot_m = {self.hotspot_m:g}: must be below the cell's {cell_radius_m:g} m")
        centres = _in_disc(streams.at("hot spots").random((2, self.hotspots)), cell_radius_m - self.hotspot_m)
        homes = [self._drawn(streams.at("homes").random(len(start_m)))]  # each leg's hot spots

        def leg(number: int) -> Leg:
            uniform = streams.at("mobility", number).random((5, len(start_m)))
            homes.append(np.where(uniform[3] < self.leave_prob, self._drawn(uniform[4]), homes[-1]))
            return centres[homes[-1]] + _in_disc(uniform[:2], self.hotspot_m), self._speeds(uniform[2])

        first = centres[homes[0]] + _in_disc(streams.at("first places").random((2, len(start_m))), self.hotspot_m)
        return _walk(first, leg, self.round_s, num_rounds)

    def _drawn(self, uniform: Array) -> NDArray[np.int64]:
        return np.minimum((uniform * self.hotspots).astype(np.int64), self.hotspots - 1)


@dataclass(frozen=True)
class Trace(Recording):
    """Recorded positions: a file with the columns time_s, device, x_m, y_m; the server is at (0, 0)."""

    section: ClassVar[str] = "mobility"

    def positions(self, start_m: Array, cell_radius_m: float, num_rounds: int, streams: Streams) -> Array:
        """Positions during every round, [T, M, 2], as recorded."""
        return self.on_rounds(("x_m", "y_m"), len(start_m), num_rounds, streams)


def _walk(
    start_m: Array,
    draw_leg: Callable[[int], Leg],
    round_s: float,
    num_rounds: int,
    movers: NDArray[np.bool_] | None = None,
) -> Array:
    """Positions [T, M, 2] on straight legs; a step stops at the waypoint, and the next leg starts in the next round."""
    num_devices = len(start_m)
    if movers is None:
        movers = np.ones(num_devices, dtype=np.bool_)
    legs: list[Leg] = [draw_leg(0)]
    track = np.empty((num_rounds, num_devices, 2))
    here = start_m.copy()
    waypoint_m, speed_mps = legs[0][0].copy(), legs[0][1].copy()
    leg = np.zeros(num_devices, dtype=np.int64)  # number of each device's present leg
    for t in range(num_rounds):
        track[t] = here
        ahead_m = waypoint_m - here
        distance_m = np.hypot(ahead_m[:, 0], ahead_m[:, 1])
        step_m = speed_mps * round_s
        arrived = movers & (step_m >= distance_m)
        travelled = np.divide(step_m, distance_m, out=np.ones(num_devices), where=step_m < distance_m)
        here = np.where(movers[:, None], here + travelled[:, None] * ahead_m, here)
        leg += arrived
        for number in np.unique(leg[arrived]):
            while len(legs) <= number:
                legs.append(draw_leg(len(legs)))
            starts = arrived & (leg == number)
            waypoint_m[starts], speed_mps[starts] = legs[number][0][starts], legs[number][1][starts]
    return track


def _reflected(here: Array, velocity: Array, seconds: float, radius_m: float) -> tuple[Array, Array]:
    """Positions and velocities after some seconds of straight motion in a disc whose edge reflects."""
    here, velocity = here.copy(), velocity.copy()
    left = np.full(len(here), seconds)
    for _ in range(1000):
        speed_sq = (velocity**2).sum(1)
        inward = (here * velocity).sum(1)
        room = np.maximum(radius_m**2 - (here**2).sum(1), 0.0)
        moving = (speed_sq > 0) & (left > 0)
        if not moving.any():
            break
        root = np.sqrt(inward**2 + speed_sq * room)
        until = np.divide(root - inward, speed_sq, out=np.full(len(here), np.inf), where=moving)
        step = np.where(moving, np.minimum(left, until), 0.0)
        here += step[:, None] * velocity
        left -= step
        hits = moving & (left > 0)
        normal = here[hits] / np.linalg.norm(here[hits], axis=1, keepdims=True)
        velocity[hits] -= 2 * (velocity[hits] * normal).sum(1, keepdims=True) * normal
        here[hits] = normal * radius_m * (1 - 1e-12)
    else:
        raise ConfigError(
            f"mobility.speed_mps: too fast for a cell of {radius_m:g} m: a thousand reflections in a round"
        )
    return here, velocity


def _unit(angle: Array) -> Array:
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def _in_disc(uniform: Array, radius_m: float) -> Array:
    """Uniform points of a disc [M, 2] from uniform numbers [2, M]."""
    return np.asarray(radius_m * np.sqrt(uniform[0])[:, None] * _unit(2 * np.pi * uniform[1]))
