"""The digital uplink: quantiser, slots, ledger, and error-free averaging as its limit."""

import math

import numpy as np
import pytest
import torch

from otafl.errors import ConfigError
from otafl.radio.digital import quantised, rates, slots
from tests.algorithms.worlds import channels, gradients, make
from tests.conftest import TINY_PARAMS, make_config


def test_the_quantiser_is_unbiased_and_bounded() -> None:
    rng = np.random.default_rng(4)
    v = torch.from_numpy(rng.standard_normal(50)) * torch.linspace(0, 3, 50)
    for bits in (1, 2, 4):
        drawn = torch.from_numpy(rng.random((20_000, 50)))
        found = quantised(v.expand(20_000, -1), bits, drawn)
        step = 2 * float(v.abs().max()) / (2**bits - 1)
        assert len(torch.unique((found / step * 1e6).round())) <= 2**bits
        assert ((found - v).abs() <= step * (1 + 1e-9)).all()
        error = found.std(0) / math.sqrt(20_000)
        assert ((found.mean(0) - v).abs() < 5 * error + 1e-12).all()
        assert (found.var(0) <= step**2 / 4 * 1.02 + 1e-12).all()
    assert torch.equal(quantised(torch.zeros(3), 4, torch.rand(3)), torch.zeros(3))


def test_the_quantiser_stays_within_its_levels_in_float32() -> None:
    """Coordinates at ±max are levels themselves; rounding must not carry them one step further."""
    draw = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (200, 4000), generator=draw) * 2.0 - 1
    for scale in (1.0, 0.3, 7.77, 1e-6):
        for bits in (8, 12, 16, 20):
            found = quantised(scale * signs, bits, torch.rand(signs.shape, generator=draw))
            assert found.abs().max() <= scale * (1 + 1e-6)


def test_slots_and_energies_by_hand() -> None:
    """Two devices: rate B log2(1 + |h|² E_s/(2σ²)); the better one first, the other only if it fits."""
    h = torch.tensor([[2.0, 1.0]], dtype=torch.complex128)
    rate = rates(h, 2.0, 0.5, 100.0)
    assert rate.tolist()[0] == pytest.approx([100 * math.log2(1 + 8), 100 * math.log2(1 + 2)])
    bits, who = torch.full((1, 2), 1000.0, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    first, second = 1000 / (100 * math.log2(9)), 1000 / (100 * math.log2(3))
    for deadline, through in ((first - 0.01, [0, 0]), (first + 0.01, [1, 0]), (first + second + 0.01, [1, 1])):
        delivered, seconds = slots(bits, rate, who, deadline)
        assert delivered.tolist() == [list(map(bool, through))]
        assert seconds.tolist()[0] == pytest.approx([first * through[0], second * through[1]])
    assert slots(bits, rate, torch.tensor([[False, True]]), 100.0)[0].tolist() == [[False, True]]
    assert slots(bits, torch.zeros_like(rate), who, 1e9)[0].tolist() == [[False, False]]


def test_digital_with_many_bits_and_time_is_error_free_averaging() -> None:
    keys = {"algorithm.bits": 24, "algorithm.deadline_s": 8.0, "radio.tx_power_dbm": 60.0, "cell.radius_m": 100.0}
    one, other = make("digital", keys), make("fedavg")
    a, b = one.init(), make("fedavg", {"cell.radius_m": 100.0}).init()
    for t in range(4):
        step = one.step(a, t)
        assert step.info.active.all()
        a, b = step.state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-6)


def test_digital_time_and_energy_reach_the_ledger() -> None:
    """uplink_s is the sum of slots and energy_j is P times it, P = E_s B; who does not fit spends nothing."""
    import otafl

    keys = {"experiment.rounds": 3, "algorithm.bits": 4, "radio.tx_power_dbm": 20.0}
    sim = make("digital", keys)
    result = otafl.run(sim.config, device="cpu")
    power = sim.config.radio.symbol_energy_j * sim.config.radio.bandwidth_hz
    seconds = np.zeros(2)
    for t in range(3):
        for s, world in enumerate(sim.worlds):
            snr = np.abs(world.coeff[t]) ** 2 * sim.problem.symbol_energy_j / (2 * sim.problem.noise_var_j)
            slot = np.sort((4 * TINY_PARAMS + 32) / (1e6 * np.log2(1 + snr)))
            seconds[s] += slot[np.cumsum(slot) <= 8.0].sum()
    assert result.metrics["uplink_s"][:, -1] == pytest.approx(seconds, rel=1e-7)  # log1p here, log2(1 + x) above
    assert result.metrics["energy_j"][:, -1] == pytest.approx(power * seconds, rel=1e-7)
    assert (result.metrics["channel_uses"] == 0).all()


def test_digital_averages_those_that_are_delivered() -> None:
    """A deadline that only some meet: the mean is over them, and they are the ones with the best channels."""
    keys = {"algorithm.bits": 24, "radio.tx_power_dbm": 0.0, "radio.bandwidth_hz": 1e3}
    sim, counts = make("digital", keys), set()
    for t in range(10):
        step = sim.step(sim.init(), t)
        who, h = step.info.active, channels(sim, t).abs()
        updates = gradients(sim, sim.problem.initial, t)
        for s in range(2):
            counts.add(int(who[s].sum()))
            if who[s].any():
                moved = (step.state.params - sim.problem.initial)[s] / sim.config.training.lr_at(t)
                assert torch.allclose(moved, updates[s, who[s]].mean(0), rtol=0, atol=1e-5)
                assert h[s, who[s]].min() > torch.where(who[s], 0.0, h[s]).max()
            else:
                assert torch.equal(step.state.params[s], sim.problem.initial[s])
    assert counts & {1, 2, 3, 4, 5}


def test_a_deadline_beyond_the_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="a round lasts 8 s"):
        make_config("digital", {"algorithm.deadline_s": 9.0})
    make_config("digital", {"algorithm.deadline_s": 9.0, "fading.round_s": 10.0})
