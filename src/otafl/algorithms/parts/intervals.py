"""FedAU's weights: every device keeps the mean of its participation intervals.

An interval is the number of rounds since a device last took part; after K silent rounds K is recorded and the count
starts again. The mean ω_i of the recorded intervals estimates 1/p_i, and is 1 before the first. One that ends in
this round counts from the next one on.

Knows: who is active.
Does not know: channels, models.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Intervals:
    """What devices remember of their participation, each int or float [S, M]."""

    since: Tensor
    """Rounds since a device last took part, or since K was recorded."""
    recorded: Tensor
    """Number of recorded intervals."""
    mean: Tensor
    """ω_i, their mean; 1 before the first."""

    @staticmethod
    def none(like: Tensor) -> "Intervals":
        """Before round 0, for a mask [S, M]."""
        zero = torch.zeros_like(like, dtype=torch.float64)
        return Intervals(zero, zero.clone(), torch.ones_like(zero))

    def after(self, active: Tensor, cutoff: int) -> "Intervals":
        """After a round in which the devices `active` took part."""
        since = self.since + 1
        ends = active | (since >= cutoff)
        recorded = self.recorded + ends
        first = self.recorded == 0
        mean = torch.where(first, since, self.mean + (since - self.mean) / recorded.clamp(min=1))
        return Intervals(torch.where(ends, 0.0, since), recorded, torch.where(ends, mean, self.mean))
