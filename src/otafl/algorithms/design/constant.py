"""One constant for all devices and all rounds, from channel statistics: LCPC's two forms.

The received mean is (1/m) Σ b_i u_i + (a/m) z, with unit vectors u_i; its error, up to the factor 1/m², is

    J = Σ E(b_i − 1)² + ν a²,    ν = d σ_z²

- truncate: b_i = a γ χ_i, truncated inversion with a common γ; χ_i is 1 if device i transmits, else 0. The scale a is
  optimised too: with a = 1/γ and strong noise the optimum would be γ → ∞, where nobody transmits.
- clip: b_i = min(1, a √(d E_s) |h_i|), inversion if the device has enough power, else full power.

Rayleigh fading with reach S_i = √(d Λ_i E_s). Arrays have devices last; leading axes are independent instances.

Knows: reaches and noise.
Does not know: instantaneous channels, models, methods.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

Array = NDArray[np.float64]

GRID = 400  # points of the first search
REFINEMENTS = 70  # golden-section steps after it
GOLDEN = (np.sqrt(5) - 1) / 2


def _gained(gamma: Array, reach: Array, noise: float) -> Array:
    """J*(γ) − m, where J* = m − Q²/(Q + ν/γ²) is the error at the best a, with Q = Σ exp(−γ²/S_i²)."""
    heard = np.exp(-((gamma[..., None] / reach) ** 2)).sum(-1)
    return np.asarray(-(heard**2) / (heard + noise / gamma**2))


def truncation(reach: Array, noise: float) -> tuple[Array, Array]:
    """Best γ and a of the truncated form, one of each per instance."""
    low, high = np.log(1e-3 * reach.min(-1)), np.log(3 * reach.max(-1))
    gamma = np.exp(
        minimise(lambda x: _gained(np.exp(x), reach, noise), low, high)
    )  # J − m: in J itself the change could be lost to rounding
    heard = np.exp(-((gamma[..., None] / reach) ** 2)).sum(-1)
    return gamma, heard / (heard + noise / gamma**2) / gamma


def clipped_moments(a: Array, reach: Array) -> tuple[Array, Array]:
    """Moments E b_i and E(b_i − 1)² of b_i = min(1, a √(d E_s) |h_i|); a [...], reach [..., M]."""
    t = 1 / (a[..., None] * reach)
    mean = np.sqrt(np.pi) / 2 * erf(t) / t
    return mean, 1 - 2 * mean - np.expm1(-(t**2)) / t**2


def clipping(reach: Array, noise: float) -> Array:
    """Best scale a of the clipped form, one per instance."""
    low, high = np.log(1e-6 / reach.max(-1)), np.log(1e3 / reach.min(-1))
    if noise > 0:  # at ν → ∞ the optimum is near Σ S_i/ν
        low = np.minimum(low, np.log(1e-3 * reach.sum(-1) / (noise + (reach**2).sum(-1))))

    def error(x: Array) -> Array:  # J − m, which stays precise where noise is strong
        mean, _ = clipped_moments(np.exp(x), reach)
        t = np.exp(-x)[..., None] / reach
        square = np.where(t > 1e-4, -np.expm1(-(t**2)) / t**2, 1.0)
        return np.asarray((square - 2 * mean).sum(-1) + noise * np.exp(2 * x))

    return np.exp(minimise(error, low, high))


def minimise(error: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Minimiser of a function with one minimum between `low` and `high`, by a grid and golden-section search."""
    grid = np.linspace(0, 1, GRID)
    values = np.stack([error(low + x * (high - low)) for x in grid])
    best = values.argmin(0)
    left = low + grid[np.maximum(best - 1, 0)] * (high - low)
    right = low + grid[np.minimum(best + 1, GRID - 1)] * (high - low)
    for _ in range(REFINEMENTS):
        one, other = right - GOLDEN * (right - left), left + GOLDEN * (right - left)
        down = error(one) < error(other)
        left, right = np.where(down, left, one), np.where(down, other, right)
    return np.asarray((left + right) / 2)
