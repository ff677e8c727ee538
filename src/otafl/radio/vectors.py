"""Vectors that a method makes itself, one per device: signs, sketches, sparse or complex signals, device memory.

Knows: dense tensors, the kernels for devices in a mask.
Does not know: how they were made, the radio.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from otafl.gpu import masked

COPIED = 2**25  # values of vectors that are copied at a time


@dataclass(frozen=True, eq=False)
class Vectors:
    """One vector of Q values per device, which a method makes itself: a signal for `round.uplink`, or a memory.

    As a signal it takes Q channel uses, and each device may spend Q E_s on it. In a method's state they are what
    devices remember; checkpoints and resumed runs treat them as any other tensor. Other than a plain real or complex
    tensor of three axes raises a TypeError.

    >>> signs = Vectors(torch.tensor([[[1.0, -1.0], [1.0, 1.0]]]))
    >>> signs.superpose(torch.ones(1, 2), torch.tensor([[True, True]]))
    tensor([[2., 0.]])
    """

    values: Tensor
    """The vectors, real or complex floating point, [S, M, Q]."""

    def __post_init__(self) -> None:
        if type(self.values) is not Tensor or self.values.dim() != 3:
            raise TypeError("vectors are a plain tensor of shape [S, M, Q]")
        if not (self.values.is_floating_point() or self.values.is_complex()):
            raise TypeError(f"vectors are real or complex numbers, not {self.values.dtype}")

    @property
    def size(self) -> int:
        """Number of values Q per vector."""
        return self.values.shape[2]

    @property
    def _together(self) -> int:
        """How many seeds are computed with at once, so that copies of their vectors take little memory."""
        return max(1, COPIED // max(1, self.values[0].numel()))

    @property
    def _real(self) -> Tensor:
        """The values as real numbers, [S, M, Q] or [S, M, 2 Q], rows one after the other where kernels ask for it."""
        values = self.values.resolve_conj()
        if values.is_cuda and (values.stride(2) != 1 or values.stride(0) != values.shape[1] * values.stride(1)):
            values = values.contiguous()
        return torch.view_as_real(values).flatten(2) if self.is_complex else values

    @property
    def is_complex(self) -> bool:
        """Whether values are complex, so that both the in-phase and the quadrature part carry data."""
        return self.values.is_complex()

    def norms(self, who: Tensor) -> Tensor:
        """Euclidean norms of the vectors.

        Args:
            who: devices whose norms are needed, bool [S, M].

        Returns:
            Norms in float64, [S, M]; 0 for the others.
        """
        parts = self._real
        if masked.possible(parts):
            return masked.squares(parts, None, None, who).sqrt_()
        norms = torch.cat(
            [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in torch.split(parts, self._together)]
        )
        return torch.where(who, norms, 0.0)

    measured_norms = norms

    def superpose(self, weights: Tensor, who: Tensor) -> Tensor:
        """Weighted sum Σ_i weights_i vector_i over the devices `who`, complex if the weights or the vectors are.

        Args:
            weights: weights [S, M], or K of them for each device [S, M, K]; ignored outside `who`.
            who: devices in the sum, bool [S, M].

        Returns:
            The sum [S, Q], or K sums [S, K, Q].
        """
        several = weights if weights.dim() == 3 else weights[..., None]
        if masked.possible(parts := self._real):
            total = torch.stack([self._sum(parts, several[..., k], who) for k in range(several.shape[2])], 1)
            return total if weights.dim() == 3 else total[:, 0]
        complex_sum = self.is_complex or weights.is_complex()
        dtype = torch.promote_types(self.values.dtype, torch.complex64) if complex_sum else self.values.dtype
        several = torch.where(who[..., None], several, 0.0).to(dtype)
        sums = []
        for at in range(0, len(who), self._together):
            part = slice(at, at + self._together)
            values = torch.where(who[part, :, None], self.values[part], 0.0).to(dtype)  # 0 · NaN must not poison others
            sums.append(torch.einsum("smk,smq->skq", several[part], values))
        total = torch.cat(sums)
        return total if weights.dim() == 3 else total[:, 0]

    def _sum(self, parts: Tensor, weights: Tensor, who: Tensor) -> Tensor:
        """Weighted sum [S, Q] by kernels, which read the vectors of the devices `who` alone."""

        def summed(by: Tensor) -> Tensor:
            total = masked.weighted_sum(parts, None, None, by.to(parts.dtype), who)
            return torch.view_as_complex(total.view(len(total), -1, 2)) if self.is_complex else total

        if not weights.is_complex():
            return summed(weights)
        return summed(weights.real) + 1j * summed(weights.imag)

    def dense(self) -> Tensor:
        """All vectors, [S, M, Q]."""
        return self.values
