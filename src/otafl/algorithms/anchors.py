"""The server's buffer of anchors: the models its devices last received.

The paper's Algorithm 1 prunes x^r for r < min_j τ_j + 1 (line 21), which keeps every later model as long as one
device stays silent: O(T d) memory. Counting references keeps a model only as long as some device refers to it:
at most m models, and the same result. Both rules are here, to show the difference.

A server that cannot keep m models has two ways out, both exact without noise: devices measure against what it has.
Anchors rounded to 16 bits are the devices' anchors, too, so that the rounding error is a part of the innovation. One
common reference needs one model; with the paper's noise it diverges (docs/open-problems.md).

Knows: models and which device refers to which.
Does not know: why a device received a model.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from otafl.algorithms.base import Problem
from otafl.engine import kernels
from otafl.engine.rows import replace_rows
from otafl.engine.updates import shared_reference

Keeping = Literal["kept", "float16", "bfloat16", "common", "none"]
Pruning = Literal["references", "paper"]
FREE = -1


def rounded(params: Tensor, keeping: Keeping) -> Tensor:
    """A model as the server remembers it."""
    match keeping:
        case "float16":
            return params.to(torch.float16).to(params.dtype)
        case "bfloat16":
            return params.to(torch.bfloat16).to(params.dtype)
    return params


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
    def initial(problem: Problem, keeping: Keeping = "kept") -> "Anchors":
        """Every device's anchor is x^0; on a GPU all rows that may be needed are there, so that it is never asked."""
        params, num_devices = rounded(problem.initial, keeping), problem.num_devices
        num_rows = 1 if params.device.type == "cpu" else problem.most_last_heard + 1
        pool = params.new_zeros(len(params), num_rows, params.shape[1])
        pool[:, 0] = params
        slot = torch.zeros((len(params), num_devices), dtype=torch.int64, device=params.device)
        index = torch.full((len(params), num_rows), FREE, device=params.device)
        index[:, 0] = 0
        return Anchors(pool, index, slot)

    def continued(self, saved: "Anchors") -> "Anchors":
        """What a checkpoint holds, with at least as many rows as these: it may come from another kind of device."""
        missing = max(0, self.pool.shape[1] - saved.pool.shape[1])
        pool = torch.nn.functional.pad(saved.pool, (0, 0, 0, missing))
        return Anchors(pool, torch.nn.functional.pad(saved.index, (0, missing), value=FREE), saved.slot)

    def count(self) -> Tensor:
        """Models held, [S]."""
        return (self.index != FREE).sum(-1)

    def mean(self, who: Tensor) -> Tensor:
        """Mean anchor of the devices `who`, [S, P]; 0 where there are none."""
        references = torch.zeros(self.index.shape, dtype=torch.float64, device=self.pool.device)
        references.scatter_add_(1, self.slot, who.to(torch.float64))
        share = (references / references.sum(-1, keepdim=True).clamp(min=1.0)).to(self.pool.dtype)
        if kernels.can_mask(self.pool):
            return kernels.masked_sum(self.pool, None, None, share, share != 0)
        if self.pool.device.type != "cpu":
            return torch.einsum("sk,skp->sp", share, self.pool)
        mean = self.pool.new_zeros(self.pool.shape[0], self.pool.shape[2])
        for s, row in share.nonzero().tolist():
            mean[s].add_(self.pool[s, row], alpha=float(share[s, row]))
        return mean

    def receive(self, params: Tensor, r: Any, who: Tensor, pruning: Pruning, in_place: bool) -> "Anchors":
        """The devices `who` receive x^r [S, P]; models that the pruning rule no longer keeps are dropped."""
        kept = self._kept(~who, pruning)
        pool, index = self.pool, torch.where(kept, self.index, FREE)
        if self._lacks_row(kept, who, pruning):
            pool = torch.cat([pool, pool.new_zeros(len(pool), 1, pool.shape[2])], dim=1)
            index = torch.nn.functional.pad(index, (0, 1), value=FREE)
        elif not in_place:
            pool = pool.clone()
        heard = who.any(-1)
        row = (index != FREE).to(torch.int8).argmin(dim=-1)  # first free one
        seeds = torch.arange(len(pool), device=pool.device)
        written = torch.zeros_like(index, dtype=torch.bool)
        written[seeds, row] = heard
        pool = replace_rows(pool, written, params, in_place=True)
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

    def _lacks_row(self, kept: Tensor, who: Tensor, pruning: Pruning) -> bool:
        """Whether a new model finds no free row."""
        if self.pool.device.type != "cpu" and pruning == "references":
            return False
        return bool((kept.all(-1) & who.any(-1)).any())


@dataclass(frozen=True)
class Common:
    """One reference for all devices: x^0, or the model that was last broadcast to everybody."""

    pool: Tensor
    """[S, 1, P]."""
    slot: Tensor
    """0 for every device, int [S, M]."""

    @staticmethod
    def initial(problem: Problem) -> "Common":
        """Everybody knows x^0."""
        pool, slot = shared_reference(problem.initial, problem.num_devices)
        return Common(pool.clone(), slot)

    def count(self) -> Tensor:
        """Models held, [S]."""
        return torch.ones(len(self.pool), dtype=torch.int64, device=self.pool.device)

    def mean(self, who: Tensor) -> Tensor:
        """The reference, [S, P]: it is the mean of any devices' references."""
        return self.pool[:, 0]

    def receive(self, params: Tensor, r: Any, every: int | None) -> "Common":
        """x^r [S, P] becomes the reference every so many rounds."""
        if every is None:
            return self
        due = torch.as_tensor(r, device=params.device) % every == 0
        return Common(torch.where(due, params[:, None], self.pool), self.slot)
