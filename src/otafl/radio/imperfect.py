"""Imperfect radios: errors in what devices know of their channels, and distortions of the signals they send.

The believed (estimated) and the true channel are kept apart. A method's views, thresholds, inversions and energies use
the believed one; the air uses the true one. The energy limit still holds, since a device knows what it sends.

Knows: channels, signals.
Does not know: models, data, which method transmits.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from torch import Tensor

from otafl.errors import ConfigError
from otafl.radio.link import MOST_DENSITY_DBM_HZ
from otafl.radio.noise import NoiseSource
from otafl.random import Streams
from otafl.units import db_to_linear, dbm_to_watt
from otafl.world.process import independent

Complex = NDArray[np.complex128]


@dataclass(frozen=True)
class Imperfections:
    """The imperfections of a radio; all are off by default, and any can be combined."""

    pilot_snr_db: float = math.inf
    """Signal-to-noise ratio, at the mean gain, of the pilots from which devices estimate their channel: ĥ = h + e."""
    estimate_age: Annotated[int, Ge(0)] = 0
    """Age of the estimate: ĥ is the channel of so many rounds ago; meant for fading with memory."""
    phase_std_rad: Annotated[float, Ge(0)] = 0.0
    """Standard deviation of the Gaussian phase error of each device and round."""
    timing_std: Annotated[float, Ge(0), Le(1)] = 0.0
    """Deviation of the Gaussian timing error in symbols; its size, at most 1, is the share that falls into the next."""
    block_uses: Annotated[int, Ge(0)] = 0
    """Channel uses per block of constant Rayleigh fading; only the first block is estimated. 0: one block an upload."""
    block_correlation: Annotated[float, Ge(0), Le(1)] = 0.99
    """Correlation of the fading of successive blocks."""
    clip_amplitude: Annotated[float, Gt(0)] = math.inf
    """Largest amplitude that the amplifier passes, in units of √E_s."""
    bits: Annotated[int, Ge(0), Le(24)] = 0
    """Bits of the digital-to-analog converter, whose full scale is the device's largest value; 0: no quantisation."""
    interference_dbm_hz: float = -math.inf
    """Power density of Gaussian interference from a neighbouring cell; no method knows about it."""
    downlink_std: Annotated[float, Ge(0)] = 0.0
    """Deviation of the Gaussian error on every parameter of a received model; the first model has no error."""

    def __post_init__(self) -> None:
        for name in ("pilot_snr_db", "interference_dbm_hz", "clip_amplitude"):
            if math.isnan(getattr(self, name)):
                raise ConfigError(f"imperfect.{name} = nan: must be a number")
        if self.interference_dbm_hz > MOST_DENSITY_DBM_HZ:
            raise ConfigError("imperfect.interference_dbm_hz: give a density in dBm/Hz, or -inf for none")
        if self.pilot_snr_db < -100 or self.phase_std_rad > 100:
            raise ConfigError("imperfect: give pilot_snr_db of at least -100 and phase_std_rad of at most 100")
        if self.bits == 1:
            raise ConfigError("imperfect.bits = 1: at least 2, or 0 for no quantisation")

    @property
    def none(self) -> bool:
        """Whether the radio is perfect."""
        return self == Imperfections()

    def downlink(
        self, seeds: tuple[int, ...], noise: NoiseSource, active: NDArray[np.bool_] | None
    ) -> "Downlink | None":
        """Errors of received models, None if there are none; devices in the mask [T, S, M] receive, without it all."""
        if self.downlink_std == 0:
            return None
        last = None
        if active is not None:
            rounds = np.where(active, np.arange(len(active))[:, None, None], -1)
            last = np.concatenate([np.full_like(rounds[:1], -1), np.maximum.accumulate(rounds, axis=0)[:-1]])
        return Downlink(seeds, self.downlink_std, noise, last)

    @property
    def dense(self) -> bool:
        """Whether single values of a signal are changed, so that it must be written out."""
        return bool(self.block_uses or self.bits or self.clip_amplitude < math.inf or self.timing_std)

    @property
    def interference_var_j(self) -> float:
        """Variance of the interference, joule per real dimension."""
        return dbm_to_watt(self.interference_dbm_hz)

    def believed(self, h: Complex, mean_gain: NDArray[np.float64], streams: Streams) -> Complex:
        """Believed channel ĥ of every round and device, [T, M]."""
        if self.estimate_age:
            h = np.concatenate([np.repeat(h[:1], min(self.estimate_age, len(h)), axis=0), h[: -self.estimate_age]])
        if self.pilot_snr_db == math.inf:
            return h
        error = independent(h[..., None], streams, "pilots") * np.sqrt(mean_gain / db_to_linear(self.pilot_snr_db))
        return np.asarray(h + error)

    def true(self, h: Complex, streams: Streams) -> Complex:
        """True channel that a signal passes, with the device's phase error, [T, M] or at every antenna [T, M, N]."""
        if self.phase_std_rad == 0:
            return h
        places = h[..., None] if h.ndim == 2 else h[:, :, :1]
        error = self.phase_std_rad * math.sqrt(2) * independent(places, streams, "phase").real
        return np.asarray(h * np.exp(1j * (error if h.ndim == 2 else error[..., None])))

    def converted(self, vector: Tensor, scale: float, symbol_energy_j: float) -> tuple[Tensor, float]:
        """A device's vector [Q] after its converter and amplifier, and the share of its energy that is left, ≤ 1."""
        if not self.bits and self.clip_amplitude == math.inf:
            return vector, 1.0
        before = _norm(vector)
        if before == 0:
            return vector, 1.0
        sent = torch.view_as_real(vector) if vector.is_complex() else vector
        if self.bits:
            top, steps = sent.abs().max(), 2 ** (self.bits - 1) - 1
            sent = torch.round(sent / top * steps) * (top / steps)
            sent = sent / max(1.0, _norm(sent) / before)
        if self.clip_amplitude < math.inf and scale > 0:
            limit = min(self.clip_amplitude * symbol_energy_j**0.5 / scale, torch.finfo(sent.dtype).max)
            if vector.is_complex():
                size = torch.linalg.vector_norm(sent, dim=-1, keepdim=True)
                sent = torch.where(size > limit, sent * (limit / size), sent)
            else:
                sent = sent.clamp(-limit, limit)
        share = min(1.0, _norm(sent) / before) ** 2
        return (torch.view_as_complex(sent.contiguous()) if vector.is_complex() else sent), share

    def of_upload(
        self, seed: int, t: int, use: int, h: Tensor, mean_gain: NDArray[np.float64], size: int
    ) -> "UploadFlaws":
        """Timing errors of a seed's devices in one upload, and their channels [M, K] in each of its blocks."""
        streams = Streams(seed)
        drawn = streams.at(f"timing/{use}", t).standard_normal(len(h))
        timing = np.minimum(np.abs(self.timing_std * drawn), 1)
        blocks = self._blocks(h, mean_gain, streams.at(f"blocks/{use}", t), size)
        return UploadFlaws(timing, blocks, self.block_uses, size)

    def _blocks(self, h: Tensor, mean_gain: NDArray[np.float64], rng: np.random.Generator, size: int) -> Tensor:
        """The channel in each block of an upload, [blocks, M, K]; the first block has the round's channel h."""
        count = -(-size // self.block_uses) if self.block_uses else 1
        if count == 1:
            return h[None]
        power = np.repeat(mean_gain, h.shape[1]) / 2
        fresh = (rng.standard_normal((count, h.numel(), 2)) @ np.array([1, 1j])) * np.sqrt(power)
        rows = np.empty_like(fresh)
        rows[0] = h.flatten().cpu().numpy()
        for b in range(1, count):
            rows[b] = self.block_correlation * rows[b - 1] + math.sqrt(1 - self.block_correlation**2) * fresh[b]
        return torch.from_numpy(rows).to(h.device).view(count, *h.shape)


@dataclass(frozen=True)
class UploadFlaws:
    """Timing errors and changing channels of one seed's devices in one upload."""

    timing: NDArray[np.float64]
    """Share of a device's symbol that falls into the next, [M]."""
    blocks: Tensor
    """Channel in each block, [blocks, M, K]."""
    block_uses: int
    size: int

    def arrived(self, sent: Tensor, device: int, scale: Tensor, in_phase: bool) -> Tensor:
        """A device's vector [Q], times its scale, as it arrives at the server, [K, Q]."""
        weights = (self.blocks[:, device] * scale).T
        if in_phase and not sent.is_complex():
            weights = weights.real
        if self.block_uses and weights.shape[1] > 1:
            weights = weights.repeat_interleave(self.block_uses, dim=1)[:, : self.size]
        wide = torch.promote_types(sent.dtype, torch.complex64) if weights.is_complex() else sent.dtype
        arrived = sent * weights.to(wide)
        if in_phase and arrived.is_complex():
            arrived = arrived.real
        share = float(self.timing[device])
        if share > 0:
            arrived = (1 - share) * arrived + share * torch.nn.functional.pad(arrived[:, :-1], (1, 0))
        return arrived


def _norm(vector: Tensor) -> float:
    parts = torch.view_as_real(vector) if vector.is_complex() else vector
    return float(torch.linalg.vector_norm(parts, dtype=torch.float64))


@dataclass(frozen=True)
class Downlink:
    """Errors in the models that devices have received.

    A device trains from x_i + e_i with the error e_i of its last reception. It knows neither x_i nor e_i. It sends
    differences to what it received, so e_i cancels there; e_i only shifts the point where gradients are evaluated.
    """

    seeds: tuple[int, ...]
    std: float
    noise: NoiseSource
    last_heard: NDArray[np.int64] | None
    """Last round before t in which a device was heard, −1 for never, [T, S, M]; None if all receive in every round."""

    def errors(self, t: int, own: bool, like: Tensor, num_devices: int) -> Tensor:
        """Error e_i of every device in round t, [S, M, P]; all receive in every round if they have no `own` models."""
        size = like.shape[-1]
        result = like.new_zeros(len(self.seeds), num_devices, size)
        for s, seed in enumerate(self.seeds):
            for i in range(num_devices):
                received = t - 1 if not own or self.last_heard is None else int(self.last_heard[t, s, i])
                if received >= 0:
                    result[s, i] = self.noise((seed,), f"downlink/{i}", received, size)[0] * self.std
        return result
