"""Receiver noise, drawn from its address on the compute device.

Knows: seeds, names, rounds.
Does not know: signals, channels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from otafl.random import Streams

NoiseSource = Callable[[Sequence[int], str, int, int], Tensor]
"""(seeds, name, t, size) to unit-variance noise [S, size] on the compute device."""


def addressed_noise(device: torch.device, dtype: torch.dtype) -> NoiseSource:
    """Unit-variance Gaussian noise drawn on the compute device from the address (seed, name, t)."""
    generator = torch.Generator(device=device)

    def draw(seeds: Sequence[int], name: str, t: int, size: int) -> Tensor:
        noise = torch.empty((len(seeds), size), device=device, dtype=dtype)
        for row, seed in zip(noise, seeds, strict=True):
            generator.manual_seed(Streams(seed).key(name, t))
            row.normal_(generator=generator)
        return noise

    return draw
