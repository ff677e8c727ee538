"""Sionna as an oracle of the formulas, and as a source of fading."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats

from otafl.random import Streams
from otafl.world import tr38901

pytest.importorskip("sionna")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

from otafl.doors.sionna import CDL, TDL, ScenarioFading, sionna  # noqa: E402

DISTANCES = np.array([12.0, 60.0, 200.0, 384.0, 700.0, 1000.0, 1500.0, 3000.0])


@pytest.mark.parametrize("name", ["UMa", "UMi", "RMa"])
@pytest.mark.parametrize("seen", [True, False])
def test_path_loss_and_line_of_sight_are_sionnas(name: str, seen: bool) -> None:
    mine = getattr(tr38901, name)()
    count = len(DISTANCES)
    with sionna(0) as theirs:
        arrays = [
            theirs.PanelArray(
                num_rows_per_panel=1,
                num_cols_per_panel=1,
                polarization="single",
                polarization_type="V",
                antenna_pattern="omni",
                carrier_frequency=2.4e9,
            )
            for _ in range(2)
        ]
        indoor = {} if name == "RMa" else {"o2i_model": "low"}
        channel = getattr(theirs, name)(
            carrier_frequency=2.4e9, ut_array=arrays[0], bs_array=arrays[1], direction="uplink", **indoor
        )
        places, server, still = torch.zeros(1, count, 3), torch.zeros(1, 1, 3), torch.zeros(1, count, 3)
        places[0, :, 0] = torch.tensor(DISTANCES)
        places[..., 2], server[..., 2] = mine.device_height_m, mine.server_height_m
        channel.set_topology(
            ut_loc=places,
            bs_loc=server,
            ut_orientations=still,
            bs_orientations=torch.zeros(1, 1, 3),
            ut_velocities=still,
            in_state=torch.zeros(1, count, dtype=torch.bool),
            los=seen,
        )
        loss = channel._scenario.basic_pathloss[0, 0].numpy()
        prob = np.asarray(channel._scenario.los_probability[0, 0])
    assert mine.loss_db(DISTANCES)[0 if seen else 1] == pytest.approx(loss, abs=1e-3)
    assert mine.los_prob(DISTANCES) == pytest.approx(prob, abs=1e-5)


@pytest.mark.parametrize("line", [TDL(), TDL(model="C"), TDL(model="D"), CDL(), CDL(model="E")], ids=str)
def test_delay_lines_have_unit_power_and_their_probability(line: Any) -> None:
    """Devices are independent; 5 standard errors, and Kolmogorov and Smirnov's distance to the closed form."""
    power = np.abs(line.coefficients(np.zeros((2, 3000, 2)), Streams(3))[1]) ** 2
    assert abs(power.mean() - 1) < 5 * power.std() / math.sqrt(power.size) + 0.01  # clusters are few in some profiles
    if isinstance(line, TDL):
        assert stats.kstest(power, lambda x: 1 - line.exceed_prob(np.asarray(x))).statistic < 2.2 / math.sqrt(
            power.size
        )


def test_tapped_delay_line_has_bessel_memory() -> None:
    """J₀(2π f_D τ) between rounds of 5 ms at 10 m/s."""
    g = TDL(speed_mps=10.0, round_s=0.005).coefficients(np.zeros((8, 3000, 2)), Streams(4))
    doppler = 10.0 * 2.4e9 / 299_792_458
    for lag in (1, 3, 6):
        product = (g[0] * g[lag].conj()).real
        assert abs(product.mean() - special.j0(2 * math.pi * doppler * 0.005 * lag)) < 5 * product.std() / math.sqrt(
            3000
        )


def test_draws_are_addressed_and_disturb_nobody() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = TDL().coefficients(np.zeros((6, 4, 2)), Streams(5))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(first, TDL().coefficients(np.zeros((6, 4, 2)), Streams(5)))
    assert not np.allclose(first, TDL().coefficients(np.zeros((6, 4, 2)), Streams(6)))
    assert np.allclose(first, TDL().coefficients(np.zeros((20, 4, 2)), Streams(5))[:6], atol=1e-4)


def test_scenarios_share_line_of_sight_with_the_path_loss_and_have_unit_power() -> None:
    """Those in sight fade less (a K-factor of 9 dB in the mean); rounds are addressed."""
    cell = np.stack([np.linspace(30, 200, 60), np.zeros(60)], axis=-1)
    where = np.broadcast_to(cell, (40, 60, 2))
    g = ScenarioFading().coefficients(where, Streams(1))
    power, seen = np.abs(g) ** 2, tr38901.UMa().in_sight(where, Streams(1))
    assert 0.2 < seen.mean() < 0.9
    assert abs(power.mean() - 1) < 5 * power.mean(0).std() / math.sqrt(60) + 0.02
    assert power[seen].std() < 0.75 < power[~seen].std()
    assert np.allclose(ScenarioFading().coefficients(where[:5], Streams(1)), g[:5], rtol=1e-4, atol=1e-5)


def test_a_scenario_of_fading_needs_its_path_loss() -> None:
    from otafl.config.schema import load_config
    from otafl.errors import ConfigError

    assert load_config("urban", {"fading.name": "sionna-38901"}).fading.spec.scenario == "uma"
    with pytest.raises(ConfigError, match="line of sight is one for both"):
        load_config("stationary", {"fading.name": "sionna-38901"})
