"""The air: superposes what devices send, adds receiver noise, and holds everyone to the energy limit.

Device i sends x̂_i, Q values on as many channel uses, with ‖x̂_i‖² ≤ Q E_s. Antenna n of the server hears
y_n = Σ_i h_{i,n} x̂_i + z_n, where every real dimension of the noise, in-phase and quadrature alike, has variance σ_z².
The reception says what the server hears:

    real       the in-phase part of y, [S, Q]; y is that of one antenna, or of several after combining (below)
    complex    y, [S, Q] complex; its real part is what "real" hears
    antennas   every antenna's y_n, [S, N, Q] complex
    energy     Σ_n |y_n|², [S, Q], which needs no phase reference

With several antennas "real" and "complex" hear them after maximum-ratio combining for the sum of all devices
(`otafl.world.channel.combined`). Only this module and `otafl.radio.imperfect` add noise or multiply by h.

Knows: signals, transmit scales, channel coefficients, noise, energy, imperfect radios.
Does not know: models, data, which method transmits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from otafl.errors import EnergyError, PluginError
from otafl.gpu import masked
from otafl.radio.digital import rates, slots
from otafl.radio.imperfect import Imperfections
from otafl.radio.noise import NoiseSource
from otafl.radio.vectors import Vectors

ENERGY_TOLERANCE = 1e-9  # relative excess that counts as rounding
Reception = Literal["real", "complex", "antennas", "energy"]
RECEPTIONS: tuple[Reception, ...] = ("real", "complex", "antennas", "energy")


class Signal(Protocol):
    """One vector per device, lazy or dense: all that the air needs to know of what devices send."""

    @property
    def size(self) -> int:
        """Number of values per vector, which is the number of channel uses."""
        ...

    @property
    def is_complex(self) -> bool:
        """Whether values are complex."""
        ...

    def superpose(self, weights: Tensor, who: Tensor) -> Tensor:
        """Σ_i weights_i · vector_i over the devices `who`, [S, Q]; only `Vectors` get complex weights."""
        ...

    def measured_norms(self, who: Tensor) -> Tensor:
        """Euclidean norms of the devices `who`, float64 [S, M], 0 for the others; always computed afresh."""
        ...

    def dense(self) -> Tensor:
        """All vectors, [S, M, Q]; for imperfect radios, which change single values."""
        ...


@dataclass(frozen=True)
class Channel:
    """The channel coefficients of one round."""

    coeff: Tensor
    """Channel h_i after combining, complex [S, M]."""
    each: Tensor | None = None
    """Channel h_{i,n} at every antenna, complex [S, M, N]; None for one antenna."""

    def heard_by(self, reception: Reception) -> Tensor:
        """Channels that this reception uses, [S, M, K]: after combining (K = 1), or at every antenna."""
        return self.coeff[..., None] if reception in ("real", "complex") or self.each is None else self.each


@dataclass(frozen=True)
class Transmission:
    """Record of one use of the uplink, for the ledger; neither the devices nor the server see it."""

    energy_j: Tensor
    """Transmit energy ‖x̂_i‖² of every device, float64 [S, M]."""
    limit_j: float
    """Energy limit Q E_s; infinite on the ideal radio."""
    signal_norm: Tensor
    """Norm ‖Σ h_i x̂_i‖ of the received signal before noise, over all antennas heard, float64 [S]."""
    noise_norm: Tensor
    """Norm ‖z‖ of noise and interference if anybody transmitted, else 0, float64 [S]."""
    transmitted: Tensor
    """Whether anybody transmitted, bool [S]."""
    channel_uses: int
    """Number of channel uses Q; 0 on the ideal radio."""
    dimensions: int
    """Real dimensions of the received signal: Q, or 2Q per antenna if it is complex; 0 on the ideal radio."""


@dataclass(frozen=True)
class Air:
    """The noisy multiple-access channel."""

    seeds: tuple[int, ...]
    symbol_energy_j: float
    noise_var_j: float
    noise: NoiseSource
    imperfect: Imperfections = field(default_factory=Imperfections)
    mean_gain: Tensor | None = None
    """Mean gain Λ of every round, [T, S, M] on the host; for imperfect radios whose fading changes in an upload."""
    antenna_gain: Tensor | None = None
    """The mean gain at one antenna, if there are several."""
    bandwidth_hz: float = 1e6
    """Bandwidth B, which is the number of channel uses in a second."""

    def deliver(
        self, bits: Tensor, who: Tensor, channel: Channel, deadline_s: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Let the devices `who` send bits one after another: who gets through, seconds and energies, each [S, M]."""
        rate = rates(channel.coeff, self.symbol_energy_j, self.noise_var_j, self.bandwidth_hz)
        through, seconds = slots(bits, rate, who, deadline_s)
        return through, seconds, seconds * (self.symbol_energy_j * self.bandwidth_hz)

    def uplink(
        self,
        signal: Signal,
        tx_scale: Tensor,
        who: Tensor,
        channel: Channel,
        t: Any,
        use: int,
        reception: Reception = "real",
    ) -> tuple[Tensor, Transmission]:
        """Devices `who` send tx_scale_i times their vector through the channel, all at once.

        Returns what the server hears and the ledger's entry.
        """
        tx_scale = torch.where(who, tx_scale.to(torch.complex128), 0.0)
        energy_j = tx_scale.abs().square() * signal.measured_norms(who).square()
        h = channel.heard_by(reception)
        if self.imperfect.dense:
            heard, share = self._written_out(signal, tx_scale, who, h, int(t), use, reception)
            energy_j = energy_j * share
        else:
            heard = _superposed(signal, h * tx_scale[..., None], who, reception)
        transmitted = (tx_scale != 0).any(-1)
        signal_norm = _norm(heard)
        noise_norm = self._disturb(heard, transmitted, t, use)
        entry = Transmission(
            energy_j,
            signal.size * self.symbol_energy_j,
            signal_norm,
            noise_norm,
            transmitted,
            signal.size,
            heard[0].numel() * (2 if heard.is_complex() else 1),
        )
        if reception == "energy":
            return heard.abs().square().sum(1), entry
        return heard if reception == "antennas" else heard[:, 0], entry

    def _disturb(self, heard: Tensor, transmitted: Tensor, t: Any, use: int) -> Tensor:
        """Add noise and interference to what is heard [S, K, Q], in place; returns their norm [S], 0 in silence."""
        norm_sq = torch.zeros(len(heard), dtype=torch.float64, device=heard.device)
        for kind, variance in (("noise", self.noise_var_j), ("interference", self.imperfect.interference_var_j)):
            if variance > 0:
                for part, name in _dimensions(heard, kind, use):
                    drawn = self.noise(self.seeds, name, t, heard.shape[-1])
                    part.add_(drawn, alpha=variance**0.5)
                    norm_sq += (_norm(drawn) * (variance**0.5 * transmitted)).square()
        return norm_sq.sqrt()

    def _written_out(
        self, signal: Signal, tx_scale: Tensor, who: Tensor, h: Tensor, t: int, use: int, reception: Reception
    ) -> tuple[Tensor, Tensor]:
        """Signal heard before noise [S, K, Q], value by value, and the share of its energy each device sends [S, M]."""
        alone = reception in ("antennas", "energy") and self.antenna_gain is not None
        gains = self.antenna_gain if alone else self.mean_gain
        assert gains is not None
        sums, shares, dense = [], torch.ones(who.shape, dtype=torch.float64, device=who.device), signal.dense()
        for s, seed in enumerate(self.seeds):
            flaws = self.imperfect.of_upload(seed, t, use, h[s], gains[t, s].numpy(), signal.size)
            total = None
            for i in torch.nonzero(who[s]).flatten().tolist():
                sent, share = self.imperfect.converted(dense[s, i], float(tx_scale[s, i].abs()), self.symbol_energy_j)
                shares[s, i] = share
                arrived = flaws.arrived(sent, i, tx_scale[s, i], in_phase=reception == "real")
                total = arrived if total is None else total.add_(arrived)
            if total is None:
                total = _nothing(dense[s], h.shape[-1], reception)
            sums.append(total)
        return torch.stack(sums), shares


def _superposed(signal: Signal, weights: Tensor, who: Tensor, reception: Reception) -> Tensor:
    """Σ_i weights_i · vector_i for complex weights [S, M, K]: [S, K, Q]; only the in-phase part if that is received."""
    if isinstance(signal, Vectors):
        if reception == "real" and not signal.is_complex:
            return signal.superpose(weights.real, who)
        heard = signal.superpose(weights, who)
        return heard.real.contiguous() if reception == "real" else heard
    parts = []
    for k in range(weights.shape[-1]):
        in_phase = signal.superpose(weights[..., k].real, who)
        if reception != "real":
            in_phase = torch.complex(in_phase, signal.superpose(weights[..., k].imag, who))
        parts.append(in_phase)
    return parts[0][:, None] if len(parts) == 1 else torch.stack(parts, dim=1)


def _dimensions(heard: Tensor, kind: str, use: int) -> Iterator[tuple[Tensor, str]]:
    """Yield the real dimensions of what is heard [S, K, Q], each with the name of its noise stream."""
    name = kind if kind == "noise" and use == 0 else f"{kind}/{use}"
    for k in range(heard.shape[1]):
        mine = name if k == 0 else f"{name}/antenna {k}"
        if heard.is_complex():
            parts = torch.view_as_real(heard[:, k])
            yield parts[..., 0], mine
            yield parts[..., 1], f"{mine}/quadrature"
        else:
            yield heard[:, k], mine


def _norm(values: Tensor) -> Tensor:
    """Euclidean norm of each seed's values, float64 [S]."""
    parts = torch.view_as_real(values) if values.is_complex() else values
    if masked.possible(parts):  # one pass, where PyTorch writes a copy in float64 first
        rows = parts.reshape(len(parts), 1, -1)
        return masked.squares(rows, None, None, rows.new_ones(len(rows), 1, dtype=torch.bool))[:, 0].sqrt_()
    norm: Tensor = torch.linalg.vector_norm(parts.flatten(1), dim=-1, dtype=torch.float64)
    return norm


def _nothing(dense: Tensor, num_heard: int, reception: Reception) -> Tensor:
    """What one seed's server hears if nobody sends: zeros, [K, Q]."""
    dtype = dense.dtype if reception == "real" else torch.promote_types(dense.dtype, torch.complex64)
    if reception == "real" and dense.is_complex():
        dtype = dense.real.dtype
    return dense.new_zeros((num_heard, dense.shape[-1]), dtype=dtype)


@dataclass(frozen=True)
class IdealAir:
    """The ideal radio: the sum arrives without error, and there is no channel, noise or energy limit."""

    noise: NoiseSource
    """Not for the radio; for the method's own random numbers."""

    def deliver(
        self, bits: Tensor, who: Tensor, channel: Channel, deadline_s: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Everybody gets through in no time."""
        nothing = torch.zeros(who.shape, dtype=torch.float64, device=who.device)
        return who, nothing, nothing

    def uplink(
        self,
        signal: Signal,
        tx_scale: Tensor,
        who: Tensor,
        channel: Channel,
        t: Any,
        use: int,
        reception: Reception = "real",
    ) -> tuple[Tensor, Transmission]:
        """Σ_i tx_scale_i · vector_i over the devices `who`; only its in-phase part for reception "real"."""
        if reception not in ("real", "complex"):
            raise PluginError(f'an error-free uplink has no antennas: reception = "{reception}" needs a radio')
        weights = torch.where(who, tx_scale.to(torch.complex128), 0.0)
        heard = _superposed(signal, weights[..., None], who, reception)[:, 0]
        norm, nothing = _norm(heard), torch.zeros(who.shape, dtype=torch.float64, device=who.device)
        return heard, Transmission(nothing, torch.inf, norm, torch.zeros_like(norm), who.any(-1), 0, 0)


class EnergyGuard:
    """Remembers the largest energy-to-limit ratio of every seed; `check` raises if one is above 1.

    The ratios stay on the compute device until `check`, so that no round waits for the host.
    """

    def __init__(self, owner: str, seeds: tuple[int, ...], device: torch.device) -> None:
        self._owner, self._seeds = owner, seeds
        self._ratio = torch.zeros(len(seeds), dtype=torch.float64, device=device)
        self._place = torch.zeros((len(seeds), 2), dtype=torch.int64, device=device)

    def note(self, t: int | Tensor, ratio: Tensor, alive: Tensor) -> Tensor:
        """Remember the energies of round t divided by their limits [S, M]; returns each seed's largest ratio [S].

        An energy that is not finite is a violation, unless the seed is no longer `alive` [S]: then its model has
        diverged, and that is reported instead. A finite energy always counts.
        """
        largest = torch.where(ratio.isfinite(), ratio, torch.where(alive[:, None], torch.inf, 0.0)).max(dim=-1)
        worse = largest.values > self._ratio
        self._ratio.copy_(torch.where(worse, largest.values, self._ratio))
        place = torch.stack([torch.zeros_like(largest.indices) + t, largest.indices], dim=-1)
        self._place.copy_(torch.where(worse[:, None], place, self._place))
        return largest.values

    def check(self) -> None:
        """Raise EnergyError if any device ever exceeded the limit; names seed, round, device and excess."""
        row = int(self._ratio.argmax())
        ratio = float(self._ratio[row])
        if ratio > 1 + ENERGY_TOLERANCE:
            t, device = self._place[row].tolist()
            where = f"algorithm {self._owner}: seed {self._seeds[row]}, round {t}, device {device}"
            if ratio == float("inf"):
                raise EnergyError(
                    f"{where} sends what has no finite energy; where its update has exploded, lower training.lr"
                )
            raise EnergyError(
                f"{where} sent {ratio:.9g} times the energy limit, E_s for each channel use; scale its signal down"
            )


def check_mask(owner: str, call: str, who: object, shape: tuple[int, ...]) -> None:
    """Refuse what is not a boolean mask of the right shape."""
    if not isinstance(who, Tensor) or who.shape != shape or who.dtype != torch.bool:
        got = f"{who.dtype} {tuple(who.shape)}" if isinstance(who, Tensor) else type(who).__name__
        raise PluginError(f"algorithm {owner}: {call} needs a boolean mask of shape {shape}, got {got}")
