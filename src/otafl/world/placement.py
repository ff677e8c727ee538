"""Where devices stand at the start.

Knows: the cell's radius, random streams.
Does not know: motion, channels, data.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from otafl.errors import ConfigError
from otafl.random import Streams


@dataclass(frozen=True)
class Cell:
    """The cell and the devices' first positions; the server stands at the origin."""

    devices: Annotated[int, Ge(1), Le(10**6)] = 30
    """Number of devices m; paper: 30."""
    radius_m: Annotated[float, Gt(0)] = 1500.0
    """Cell radius r_max; paper: 1500 m."""
    cohort: Annotated[int, Ge(0)] = 0
    """Number of devices drawn anew in every round; only they may take part in it; 0: all devices."""
    placement: Literal["stratified", "uniform", "given"] = "stratified"
    """One device per equal-area ring, plain uniform in the disc, or `positions_m`."""
    positions_m: tuple[tuple[float, float], ...] = ()
    """Coordinates for placement = "given", one (x, y) per device, the same for every seed."""

    def __post_init__(self) -> None:
        if self.cohort > self.devices:
            raise ConfigError(f"cell.cohort = {self.cohort}: there are only {self.devices} devices; 0 takes all")
        if self.placement != "given":
            if self.positions_m:
                raise ConfigError('cell.positions_m is only used with cell.placement = "given"; set that too')
            return
        if len(self.positions_m) != self.devices:
            raise ConfigError(
                f"cell.positions_m has {len(self.positions_m)} positions for {self.devices} devices; "
                "give one [x, y] per device"
            )
        for i, position in enumerate(self.positions_m):
            if not np.hypot(*position) <= self.radius_m:
                raise ConfigError(
                    f"cell.positions_m[{i}] = {list(position)} lies outside the cell of radius {self.radius_m:g} m"
                )

    def cohorts(self, num_rounds: int, streams: Streams) -> NDArray[np.bool_]:
        """Devices that may take part in each round, [T, M]: `cohort` of them, drawn uniformly."""
        masks = np.zeros((num_rounds, self.devices), dtype=np.bool_)
        for t, mask in enumerate(masks):
            mask[streams.at("cohort", t).permutation(self.devices)[: self.cohort]] = True
        return masks

    def place(self, streams: Streams) -> NDArray[np.float64]:
        """First positions, [M, 2] in metres."""
        if self.placement == "given":
            return np.array(self.positions_m, dtype=np.float64)
        rng = streams.at("placement")
        fraction = rng.random(self.devices)
        if self.placement == "stratified":
            fraction = (rng.permutation(self.devices) + fraction) / self.devices
        angle = 2 * np.pi * rng.random(self.devices)
        radius_m = self.radius_m * np.sqrt(fraction)
        return np.stack([radius_m * np.cos(angle), radius_m * np.sin(angle)], axis=-1)
