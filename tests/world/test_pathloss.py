"""Path loss, line of sight and shadowing; tolerances are 5 standard errors."""

import math
from typing import Any

import numpy as np
import pytest

from otafl.random import Streams
from otafl.world.pathloss import FreeSpace, LogDistance
from otafl.world.process import along_path
from otafl.world.tr38901 import RMa, UMa, UMi


def at(distance_m: Any, rounds: int = 1) -> Any:
    """Positions [T, M, 2] at these distances."""
    distance_m = np.broadcast_to(np.asarray(distance_m, dtype=float), (rounds, np.size(distance_m)))
    return np.stack([distance_m, np.zeros_like(distance_m)], axis=-1)


def test_free_space_is_friis() -> None:
    assert 10 * math.log10(FreeSpace().mean_gain(np.array([1000.0]))[0]) == pytest.approx(-100.05, abs=0.01)
    near, far = FreeSpace().mean_gain(np.array([100.0, 1000.0]))
    assert near / far == pytest.approx(100)


def test_hand_values_of_the_tables() -> None:
    """TR 38.901 table 7.4.1-1 at 2.4 GHz, worked out by hand."""
    distance = np.array([100.0, 1000.0])
    space = np.hypot(distance, 23.5)
    seen, hidden = UMa().loss_db(distance)  # breakpoint 4 · 24 · 0.5 · f/c = 384 m
    assert seen[0] == pytest.approx(28 + 22 * math.log10(space[0]) + 20 * math.log10(2.4))
    far = 28 + 40 * math.log10(space[1]) + 20 * math.log10(2.4) - 9 * math.log10(384.27**2 + 23.5**2)
    assert seen[1] == pytest.approx(far, abs=1e-3)
    assert hidden[1] == pytest.approx(13.54 + 39.08 * math.log10(space[1]) + 20 * math.log10(2.4))
    assert UMi().loss_db(np.array([1056.7]))[1][0] == pytest.approx(137.244, abs=0.01)
    seen, hidden = RMa().loss_db(np.array([1000.0]))
    assert seen[0] == pytest.approx(101.9, abs=0.5)
    assert hidden[0] > seen[0]


@pytest.mark.parametrize("scenario", [UMa(), UMi(), RMa()], ids=lambda s: type(s).__name__)
def test_loss_is_continuous_and_rises(scenario: Any) -> None:
    distance = np.geomspace(10, 4000, 4000)
    for loss in scenario.loss_db(distance):
        assert (np.diff(loss) > 0).all()
        assert np.diff(loss).max() < 0.2


@pytest.mark.parametrize("scenario", [UMa(), UMi(), RMa()], ids=lambda s: type(s).__name__)
def test_line_of_sight_has_its_probability(scenario: Any) -> None:
    """Shares of 20,000 devices at a distance; between "always" and "never"."""
    for distance in (15.0, 60.0, 200.0, 900.0):
        prob = float(scenario.los_prob(np.array(distance)))
        plain = type(scenario)(shadowing=False)
        gains = plain.gains(at(np.full(20_000, distance)), Streams(1))[0]
        seen, hidden = (10 ** (-loss / 10) for loss in plain.loss_db(np.array([distance])))
        share = np.isclose(gains, seen, atol=0).mean()
        assert abs(share - prob) <= 5 * math.sqrt(prob * (1 - prob) / 20_000) + 1e-12
        assert (np.isclose(gains, seen, atol=0) | np.isclose(gains, hidden, atol=0)).all()
        always, never = (
            type(scenario)(shadowing=False, los=los).gains(at(distance), Streams(0)) for los in ("always", "never")
        )
        assert always[0, 0] == pytest.approx(seen[0])
        assert never[0, 0] == pytest.approx(hidden[0])


def test_line_of_sight_does_not_flicker() -> None:
    """A device that walks a metre a round changes sides seldom; one that stands never does."""
    walk = at(np.full(500, 100.0), 60)
    walk[:, :, 1] += np.arange(60)[:, None]
    seen = UMa(shadowing=False).gains(walk, Streams(2))
    jumps = (np.abs(np.diff(10 * np.log10(seen), axis=0)) > 3).mean()
    assert 0 < jumps < 0.08
    still = UMa().gains(at(np.full(50, 300.0), 20), Streams(2))
    assert (still == still[0]).all()


def test_shadowing_decorrelates_over_its_distance() -> None:
    """e^{−d/50 m} after walking d; unit variance everywhere."""
    walk = at(np.full(20_000, 500.0), 12)
    walk[:, :, 1] += 10.0 * np.arange(12)[:, None]
    field = along_path(walk, 50.0, Streams(3), "shadowing")
    for lag in (1, 5, 11):
        product = field[0] * field[lag]
        assert abs(product.mean() - math.exp(-10 * lag / 50)) < 5 * product.std() / math.sqrt(product.size)
        assert abs((field[lag] ** 2).mean() - 1) < 5 * math.sqrt(2 / product.size)
    fresh = along_path(at(np.full(20_000, 500.0), 2), 0.0, Streams(3), "shadowing")
    assert abs((fresh[0] * fresh[1]).mean()) < 5 / math.sqrt(20_000)


def test_log_normal_shadowing_has_its_spread_and_unit_mean() -> None:
    law = LogDistance(shadowing_db=6.0)
    ratio = law.gains(at(np.full(40_000, 700.0)), Streams(4))[0] / LogDistance().mean_gain(np.array([700.0]))
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / 200
    spread = (10 * np.log10(ratio)).std()
    assert abs(spread - 6) < 5 * 6 / math.sqrt(2 * 40_000)
    assert (LogDistance().gains(at(700.0), Streams(4)) == LogDistance().mean_gain(np.array([700.0]))).all()


def test_first_rounds_do_not_depend_on_how_many_follow() -> None:
    walk = at(np.full(5, 300.0), 40)
    walk[:, :, 1] += 3.0 * np.arange(40)[:, None]
    for law in (UMa(), LogDistance(shadowing_db=8.0)):
        assert np.array_equal(law.gains(walk[:9], Streams(5)), law.gains(walk, Streams(5))[:9])
