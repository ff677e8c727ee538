"""Small-scale fading: unit-power complex coefficients per round and device.

Every law but "none" is built from scattered waves w ~ CN(0, 1) with a memory between rounds (`otafl.world.process`).
Rayleigh, Rician, double Rayleigh and Suzuki fading add or multiply such waves. Nakagami, Weibull and log-normal fading
map w, so their law is exact in every round; a memory other than "independent" is that of w, not of the law's theory.

Knows: where devices are in each round, random streams.
Does not know: path loss, thresholds, who transmits.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray
from scipy import special

from otafl.random import Streams
from otafl.world.process import Scattering, independent

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]
NODES, WEIGHTS = special.roots_hermitenorm(96)


class Fading(Protocol):
    """A law of small-scale fading with E|g|² = 1.

    A law may also declare `zero_mean = True` (then several antennas can be combined), `goes_on = True` (it is a complex
    Gaussian process, so that fading within an upload is known), and a method `check_world(sections)`, which raises a
    ConfigError where other sections of the configuration contradict it.
    """

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """Fading g of every round and device, [T, M], for positions [T, M, 2]."""
        ...

    def exceed_prob(self, power: Array) -> Array:
        """P(|g|² ≥ power)."""
        ...


@dataclass(frozen=True)
class Rayleigh(Scattering):
    """Rayleigh fading, g ~ CN(0, 1): no line of sight; independent over rounds, it is the paper's."""

    zero_mean: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """Fading g of every round and device, [T, M]."""
        return self.scattered(positions_m, streams)

    def exceed_prob(self, power: Array) -> Array:
        """P(|g|² ≥ power) = exp(−power)."""
        return np.exp(-power)


@dataclass(frozen=True)
class Rician(Scattering):
    """Rician fading: a line of sight K times as strong as the scattered waves."""

    k_factor: Annotated[float, Ge(0), Le(1e6)] = 5.0
    """K, linear; 0 is Rayleigh."""

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """√(K/(K+1)) e^{jθ_i} + √(1/(K+1)) w; the direct wave's phase θ_i is uniform and stays."""
        phase = 2 * np.pi * streams.at("line of sight phase").random(positions_m.shape[1])
        direct, share = np.exp(1j * phase), 1 / (self.k_factor + 1)
        return np.asarray(math.sqrt(1 - share) * direct + math.sqrt(share) * self.scattered(positions_m, streams))

    def exceed_prob(self, power: Array) -> Array:
        """Marcum's Q₁(√(2K), √(2(K+1) power))."""
        from scipy import stats  # slow to load, and seldom needed

        return np.asarray(stats.ncx2.sf(2 * (self.k_factor + 1) * np.asarray(power), 2, 2 * self.k_factor))


@dataclass(frozen=True)
class Nakagami(Scattering):
    """Nakagami-m fading: |g|² is Gamma with shape m; m = 1 is Rayleigh, larger m is milder."""

    zero_mean: ClassVar[bool] = True

    m: Annotated[float, Ge(0.5), Le(1e4)] = 2.0
    """Shape m."""

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """Fading with the phases of the scattered waves, and amplitudes mapped from theirs."""
        w = self.scattered(positions_m, streams)
        return _with_power(w, special.gammainccinv(self.m, np.exp(-(np.abs(w) ** 2))) / self.m)

    def exceed_prob(self, power: Array) -> Array:
        """Γ(m, m power)/Γ(m)."""
        return np.asarray(special.gammaincc(self.m, self.m * np.asarray(power)))


@dataclass(frozen=True)
class Weibull(Scattering):
    """Weibull fading: |g| is Weibull; shape 2 is Rayleigh, smaller shapes fade more deeply."""

    zero_mean: ClassVar[bool] = True

    shape: Annotated[float, Ge(0.2), Le(100)] = 1.5
    """β of the amplitude."""

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """|g|² = |w|^{4/β}/Γ(1 + 2/β), phases of the scattered waves."""
        w = self.scattered(positions_m, streams)
        return _with_power(w, np.abs(w) ** (4 / self.shape) / special.gamma(1 + 2 / self.shape))

    def exceed_prob(self, power: Array) -> Array:
        """exp(−(Γ(1 + 2/β) power)^{β/2})."""
        return np.asarray(np.exp(-((special.gamma(1 + 2 / self.shape) * np.asarray(power)) ** (self.shape / 2))))


@dataclass(frozen=True)
class DoubleRayleigh(Scattering):
    """Double Rayleigh fading, the product of two Rayleigh fades: waves scatter near both ends, as between vehicles."""

    zero_mean: ClassVar[bool] = True

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """The product w w′, both with the memory chosen."""
        return self.scattered(positions_m, streams) * self.scattered(positions_m, streams, "fading, second")

    def exceed_prob(self, power: Array) -> Array:
        """2 √power K₁(2 √power)."""
        x = 2 * np.sqrt(np.asarray(power, dtype=np.float64))
        return np.where(x > 0, x * special.k1(np.where(x > 0, x, 1.0)), 1.0)


@dataclass(frozen=True)
class LogNormal(Scattering):
    """Log-normal fading, by default fresh in every round; `pathloss.shadowing_db` gives shadowing along a path."""

    zero_mean: ClassVar[bool] = True

    std_db: Annotated[float, Ge(0), Le(50)] = 8.0
    """Standard deviation of 10 log₁₀ |g|²."""

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """10 log₁₀ |g|² is Gaussian, with the mean that gives unit power; phases are uniform."""
        w = self.scattered(positions_m, streams) * math.sqrt(2)
        power = unit_log_normal(self.std_db, w.real)
        return np.asarray(np.sqrt(power) * np.exp(2j * np.pi * special.ndtr(w.imag)))

    def exceed_prob(self, power: Array) -> Array:
        """P(|g|² ≥ power), from the Gaussian in dB."""
        if self.std_db == 0:
            return (np.asarray(power) <= 1.0).astype(np.float64)
        scale = self.std_db * math.log(10) / 10
        with np.errstate(divide="ignore"):
            return np.asarray(special.ndtr(-(np.log(power) + scale**2 / 2) / scale))


@dataclass(frozen=True)
class Suzuki(Scattering):
    """Suzuki fading: Rayleigh fading under log-normal shadowing that is fresh in every round."""

    zero_mean: ClassVar[bool] = True

    std_db: Annotated[float, Ge(0), Le(50)] = 8.0
    """Standard deviation of the shadowing."""

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """The waves w times the root of a unit-mean log-normal power."""
        shadow = independent(positions_m, streams, "fading, shadow").real * math.sqrt(2)
        return np.asarray(self.scattered(positions_m, streams) * np.sqrt(unit_log_normal(self.std_db, shadow)))

    def exceed_prob(self, power: Array) -> Array:
        """E exp(−power/s) over the shadowing s, by Gauss–Hermite quadrature."""
        shadow = unit_log_normal(self.std_db, NODES)
        return np.asarray((np.exp(-np.asarray(power)[..., None] / shadow) * WEIGHTS).sum(-1) / WEIGHTS.sum())


@dataclass(frozen=True)
class NoFading:
    """No fading, g = 1: the channel is its path loss."""

    def coefficients(self, positions_m: Array, streams: Streams) -> Complex:
        """Ones, [T, M]."""
        return np.ones(positions_m.shape[:2], dtype=np.complex128)

    def exceed_prob(self, power: Array) -> Array:
        """1 where power ≤ 1, else 0."""
        return (np.asarray(power) <= 1.0).astype(np.float64)


def unit_log_normal(std_db: float, normal: Array) -> Array:
    """A log-normal power of mean 1, from a standard normal variable."""
    scale = std_db * math.log(10) / 10
    return np.exp(scale * normal - scale**2 / 2)


def _with_power(w: Complex, power: Array) -> Complex:
    """Numbers with the phases of w and the given power."""
    size = np.abs(w)
    return np.asarray(w * np.sqrt(power) / np.where(size > 0, size, 1.0))
