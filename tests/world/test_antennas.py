"""Several receive antennas: maximum-ratio combining for the sum of all devices; 5 standard errors."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import otafl
from otafl.errors import ConfigError
from otafl.papers.fedoag.theory.account import account
from otafl.report.page import report
from otafl.report.runs import Named
from otafl.runs.result import read_run
from otafl.world.channel import combined, combined_prob, trajectory
from otafl.world.fading import Rayleigh
from otafl.world.mobility import Static
from otafl.world.pathloss import LogDistance
from otafl.world.placement import Cell
from tests.conftest import make_config, simulate


def channels(gain: Any, antennas: int, rounds: int = 20_000) -> Any:
    """Rayleigh channels [N, T, M] of these gains."""
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((2, antennas, rounds, len(gain)))
    return np.sqrt(np.asarray(gain) / 2) * (parts[0] + 1j * parts[1])


def test_one_device_gets_the_whole_array() -> None:
    """|c^H h|² is Σ_k |h_k|²: Gamma with shape N."""
    h = channels([2.0], 4)
    grown, g = combined(np.full((20_000, 1), 2.0), h)
    assert np.allclose(np.abs(g[:, 0]) ** 2, (np.abs(h[..., 0]) ** 2).sum(0))
    assert np.allclose(g.imag, 0)  # matched: no phase is left
    assert grown[0, 0] == 8.0
    assert stats.kstest(np.abs(g[:, 0]) ** 2 / 2, "gamma", args=(4,)).statistic < 2 / math.sqrt(20_000)


@pytest.mark.parametrize("antennas", [2, 8])
def test_gains_and_probabilities_of_unequal_devices(antennas: int) -> None:
    gain = np.array([5.0, 1.0, 0.3, 0.01])
    grown, g = combined(np.broadcast_to(gain, (20_000, 4)), channels(gain, antennas))
    power = np.abs(g) ** 2
    assert (np.abs(power.mean(0) - grown[0]) < 5 * power.std(0) / math.sqrt(len(power))).all()
    for level in (0.1, 1.0, 6.0):
        prob = combined_prob(gain, antennas, math.sqrt(level))
        seen = (power >= level).mean(0)
        assert (np.abs(seen - prob) <= 5 * np.sqrt(prob * (1 - prob) / len(power)) + 1e-9).all()


def test_one_antenna_is_as_ever_and_more_hear_more() -> None:
    parts = (Cell(), Static(), LogDistance(), Rayleigh(), 50, 0)
    one, four = trajectory(*parts), trajectory(*parts, 4)
    assert np.array_equal(one.coeff, trajectory(*parts, 1).coeff)
    assert np.array_equal(one.mean_gain, four.antenna_gain)
    assert (four.mean_gain > one.mean_gain).all()
    assert combined_prob(one.mean_gain, 1, 1e-9) == pytest.approx(np.exp(-1e-18 / one.mean_gain), rel=1e-6)


def test_the_theory_knows_and_says_where_it_does_not() -> None:
    more = simulate(make_config(overrides={"radio.antennas": 4})).uplink_probability()
    assert (more > simulate(make_config()).uplink_probability()).all()
    with pytest.raises(ConfigError, match="rayleigh fading only"):
        account(simulate(make_config(overrides={"radio.antennas": 4, "fading.name": "weibull"})))
    for law in ("rician", "none"):  # their means are not 0: the mean gain would be another
        with pytest.raises(ConfigError, match="zero_mean"):
            make_config(overrides={"radio.antennas": 4, "fading.name": law})


def test_a_device_that_dominates_has_the_probability_of_being_alone() -> None:
    from scipy.special import gammaincc

    for antennas, level in ((2, 1.0), (4, 2.0), (4, 6.0)):
        for other in (1e-3, 1e-4, 1e-12):
            prob = combined_prob(np.array([1.0, other]), antennas, math.sqrt(level))[0]
            assert prob == pytest.approx(gammaincc(antennas, level), abs=2e-3)


def test_a_report_does_without_a_formula(tmp_path: Path) -> None:
    for law, shown in (("rayleigh", True), ("weibull", False)):
        config = make_config(overrides={"radio.antennas": 2, "fading.name": law})
        otafl.run(config, out=tmp_path / law, device="cpu")
        page = report([Named("run", read_run(tmp_path / law), tmp_path / law)])
        assert ('"probability"' in page) == shown
