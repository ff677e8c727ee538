"""Radios that are not perfect: what devices believe of their channels, and what becomes of the signals they send.

Belief and truth are kept apart. A method's views, thresholds, inversions and energies use the believed channel; the air
uses the true one. The energy limit holds all the same, since a device knows what it sends.

Knows: channels, signals.
Does not know: models, data, which method is speaking.
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
    """All of them are off by default, and any may be combined."""

    pilot_snr_db: float = math.inf
    """Devices estimate their channel from pilots of this signal-to-noise ratio at the mean gain: ĥ = h + e."""
    estimate_age: Annotated[int, Ge(0)] = 0
    """Rounds since the estimate: ĥ is that of an earlier round; for fading with a memory."""
    phase_std_rad: Annotated[float, Ge(0)] = 0.0
    """Residual phase error of each device and round, Gaussian."""
    timing_std: Annotated[float, Ge(0), Le(1)] = 0.0
    """Timing error in channel uses, the size of a Gaussian, at most 1: that share of a symbol falls into the next."""
    block_uses: Annotated[int, Ge(0)] = 0
    """Channel uses over which Rayleigh fading is constant within one upload, the first of them estimated; 0: all."""
    block_correlation: Annotated[float, Ge(0), Le(1)] = 0.99
    """Of the fading of successive blocks."""
    clip_amplitude: Annotated[float, Gt(0)] = math.inf
    """Largest amplitude that the amplifier passes, over √E_s."""
    bits: Annotated[int, Ge(0), Le(24)] = 0
    """Of the digital-to-analog converter, full scale at the device's largest value; 0: not quantised."""
    interference_dbm_hz: float = -math.inf
    """Density of Gaussian interference from a neighbouring cell, which no method knows of."""
    downlink_std: Annotated[float, Ge(0)] = 0.0
    """Gaussian error on every parameter of a model that a device receives; the first model is known to all."""

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
        """What devices receive, where that has errors; those in the mask [T, S, M] receive, or all."""
        if self.downlink_std == 0:
            return None
        last = None
        if active is not None:
            rounds = np.where(active, np.arange(len(active))[:, None, None], -1)
            last = np.concatenate([np.full_like(rounds[:1], -1), np.maximum.accumulate(rounds, axis=0)[:-1]])
        return Downlink(seeds, self.downlink_std, noise, last)

    @property
    def dense(self) -> bool:
        """Whether single values of a signal matter, so that it must be written out."""
        return bool(self.block_uses or self.bits or self.clip_amplitude < math.inf or self.timing_std)

    @property
    def interference_var_j(self) -> float:
        """Joule per real dimension."""
        return dbm_to_watt(self.interference_dbm_hz)

    def believed(self, h: Complex, mean_gain: NDArray[np.float64], streams: Streams) -> Complex:
        """ĥ of every round and device, [T, M]."""
        if self.estimate_age:
            h = np.concatenate([np.repeat(h[:1], min(self.estimate_age, len(h)), axis=0), h[: -self.estimate_age]])
        if self.pilot_snr_db == math.inf:
            return h
        error = independent(h[..., None], streams, "pilots") * np.sqrt(mean_gain / db_to_linear(self.pilot_snr_db))
        return np.asarray(h + error)

    def true(self, h: Complex, streams: Streams) -> Complex:
        """What a signal meets, [T, M] or at every antenna [T, M, N]: the channel and the device's phase error."""
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
        """The channel in each block of an upload, [blocks, M, K]; the first is what was there to estimate."""
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
    """What becomes of one seed's signals in one upload."""

    timing: NDArray[np.float64]
    """Share of a device's symbol that falls into the next, [M]."""
    blocks: Tensor
    """[blocks, M, K]."""
    block_uses: int
    size: int

    def arrived(self, sent: Tensor, device: int, scale: Tensor, in_phase: bool) -> Tensor:
        """What a device's vector [Q], times its scale, is at the server, [K, Q]."""
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
    """Errors of the models that devices hold, as they received them.

    A device trains from x_i + e_i with the error e_i of its last reception. It knows neither x_i nor e_i, but it takes
    differences to what it received, so that e_i is not in what it sends: only where it evaluates gradients.
    """

    seeds: tuple[int, ...]
    std: float
    noise: NoiseSource
    last_heard: NDArray[np.int64] | None
    """Last round before round t in which a device was heard, −1 for never, [T, S, M]; where only those receive."""

    def errors(self, t: int, own: bool, like: Tensor, num_devices: int) -> Tensor:
        """E_i of every device in round t, [S, M, P]; without models of their `own` all receive in every round."""
        size = like.shape[-1]
        result = like.new_zeros(len(self.seeds), num_devices, size)
        for s, seed in enumerate(self.seeds):
            for i in range(num_devices):
                received = t - 1 if not own or self.last_heard is None else int(self.last_heard[t, s, i])
                if received >= 0:
                    result[s, i] = self.noise((seed,), f"downlink/{i}", received, size)[0] * self.std
        return result
