"""Which (seed, device) pairs a mask selects, without waiting for a GPU where the host already knows.

Who transmits is decided by the channel, which is known before the first round; asking a GPU which entries of a
mask are true would make every round wait for it. So whoever makes a mask from what the host knows announces its
rows, and `rows_of` finds them again. A mask that nobody announced, or that was written since, is asked.

Knows: masks [S, M] and their rows.
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
from torch.utils.weak import WeakIdKeyDictionary

from otafl.engine import kernels


@dataclass(frozen=True, eq=False)
class Rows:
    """The true entries of a mask [S, M], as rows of a tensor [S·M, ...]."""

    index: Tensor
    """s·M + i, rising, int [N] on the compute device."""
    bounds: tuple[int, ...]
    """The rows of seed s are index[bounds[s]:bounds[s + 1]]."""
    num_devices: int
    padded: bool = False
    """Whether other rows are among them, so that every round has as many: the mask tells."""

    def __len__(self) -> int:
        return self.bounds[-1]

    @property
    def complete(self) -> bool:
        """Whether every device of every seed is there."""
        return len(self) == (len(self.bounds) - 1) * self.num_devices

    @property
    def even(self) -> bool:
        """Whether every seed has as many rows."""
        return all(stop - start == self.bounds[1] for start, stop in pairwise(self.bounds))

    def per_seed(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(seed, first, last) for the seeds that positions start … stop of `index` touch."""
        for s, (first, last) in enumerate(pairwise(self.bounds)):
            first, last = max(first, start), min(last, stop)
            if first < last:
                yield s, first, last


_announced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # mask to (its version, its rows)


def announce(mask: Tensor, rows: Rows) -> Tensor:
    """Remember the rows of a mask; returns the mask."""
    _announced[mask] = (mask._version, rows)
    return mask


def rows_of(mask: Tensor) -> Rows:
    """The rows of a mask: as announced, or else by looking."""
    if mask in _announced:
        version, rows = _announced[mask]
        if version == mask._version:
            return rows  # type: ignore[no-any-return]
    counts = mask.sum(-1).tolist()
    return Rows(mask.flatten().nonzero().flatten(), (0, *np.cumsum(counts).tolist()), mask.shape[1])


class Schedule:
    """Masks of every round that the host knows beforehand."""

    def __init__(self, masks: NDArray[np.bool_], device: torch.device) -> None:
        """Masks [T, S, M]."""
        self.masks = torch.from_numpy(masks).to(device)
        self._num_devices = masks.shape[2]
        rounds, rows = np.nonzero(masks.reshape(len(masks), -1))
        self._index = torch.from_numpy(rows).to(device)
        self._first = np.searchsorted(rounds, np.arange(len(masks) + 1)).tolist()
        counts = np.cumsum(masks.sum(-1), axis=1)
        self._bounds = np.concatenate([np.zeros_like(counts[:, :1]), counts], axis=1).tolist()

    def at(self, t: int) -> Tensor:
        """The mask of round t, announced."""
        index = self._index[self._first[t] : self._first[t + 1]]
        return announce(self.masks[t].clone(), Rows(index, tuple(self._bounds[t]), self._num_devices))

    def pick(self, t: Tensor) -> Tensor:
        """The mask of the round in a tensor, announced with equally many rows in every round and seed."""
        index = self._padded.index_select(0, t.view(1))[0]
        bounds = tuple(range(0, index.numel() + 1, index.shape[1]))
        rows = Rows(index.flatten(), bounds, self._num_devices, padded=True)
        return announce(self.masks.index_select(0, t.view(1))[0], rows)

    def most_last(self) -> int:
        """Most different rounds in which the devices of a seed were last in the mask ("never" is one), at any time."""
        masks = self.masks.cpu().numpy()
        rounds = np.where(masks, np.arange(len(masks))[:, None, None], -1)
        last = np.sort(np.maximum.accumulate(rounds, axis=0), axis=-1)
        return int((np.diff(last, axis=-1) > 0).sum(-1).max()) + 1

    @cached_property
    def _padded(self) -> Tensor:
        """Rows of each round and seed, those of the mask first, as many as the largest mask has, [T, S, C]."""
        masks = self.masks.cpu().numpy()
        most = max(1, masks.sum(-1).max())
        devices = np.argsort(~masks, axis=-1, kind="stable")[..., :most]
        seeds = np.arange(masks.shape[1])[:, None]
        return torch.from_numpy(np.sort(devices, axis=-1) + seeds * self._num_devices).to(self.masks.device)


def replace_rows(models: Tensor, who: Tensor, params: Tensor, in_place: bool) -> Tensor:
    """Models [S, M, P] in which the devices `who` have their seed's [S, P]."""
    models = models if in_place else models.clone()
    if kernels.can_mask(models):
        kernels.masked_replace(models, params, who)
        increment_version(models)
        return models
    flat, rows = models.flatten(0, 1), rows_of(who)
    if models.device.type == "cpu":
        for s, first, last in rows.per_seed(0, len(rows)):
            for row in rows.index[first:last].tolist():
                flat[row].copy_(params[s])
    else:
        flat[rows.index] = params[rows.index // models.shape[1]]
    return models


def blend_rows(
    models: Tensor, who: Tensor, params: Tensor, kept: Tensor, reference: tuple[Tensor, Tensor], in_place: bool
) -> Tensor:
    """Models [S, M, P] in which the devices `who` have params + kept_i (model_i − reference_i), kept [S, M].

    A device's reference is `pool[s, slot[s, i]]`, as in `Updates`.
    """
    pool, slot = reference
    models = models if in_place else models.clone()
    kept = kept.to(models.dtype)
    if kernels.can_mask(models):
        kernels.masked_blend(models, params, who, kept, pool, slot)
        increment_version(models)
        return models
    flat, rows = models.flatten(0, 1), rows_of(who)
    for row in rows.index.tolist():
        s, i = divmod(row, models.shape[1])
        flat[row].sub_(pool[s, slot[s, i]]).mul_(kept[s, i]).add_(params[s])
    return models
