"""The (seed, device) pairs that a mask selects, and operations on the models of these pairs alone.

On a CPU the rows are read from the mask. On a GPU the host would have to wait for the GPU before it could read them. So
there a round takes the rows of masks that were known before round 0 from a `Schedule`, and everything after local
training works with the mask itself.

Knows: masks [S, M], their rows, models.
Does not know: why a device is in a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from otafl.gpu import masked

SMALL = 4096  # models with fewer parameters are blended all at once


@dataclass(frozen=True, eq=False)
class Rows:
    """The true entries of a mask [S, M], as rows of a tensor [S·M, ...]."""

    index: Tensor
    """Row numbers s·M + i in increasing order, int [N], on the compute device."""
    bounds: tuple[int, ...]
    """The rows of seed s are index[bounds[s]:bounds[s + 1]]."""
    num_devices: int

    def __len__(self) -> int:
        return self.bounds[-1]

    @property
    def complete(self) -> bool:
        """Whether every device of every seed is included."""
        return len(self) == (len(self.bounds) - 1) * self.num_devices

    @property
    def even(self) -> bool:
        """Whether every seed has the same number of rows."""
        return all(stop - start == self.bounds[1] for start, stop in pairwise(self.bounds))

    def per_seed(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (seed, first, last), `last` excluded, for each seed with rows at positions start … stop of `index`."""
        for s, (first, last) in enumerate(pairwise(self.bounds)):
            first, last = max(first, start), min(last, stop)
            if first < last:
                yield s, first, last


def rows_of(mask: Tensor) -> Rows:
    """The rows that a mask selects; the host reads the mask."""
    counts = mask.sum(-1).tolist()
    return Rows(mask.flatten().nonzero().flatten(), (0, *np.cumsum(counts).tolist()), mask.shape[1])


def all_rows(mask: Tensor) -> Rows:
    """Every row of a mask's shape."""
    bounds = tuple(range(0, mask.numel() + 1, mask.shape[1]))
    return Rows(torch.arange(mask.numel(), device=mask.device), bounds, mask.shape[1])


@dataclass(frozen=True, eq=False)
class Known:
    """A mask whose rows the host knows."""

    mask: Tensor
    """bool [S, M]."""
    rows: Rows
    exact: bool = True
    """False if `rows` is padded to the same length in every round; the mask then marks the real rows."""


class Schedule:
    """The masks of all rounds, known to the host before round 0."""

    def __init__(self, masks: NDArray[np.bool_], device: torch.device) -> None:
        """Masks [T, S, M]."""
        self.masks = torch.from_numpy(masks).to(device)
        self._num_devices = masks.shape[2]
        rounds, rows = np.nonzero(masks.reshape(len(masks), -1))
        self._index = torch.from_numpy(rows).to(device)
        self._first = np.searchsorted(rounds, np.arange(len(masks) + 1)).tolist()
        counts = np.cumsum(masks.sum(-1), axis=1)
        self._bounds = np.concatenate([np.zeros_like(counts[:, :1]), counts], axis=1).tolist()

    def at(self, t: int) -> Known:
        """The mask of round t."""
        index = self._index[self._first[t] : self._first[t + 1]]
        return Known(self.masks[t].clone(), Rows(index, tuple(self._bounds[t]), self._num_devices))

    def pick(self, t: Tensor) -> Known:
        """The mask of round t, given as a tensor; its rows are padded to the same number in every round and seed."""
        index = self._padded.index_select(0, t.view(1))[0]
        bounds = tuple(range(0, index.numel() + 1, index.shape[1]))
        rows = Rows(index.flatten(), bounds, self._num_devices)
        return Known(self.masks.index_select(0, t.view(1))[0], rows, exact=self._even)

    @cached_property
    def _even(self) -> bool:
        """Whether every round and seed has the same number of devices, and at least one."""
        counts = self.masks.sum(-1)
        return bool((counts == counts.max()).all()) and bool(counts.max() > 0)

    @cached_property
    def _padded(self) -> Tensor:
        """Rows of each round and seed in increasing order, padded to the size of the largest mask, [T, S, C]."""
        masks = self.masks.cpu().numpy()
        most = max(1, masks.sum(-1).max())
        devices = np.argsort(~masks, axis=-1, kind="stable")[..., :most]
        seeds = np.arange(masks.shape[1])[:, None]
        return torch.from_numpy(np.sort(devices, axis=-1) + seeds * self._num_devices).to(self.masks.device)


ALIGNMENT = 32  # values: the largest alignment that matrix products ask for


def aligned(shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """An empty tensor [S, M, P] in which each row is aligned in memory, for matrix products and wide loads."""
    num_seeds, num_rows, size = shape
    return like.new_empty(num_seeds, num_rows, -(-size // ALIGNMENT) * ALIGNMENT)[..., :size]


def can_look(values: Tensor) -> bool:
    """Whether the host can read values without waiting, which is so unless they are on a GPU."""
    return not values.is_cuda


def weighted_mean(models: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean Σ_k weights_k model_k / max(1, Σ_k weights_k), [S, P], of models [S, K, P]; weights [S, K]."""
    share = (weights / weights.sum(-1, keepdim=True).clamp(min=1.0)).to(models.dtype)
    if masked.possible(models):
        return masked.weighted_sum(models, None, None, share, share != 0)
    if not can_look(models):
        return torch.einsum("sk,skp->sp", share, models)
    mean = models.new_zeros(models.shape[0], models.shape[2])
    for s, row in share.nonzero().tolist():
        mean[s].add_(models[s, row], alpha=float(share[s, row]))
    return mean


def replace_rows(models: Tensor, who: Tensor, params: Tensor) -> None:
    """Set the models [S, M, P] of the devices `who` to their seed's `params` [S, P], in place."""
    if masked.possible(models):
        masked.replace(models, params, who)
        increment_version(models)
    elif can_look(models):
        flat, rows = models.flatten(0, 1), rows_of(who)
        for s, first, last in rows.per_seed(0, len(rows)):
            for row in rows.index[first:last].tolist():
                flat[row].copy_(params[s])
    else:
        rows = rows_of(who)
        models.flatten(0, 1)[rows.index] = params[rows.index // models.shape[1]]


def blend_rows(models: Tensor, who: Tensor, params: Tensor, kept: Tensor, pool: Tensor, slot: Tensor) -> None:
    """Set the models [S, M, P] of the devices `who` to params + kept_i (model_i − reference_i), in place; kept [S, M].

    A device's reference is `pool[s, slot[s, i]]`, as in `Updates`.
    """
    kept = kept.to(models.dtype)
    if masked.possible(models):
        masked.blend(models, params, who, kept, pool, slot)
        increment_version(models)
        return
    flat, rows = models.flatten(0, 1), rows_of(who)
    if models.shape[2] < SMALL:
        index, seeds = rows.index, rows.index // models.shape[1]
        reference = pool[seeds, slot.flatten()[index]]
        flat[index] = (flat[index] - reference).mul_(kept.flatten()[index][:, None]).add_(params[seeds])
        return
    for row in rows.index.tolist():  # in place: new memory would cost more than the arithmetic
        s, i = divmod(row, models.shape[1])
        flat[row].sub_(pool[s, slot[s, i]]).mul_(kept[s, i]).add_(params[s])
