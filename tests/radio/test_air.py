"""The air: superposition, noise, energy; physics with tolerances from the standard error."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from otafl.engine.updates import Updates, own_references, shared_reference
from otafl.errors import ConfigError, EnergyError
from otafl.radio.air import Air, Channel, EnergyGuard, IdealAir
from otafl.radio.link import LinkBudget, inversion_threshold
from otafl.radio.noise import addressed_noise

CPU = torch.device("cpu")


def vectors(seeds: int = 2, devices: int = 5, size: int = 7, dtype: torch.dtype = torch.float64) -> Updates:
    generator = torch.Generator().manual_seed(1)
    end = torch.randn((seeds, devices, size), generator=generator, dtype=dtype)
    return Updates(end, *shared_reference(torch.zeros((seeds, size), dtype=dtype), devices), lr=0.5)


def channel(seeds: int = 2, devices: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn((seeds, devices), generator=generator, dtype=torch.complex128) * 1e-7


def truncated_inversion(gamma: float, coeff: Tensor, active: Tensor, bound: Tensor) -> Tensor:
    """γ/(h_i B) for the active devices."""
    return torch.where(active, gamma / (coeff * bound[:, None]), 0.0)


def quiet() -> Air:
    return Air((0, 1), 1.0, 0.0, addressed_noise(CPU, torch.float64))


def test_paper_link_budget() -> None:
    """The paper's setting: E_s = 1e-9 J, N_0 = 5.012e-21 J, √(d E_s) = 0.028532; N_0/2 is 3 dB less."""
    budget = LinkBudget()
    assert budget.symbol_energy_j == pytest.approx(1e-9)
    assert budget.noise_var_j == pytest.approx(5.012e-21, rel=1e-4)
    assert math.sqrt(814_090 * budget.symbol_energy_j) == pytest.approx(0.028532, rel=1e-4)
    assert LinkBudget(noise_convention="n0/2").noise_var_j == budget.noise_var_j / 2
    assert LinkBudget(noise_dbm_hz=-math.inf).noise_var_j == 0
    with pytest.raises(ConfigError, match="noise_dbm_hz"):
        LinkBudget(noise_dbm_hz=math.inf)


def test_inverted_signals_superpose_to_the_weighted_sum() -> None:
    """C2: with z = 0 the server hears Σ_{i∈A} γ u_i/B, whatever the channels."""
    signal, coeff = vectors(), channel()
    active = coeff.abs() >= coeff.abs().median()
    bound = signal.norms(active).max(-1).values
    heard, _ = quiet().uplink(signal, truncated_inversion(3e-9, coeff, active, bound), active, Channel(coeff), 0, 0)
    expected = (signal.dense() * active[..., None]).sum(1) * 3e-9 / bound[:, None]
    assert torch.allclose(heard, expected, rtol=1e-12, atol=0)


def test_phases_do_not_matter() -> None:
    """C4: multiplying every h_i by e^{jθ_i} leaves the received signal unchanged."""
    signal, coeff = vectors(), channel()
    everyone = torch.ones_like(coeff, dtype=torch.bool)
    bound = signal.norms(everyone).max(-1).values
    turned = coeff * torch.polar(torch.ones(5, dtype=torch.float64), torch.arange(5, dtype=torch.float64))
    one, other = (
        quiet().uplink(signal, truncated_inversion(1e-9, h, everyone, bound), everyone, Channel(h), 0, 0)[0]
        for h in (coeff, turned)
    )
    assert torch.allclose(one, other, rtol=1e-12)


def test_noise_has_the_stated_variance_and_is_addressed() -> None:
    """C3: mean 0 and variance σ_z² per real dimension, 5 standard errors; the same address gives the same noise."""
    size, variance = 200_000, 5.012e-21
    air = Air((0, 1), 1.0, variance, addressed_noise(CPU, torch.float32))
    silent = Updates(torch.zeros((2, 1, size)), *shared_reference(torch.zeros((2, size)), 1), lr=1.0)
    nobody = torch.zeros((2, 1), dtype=torch.bool)
    scale = torch.zeros((2, 1), dtype=torch.complex128)
    first = air.uplink(silent, scale, nobody, Channel(scale), 3, 0)[0]
    unit = first.to(torch.float64) / math.sqrt(variance)
    assert (unit.mean(-1).abs() < 5 / math.sqrt(size)).all()
    assert ((unit.square().mean(-1) - 1).abs() < 5 * math.sqrt(2 / size)).all()
    assert (unit[0] * unit[1]).mean().abs() < 5 / math.sqrt(size)  # seeds are independent
    assert torch.equal(first, air.uplink(silent, scale, nobody, Channel(scale), 3, 0)[0])
    assert not torch.equal(first, air.uplink(silent, scale, nobody, Channel(scale), 4, 0)[0])
    assert not torch.equal(first, air.uplink(silent, scale, nobody, Channel(scale), 3, 1)[0])


def test_silent_nan_does_not_poison_the_others() -> None:
    signal, coeff = vectors(), channel()
    end = signal.end.clone()
    end[:, 2] = math.nan
    broken = Updates(end, *shared_reference(torch.zeros((2, 7), dtype=torch.float64), 5), lr=0.5)
    active = torch.tensor([[True, True, False, True, True]] * 2)
    scale = truncated_inversion(1e-9, coeff, active, torch.ones(2, dtype=torch.float64))
    heard = quiet().uplink(broken, scale, active, Channel(coeff), 0, 0)[0]
    assert heard.isfinite().all()
    assert torch.allclose(heard, quiet().uplink(signal, scale, active, Channel(coeff), 0, 0)[0])


def test_energy_and_norms_are_accumulated_in_float64() -> None:
    """A float32 sum of 2·10⁶ equal squares would be off by more than the limit's 1e-9; float64 is not."""
    size = 2_000_000
    end = torch.full((1, 1, size), 0.1, dtype=torch.float32)
    signal = Updates(end, *shared_reference(torch.zeros((1, size)), 1), lr=1.0)
    everyone = torch.ones((1, 1), dtype=torch.bool)
    exact = float(torch.tensor(0.1, dtype=torch.float32)) * math.sqrt(size)
    assert float(signal.norms(everyone)) == pytest.approx(exact, rel=1e-11)


def test_energy_guard_names_seed_round_device_and_excess() -> None:
    guard = EnergyGuard("mine", (7, 8), CPU)
    alive, dead = torch.tensor([True, True]), torch.tensor([False, False])
    guard.note(0, torch.tensor([[0.5, 1.0], [0.25, 1 + 5e-10]], dtype=torch.float64), alive)
    guard.check()  # exactly at the limit, and within rounding
    guard.note(1, torch.tensor([[0.5, math.nan], [math.inf, 0.0]], dtype=torch.float64), dead)
    guard.check()  # the models are not finite either: divergence, which is reported as such
    guard.note(5, torch.tensor([[0.0, 0.0], [1.5, 0.0]], dtype=torch.float64), alive)
    with pytest.raises(EnergyError, match=r"mine: seed 8, round 5, device 0 sent 1\.5 times"):
        guard.check()


@pytest.mark.parametrize("energy_j", [math.nan, math.inf])
def test_energy_that_is_not_finite_is_a_violation(energy_j: float) -> None:
    """A signal so strong that its energy overflows must not pass as silence."""
    guard = EnergyGuard("mine", (7,), CPU)
    guard.note(3, torch.tensor([[0.0, energy_j]], dtype=torch.float64), torch.tensor([True]))
    with pytest.raises(EnergyError, match="seed 7, round 3, device 1"):
        guard.check()


def test_largest_report_may_be_negative() -> None:
    from otafl.radio.csi import Reports

    values = torch.tensor([[-3.0, 0.0, -1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    who = torch.tensor([[True, False, True], [False, False, False]])
    assert Reports(values, who).max().tolist() == [-1.0, 0.0]


def test_norms_follow_a_mask_that_is_changed_in_place() -> None:
    signal = vectors()
    who = torch.zeros((2, 5), dtype=torch.bool)
    assert (signal.norms(who) == 0).all()
    who.fill_(True)
    assert (signal.norms(who) > 0).all()


def test_injected_noise_is_left_alone() -> None:
    kept = torch.ones((2, 7), dtype=torch.float64)
    air = Air((0, 1), 1.0, 4.0, lambda seeds, name, t, size: kept)
    nobody = torch.zeros((2, 5), dtype=torch.bool)
    heard, _ = air.uplink(vectors(), torch.zeros((2, 5), dtype=torch.complex128), nobody, Channel(channel()), 0, 0)
    assert (heard == 2).all()
    assert (kept == 1).all()


def test_threshold_keeps_the_energy_limit_with_equality_at_the_edge() -> None:
    """|h| = γ/√(d E_s) and ‖u‖ = B: exactly d E_s."""
    threshold = inversion_threshold(2e-9, 50, 1e-9)
    coeff = torch.tensor([[threshold]], dtype=torch.complex128)
    scale = truncated_inversion(2e-9, coeff, coeff.abs() >= threshold, torch.ones(1, dtype=torch.float64))
    assert float(scale.abs() ** 2) == pytest.approx(50 * 1e-9, rel=1e-12)


def test_ideal_air_is_exact_and_free() -> None:
    signal = vectors()
    weights = torch.full((2, 5), 0.2, dtype=torch.float64)
    everyone = torch.ones((2, 5), dtype=torch.bool)
    heard, entry = IdealAir(addressed_noise).uplink(signal, weights, everyone, Channel(channel()), 0, 0)
    assert torch.allclose(heard, signal.dense().mean(1))
    assert (entry.energy_j == 0).all()
    assert entry.channel_uses == 0


@pytest.mark.parametrize("write", ["end", "reference"])
def test_updates_are_invalid_once_their_tensors_are_written(write: str) -> None:
    end, start = torch.ones((1, 2, 3)), torch.zeros((1, 2, 3))
    updates = Updates(end, *own_references(start), lr=1.0)
    everyone = torch.ones((1, 2), dtype=torch.bool)
    updates.norms(everyone)
    target: Any = end if write == "end" else start
    target[0, 0] = 5.0
    with pytest.raises(RuntimeError, match="no longer valid"):
        updates.superpose(torch.ones((1, 2)), everyone)
