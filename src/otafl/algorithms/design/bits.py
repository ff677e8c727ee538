"""How many devices of an analog-digital hybrid go digital, and with how many bits.

One more bit, from r to r + 1, lessens a device's error by A (1/(2^r − 1)² − 1/(2^{r+1} − 1)²) and takes it τ seconds.
Bits go where they lessen the error most per second, until the time is spent. All seeds and all splits are solved at
once.

Knows: channels, the largest entries of updates, rates.
Does not know: models, rounds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from otafl.engine.rows import can_look
from otafl.radio.digital import SCALE_BITS

MOST_BITS = 24
TOGETHER = 32  # splits that are solved at a time, for the memory that it takes


class Cell(NamedTuple):
    """What the split depends on besides the devices."""

    size: int
    """Number of parameters d."""
    noise: float
    """σ_z²."""
    peak: float
    """E_s."""
    bandwidth_hz: float
    deadline_s: float


def spend(error: Tensor, time: Tensor, digital: Tensor, budget: Tensor) -> Tensor:
    """Bits of the digital devices within a time budget, at least 1 each, and 0 for the others; [S, K, M].

    Args:
        error: A_i, each device's error at one bit, [S, M].
        time: τ_i, seconds for one more bit of every entry, [S, M].
        digital: who goes digital, for K splits, bool [S, K, M].
        budget: seconds for all their bits, [S, K]; one bit each may exceed it, which the caller looks at.
    """
    steps = torch.arange(1, MOST_BITS, dtype=error.dtype, device=error.device)
    per_second = _gain(error[..., None], steps) / time[..., None].clamp(min=torch.finfo(error.dtype).tiny)
    best = per_second.flatten(1).argsort(dim=-1, descending=True, stable=True)  # a device's bits are in their order
    device = (best // len(steps))[:, None, :].expand(-1, digital.shape[1], -1)
    taken = digital.gather(-1, device)
    seconds = torch.where(taken, time[:, None, :].expand_as(digital).gather(-1, device), 0.0)
    first = torch.where(digital, time[:, None, :], 0.0).sum(-1)
    taken = taken & (first[..., None] + seconds.cumsum(-1) <= budget[..., None])
    bits = digital.to(error.dtype).scatter_add(-1, device, taken.to(error.dtype))
    for _ in range(MOST_BITS + digital.shape[-1]):  # what is left may do for a bit that takes less time
        left = budget - (time[:, None, :] * bits).sum(-1)
        fits = digital & (time[:, None, :] <= left[..., None]) & (bits < MOST_BITS)
        if can_look(fits) and not bool(fits.any()):
            break
        gain = torch.where(fits, _gain(error[:, None, :], bits) / time[:, None, :], -1.0)
        chosen = gain.argmax(-1, keepdim=True)
        bits = bits.scatter_add(-1, chosen, fits.gather(-1, chosen).to(bits.dtype))
    return bits


def _gain(error: Tensor, bits: Tensor) -> Tensor:
    """By how much one more bit lessens the error of a device that has `bits` ≥ 1; 0 bits count as 1."""
    levels = 2.0 ** bits.clamp(min=1) - 1
    return error * (levels.square().reciprocal() - (2 * levels + 1).square().reciprocal())


def split(strength: Tensor, largest: Tensor, rate: Tensor, who: Tensor, cell: Cell) -> tuple[Tensor, Tensor]:
    """Bits of every device [S, M], 0 for analog ones, and the least error over all K, [S].

    Args:
        strength: |h_i|, [S, M].
        largest: ‖Δ_i‖_∞, [S, M].
        rate: bits per second, [S, M].
        who: devices that take part, bool [S, M].
        cell: constants.
    """
    if cell.noise == 0:  # the analog uplink has no error, and a rate has no limit
        return torch.zeros_like(strength), torch.zeros_like(strength[:, 0])
    metric = torch.where(who & (largest > 0), strength / torch.where(largest > 0, largest, 1.0), torch.inf)
    place = metric.argsort(dim=-1, stable=True).argsort(dim=-1)
    counts = torch.arange(who.shape[1] + 1, device=who.device)
    found = [
        cost(metric, largest, rate, who, (place[:, None, :] < some[:, None]) & who[:, None, :], cell)
        for some in torch.split(counts, TOGETHER)
    ]
    bits, error = torch.cat([part[0] for part in found], 1), torch.cat([part[1] for part in found], 1)
    error = error.nan_to_num(nan=torch.inf)  # of a seed that diverges: it stops alone
    least = error.amin(-1, keepdim=True)
    first = torch.where(error == least, counts, len(counts)).amin(-1)
    return bits.gather(1, first[:, None, None].expand(-1, 1, bits.shape[-1]))[:, 0], least[:, 0]


def cost(
    metric: Tensor, largest: Tensor, rate: Tensor, who: Tensor, digital: Tensor, cell: Cell
) -> tuple[Tensor, Tensor]:
    """Bits [S, K, M] of K splits `digital` [S, K, M], and their errors [S, K]; infinite if they do not fit.

    `metric` is |h_i|/‖Δ_i‖_∞ of every device, [S, M], infinite where there is nothing to send.
    """
    analog = who[:, None, :] & ~digital
    weakest = torch.where(analog, metric[:, None, :], torch.inf).amin(-1)
    heard = rate > 0
    per_bit_s = torch.where(heard, 1 / torch.where(heard, rate, 1.0), 0.0)
    time = cell.size * per_bit_s
    free = cell.deadline_s - analog.any(-1) * (cell.size / cell.bandwidth_hz)
    free = free - SCALE_BITS * torch.where(digital, per_bit_s[:, None, :], 0.0).sum(-1)
    least = cell.size * largest.clamp(min=1e-150).square()
    bits = spend(least, time, digital, free)
    rounding = torch.where(digital, least[:, None, :] / (2.0 ** bits.clamp(min=1) - 1).square(), 0.0).sum(-1)
    fits = (torch.where(digital, time[:, None, :], 0.0).sum(-1) <= free) & ~(digital & ~heard[:, None, :]).any(-1)
    return bits, torch.where(fits, rounding + cell.size * cell.noise / (cell.peak * weakest.square()), torch.inf)
