"""Placement, mobility, path loss and fading follow their laws; tolerances are 5 standard errors."""

import math

import numpy as np
import pytest
from scipy.special import gamma as gamma_function, gammainc

from otafl.radio.link import LinkBudget, inversion_threshold
from otafl.random import Streams
from otafl.world.channel import active_prob, trajectory
from otafl.world.fading import NoFading, Rayleigh
from otafl.world.mobility import BoundedWaypoint, Static
from otafl.world.pathloss import LogDistance
from otafl.world.placement import Cell

PAPER_PARAMS = 814_090


def test_stratified_puts_one_device_in_every_equal_area_ring() -> None:
    cell = Cell()
    for seed in range(20):
        positions_m = cell.place(Streams(seed))
        ring = np.floor(30 * (np.hypot(*positions_m.T) / 1500) ** 2).astype(int)
        assert sorted(ring) == list(range(30))
    orders = {tuple(np.hypot(*cell.place(Streams(seed)).T).argsort()) for seed in range(20)}
    assert len(orders) == 20  # rings are shuffled over devices, differently per seed


def test_uniform_placement_is_uniform_in_area_and_angle() -> None:
    """(D/R)² and the angle are uniform: mean 1/2, variance 1/12."""
    cell = Cell(devices=20_000, placement="uniform")
    positions_m = cell.place(Streams(3))
    area = (np.hypot(*positions_m.T) / cell.radius_m) ** 2
    turn = np.arctan2(positions_m[:, 1], positions_m[:, 0]) / (2 * np.pi) + 0.5
    for uniform in (area, turn):
        assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(uniform))
        assert abs((uniform**2).mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / len(uniform))


def test_given_coordinates_are_kept() -> None:
    cell = Cell(devices=2, placement="given", positions_m=((3.0, 4.0), (-100.0, 0.0)))
    assert np.array_equal(cell.place(Streams(0)), [[3, 4], [-100, 0]])


def test_static_devices_stay() -> None:
    start_m = Cell().place(Streams(0))
    track = Static().positions(start_m, 1500, 7, Streams(0))
    assert (track == start_m).all()


@pytest.mark.parametrize("territory_m", [50.0, 400.0])
def test_waypoint_stays_in_territory_and_cell_and_keeps_the_speed_limit(territory_m: float) -> None:
    start_m = Cell().place(Streams(1))
    model = BoundedWaypoint(speed_mps=(0.5, 2.5), territory_m=territory_m)
    track = model.positions(start_m, 1500, 400, Streams(1))
    assert np.array_equal(track[0], start_m)
    assert (np.hypot(*(track - start_m).transpose(2, 0, 1)) <= territory_m + 1e-9).all()
    assert (np.hypot(*track.transpose(2, 0, 1)) <= 1500 + 1e-9).all()
    step_m = np.hypot(*np.diff(track, axis=0).transpose(2, 0, 1))
    assert (step_m <= 2.5 * 8 + 1e-9).all()
    assert (step_m > 0).all()  # with v_min > 0 everybody moves in every round


def test_waypoint_step_never_passes_the_waypoint_and_goes_straight() -> None:
    """Eq. (position update): within a leg, steps are equal vectors of length v τ until the waypoint."""
    model = BoundedWaypoint(speed_mps=(1.0, 1.0), territory_m=50)
    start_m = np.zeros((1, 2))
    track = model.positions(start_m, 1500, 60, Streams(5))[:, 0]
    waypoints = [model._draw_leg(start_m, 1500, Streams(5), k)[0][0] for k in range(60)]
    here, leg = start_m[0], 0
    for t in range(59):
        ahead = waypoints[leg] - here
        far = np.linalg.norm(ahead)
        here = waypoints[leg] if far <= 8.0 else here + 8.0 / far * ahead
        leg += far <= 8.0
        assert np.allclose(track[t + 1], here)
    assert leg > 3


def test_waypoints_are_uniform_in_the_territory() -> None:
    model = BoundedWaypoint(territory_m=50)
    start_m = np.zeros((20_000, 2))
    waypoint_m, speed_mps = model._draw_leg(start_m, 1500, Streams(0), 0)
    area = (np.hypot(*waypoint_m.T) / 50) ** 2
    assert abs(area.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 20_000)
    assert abs(speed_mps.mean() - 1.25) < 5 * 2.5 * math.sqrt(1 / 12 / 20_000)


def test_mixed_regime_moves_the_asked_fraction_drawn_per_seed() -> None:
    model = BoundedWaypoint(speed_mps=(1.0, 2.5), moving_fraction=0.5)
    moved = []
    for seed in range(5):
        track = model.positions(Cell().place(Streams(seed)), 1500, 10, Streams(seed))
        moved.append(tuple((track[-1] != track[0]).any(-1)))
        assert sum(moved[-1]) == 15
    assert len(set(moved)) == 5


def test_a_longer_run_has_the_same_first_rounds() -> None:
    parts = (Cell(), BoundedWaypoint(), LogDistance(), Rayleigh())
    short, long = trajectory(*parts, 20, 4), trajectory(*parts, 50, 4)
    assert np.array_equal(short.coeff, long.coeff[:20])
    assert np.array_equal(short.positions_m, long.positions_m[:20])


def test_path_loss_of_the_paper() -> None:
    """Λ(D) = 1e-5 D^-3.5: 35 dB a decade, and hand-computed values."""
    law = LogDistance()
    assert law.mean_gain(np.array([100.0, 750.0, 1500.0])) == pytest.approx([1e-12, 8.66e-16, 7.65e-17], rel=2e-3)
    decade = law.mean_gain(np.array([10.0, 100.0]))
    assert 10 * np.log10(decade[0] / decade[1]) == pytest.approx(35)
    assert law.mean_gain(np.array([0.2])) == law.mean_gain(np.array([1.0]))


def test_rayleigh_moments() -> None:
    """E|g|² = 1, E g = 0, E g² = 0 (circular), P(|g|² ≥ x) = e^-x."""
    count = 200 * 500
    gain = Rayleigh().coefficients(np.zeros((500, 200, 2)), Streams(0)).ravel()
    power = np.abs(gain) ** 2
    assert abs(power.mean() - 1) < 5 / math.sqrt(count)  # the variance of Exp(1) is 1
    assert abs(gain.mean()) < 5 / math.sqrt(count)
    assert abs((gain**2).mean()) < 5 * math.sqrt(2 / count)  # E|g²|² = 2
    for level in (0.1, 1.0, 3.0):
        prob = math.exp(-level)
        assert abs((power >= level).mean() - prob) < 5 * math.sqrt(prob * (1 - prob) / count)
        assert Rayleigh().exceed_prob(np.array(level)) == pytest.approx(prob)


def test_rayleigh_is_independent_over_rounds_and_devices() -> None:
    gain = Rayleigh().coefficients(np.zeros((400, 250, 2)), Streams(1))
    for lagged in (gain[1:] * gain[:-1].conj(), gain[:, 1:] * gain[:, :-1].conj()):
        assert abs(lagged.mean()) < 5 / math.sqrt(lagged.size)


def test_no_fading() -> None:
    assert (NoFading().coefficients(np.zeros((3, 2, 2)), Streams(0)) == 1).all()
    assert NoFading().exceed_prob(np.array([0.5, 1.0, 1.5])).tolist() == [1, 1, 0]


def test_channel_is_path_loss_times_fading() -> None:
    world = trajectory(Cell(), Static(), LogDistance(), NoFading(), 3, 0)
    assert np.allclose(np.abs(world.coeff) ** 2, LogDistance().mean_gain(world.distance_m))


def test_paper_threshold_and_unit_probability_distance() -> None:
    """γ = 1e-9: threshold 3.505e-8, and a device at 678 m has p = 1/e."""
    threshold = inversion_threshold(1e-9, PAPER_PARAMS, LinkBudget().symbol_energy_j)
    assert threshold == pytest.approx(3.505e-8, rel=1e-3)
    assert (1e-5 / threshold**2) ** (1 / 3.5) == pytest.approx(678, abs=1)  # Λ = threshold² there


GAMMAS = {1e-10: 28.33, 2e-10: 24.18, 3e-10: 19.33, 5e-10: 12.00, 1e-9: 5.47, 2e-9: 2.48, 3e-9: 1.56, 5e-9: 0.87,
          1e-8: 0.39}  # fmt: skip


def closed_form_active(gamma: float) -> float:
    """Devices uniform in the disc: E|A| = m a x^-a Γ(a, x), a = 2/n, x = γ²/(d E_s Λ(r_max))."""
    law = LogDistance()
    a = 2 / law.exponent
    x = gamma**2 / (PAPER_PARAMS * LinkBudget().symbol_energy_j * law.mean_gain(np.array([1500.0]))[0])
    return float(30 * a * x**-a * gammainc(a, x) * gamma_function(a))


@pytest.mark.parametrize(("gamma", "table"), GAMMAS.items())
def test_mean_number_of_active_devices(gamma: float, table: float) -> None:
    """Simulated over random placements, against the closed form and the table it was printed in."""
    exact = closed_form_active(gamma)
    assert exact == pytest.approx(table, abs=6e-3)
    threshold = inversion_threshold(gamma, PAPER_PARAMS, LinkBudget().symbol_energy_j)
    counts, probs = [], []
    for seed in range(300):
        world = trajectory(Cell(placement="uniform"), Static(), LogDistance(), Rayleigh(), 20, seed)
        counts.append((np.abs(world.coeff) >= threshold).sum(axis=1).mean())
        probs.append(active_prob(world, Rayleigh(), threshold).sum())
    for values in (np.array(counts), np.array(probs)):
        assert abs(values.mean() - exact) < 5 * values.std(ddof=1) / math.sqrt(len(values)) + 1e-12


def test_stratified_placement_has_the_same_mean_with_less_spread() -> None:
    threshold = inversion_threshold(1e-9, PAPER_PARAMS, LinkBudget().symbol_energy_j)
    spread = {}
    for placement in ("stratified", "uniform"):
        cell = Cell(placement=placement)  # type: ignore[arg-type]
        sums = np.array([
            active_prob(trajectory(cell, Static(), LogDistance(), Rayleigh(), 1, s), Rayleigh(), threshold).sum()
            for s in range(300)
        ])  # fmt: skip
        assert abs(sums.mean() - closed_form_active(1e-9)) < 5 * sums.std(ddof=1) / math.sqrt(300)
        spread[placement] = sums.std(ddof=1)
    assert spread["stratified"] < spread["uniform"] / 3
