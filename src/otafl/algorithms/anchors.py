"""The server's buffer of anchors: the models its devices last received.

The paper's Algorithm 1 prunes x^r for r < min_j τ_j + 1 (line 21), which keeps every later model as long as one
device stays silent: O(T d) memory. Counting references keeps a model only as long as some device refers to it:
at most m models, and the same result. Both rules are here, to show the difference.

Knows: models and which device refers to which.
Does not know: why a device received a model.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Pruning = Literal["references", "paper"]
FREE = -1
GPU_ROWS = 8  # rows by which a buffer on a GPU grows


@dataclass(frozen=True)
class Anchors:
    """Models, and the one each device refers to."""

    pool: Tensor
    """[S, K, P]."""
    index: Tensor
    """Round r of the model x^r in each row, int [S, K]; −1 where the row is free."""
    slot: Tensor
    """Row of each device's anchor, int [S, M]."""

    @staticmethod
    def initial(params: Tensor, num_devices: int) -> "Anchors":
        """Every device's anchor is x^0."""
        slot = torch.zeros((len(params), num_devices), dtype=torch.int64, device=params.device)
        return Anchors(params[:, None, :].clone(), slot[:, :1].clone(), slot)

    def count(self) -> Tensor:
        """Models held, [S]."""
        return (self.index != FREE).sum(-1)

    def mean(self, who: Tensor) -> Tensor:
        """Mean anchor of the devices `who`, [S, P]; 0 where there are none."""
        references = torch.zeros(self.index.shape, dtype=torch.float64, device=self.pool.device)
        references.scatter_add_(1, self.slot, who.to(torch.float64))
        share = (references / references.sum(-1, keepdim=True).clamp(min=1.0)).to(self.pool.dtype)
        if self.pool.device.type != "cpu":
            return torch.einsum("sk,skp->sp", share, self.pool)
        mean = self.pool.new_zeros(self.pool.shape[0], self.pool.shape[2])
        for s, row in share.nonzero().tolist():
            mean[s].add_(self.pool[s, row], alpha=float(share[s, row]))
        return mean

    def receive(self, params: Tensor, r: int, who: Tensor, pruning: Pruning, in_place: bool) -> "Anchors":
        """The devices `who` receive x^r [S, P]; models that the pruning rule no longer keeps are dropped."""
        kept = self._kept(~who, pruning)
        pool, index = self.pool, torch.where(kept, self.index, FREE)
        missing = self._missing_rows(kept, who, r, pruning)
        if missing:
            pool = torch.cat([pool, pool.new_zeros(len(pool), missing, pool.shape[2])], dim=1)
            index = torch.nn.functional.pad(index, (0, missing), value=FREE)
        elif not in_place:
            pool = pool.clone()
        heard = who.any(-1)
        row = (index != FREE).to(torch.int8).argmin(dim=-1)  # first free one
        seeds = torch.arange(len(pool), device=pool.device)
        pool[seeds, row] = torch.where(heard[:, None], params, pool[seeds, row])
        index[seeds, row] = torch.where(heard, r, index[seeds, row])
        return Anchors(pool, index, torch.where(who, row[:, None], self.slot))

    def _kept(self, others: Tensor, pruning: Pruning) -> Tensor:
        """Rows that stay once only the devices `others` refer to what is here, bool [S, K]."""
        if pruning == "references":
            marks = torch.zeros_like(self.index)
            return marks.scatter_add_(1, self.slot, others.to(torch.int64)) > 0
        newest = torch.iinfo(torch.int64).max
        oldest = torch.where(others, self.index.gather(1, self.slot), newest).min(dim=-1, keepdim=True).values
        return (self.index != FREE) & (self.index >= oldest)

    def _missing_rows(self, kept: Tensor, who: Tensor, r: int, pruning: Pruning) -> int:
        """Rows that a new model still needs; a GPU is not asked but given rows ahead, up to one per model there is."""
        if self.pool.device.type == "cpu":
            return int((kept.all(-1) & who.any(-1)).any())
        most = r + 1 if pruning == "paper" else min(r + 1, who.shape[1])
        return GPU_ROWS if kept.shape[1] < most else 0
