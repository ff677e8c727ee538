"""How many devices of an analog-digital hybrid go digital, and with how many bits.

The digital devices' problem min Σ A_i/(2^{r_i} − 1)² with Σ τ_i r_i ≤ T is convex and has the solution
2 ln 2 A_i 2^r/(2^r − 1)³ = λ τ_i; the r_i are rounded down, and what time is left is spent where it helps most.

Knows: channels, the largest entries of updates, rates.
Does not know: models, rounds.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otafl.radio.digital import SCALE_BITS

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
MOST_BITS = 24


def relaxed_bits(error: Array, time: Array, budget: float) -> Array:
    """The real r_i ≥ 1 that minimise Σ A_i/(2^{r_i} − 1)² with Σ τ_i r_i = T, by bisection on λ.

    Args:
        error: A_i, each device's error at one bit.
        time: τ_i, seconds for one more bit of every entry.
        budget: T ≥ Σ τ_i, seconds for all of them.
    """

    def bits_at(log_price: float) -> Array:
        # with 2^r − 1 = e^u: log(1 + e^{−u}) − 2 u = c, by Newton from the left, where the convex curve is above
        c = log_price + np.log(time / (2 * math.log(2) * error))
        u = -c / 2
        for _ in range(9):
            u = u + (np.logaddexp(0.0, -u) - 2 * u - c) / (2 + 1 / (1 + np.exp(np.minimum(u, 700.0))))
        return np.asarray(np.maximum(1.0, np.logaddexp(0.0, u) / math.log(2)))

    low, high = -400.0, 400.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if (time * bits_at(middle)).sum() > budget else (low, middle)
    return bits_at(high)


def best_bits(error: Array, time: Array, budget: float) -> Array | None:
    """Whole bits near that optimum, within the time, with the same arguments; None if T < Σ τ_i."""
    if time.sum() > budget:
        return None
    bits = np.minimum(np.floor(relaxed_bits(error, time, budget)), MOST_BITS)
    while True:
        gain = (error / (2.0**bits - 1) ** 2 - error / (2.0 ** (bits + 1) - 1) ** 2) / time
        fits = (time <= budget - (time * bits).sum()) & (bits < MOST_BITS)
        if not fits.any():
            return np.asarray(bits)
        bits[np.where(fits, gain, -1.0).argmax()] += 1


class Cell(NamedTuple):
    """What the split depends on besides the devices."""

    size: int
    """Number of parameters d."""
    noise: float
    """σ_z²."""
    peak: float
    """E_s."""
    bandwidth_hz: float
    deadline_s: float


def cost(strength: Array, largest: Array, rate: Array, digital: Mask, cell: Cell) -> tuple[Array, float]:
    """Bits of the devices that go digital (a mask), 0 for the others, and the error; infinite if they do not fit."""
    analog = ~digital
    bits, error = np.zeros_like(strength), 0.0
    free = cell.deadline_s
    if analog.any():
        with np.errstate(divide="ignore"):
            weakest = np.where(largest > 0, strength / np.where(largest > 0, largest, 1.0), np.inf)[analog].min()
        error += cell.size * cell.noise / (cell.peak * weakest**2)
        free -= cell.size / cell.bandwidth_hz
    if digital.any():
        if (rate[digital] <= 0).any():
            return bits, math.inf
        free -= SCALE_BITS * float((1 / rate[digital]).sum())
        least = cell.size * np.maximum(largest[digital], 1e-150) ** 2
        found = best_bits(least, cell.size / rate[digital], free)
        if found is None:
            return bits, math.inf
        bits[digital] = found
        error += float((least / (2.0**found - 1) ** 2).sum())
    return bits, error


def split(strength: Array, largest: Array, rate: Array, cell: Cell) -> tuple[Array, float]:
    """Bits of every device, 0 for analog ones, and the least error over all K.

    Args:
        strength: |h_i|, [M].
        largest: ‖Δ_i‖_∞, [M].
        rate: bits per second, [M].
        cell: constants.
    """
    metric = np.where(largest > 0, strength / np.where(largest > 0, largest, 1.0), np.inf)
    place = np.argsort(np.argsort(metric, kind="stable"), kind="stable")
    found = [cost(strength, largest, rate, place < count, cell) for count in range(len(metric) + 1)]
    return min(found, key=lambda pair: pair[1])
