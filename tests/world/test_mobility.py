"""Laws of motion: they stay in the cell, begin where they should, and have their long-run densities."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from otafl.errors import ConfigError
from otafl.random import Streams
from otafl.world.measured import MeasuredFading, MeasuredGain
from otafl.world.mobility import GaussMarkov, Hotspots, RandomDirection, RandomWaypoint, Road, Trace
from otafl.world.placement import Cell

RADIUS = 500.0
LAWS: list[Any] = [RandomWaypoint(), RandomDirection(), GaussMarkov(), Road(), Hotspots(), Hotspots(leave_prob=0.0)]


def start(count: int, seed: int = 0) -> Any:
    return Cell(devices=count, radius_m=RADIUS, placement="uniform").place(Streams(seed))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_devices_stay_in_the_cell_at_their_speed_and_rounds_are_addressed(law: Any) -> None:
    track = law.positions(start(40), RADIUS, 300, Streams(1))
    beyond = 3.5 * law.lanes if isinstance(law, Road) else 1e-6
    assert np.hypot(track[..., 0], track[..., 1]).max() <= RADIUS + beyond
    assert np.array_equal(law.positions(start(40), RADIUS, 50, Streams(1)), track[:50])
    if not isinstance(law, Road | Hotspots):
        assert np.array_equal(track[0], start(40))
    if not isinstance(law, GaussMarkov):
        steps = np.hypot(*np.moveaxis(np.diff(track, axis=0), -1, 0))
        if isinstance(law, Road):
            steps = steps[steps < RADIUS]  # but for vehicles that begin again at the other end
        assert steps.max() <= law.speed_mps[1] * 8.0 + 1e-9


def late_distances(law: Any, rounds: int, count: int) -> Any:
    """Distances over the radius of independent devices after many rounds."""
    last = law.positions(start(count), RADIUS, rounds, Streams(2))[-1]
    return np.hypot(last[:, 0], last[:, 1]) / RADIUS


def test_random_waypoint_crowds_the_middle_as_known() -> None:
    """Hyytiä, Lassila and Virtamo: f(r) ∝ (1 − r²) ∫_0^π √(1 − r² cos²φ) dφ in the unit disc."""
    seen = late_distances(RandomWaypoint(speed_mps=(2.0, 2.0)), 500, 4000)
    grid = np.linspace(0, 1, 401)
    angle = np.linspace(0, math.pi, 721)
    inner = integrate.simpson(np.sqrt(np.maximum(0, 1 - grid[:, None] ** 2 * np.cos(angle) ** 2)), x=angle, axis=1)
    density = grid * (1 - grid**2) * inner
    share = integrate.cumulative_simpson(density, x=grid, initial=0)
    assert stats.kstest(seen, lambda r: np.interp(r, grid, share / share[-1])).statistic < 2 / math.sqrt(len(seen))
    assert stats.kstest(seen**2, "uniform").pvalue < 1e-6  # and not everywhere alike


@pytest.mark.parametrize(
    "law", [RandomDirection(speed_mps=(5.0, 15.0)), GaussMarkov(speed_mps=10.0, memory=0.7)], ids=["direction", "gauss"]
)
def test_reflection_leaves_the_cell_uniform(law: Any) -> None:
    seen = late_distances(law, 80, 4000)
    assert stats.kstest(seen**2, "uniform").statistic < 2 / math.sqrt(len(seen))


def test_gauss_markov_velocity_has_its_memory() -> None:
    """In a cell too large to meet its edge: variance v²/2 per axis, correlation α^k."""
    track = GaussMarkov(memory=0.8, speed_mps=2.0).positions(np.zeros((4000, 2)), 1e9, 12, Streams(3))
    velocity = np.diff(track, axis=0)[..., 0] / 8.0
    for lag in (0, 1, 4):
        product = velocity[0] * velocity[lag]
        assert abs(product.mean() - 2.0 * 0.8**lag) < 5 * product.std() / math.sqrt(product.size)


def test_vehicles_are_spread_along_the_road_and_both_ways() -> None:
    track = Road(offset_m=100.0, lanes=2).positions(np.zeros((3000, 2)), RADIUS, 5, Streams(4))
    half = math.sqrt(RADIUS**2 - 100**2)
    for t in (0, 4):
        assert stats.kstest((track[t, :, 0] + half) / (2 * half), "uniform").statistic < 2 / math.sqrt(3000)
    assert set(np.unique(track[..., 1])) == {100.0, 103.5}
    ahead = np.diff(track[..., 0], axis=0)[0]
    assert 0.45 < (ahead[np.abs(ahead) < RADIUS] > 0).mean() < 0.55


def test_crowds_stay_in_their_hot_spots() -> None:
    track = Hotspots(hotspots=3, hotspot_m=40.0, leave_prob=0.0).positions(np.zeros((60, 2)), RADIUS, 100, Streams(5))
    assert np.hypot(*np.moveaxis(track - track[0], -1, 0)).max() <= 80.0
    wander = Hotspots(hotspots=3, hotspot_m=40.0, leave_prob=0.5).positions(np.zeros((60, 2)), RADIUS, 400, Streams(5))
    assert np.hypot(*np.moveaxis(wander[-1] - wander[0], -1, 0)).max() > 80.0


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (lambda: RandomWaypoint(speed_mps=(3.0, 1.0)), "0 <= min <= max"),
        (lambda: Road(offset_m=600.0).positions(np.zeros((2, 2)), RADIUS, 3, Streams(0)), "must cross the cell"),
        (lambda: GaussMarkov(speed_mps=1e9).positions(np.zeros((2, 2)), RADIUS, 3, Streams(0)), "too fast for a cell"),
        (lambda: Hotspots(hotspot_m=600.0).positions(np.zeros((2, 2)), RADIUS, 3, Streams(0)), "below the cell's"),
    ],
)
def test_impossible_motion_is_refused(law: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        law()


TRACE = "time_s,device,x_m,y_m\n0,a,0,10\n16,a,32,10\n0,b,5,5\n16,b,5,5\n0,c,1,1\n16,c,1,9\n"


def trace(folder: Path, text: str = TRACE, **keys: Any) -> Trace:
    (folder / "track.csv").write_text(text)
    return Trace(file=str(folder / "track.csv"), **keys)


def test_a_trace_is_interpolated_on_rounds(tmp_path: Path) -> None:
    track = trace(tmp_path).positions(np.zeros((3, 2)), RADIUS, 3, Streams(0))
    assert track[:, 0].tolist() == [[0, 10], [16, 10], [32, 10]]
    nearest = trace(tmp_path, interpolation="nearest", round_s=6.0).positions(np.zeros((3, 2)), RADIUS, 3, Streams(0))
    assert nearest[:, 0].tolist() == [[0, 10], [0, 10], [32, 10]]
    hold = trace(tmp_path, beyond="hold").positions(np.zeros((3, 2)), RADIUS, 6, Streams(0))
    assert hold[-1, 0].tolist() == [32, 10]
    again = trace(tmp_path, beyond="repeat").positions(np.zeros((3, 2)), RADIUS, 7, Streams(0))
    assert again[:, 0, 0] == pytest.approx([0, 16, 32, 32, 0, 16, 32], abs=1e-6)  # one more step, then again


@pytest.mark.parametrize("beyond", ["hold", "repeat"])
def test_first_rounds_of_a_trace_do_not_depend_on_how_many_follow(beyond: str, tmp_path: Path) -> None:
    law = trace(tmp_path, beyond=beyond)
    long = law.positions(np.zeros((3, 2)), RADIUS, 9, Streams(0))
    for rounds in range(1, 9):
        assert np.array_equal(law.positions(np.zeros((3, 2)), RADIUS, rounds, Streams(0)), long[:rounds])


def test_devices_are_in_the_order_of_their_numbers_and_rounding_is_forgiven(tmp_path: Path) -> None:
    rows = "".join(f"{t / 10},{i} , {i},0\n" for i in range(12) for t in range(4))
    law = trace(tmp_path, "time_s, device,x_m,y_m\n\n  \n" + rows, round_s=0.1)
    assert law.positions(np.zeros((12, 2)), RADIUS, 4, Streams(0))[3, :, 0].tolist() == list(range(12))


def test_of_more_recorded_devices_each_seed_draws_its_own(tmp_path: Path) -> None:
    law = trace(tmp_path)
    drawn = {tuple(law.positions(np.zeros((1, 2)), RADIUS, 1, Streams(seed))[0, 0]) for seed in range(20)}
    assert drawn == {(0, 10), (5, 5), (1, 1)}


def test_parquet_is_the_same(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"time_s": [0.0, 16.0], "device": ["a", "a"], "x_m": [0.0, 32.0], "y_m": [10.0, 10.0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "track.parquet")
    track = Trace(file=str(tmp_path / "track.parquet")).positions(np.zeros((1, 2)), RADIUS, 2, Streams(0))
    assert track[1, 0].tolist() == [16, 10]
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        Trace(file=str(tmp_path / "bad.parquet")).positions(np.zeros((1, 2)), RADIUS, 2, Streams(0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column time_s"),
        ("time_s,device,x_m\n0,a,1\n", "has no column y_m"),
        ("time_s,device,x_m,y_m\n", "has no rows"),
        ("time_s,device,x_m,y_m\n0,a,1\n", "line 2 has 3 values, the header 4"),
        ("time_s,device,x_m,x_m\n0,a,1,2\n", "two columns 'x_m'"),
        ("time_s,device,x_m,y_m\n0,a,one,2\n", "row 1: x_m = 'one' is not a number"),
        ("time_s,device,x_m,y_m\n0,a,nan,2\n", "row 1: x_m is not a finite number"),
        ("time_s,device,x_m,y_m\n0,a,1,2\n0,a,1,3\n", "two rows at 0 s"),
        ("time_s,device,x_m,y_m\n5,a,1,2\n50,a,1,3\n", "begins at 5 s"),
        ("time_s,device,x_m,y_m\n0,a,1,2\n9,a,1,3\n", "ends at 9 s, 3 rounds need 16 s"),
        ("time_s,device,x_m,y_m\n0,a,1,2\n99,a,1,3\n", "has 1 devices, cell.devices = 2"),
    ],
)
def test_bad_traces_are_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    count = 2 if "devices" in message else 1
    with pytest.raises(ConfigError, match=message):
        trace(tmp_path, text).positions(np.zeros((count, 2)), RADIUS, 3, Streams(0))


def test_a_changed_file_is_another_run(tmp_path: Path) -> None:
    before = trace(tmp_path)
    after = trace(tmp_path, TRACE.replace("32", "33"))
    assert before.digest != after.digest
    with pytest.raises(ConfigError, match="content has changed"):
        Trace(file=after.file, digest=before.digest)
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace(file=str(tmp_path / "nowhere.csv"))
    with pytest.raises(ConfigError, match="name the recorded file"):
        Trace()


def test_measured_channels_come_back_as_measured(tmp_path: Path) -> None:
    """√Λ_i g_i is h_i; Λ_i its mean power; probabilities are the recorded shares."""
    rng = np.random.default_rng(0)
    h = 1e-6 * (rng.standard_normal((400, 3)) + 1j * rng.standard_normal((400, 3))) * [1, 3, 0.2]
    rows = [f"{8 * t},{i},{h[t, i].real!r},{h[t, i].imag!r}" for t in range(400) for i in range(3)]
    path = tmp_path / "channel.csv"
    path.write_text("\n".join(["time_s,device,re,im", *rows]).replace("np.float64(", "").replace(")", ""))
    gain, fading = (kind(file=str(path), values="complex") for kind in (MeasuredGain, MeasuredFading))
    where = np.zeros((100, 3, 2))
    again = np.sqrt(gain.gains(where, Streams(0))) * fading.coefficients(where, Streams(0))
    assert np.allclose(again, h[:100])
    assert gain.gains(where, Streams(0))[0] == pytest.approx((np.abs(h) ** 2).mean(0))
    path.write_text("time_s,device,magnitude\n0,a,-80\n")
    with pytest.raises(ConfigError, match="not dB"):
        MeasuredGain(file=str(path)).gains(np.zeros((1, 1, 2)), Streams(0))
    power = np.abs(h) ** 2 / (np.abs(h) ** 2).mean(0)
    assert float(fading.exceed_prob(np.array(0.7))) == pytest.approx((power >= 0.7).mean())
