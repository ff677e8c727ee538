"""A random projection of long sparse vectors to few values, and their reconstruction.

Knows: vectors.
Does not know: channels, what the vectors are.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from scipy.fft import next_fast_len
from torch import Tensor

from otafl.random import Streams

SIGNS = Streams(0)
"""The projection is part of the method, as a code book is: it is the same in every run."""


@dataclass(frozen=True)
class Projection:
    """P: random signs, an orthonormal Hartley transform, and some of its rows, scaled so that E‖P v‖² = ‖v‖².

    The transform has N ≥ d values, N with small prime factors, since others are slow; vectors get zeros at their end.
    """

    signs: Tensor
    """Random signs ±1, [d]."""
    rows: Tensor
    """Which values of the transform are kept, int [Q]."""

    @property
    def _scale(self) -> float:
        return math.sqrt(self._length / len(self.rows))

    @property
    def _length(self) -> int:
        """N."""
        return int(next_fast_len(len(self.signs), real=True))

    @staticmethod
    def of(size: int, rows: int, like: Tensor) -> "Projection":
        """The projection of vectors of `size` values to `rows`, with the number type of `like` and where it is."""
        return _projection(size, rows, like.dtype, like.device)

    @staticmethod
    def drawn(size: int, rows: int, dtype: torch.dtype, device: torch.device) -> "Projection":
        """The same, drawn now."""
        draw = SIGNS.at("projection", size)
        signs = torch.from_numpy(draw.choice([-1.0, 1.0], size)).to(device, dtype)
        length = next_fast_len(size, real=True)
        chosen = torch.from_numpy(np.sort(draw.permutation(length)[:rows])).to(device)
        return Projection(signs, chosen)

    def apply(self, vectors: Tensor) -> Tensor:
        """P v for vectors [..., d]."""
        return _hartley(vectors * self.signs, self._length)[..., self.rows] * self._scale

    def back(self, values: Tensor) -> Tensor:
        """Pᵀ w for values [..., Q]."""
        wide = values.new_zeros(*values.shape[:-1], self._length).index_copy(-1, self.rows, values)
        return _hartley(wide, self._length)[..., : len(self.signs)] * self.signs * self._scale


_projection = lru_cache(maxsize=64)(Projection.drawn)
"""Kept from round to round: a CUDA graph cannot draw it."""


def _hartley(values: Tensor, length: int) -> Tensor:
    """The orthonormal discrete Hartley transform of vectors with zeros up to `length`, which is its own inverse."""
    seen: Tensor = torch.fft.fft(values, length, norm="ortho")
    return seen.real - seen.imag


def reconstruct(projection: Projection, heard: Tensor, steps: int, threshold: float = 1.4) -> Tensor:
    """Approximate message passing with a soft threshold: a sparse x with P x ≈ heard.

    Args:
        projection: P.
        heard: what is known of x, [..., Q].
        steps: number of steps.
        threshold: the soft threshold, in estimated standard deviations of what disturbs x in a step.

    Returns:
        x, [..., d].
    """
    rows = len(projection.rows)
    x = torch.zeros_like(projection.back(heard))
    left = heard
    for _ in range(steps):
        spread = torch.linalg.vector_norm(left, dim=-1, keepdim=True) / math.sqrt(rows)
        guess = x + projection.back(left)
        x = guess.sign() * (guess.abs() - threshold * spread).clamp(min=0)
        kept = (x != 0).sum(-1, keepdim=True) / rows
        left = heard - projection.apply(x) + left * kept
    return x
