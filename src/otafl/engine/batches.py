"""Which training images each device's steps use, drawn from addressed streams.

Knows: devices' shares of the data, batch sizes.
Does not know: features, models, who transmits.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otafl.random import Streams

Batches = Literal["per_step", "per_round"]


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
    ) -> None:
        self._seeds, self._local_steps, self._batch_size, self._batches = (
            seeds,
            local_steps,
            batch_size,
            batches,
        )
        self._images = [np.concatenate(share) for share in shares]
        self._counts = [np.array([len(part) for part in share]) for share in shares]

    def at(self, t: int) -> Tensor:
        """Image indices of round t on the host, [S, M, steps, batch]; one step's worth if drawn per round."""
        steps = self._local_steps if self._batches == "per_step" else 1
        rows = []
        for seed, images, counts in zip(self._seeds, self._images, self._counts, strict=True):
            uniform = Streams(seed).at("batches", t).random((len(counts), steps, self._batch_size))
            first = np.cumsum(counts) - counts
            rows.append(images[first[:, None, None] + (uniform * counts[:, None, None]).astype(np.int64)])
        return torch.from_numpy(np.stack(rows))

    def image_weights(self, num_images: int) -> Tensor:
        """Weight 1/(m n_i) of every training image in F = (1/m) Σ F_i, [S, N]."""
        weights = np.zeros((len(self._seeds), num_images))
        for row, images, counts in zip(weights, self._images, self._counts, strict=True):
            row[images] = np.repeat(1.0 / (len(counts) * counts), counts)
        return torch.from_numpy(weights)
