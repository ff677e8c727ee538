"""Small-scale fading: unit-power complex coefficients per round and device.

Knows: where devices are in each round, random streams.
Does not know: path loss, thresholds, who transmits.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from otafl.random import Streams


class Fading(Protocol):
    """A law of small-scale fading with E|g|² = 1."""

    def coefficients(self, positions_m: NDArray[np.float64], streams: Streams) -> NDArray[np.complex128]:
        """Fading g of every round and device, [T, M], for positions [T, M, 2]."""
        ...

    def exceed_prob(self, power: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(|g|² ≥ power)."""
        ...


@dataclass(frozen=True)
class Rayleigh:
    """Rayleigh fading, g ~ CN(0, 1), independent over rounds and devices (the paper's)."""

    def coefficients(self, positions_m: NDArray[np.float64], streams: Streams) -> NDArray[np.complex128]:
        """Fading g of every round and device, [T, M]."""
        num_rounds, num_devices = positions_m.shape[:2]
        parts = np.empty((num_rounds, num_devices, 2))
        for t in range(num_rounds):
            streams.at("fading", t).standard_normal(out=parts[t])
        coefficients: NDArray[np.complex128] = np.sqrt(0.5) * (parts[..., 0] + 1j * parts[..., 1])
        return coefficients

    def exceed_prob(self, power: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(|g|² ≥ power) = exp(−power)."""
        return np.exp(-power)


@dataclass(frozen=True)
class NoFading:
    """No fading, g = 1: the channel is its path loss."""

    def coefficients(self, positions_m: NDArray[np.float64], streams: Streams) -> NDArray[np.complex128]:
        """Ones, [T, M]."""
        return np.ones(positions_m.shape[:2], dtype=np.complex128)

    def exceed_prob(self, power: NDArray[np.float64]) -> NDArray[np.float64]:
        """1 where power ≤ 1, else 0."""
        return (np.asarray(power) <= 1.0).astype(np.float64)
