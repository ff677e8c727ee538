"""The air: superposes what devices send, adds receiver noise, and holds everyone to the energy limit.

Nobody else adds noise. The convention on real dimensions and noise is that of `otafl.radio.link`.

Knows: updates, transmit scales, channel coefficients, noise, energy.
Does not know: models, data, which method is speaking.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from otafl.errors import EnergyError, PluginError
from otafl.random import Streams

ENERGY_TOLERANCE = 1e-9  # relative excess that counts as rounding


class Signal(Protocol):
    """One vector per device, lazily: all the air needs of an update."""

    def norms(self, who: Tensor) -> Tensor:
        """Euclidean norms of the devices `who`, float64 [S, M], 0 for the others."""
        ...

    def superpose(self, weights: Tensor, who: Tensor) -> Tensor:
        """Σ_i weights_i · vector_i over the devices `who`, [S, P]."""
        ...

    def measured_norms(self, who: Tensor) -> Tensor:
        """`norms`, measured now."""
        ...

    def dense(self) -> Tensor:
        """All vectors, [S, M, P]; for radios that change single values."""
        ...


NoiseSource = Callable[[Sequence[int], str, int, int], Tensor]
"""(seeds, name, t, num_params) to unit-variance noise [S, P] on the compute device."""


@dataclass(frozen=True)
class Transmission:
    """What one use of the uplink was, for the ledger: neither devices nor server see it."""

    energy_j: Tensor
    """‖x̂_i‖² of every device, float64 [S, M]."""
    signal_norm: Tensor
    """‖Σ h_i x̂_i‖ before noise, float64 [S]."""
    noise_norm: Tensor
    """‖z‖ where anybody transmitted, else 0, float64 [S]."""
    transmitted: Tensor
    """Whether anybody transmitted, bool [S]."""
    channel_uses: int


def addressed_noise(device: torch.device, dtype: torch.dtype) -> NoiseSource:
    """Unit-variance Gaussian noise drawn on the compute device from the address (seed, name, t)."""
    generator = torch.Generator(device=device)

    def draw(seeds: Sequence[int], name: str, t: int, num_params: int) -> Tensor:
        noise = torch.empty((len(seeds), num_params), device=device, dtype=dtype)
        for row, seed in zip(noise, seeds, strict=True):
            generator.manual_seed(Streams(seed).key(name, t))
            row.normal_(generator=generator)
        return noise

    return draw


@dataclass(frozen=True)
class Air:
    """The noisy multiple-access channel."""

    seeds: tuple[int, ...]
    num_params: int
    noise_var_j: float
    noise: NoiseSource

    def uplink(
        self, signal: Signal, tx_scale: Tensor, who: Tensor, coeff: Tensor, t: Any, use: int
    ) -> tuple[Tensor, Transmission]:
        """Devices `who` send tx_scale_i times their vector through h_i = coeff_i, all at once.

        Returns what the server hears, the in-phase part of Σ h_i x̂_i + z, [S, P], and the ledger's entry.
        """
        tx_scale = torch.where(who, tx_scale.to(torch.complex128), 0.0)
        heard, energy_j = self.superposed(signal, tx_scale, who, coeff, t, use)
        transmitted = (tx_scale != 0).any(-1)
        signal_norm = torch.linalg.vector_norm(heard, dim=-1, dtype=torch.float64)
        noise_norm = torch.zeros_like(signal_norm)
        if self.noise_var_j > 0:
            name = "noise" if use == 0 else f"noise/{use}"
            noise, noise_std = self.noise(self.seeds, name, t, self.num_params), self.noise_var_j**0.5
            noise_norm = torch.linalg.vector_norm(noise, dim=-1, dtype=torch.float64) * (noise_std * transmitted)
            heard.add_(noise, alpha=noise_std)
        other = self.disturbance(t, use)
        if other is not None:
            heard.add_(other)
            size = torch.linalg.vector_norm(other, dim=-1, dtype=torch.float64) * transmitted
            noise_norm = torch.hypot(noise_norm, size)
        return heard, Transmission(energy_j, signal_norm, noise_norm, transmitted, self.num_params)

    def disturbance(self, t: Any, use: int) -> Tensor | None:
        """What else the server hears, [S, P]."""
        return None

    def superposed(
        self, signal: Signal, tx_scale: Tensor, who: Tensor, coeff: Tensor, t: Any, use: int
    ) -> tuple[Tensor, Tensor]:
        """The in-phase part of Σ h_i x̂_i [S, P], and each device's energy [S, M]."""
        energy_j = tx_scale.abs().square() * signal.measured_norms(who).square()
        return signal.superpose((coeff * tx_scale).real, who), energy_j


@dataclass(frozen=True)
class IdealAir:
    """Error-free and free of charge: the sum arrives as it was meant, no channel, noise or energy."""

    num_params: int

    def uplink(
        self, signal: Signal, tx_scale: Tensor, who: Tensor, coeff: Tensor, t: Any, use: int
    ) -> tuple[Tensor, Transmission]:
        """Σ_i Re(tx_scale_i) · vector_i over the devices `who`."""
        weights = torch.where(who, tx_scale.to(torch.complex128), 0.0).real
        heard = signal.superpose(weights, who)
        norm = torch.linalg.vector_norm(heard, dim=-1, dtype=torch.float64)
        nothing = torch.zeros_like(weights)
        return heard, Transmission(nothing, norm, torch.zeros_like(norm), who.any(-1), channel_uses=0)


class EnergyGuard:
    """Remembers the worst energy-to-limit ratio of every seed, and raises when asked and it is above 1.

    The ratios stay on the compute device until `check`, so that no round waits for the host.
    """

    def __init__(self, owner: str, seeds: tuple[int, ...], limit_j: float, device: torch.device) -> None:
        self._owner, self._seeds, self._limit_j = owner, seeds, limit_j
        self._ratio = torch.zeros(len(seeds), dtype=torch.float64, device=device)
        self._place = torch.zeros((len(seeds), 2), dtype=torch.int64, device=device)

    def note(self, t: int | Tensor, energy_j: Tensor, alive: Tensor) -> Tensor:
        """Remember the energies [S, M] spent in round t; returns each seed's largest ratio [S].

        An energy that is not finite is a violation, unless the seed's model has exploded: that seed (not `alive` [S])
        has diverged, which is reported as such. A finite energy counts in any case.
        """
        energy_j = torch.where(energy_j.isfinite(), energy_j, torch.where(alive[:, None], torch.inf, 0.0))
        largest = (energy_j / self._limit_j).max(dim=-1)
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
                f"{where} sent {ratio:.9g} times the energy limit d E_s = {self._limit_j:.4g} J; scale its signal down"
            )


def check_mask(owner: str, call: str, who: object, shape: tuple[int, ...]) -> None:
    """Refuse what is not a boolean mask of the right shape."""
    if not isinstance(who, Tensor) or who.shape != shape or who.dtype != torch.bool:
        got = f"{who.dtype} {tuple(who.shape)}" if isinstance(who, Tensor) else type(who).__name__
        raise PluginError(f"algorithm {owner}: {call} needs a boolean mask of shape {shape}, got {got}")
