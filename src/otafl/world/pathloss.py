"""Mean channel gain over distance.

Knows: distances.
Does not know: fading, motion, who transmits.
"""

from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from annotated_types import Gt
from numpy.typing import NDArray

from otafl.units import db_to_linear


class PathLoss(Protocol):
    """A law of mean power gain over distance."""

    def mean_gain(self, distance_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Λ = E|h|² at each distance, linear."""
        ...


@dataclass(frozen=True)
class LogDistance:
    """Log-distance law Λ(D) = 10^(−reference_db/10) · (max(D, D_0)/D_0)^(−exponent)."""

    reference_db: float = 50.0
    """PL_ref, loss at the reference distance; paper: 50 dB."""
    reference_m: Annotated[float, Gt(0)] = 1.0
    """D_0; nearer devices count as if they stood here; paper: 1 m."""
    exponent: Annotated[float, Gt(0)] = 3.5
    """n; paper: 3.5."""
    carrier_hz: Annotated[float, Gt(0)] = 2.4e9
    """f_c; not used by this law, recorded for models that need it; paper: 2.4 GHz."""

    def mean_gain(self, distance_m: NDArray[np.float64]) -> NDArray[np.float64]:
        """Λ = E|h|² at each distance, linear."""
        ratio = np.maximum(distance_m, self.reference_m) / self.reference_m
        return db_to_linear(-self.reference_db) * ratio**-self.exponent
