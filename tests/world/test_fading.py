"""Laws of fading and of their memory; tolerances are 5 standard errors, densities by Kolmogorov and Smirnov."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from otafl.random import Streams
from otafl.world.fading import DoubleRayleigh, LogNormal, Nakagami, Rayleigh, Rician, Suzuki, Weibull
from otafl.world.process import Scattering

LAWS: list[Any] = [
    Rayleigh(),
    Rician(k_factor=4.0),
    Rician(k_factor=0.0),
    Nakagami(m=0.5),
    Nakagami(m=3.0),
    Weibull(shape=1.2),
    DoubleRayleigh(),
    LogNormal(std_db=6.0),
    Suzuki(std_db=4.0),
]
STILL = np.zeros((200, 100, 2))
LEVELS = np.array([1e-3, 0.1, 0.5, 1.0, 2.0, 4.0])


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_unit_power_and_the_closed_form(law: Any) -> None:
    power = np.abs(law.coefficients(STILL, Streams(1))).ravel() ** 2
    assert abs(power.mean() - 1) < 5 * power.std() / math.sqrt(power.size)
    distance = stats.kstest(power, lambda x: 1 - law.exceed_prob(np.asarray(x))).statistic
    assert distance < 2.0 / math.sqrt(power.size)  # P = 7e-4
    prob = law.exceed_prob(LEVELS)
    assert (np.diff(prob) < 0).all()
    assert law.exceed_prob(np.array(0.0)) == pytest.approx(1.0)
    seen = np.array([(power >= level).mean() for level in LEVELS])
    assert (np.abs(seen - prob) <= 5 * np.sqrt(prob * (1 - prob) / power.size)).all()


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("memory", ["autoregressive", "clarke"])
def test_memory_keeps_the_law_and_addresses_are_by_round(law: Any, memory: str) -> None:
    """One round of 20,000 devices has the law, after many rounds too; fewer rounds are a beginning of more."""
    kind = type(law)(**{**vars(law), "memory": memory})
    power = np.abs(kind.coefficients(np.zeros((12, 20_000, 2)), Streams(2))[-1]) ** 2
    assert stats.kstest(power, lambda x: 1 - kind.exceed_prob(np.asarray(x))).statistic < 2.0 / math.sqrt(power.size)
    short, long = (kind.coefficients(np.zeros((t, 5, 2)), Streams(3)) for t in (7, 150))
    assert np.allclose(short, long[:7], rtol=1e-12)


def test_known_special_cases() -> None:
    """Rician with K = 0, Nakagami with m = 1 and Weibull with shape 2 are Rayleigh; published values."""
    for law in (Rician(k_factor=0.0), Nakagami(m=1.0), Weibull(shape=2.0)):
        assert law.exceed_prob(LEVELS) == pytest.approx(np.exp(-LEVELS), rel=1e-9)
    assert Suzuki(std_db=0.0).exceed_prob(LEVELS) == pytest.approx(np.exp(-LEVELS), rel=1e-9)
    # Q₁(2, 2) = (1 + e⁻⁴ I₀(4))/2
    assert float(Rician(k_factor=2.0).exceed_prob(np.array(4 / 6))) == pytest.approx((1 + special.i0e(4)) / 2, rel=1e-9)


def correlation(g: Any, lag: int) -> tuple[float, float]:
    """Mean of Re g_t g*_{t+lag} over devices (independent) and rounds, and its standard error."""
    each = (g[:-lag] * g[lag:].conj()).real.mean(0)
    return float(each.mean()), float(each.std(ddof=1) / math.sqrt(len(each)))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95])
def test_autoregressive_memory(rho: float) -> None:
    g = Rayleigh(memory="autoregressive", correlation=rho).coefficients(np.zeros((60, 3000, 2)), Streams(4))
    for lag in (1, 2, 5):
        seen, error = correlation(g, lag)
        assert abs(seen - rho**lag) < 5 * error


def test_clarke_has_bessel_correlation_by_scatter_and_by_motion() -> None:
    """J₀(2π f τ k) for devices that stand, J₀(2π d/λ) for those that walk d = 0.02 m a round."""
    law = Rayleigh(memory="clarke", scatter_doppler_hz=0.02)
    for positions_m, per_round in (
        (np.zeros((60, 3000, 2)), 2 * math.pi * 0.02 * 8),
        (np.zeros((60, 3000, 2)) + np.arange(60)[:, None, None] * [0.1, 0.0], 2 * math.pi * 0.1 * 2.4e9 / 299_792_458),
    ):
        g = law.coefficients(positions_m, Streams(5))
        for lag in (1, 2, 3, 7):
            seen, error = correlation(g, lag)
            assert abs(seen - special.j0(per_round * lag)) < 5 * error


def test_without_doppler_a_channel_stays() -> None:
    g = Rayleigh(memory="clarke", scatter_doppler_hz=0.0).coefficients(np.zeros((5, 3, 2)), Streams(6))
    assert np.allclose(g, g[0])


def test_level_crossing_rate() -> None:
    """Rice: √(2π) f_d r e^{−r²} upward crossings of r root mean squares a second; 50 rounds to a period here."""
    doppler, steps = 0.02, 50
    law = Rayleigh(memory="clarke", scatter_doppler_hz=doppler, round_s=1 / (doppler * steps))
    size = np.abs(law.coefficients(np.zeros((40 * steps, 400, 2)), Streams(7)))
    for level in (0.3, 0.7, 1.2):
        rate = ((size[:-1] < level) & (size[1:] >= level)).mean(0) * doppler * steps
        expected = math.sqrt(2 * math.pi) * doppler * level * math.exp(-(level**2))
        assert abs(rate.mean() - expected) < 5 * rate.std(ddof=1) / math.sqrt(400) + 0.01 * expected  # sampling in time


def test_defaults_draw_what_they_always_drew() -> None:
    """The paper's fading: its stream and its order are fixed."""
    first = Streams(0).at("fading", 1).standard_normal((3, 2))
    g = Scattering().scattered(np.zeros((2, 3, 2)), Streams(0))
    assert g[1] == pytest.approx((first[:, 0] + 1j * first[:, 1]) * math.sqrt(0.5))
