"""The digital uplink: one device after another, each at the capacity of its channel.

    rate_i = B log2(1 + |h_i|² E_s/(2 σ_z²)),   slot_i = bits_i/rate_i,   energy_i = P slot_i with P = E_s B

The noise is the analog uplink's, σ_z² for each real dimension. Devices go in the order of their rates, and a device
whose slot ends after the deadline is not heard. What is heard has no error but its quantisation.

Knows: channel coefficients, bits, rates.
Does not know: models, methods.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otafl.gpu import dense

SCALE_BITS = 32  # of the number that scales a quantised vector
REPORT_BITS = 32  # of a reported scalar, at one bit per channel use


@dataclass(frozen=True)
class Delivered:
    """What the server has after a digital uplink."""

    signal: Any
    """The vectors of all devices."""
    who: Tensor
    """Devices that got through in time, bool [S, M]."""

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i · vector_i over the devices that got through, [S, Q]; weights are real [S, M]."""
        total: Tensor = self.signal.superpose(torch.where(self.who, weights, 0.0), self.who)
        return total


def rates(h: Tensor, symbol_energy_j: float, noise_var_j: float, bandwidth_hz: float) -> Tensor:
    """Capacity of every device's channel in bits per second, of the shape of h; infinite without noise."""
    if noise_var_j == 0:
        return torch.where(h.abs() > 0, torch.inf, 0.0).to(torch.float64)
    ratio = h.abs().to(torch.float64).square() * (symbol_energy_j / (2 * noise_var_j))
    return bandwidth_hz / math.log(2) * torch.log1p(ratio)


def slots(bits: Tensor, rate: Tensor, who: Tensor, deadline_s: float | Tensor) -> tuple[Tensor, Tensor]:
    """Who gets through before the deadline (a number or [S]), and the seconds that each of them takes, both [S, M]."""
    length = torch.where(who & (rate > 0), bits / rate, torch.inf)
    order = torch.where(who, rate, -1.0).argsort(dim=-1, descending=True, stable=True)
    ends = length.gather(-1, order).cumsum(-1)
    deadline = deadline_s.to(ends.device)[..., None] if isinstance(deadline_s, Tensor) else deadline_s
    through = torch.zeros_like(who).scatter(-1, order, ends <= deadline)
    return through, torch.where(through, length, 0.0)


def quantised(values: Tensor, bits: Tensor | int, uniform: Tensor) -> Tensor:
    """Stochastic rounding to 2^bits values between −max|v| and max|v|, unbiased; [..., P].

    In float32 the mean is right to a fortieth of a step up to 20 bits; at 24 bits a step is a rounding of float32.

    Args:
        values: vectors [..., P].
        bits: bits for a coordinate, a number or one for every vector [...].
        uniform: uniform random numbers in [0, 1), of the shape of `values`.
    """
    levels = values.new_full((1,), 2.0**bits - 1) if isinstance(bits, int) else 2.0 ** bits[..., None].to(values) - 1
    scale = torch.linalg.vector_norm(values, ord=torch.inf, dim=-1, keepdim=True)
    if dense.possible(values) and dense.possible(uniform) and values.dim() == 2 and uniform.shape == values.shape:
        return dense.quantised(values, uniform, scale, levels)
    safe = torch.where(scale > 0, scale, 1.0)
    step = torch.addcmul(uniform, values, levels / (2 * safe)).add_(levels / 2).floor_().clamp_(min=0)
    torch.minimum(step, levels, out=step)
    return torch.addcmul(-scale, step, 2 * scale / levels)
