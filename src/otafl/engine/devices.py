"""What each device keeps between rounds: its model and, if the method needs it, the last server model it received.

That server model is the device's anchor: what a device has learnt is measured against it. The server adds the mean
anchor to what it hears, so it keeps the same models, each as long as some device refers to it: at most m. The paper
(Algorithm 1, line 21) keeps every model since the oldest anchor, with the same result: `count_since_oldest`.

Knows: models, and which device has received which.
Does not know: why a device received a model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from otafl.engine.rows import aligned, can_look, replace_rows, weighted_mean

FREE = -1


@dataclass(frozen=True)
class Anchors:
    """The server models that devices last received."""

    pool: Tensor
    """The models, one per row, [S, K, P]."""
    number: Tensor
    """Serial number of each row's model: how many were sent out before it, int [S, K]; −1 for a free row."""
    slot: Tensor
    """Row of `pool` that holds each device's anchor, int [S, M]."""

    @staticmethod
    def initial(params: Tensor, num_devices: int, most_rows: int) -> "Anchors":
        """The anchors of round 0: every device has received x^0 [S, P]; `most_rows` if rows cannot be added later."""
        num_rows = 1 if can_look(params) else most_rows
        pool = aligned((len(params), num_rows, params.shape[1]), params).zero_()
        pool[:, 0] = params
        number = pad(torch.zeros_like(params[:, :1], dtype=torch.int64), (0, num_rows - 1), value=FREE)
        return Anchors(pool, number, torch.zeros((len(params), num_devices), dtype=torch.int64, device=params.device))

    def continued(self, saved: "Anchors") -> "Anchors":
        """The saved anchors, with at least as many rows as these; a checkpoint may have fewer."""
        missing = max(0, self.pool.shape[1] - saved.pool.shape[1])
        return Anchors(pad(saved.pool, (0, 0, 0, missing)), pad(saved.number, (0, missing), value=FREE), saved.slot)

    def count(self) -> Tensor:
        """Number of models held, [S]."""
        return (self.number != FREE).sum(-1)

    def count_since_oldest(self) -> Tensor:
        """Number of models sent out since the oldest one held, [S]; the paper's rule would hold all of these."""
        newest = self.number.max(-1).values
        return newest - torch.where(self.number == FREE, newest[:, None], self.number).min(-1).values + 1

    def mean(self, who: Tensor) -> Tensor:
        """Mean anchor of the devices `who`, [S, P]; 0 where there are none."""
        references = torch.zeros(self.number.shape, dtype=torch.float64, device=self.pool.device)
        return weighted_mean(self.pool, references.scatter_add_(1, self.slot, who.to(torch.float64)))

    def after(self, params: Tensor, who: Tensor, in_place: bool) -> "Anchors":
        """The anchors after the devices `who` received `params` [S, P]; models without a reference are dropped."""
        references = torch.zeros_like(self.number).scatter_add_(1, self.slot, (~who).to(torch.int64))
        pool, number = self.pool, torch.where(references > 0, self.number, FREE)
        sent, full = who.any(-1), (number != FREE).all(-1)
        if can_look(pool) and bool((full & sent).any()):
            pool = torch.cat([pool, pool.new_zeros(len(pool), 1, pool.shape[2])], dim=1)
            number = pad(number, (0, 1), value=FREE)
        elif not in_place:
            pool = pool.clone()
        if not can_look(pool) and pool.shape[1] < who.shape[1]:  # room for a model a round: more must not go unnoticed
            params = params.masked_fill((full & sent)[:, None], torch.nan)
        row = (number != FREE).to(torch.int8).argmin(dim=-1, keepdim=True)  # the first free row
        written = torch.zeros_like(number, dtype=torch.bool).scatter_(1, row, sent[:, None])
        replace_rows(pool, written, params)
        next_number = self.number.max(-1, keepdim=True).values + 1
        return Anchors(pool, torch.where(written, next_number, number), torch.where(who, row, self.slot))


@dataclass(frozen=True)
class Devices:
    """What each device remembers: `problem.devices` makes it, `round.train` starts from it, `broadcast` renews it."""

    models: Tensor
    """Each device's model x_i, [S, M, P]."""
    anchors: Anchors | None = None
    """The server models they last received, with `mean(who)` [S, P]; None unless updates are measured against them."""
