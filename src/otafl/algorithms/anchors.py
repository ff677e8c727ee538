"""The server's buffer of anchors: the models its devices last received, each kept once.

The paper prunes x^r for r < min_j τ_j + 1, which keeps every later model as long as one device stays silent.
Here references are counted: a model is kept as long as some device refers to it, so at most m are held, and
the result is the same.

Knows: models and which device refers to which.
Does not know: why a device received a model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """Reference-counted models."""

    pool: Tensor
    """[S, K, P]; rows that nobody refers to are free."""
    slot: Tensor
    """Row of each device's anchor, int [S, M]."""

    @staticmethod
    def initial(params: Tensor, num_devices: int) -> "Anchors":
        """Every device's anchor is x^0."""
        slot = torch.zeros((len(params), num_devices), dtype=torch.int64, device=params.device)
        return Anchors(params[:, None, :].clone(), slot)

    def count(self) -> Tensor:
        """Models held, [S]."""
        return self._referenced(torch.ones_like(self.slot, dtype=torch.bool)).sum(-1)

    def mean(self, who: Tensor) -> Tensor:
        """Mean anchor of the devices `who`, [S, P]; 0 where there are none."""
        references = torch.zeros(self.pool.shape[:2], dtype=torch.float64, device=self.pool.device)
        references.scatter_add_(1, self.slot, who.to(torch.float64))
        share = references / references.sum(-1, keepdim=True).clamp(min=1.0)
        return torch.einsum("sk,skp->sp", share.to(self.pool.dtype), self.pool)

    def receive(self, params: Tensor, who: Tensor, in_place: bool) -> "Anchors":
        """The devices `who` receive the model [S, P]; models that nobody refers to any more are dropped."""
        pool = self.pool
        occupied = self._referenced(~who)
        if pool.shape[1] < self.slot.shape[1]:  # one free row is enough: at most one model is new
            spare = pool.new_zeros(len(pool), 1, pool.shape[2])
            if pool.device.type != "cpu" or bool((occupied.all(-1) & who.any(-1)).any()):
                pool = torch.cat([pool, spare], dim=1)
                occupied = torch.nn.functional.pad(occupied, (0, 1))
        free = occupied.to(torch.int8).argmin(dim=-1)  # first row that nobody else refers to
        if pool is self.pool and not in_place:
            pool = pool.clone()
        seeds = torch.arange(len(pool), device=pool.device)
        heard = who.any(-1, keepdim=True)
        pool[seeds, free] = torch.where(heard, params, pool[seeds, free])
        return Anchors(pool, torch.where(who, free[:, None], self.slot))

    def _referenced(self, who: Tensor) -> Tensor:
        """Rows that one of the devices `who` refers to, bool [S, K]."""
        marks = torch.zeros(self.pool.shape[:2], dtype=torch.int64, device=self.pool.device)
        return marks.scatter_add_(1, self.slot, who.to(torch.int64)) > 0
