"""Channel inversion with a factor c_i for each device, so that no device is biased: Air-FEEL's unbiased design.

Device i arrives with factor b_i = min(c_i, a √(d E_s) |h_i|), E b_i = 1, and the server scales by a/m. This is possible
for a ≥ a_min. Among these a the design minimises the variance Σ (E b_i² − 1) + ν a², ν = d σ_z².

Rayleigh fading with reach S_i = √(d Λ_i E_s). Arrays have devices last; leading axes are independent instances.

Knows: reaches and noise.
Does not know: instantaneous channels, models, methods.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfinv

from otafl.algorithms.design.constant import minimise

Array = NDArray[np.float64]

WIDEST = 1e4  # largest a over a_min that is searched


def least_scale(reach: Array) -> Array:
    """Smallest scale a_min = 2/(√π S_min): below it the weakest device cannot have E b_i = 1 even at full power."""
    return np.asarray(2 / (np.sqrt(np.pi) * reach.min(-1)))


def factors(a: Array, reach: Array) -> Array:
    """Factors c_i with E b_i = (√π/2) a S_i erf(c_i/(a S_i)) = 1; infinite where full power is just enough."""
    strength = a[..., None] * reach
    return np.asarray(strength * erfinv(np.minimum(2 / (np.sqrt(np.pi) * strength), 1.0)))


def variance(a: Array, reach: Array, noise: float) -> Array:
    """Variance Σ (E b_i² − 1) + ν a², with E b_i² = (a S_i)² (1 − e^{−(c_i/(a S_i))²})."""
    strength = a[..., None] * reach
    square = -(strength**2) * np.expm1(-((factors(a, reach) / strength) ** 2))
    return np.asarray((square - 1).sum(-1) + noise * a**2)


def scale(reach: Array, noise: float) -> Array:
    """The best a, one per instance; where noise is strong it is a_min."""
    least = least_scale(reach)
    found = np.exp(minimise(lambda x: variance(np.exp(x), reach, noise), np.log(least), np.log(WIDEST * least)))
    return np.where(variance(least, reach, noise) <= variance(found, reach, noise), least, found)
