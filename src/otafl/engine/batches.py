"""Which training images each device's steps use, drawn from addressed streams.

Knows: devices' shares of the data, batch sizes.
Does not know: features, models, who transmits.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otafl.random import Streams

Batches = Literal["per_step", "per_round"]
KEPT_INDICES = 2**27  # image indices of one sampler that stay on a GPU


class BatchSampler:
    """Mini-batches with replacement from every device's own images.

    A round's draws are made for all devices, so a method that trains fewer uses the same rows of the same
    batches.
    """

    def __init__(
        self,
        seeds: tuple[int, ...],
        shares: Sequence[Sequence[NDArray[np.int64]]],
        local_steps: int,
        batch_size: int,
        batches: Batches,
        device: torch.device | None = None,
    ) -> None:
        self._seeds, self._device = seeds, device or torch.device("cpu")
        self._shape = (local_steps if batches == "per_step" else 1, batch_size)
        images = [np.concatenate(share) for share in shares]
        counts = np.array([[len(part) for part in share] for share in shares])
        self._images, self._counts = images, counts
        before = np.cumsum([0] + [len(part) for part in images[:-1]])[:, None]
        self._first = torch.from_numpy(before + np.cumsum(counts, axis=1) - counts)[..., None, None].to(self._device)
        self._count = torch.from_numpy(counts.astype(np.float64))[..., None, None].to(self._device)
        self._image = torch.from_numpy(np.concatenate(images)).to(self._device)
        self._drawn: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self._kept = KEPT_INDICES // (counts.size * self._shape[0] * batch_size)

    def at(self, t: int) -> Tensor:
        """Image indices of round t, [S, M, steps, batch]; one step's worth if drawn per round.

        On a GPU the draws of the first rounds are kept there, for the next method of this process.
        """
        if t in self._drawn:
            kept, done = self._drawn[t]
            torch.cuda.current_stream(self._device).wait_event(done)  # another run's stream may have drawn it
            return kept
        uniform = np.empty((*self._counts.shape, *self._shape))
        for seed, row in zip(self._seeds, uniform, strict=True):
            Streams(seed).at("batches", t).random(out=row)
        drawn = torch.from_numpy(uniform)
        if self._device.type != "cpu":
            drawn = drawn.pin_memory().to(self._device, non_blocking=True)  # the host does not wait
        drawn = self._image[(drawn * self._count).to(torch.int64).add_(self._first)]
        if self._device.type != "cpu" and t < self._kept:
            self._drawn[t] = drawn, torch.cuda.current_stream(self._device).record_event()
        return drawn

    def image_weights(self, num_images: int) -> Tensor:
        """Weight 1/(m n_i) of every training image in F = (1/m) Σ F_i, [S, N]."""
        weights = np.zeros((len(self._seeds), num_images))
        for row, images, counts in zip(weights, self._images, self._counts, strict=True):
            row[images] = np.repeat(1.0 / (len(counts) * counts), counts)
        return torch.from_numpy(weights)


_samplers: dict[Any, BatchSampler] = {}  # the two used last


def shared_sampler(
    seeds: tuple[int, ...],
    shares: Sequence[Sequence[NDArray[np.int64]]],
    local_steps: int,
    batch_size: int,
    batches: Batches,
    device: torch.device,
) -> BatchSampler:
    """A sampler for these arguments: that of an earlier run of this process, or a new one."""
    digest = hashlib.blake2b()
    for share in shares:
        for part in share:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.tobytes())
    key = (digest.digest(), seeds, local_steps, batch_size, batches, device)
    sampler = _samplers.pop(key, None) or BatchSampler(seeds, shares, local_steps, batch_size, batches, device)
    _samplers[key] = sampler
    while len(_samplers) > 2:
        del _samplers[next(iter(_samplers))]
    return sampler
