"""What devices keep from round to round: a model each and, where a method asks, the server model each last received.

The latter is a device's anchor: what it has trained since is measured against it, and the server, which adds the mean
anchor to what it hears, keeps the same models. A model is kept as long as some device refers to it, so there are at
most m. The paper's Algorithm 1 (line 21) keeps every model since the oldest of these; `count_since_oldest` tells how
many those would be. The result is the same.

Knows: models, and which device has received which.
Does not know: why a device received a model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from otafl.engine.rows import can_look, replace_rows, weighted_mean

FREE = -1


@dataclass(frozen=True)
class Anchors:
    """The server models that devices last received."""

    pool: Tensor
    """[S, K, P]."""
    number: Tensor
    """How many models were sent out before the one in each row, int [S, K]; −1 where the row is free."""
    slot: Tensor
    """Row of each device's model, int [S, M]."""

    @staticmethod
    def initial(params: Tensor, num_devices: int) -> "Anchors":
        """Every device has received x^0 [S, P]."""
        num_rows = 1 if can_look(params) else num_devices  # else there is a row for each, so that it is never asked
        pool = params.new_zeros(len(params), num_rows, params.shape[1])
        pool[:, 0] = params
        number = torch.full((len(params), num_rows), FREE, device=params.device)
        number[:, 0] = 0
        return Anchors(pool, number, torch.zeros((len(params), num_devices), dtype=torch.int64, device=params.device))

    def continued(self, saved: "Anchors") -> "Anchors":
        """What a checkpoint holds, with at least as many rows as these: it may come from another kind of machine."""
        missing = max(0, self.pool.shape[1] - saved.pool.shape[1])
        pool = torch.nn.functional.pad(saved.pool, (0, 0, 0, missing))
        return Anchors(pool, torch.nn.functional.pad(saved.number, (0, missing), value=FREE), saved.slot)

    def count(self) -> Tensor:
        """Models held, [S]."""
        return (self.number != FREE).sum(-1)

    def count_since_oldest(self) -> Tensor:
        """Models that were sent out since the oldest of those held, [S]: what the paper's rule would hold."""
        newest = self.number.max(-1).values
        return newest - torch.where(self.number == FREE, newest[:, None], self.number).min(-1).values + 1

    def mean(self, who: Tensor) -> Tensor:
        """Mean of what the devices `who` last received, [S, P]; 0 where there are none."""
        references = torch.zeros(self.number.shape, dtype=torch.float64, device=self.pool.device)
        return weighted_mean(self.pool, references.scatter_add_(1, self.slot, who.to(torch.float64)))

    def after(self, params: Tensor, who: Tensor, in_place: bool) -> "Anchors":
        """Once the devices `who` have received `params` [S, P]; models that nobody refers to any more are dropped."""
        references = torch.zeros_like(self.number).scatter_add_(1, self.slot, (~who).to(torch.int64))
        pool, number = self.pool, torch.where(references > 0, self.number, FREE)
        sent = who.any(-1)
        if can_look(pool) and bool(((number != FREE).all(-1) & sent).any()):  # no free row
            pool = torch.cat([pool, pool.new_zeros(len(pool), 1, pool.shape[2])], dim=1)
            number = torch.nn.functional.pad(number, (0, 1), value=FREE)
        elif not in_place:
            pool = pool.clone()
        row = (number != FREE).to(torch.int8).argmin(dim=-1, keepdim=True)  # the first that is free
        written = torch.zeros_like(number, dtype=torch.bool).scatter_(1, row, sent[:, None])
        replace_rows(pool, written, params)
        next_number = self.number.max(-1, keepdim=True).values + 1
        return Anchors(pool, torch.where(written, next_number, number), torch.where(who, row, self.slot))


@dataclass(frozen=True)
class Devices:
    """What every device remembers; `round.train` starts from it, and `round.broadcast` gives that of the next round."""

    models: Tensor
    """x_i, [S, M, P]."""
    anchors: Anchors | None = None
    """The server models that they last received, where they remember these and measure their updates against them."""
