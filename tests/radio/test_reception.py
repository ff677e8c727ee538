"""Vectors and receptions: what the server hears, how much noise is in it, what it costs; closed forms."""

import dataclasses
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import otafl
from otafl.engine.updates import Updates, shared_reference
from otafl.radio.air import RECEPTIONS, Air, Channel, IdealAir, Reception
from otafl.radio.imperfect import Imperfections
from otafl.radio.noise import addressed_noise
from otafl.radio.vectors import Vectors
from tests.conftest import make_config

CPU = torch.device("cpu")
S, M, N = 2, 4, 3


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.complex128) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def air(noise_var_j: float = 0.0, **flaw: Any) -> Air:
    gains = torch.ones((1, S, M), dtype=torch.float64)
    return Air((0, 1), 1.0, noise_var_j, addressed_noise(CPU, torch.float64), Imperfections(**flaw), gains)


def channel() -> Channel:
    each = draw(S, M, N, seed=2)
    return Channel(draw(S, M, seed=3), each)


def some() -> Tensor:
    return torch.tensor([[True, True, False, True], [False, True, True, True]])


def expected(values: Tensor, scale: Tensor, who: Tensor, where: Channel, reception: Reception) -> Tensor:
    """By definition, device by device."""
    assert where.each is not None
    sent = torch.where(who[..., None], scale[..., None] * values, 0.0)
    if reception in ("real", "complex"):
        heard = sum(where.coeff[:, i, None] * sent[:, i] for i in range(M))
        return heard.real if reception == "real" else heard
    antennas = sum(where.each[:, i, :, None] * sent[:, i, None] for i in range(M))
    return antennas if reception == "antennas" else antennas.abs().square().sum(1)


@pytest.mark.parametrize("reception", RECEPTIONS)
@pytest.mark.parametrize("kind", ["updates", "real vectors", "complex vectors"])
@pytest.mark.parametrize("flaw", [{}, {"clip_amplitude": 1e9}])  # the latter is written out and changes nothing
def test_what_is_heard_without_noise(reception: Reception, kind: str, flaw: dict[str, Any]) -> None:
    values = draw(S, M, 7) if kind == "complex vectors" else draw(S, M, 7, dtype=torch.float64)
    signal: Any = Vectors(values)
    if kind == "updates":
        signal = Updates(values, *shared_reference(torch.zeros((S, 7), dtype=torch.float64), M), lr=1.0)
    scale, who, where = draw(S, M, seed=4), some(), channel()
    heard, entry = air(**flaw).uplink(signal, scale, who, where, 0, 0, reception)
    assert torch.allclose(heard, expected(values, scale, who, where, reception), rtol=1e-12)
    energy = torch.where(who, (scale[..., None] * values).abs().square().sum(-1), 0.0)
    assert torch.allclose(entry.energy_j, energy, rtol=1e-12)
    assert (entry.channel_uses, entry.limit_j) == (7, 7.0)
    antennas = N if reception in ("antennas", "energy") else 1
    assert entry.dimensions == (7 if reception == "real" else 14 * antennas)


def test_one_antenna_hears_the_same_in_every_reception() -> None:
    """[S, 1, Q] is complex; its real part is "real", noise and all; its square is "energy"."""
    signal, scale, who, where = Vectors(draw(S, M, 9)), draw(S, M, seed=4), some(), Channel(draw(S, M, seed=3))
    heard = {kind: air(0.3).uplink(signal, scale, who, where, 5, 1, kind)[0] for kind in RECEPTIONS}
    assert torch.equal(heard["antennas"][:, 0], heard["complex"])
    assert torch.allclose(heard["real"], heard["complex"].real, rtol=1e-12)
    assert torch.allclose(heard["energy"], heard["complex"].abs().square(), rtol=1e-12)


def test_noise_is_independent_in_every_real_dimension() -> None:
    """Variance σ_z² in phase and in quadrature, at every antenna; 5 standard errors. Energy: 2N σ_z² for silence."""
    size, variance = 100_000, 0.25
    signal, nobody = Vectors(torch.zeros(S, M, size, dtype=torch.float64)), torch.zeros(S, M, dtype=torch.bool)
    scale, where = torch.zeros(S, M, dtype=torch.complex128), channel()
    heard, entry = air(variance).uplink(signal, scale, nobody, where, 0, 0, "antennas")
    parts = torch.view_as_real(heard).permute(0, 1, 3, 2).reshape(S * N * 2, size) / math.sqrt(variance)
    moments = parts @ parts.T / size
    assert (moments.diag() - 1).abs().max() < 5 * math.sqrt(2 / size)
    assert (moments - moments.diag().diag()).abs().max() < 5 / math.sqrt(size)
    assert (entry.noise_norm == 0).all()  # nobody transmitted
    energy = air(variance).uplink(signal, scale, nobody, where, 0, 0, "energy")[0]
    mean, error = 2 * N * variance, 2 * math.sqrt(N) * variance / math.sqrt(size)
    assert (energy.mean(-1) - mean).abs().max() < 5 * error


def test_energy_detection_has_its_closed_mean() -> None:
    """E[Σ_n |y_n|²] = Σ_n |Σ_i h_{i,n} x_i|² + 2N σ_z²; over many uses of the same symbols."""
    size, variance = 200_000, 0.5
    symbols = draw(S, M, 1)
    signal, scale, who, where = Vectors(symbols.repeat(1, 1, size)), draw(S, M, seed=4), some(), channel()
    energy = air(variance).uplink(signal, scale, who, where, 0, 0, "energy")[0]
    quiet = expected(symbols, scale, who, where, "energy")[:, 0]
    error = (4 * N * variance**2 + 4 * quiet * variance).sqrt() / math.sqrt(size)
    assert ((energy.mean(-1) - quiet - 2 * N * variance).abs() < 5 * error).all()


def test_silent_nan_does_not_poison_the_others() -> None:
    values = draw(S, M, 7)
    values[0, 2] = math.nan
    heard = air().uplink(Vectors(values), draw(S, M, seed=4), some(), channel(), 0, 0, "antennas")[0]
    assert torch.view_as_real(heard).isfinite().all()


def test_imperfect_radios_do_to_complex_vectors_what_they_say() -> None:
    """Clipping keeps phases and limits amplitudes; a converter has few steps in each part; blocks fade apart."""
    values, who = draw(S, M, 50), some()
    one = Channel(torch.ones(S, M, dtype=torch.complex128))
    scale = torch.ones(S, M, dtype=torch.complex128)
    alone = torch.zeros_like(who)
    alone[:, 1] = True
    heard, entry = air(clip_amplitude=0.6).uplink(Vectors(values), scale, alone, one, 0, 0, "complex")
    assert float(heard.abs().max()) <= 0.6 * (1 + 1e-12)
    assert torch.allclose(heard.angle(), values[:, 1].angle())
    assert torch.allclose(entry.energy_j[:, 1], heard.abs().square().sum(-1))
    coded = air(bits=3).uplink(Vectors(values), scale, alone, one, 0, 0, "complex")[0]
    assert all(len(torch.view_as_real(row).abs().mul(1e9).round().unique()) <= 4 for row in coded)
    fading = air(block_uses=10, block_correlation=0.5)
    faded = fading.uplink(
        Vectors(torch.ones(S, M, 50, dtype=torch.float64)), scale, alone, channel(), 0, 0, "antennas"
    )[0]
    assert torch.equal(faded[..., 0], faded[..., 9])
    assert not torch.allclose(faded[..., 9], faded[..., 10])
    each = channel().each
    assert each is not None
    assert torch.allclose(faded[..., 0], each[:, 1])
    assert faded.shape == (S, N, 50)
    assert who.any()


def test_fading_within_an_upload_has_the_power_of_one_antenna_at_each() -> None:
    """Far from the estimated block every antenna has the gain of one, not that after combining; 5 standard errors."""
    uses = 20_000
    alone = torch.zeros(S, M, dtype=torch.bool)
    alone[:, 1] = True
    faded = dataclasses.replace(
        air(block_uses=1, block_correlation=0.0),
        mean_gain=torch.full((1, S, M), 9.0, dtype=torch.float64),
        antenna_gain=torch.full((1, S, M), 4.0, dtype=torch.float64),
    )
    signal, scale = Vectors(torch.ones(S, M, uses, dtype=torch.float64)), torch.ones(S, M, dtype=torch.complex128)
    for reception, gain in (("antennas", 4.0), ("complex", 9.0)):
        heard = faded.uplink(signal, scale, alone, channel(), 0, 0, reception)[0][..., 1:]  # type: ignore[arg-type]
        power = heard.abs().square().mean(-1)
        assert ((power - gain).abs() < 5 * gain / math.sqrt(uses)).all()


def test_an_error_free_uplink_has_no_antennas() -> None:
    signal, scale, who = Vectors(draw(S, M, 7)), draw(S, M, seed=4), some()
    heard, entry = IdealAir(addressed_noise).uplink(signal, scale, who, channel(), 0, 0, "complex")
    assert torch.allclose(heard, torch.where(who[..., None], scale[..., None] * signal.values, 0.0).sum(1))
    assert entry.channel_uses == 0
    with pytest.raises(Exception, match="has no antennas"):
        IdealAir(addressed_noise).uplink(signal, scale, who, channel(), 0, 0, "energy")


def test_vectors_are_plain_numbers() -> None:
    for wrong in (torch.zeros(2, 3), torch.zeros(1, 2, 3, dtype=torch.int64), [1.0]):
        with pytest.raises(TypeError, match="vectors are"):
            Vectors(wrong)  # type: ignore[arg-type]
    assert set(get_args(Reception)) == set(RECEPTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_norms_of_vectors_are_accumulated_in_float64(dtype: torch.dtype) -> None:
    size = 2_000_000
    signal = Vectors(torch.full((1, 1, size), 0.1, dtype=dtype))
    exact = float(torch.tensor(0.1, dtype=torch.float32)) * math.sqrt(size)
    assert float(signal.norms(torch.ones((1, 1), dtype=torch.bool))) == pytest.approx(exact, rel=1e-11)


@pytest.mark.parametrize("algorithm", ["ota-fedavg", "fedavg"])
def test_seconds_of_the_uplink_are_channel_uses_over_the_bandwidth(algorithm: str) -> None:
    """Q uses at a bandwidth B take Q/B, and a reported scalar 32/B; an error-free uplink takes none."""
    result = otafl.run(make_config(algorithm, {"radio.bandwidth_hz": 2e5, "radio.tx_power_dbm": 3.0}))
    uses = result.metrics["channel_uses"]
    assert np.allclose(result.metrics["uplink_s"], (uses + 32 * result.metrics["scalar_reports"]) / 2e5)
    assert (uses[:, -1] > 0).all() == (algorithm == "ota-fedavg")
