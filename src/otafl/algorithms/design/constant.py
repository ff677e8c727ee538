"""One constant for all devices and all rounds, from channel statistics: LCPC's two forms.

The received mean is (1/m) Σ b_i u_i + (a/m) z, with unit vectors u_i; its error, up to 1/m², is

    J = Σ E(b_i − 1)² + ν a²,    ν = d σ_z²

- truncate: b_i = a γ χ_i, truncated inversion with a common γ; a is optimised jointly, since a = 1/γ would have its
  optimum where nobody transmits (γ → ∞) when noise is strong.
- clip: b_i = min(1, a √(d E_s) |h_i|), inversion where the device can, else full power.

Rayleigh fading; S_i = √(d Λ_i E_s). Arrays have the devices last; leading axes are independent instances.

Knows: reaches and noise.
Does not know: channels as they happen, models, who asks.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

Array = NDArray[np.float64]

GRID = 400  # points of a first look
REFINEMENTS = 70  # golden sections after it
GOLDEN = (np.sqrt(5) - 1) / 2


def truncation_error(gamma: Array, reach: Array, noise: float) -> Array:
    """J*(γ) = m − Q²/(Q + ν/γ²) with the best a; γ [...], reach [..., M]."""
    return np.asarray(reach.shape[-1] + _gained(gamma, reach, noise))


def _gained(gamma: Array, reach: Array, noise: float) -> Array:
    """J* − m."""
    heard = np.exp(-((gamma[..., None] / reach) ** 2)).sum(-1)
    return np.asarray(-(heard**2) / (heard + noise / gamma**2))


def truncation(reach: Array, noise: float) -> tuple[Array, Array]:
    """γ and a of the truncated form, each one per instance."""
    low, high = np.log(1e-3 * reach.min(-1)), np.log(3 * reach.max(-1))
    gamma = np.exp(
        minimise(lambda x: _gained(np.exp(x), reach, noise), low, high)
    )  # J − m: J would lose it in rounding
    heard = np.exp(-((gamma[..., None] / reach) ** 2)).sum(-1)
    return gamma, heard / (heard + noise / gamma**2) / gamma


def clipped_moments(a: Array, reach: Array) -> tuple[Array, Array]:
    """E b_i and E(b_i − 1)² of b_i = min(1, a √(d E_s) |h_i|); a [...], reach [..., M]."""
    t = 1 / (a[..., None] * reach)
    mean = np.sqrt(np.pi) / 2 * erf(t) / t
    return mean, 1 - 2 * mean - np.expm1(-(t**2)) / t**2


def clipping(reach: Array, noise: float) -> Array:
    """A of the clipped form, one per instance."""
    low, high = np.log(1e-6 / reach.max(-1)), np.log(1e3 / reach.min(-1))
    if noise > 0:  # at ν → ∞ the optimum is near Σ S_i/ν
        low = np.minimum(low, np.log(1e-3 * reach.sum(-1) / (noise + (reach**2).sum(-1))))

    def error(x: Array) -> Array:  # J − m, to keep it where noise is strong
        mean, _ = clipped_moments(np.exp(x), reach)
        t = np.exp(-x)[..., None] / reach
        square = np.where(t > 1e-4, -np.expm1(-(t**2)) / t**2, 1.0)
        return np.asarray((square - 2 * mean).sum(-1) + noise * np.exp(2 * x))

    return np.exp(minimise(error, low, high))


def minimise(error: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Where a function with one minimum between `low` and `high` has it, by a grid and golden sections."""
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
