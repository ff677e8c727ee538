"""Radios that are not perfect: each flaw has its physics, and the contracts hold under all of them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from otafl.engine.devices import Anchors, Devices
from otafl.engine.updates import Updates, shared_reference
from otafl.errors import ConfigError
from otafl.radio.air import Air, Channel
from otafl.radio.imperfect import Imperfections
from otafl.radio.noise import addressed_noise
from otafl.random import Streams
from otafl.simulation.run import run
from tests.conftest import make_config, make_quadratic, simulate

CPU = torch.device("cpu")
FLAWS: list[dict[str, Any]] = [
    {"pilot_snr_db": 10.0},
    {"estimate_age": 2},
    {"phase_std_rad": 0.4},
    {"timing_std": 0.2},
    {"block_uses": 10, "block_correlation": 0.9},
    {"clip_amplitude": 1.5},
    {"bits": 4},
    {"interference_dbm_hz": -190.0},
    {"downlink_std": 0.05},
    {"pilot_snr_db": 15.0, "phase_std_rad": 0.2, "bits": 6, "clip_amplitude": 2.0, "block_uses": 20, "timing_std": 0.1},
]


def ids(flaw: dict[str, Any]) -> str:
    return "+".join(flaw)


def vectors(size: int, devices: int = 1) -> Updates:
    end = torch.randn((1, devices, size), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Updates(end, *shared_reference(torch.zeros((1, size), dtype=torch.float64), devices), lr=1.0)


def air(devices: int = 1, mean_gain: float = 1.0, **flaw: Any) -> Air:
    gains = torch.full((1, 1, devices), mean_gain, dtype=torch.float64)
    return Air((0,), 1.0, 0.0, addressed_noise(CPU, torch.float64), Imperfections(**flaw), gains)


def one(devices: int = 1) -> tuple[Tensor, Tensor]:
    """Everybody, with channel 1."""
    return torch.ones((1, devices), dtype=torch.bool), torch.ones((1, devices), dtype=torch.complex128)


@pytest.mark.parametrize("flaw", FLAWS, ids=ids)
@pytest.mark.parametrize("algorithm", ["fedoag", "fedoag-plus", "vanilla", "sca"])
def test_runs_hold_the_energy_limit_and_differ_from_the_perfect_radio(algorithm: str, flaw: dict[str, Any]) -> None:
    """The energy contract is checked by the run itself."""
    keys = {"fading.memory": "autoregressive", "experiment.rounds": 12}
    plain = run(make_config(algorithm, keys), device="cpu")
    flawed = run(
        make_config(algorithm, {**keys, **{f"imperfect.{key}": value for key, value in flaw.items()}}), device="cpu"
    )
    assert (flawed.metrics["energy_ratio_max"][:, 1:] <= 1 + 1e-9).all()
    assert not torch.allclose(plain.params, flawed.params)


@pytest.mark.parametrize("flaw", [{"timing_std": 0.1}, {"block_uses": 1000}, {"bits": 8}, {"bits": 2}], ids=ids)
@pytest.mark.parametrize("algorithm", ["fedoag-plus", "vanilla", "opc"])
def test_the_energy_limit_holds_in_float32_where_it_is_used_up(algorithm: str, flaw: dict[str, Any]) -> None:
    """The loudest device of these methods is at the limit: rounding must not count as excess."""
    keys = {"training.precision": "float32", "model.hidden": [300], "experiment.rounds": 8, "cell.devices": 10}
    result = run(
        make_config(algorithm, keys | {f"imperfect.{key}": value for key, value in flaw.items()}), device="cpu"
    )
    assert (result.metrics["energy_ratio_max"][:, 1:] <= 1 + 1e-9).all()
    assert result.metrics["energy_ratio_max"][:, 1:].max() > 0.5


def test_vanishing_flaws_are_the_perfect_radio() -> None:
    """The dense path, with nothing to do, hears the same."""
    plain = run(make_config(), device="cpu")
    for flaw in ({"block_uses": 10, "block_correlation": 1.0}, {"clip_amplitude": 1e9}, {"pilot_snr_db": 400.0}):
        flawed = run(make_config(overrides={f"imperfect.{key}": value for key, value in flaw.items()}), device="cpu")
        assert torch.allclose(plain.params, flawed.params, rtol=1e-9)
    assert Imperfections().none
    assert not Imperfections().dense


def test_belief_and_truth_are_apart() -> None:
    """A device sees its estimate; the signal meets the channel; statistics are not touched."""
    sim = simulate(make_config(overrides={"imperfect.pilot_snr_db": 0.0, "imperfect.phase_std_rad": 1.0}))
    world = sim.worlds[0]
    round_ = sim.round_at(2)
    assert not np.allclose(round_.device.h[0].numpy(), world.coeff[2])
    assert np.allclose(np.abs(round_._channel.coeff[0].numpy()), np.abs(world.coeff[2]))  # the phase error only
    assert not np.allclose(round_._channel.coeff[0].numpy(), world.coeff[2])


def test_pilots_have_their_error() -> None:
    h, gain = np.zeros((200, 100), dtype=complex), np.full((200, 100), 4.0)
    error = np.abs(Imperfections(pilot_snr_db=10.0).believed(h, gain, Streams(0))) ** 2
    assert abs(error.mean() - 0.4) < 5 * error.std() / math.sqrt(error.size)


def test_old_estimates_are_of_earlier_rounds() -> None:
    h = np.arange(5)[:, None] + 1j * np.zeros((5, 1))
    assert Imperfections(estimate_age=2).believed(h, np.ones((5, 1)), Streams(0))[:, 0].real.tolist() == [0, 0, 0, 1, 2]
    assert Imperfections(estimate_age=9).believed(h, np.ones((5, 1)), Streams(0))[:, 0].real.tolist() == [0] * 5


def test_phase_errors_cost_their_cosine() -> None:
    """E cos φ = e^{−σ²/2}."""
    true = Imperfections(phase_std_rad=0.7).true(np.ones((200, 100), dtype=complex), Streams(0)).real
    assert abs(true.mean() - math.exp(-0.245)) < 5 * true.std() / math.sqrt(true.size)


def test_timing_smears_into_the_next_symbol_and_keeps_the_sum() -> None:
    signal, (who, h) = vectors(1000), one()
    heard, _ = air(timing_std=0.3).uplink(signal, h, who, Channel(h), 0, 0)
    sent = signal.dense()[0, 0]
    before = torch.nn.functional.pad(sent[:-1], (1, 0))
    share = float(((heard[0] - sent) @ (before - sent)) / ((before - sent) @ (before - sent)))
    assert 0 < share < 1
    assert torch.allclose(heard[0], (1 - share) * sent + share * before)


def test_clipping_limits_amplitudes_and_counts_less_energy() -> None:
    signal, (who, h) = vectors(1000), one()
    heard, sent = air(clip_amplitude=0.8).uplink(signal, h, who, Channel(h), 0, 0)
    assert float(heard.abs().max()) == pytest.approx(0.8)
    assert torch.allclose(heard[0], signal.dense()[0, 0].clamp(-0.8, 0.8))
    assert float(sent.energy_j) == pytest.approx(float(heard.square().sum()))


def test_quantisation_error_is_that_of_its_step() -> None:
    """Variance Δ²/12 with Δ = max|u|/(2^{b−1} − 1); never more energy."""
    signal, (who, h) = vectors(20_000), one()
    plain = signal.dense()[0, 0]
    for bits in (4, 8):
        heard, sent = air(bits=bits).uplink(signal, h, who, Channel(h), 0, 0)
        step = float(plain.abs().max()) / (2 ** (bits - 1) - 1)
        error = (heard[0] - plain).square()
        assert float(error.mean()) == pytest.approx(step**2 / 12, rel=0.1)
        assert float(sent.energy_j) <= float(plain.square().sum()) * (1 + 1e-12)


def test_fading_goes_on_within_an_upload() -> None:
    """From h = 3 towards Λ = 1: block b has mean 3ρ^b and power 9ρ^{2b} + 1 − ρ^{2b}."""
    devices, rho = 4000, 0.8
    who, _ = one(devices)
    h = torch.full((1, devices), 3.0, dtype=torch.complex128)
    kind = air(devices, block_uses=10, block_correlation=rho)
    blocks = kind.imperfect.of_upload(0, 0, 0, h[0][:, None], np.ones(devices), 50).blocks[..., 0]
    assert blocks.shape == (5, devices)
    for b in range(5):
        mean, power = blocks[b].real, blocks[b].abs().square()
        assert abs(float(mean.mean()) - 3 * rho**b) <= 5 * float(mean.std()) / math.sqrt(devices) + 1e-12
        expected = 9 * rho ** (2 * b) + 1 - rho ** (2 * b)
        assert abs(float(power.mean()) - expected) <= 5 * float(power.std()) / math.sqrt(devices) + 1e-9
    heard, _ = kind.uplink(vectors(50, devices), 1 / h, who, Channel(h), 0, 0)
    expected = (vectors(50, devices).dense()[0] * (blocks / 3).real.repeat_interleave(10, 0).T).sum(0)
    assert torch.allclose(heard[0], expected)


def test_interference_is_noise_nobody_knows_of() -> None:
    signal, (who, h) = vectors(50_000), one()
    kind = Imperfections(interference_dbm_hz=-170.0)
    heard, ledger = air(interference_dbm_hz=-170.0).uplink(signal, h, who, Channel(h), 0, 0)
    extra = (heard[0] - signal.dense()[0, 0]).square()
    assert abs(float(extra.mean()) / kind.interference_var_j - 1) < 5 * math.sqrt(2 / 50_000)
    assert float(ledger.signal_norm) == pytest.approx(float(signal.norms(who)))  # it is not signal
    assert float(ledger.noise_norm) == pytest.approx(math.sqrt(50_000 * kind.interference_var_j), rel=0.02)
    assert simulate(
        make_config(overrides={"imperfect.interference_dbm_hz": -170.0})
    ).problem.noise_var_j == pytest.approx(simulate(make_config()).problem.noise_var_j)


def test_downlink_errors_last_until_the_next_reception() -> None:
    """Fresh after a device was heard, the same while it is not, none before its first reception."""
    sim = simulate(make_config(overrides={"imperfect.downlink_std": 0.1, "experiment.rounds": 30}))
    active, like = sim._active.masks.numpy(), sim.problem.initial
    assert active.any(0).any()
    assert not active.all(0).any()
    errors = [sim._downlink.errors(t, True, like, 4) for t in range(30)]
    assert not errors[0].any()
    for t in range(29):
        same = (errors[t + 1] == errors[t]).all(-1).numpy()
        assert (same == ~active[t]).all()
    everything = torch.stack(errors)
    drawn = everything[everything.abs().sum(-1) > 0]
    assert abs(float(drawn.std()) - 0.1) < 0.01


def anchored(models: Tensor) -> Devices:
    """Devices whose anchors are their models."""
    own = torch.arange(models.shape[1]).expand(models.shape[:2])
    return Devices(models, Anchors(models.clone(), own, own))


@pytest.mark.parametrize("algorithm", ["vanilla", "fedoag"])
def test_downlink_errors_move_gradients_and_are_not_sent(algorithm: str) -> None:
    """½‖x − c_i‖², one step: the update is c_i − (x + e_i), against the clean model or anchor."""
    keys = {"imperfect.downlink_std": 0.1, "training.local_steps": 1}
    sim = simulate(make_quadratic(algorithm, keys))
    state = sim.step(sim.step(sim.init(), 0).state, 1).state
    round_ = sim.round_at(2)
    if algorithm == "vanilla":
        start, own = state.params, False
        updates = round_.train(start).dense()
        models = start[:, None]
    else:
        own, models = True, state.devices.models.clone()
        updates = round_.train(anchored(models.clone())).dense()
    errors = sim._downlink.errors(2, own, state.params, 4)
    clean = simulate(make_quadratic(algorithm, {"training.local_steps": 1})).round_at(2)
    plain = clean.train(anchored(models.expand(2, 4, -1).clone())).dense()
    assert torch.allclose(updates, plain - errors)
    assert errors.abs().max() > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"imperfect.pilot_snr_db": math.nan}, "must be a number"),
        ({"imperfect.interference_dbm_hz": math.inf}, "density in dBm/Hz"),
        ({"imperfect.bits": 1}, "at least 2"),
        ({"imperfect.timing_std": 2.0}, "imperfect.timing_std"),
        ({"imperfect.pilot_snr_db": -math.inf}, "at least -100"),
        ({"imperfect.block_uses": 5, "fading.name": "rician"}, "rayleigh fading only"),
        ({"imperfect.phase_std_rad": -1.0}, "imperfect.phase_std_rad"),
    ],
)
def test_mistakes_are_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(overrides=keys)
