"""Element-wise work on whole vectors of all devices, in one pass by Triton kernels on a GPU.

Knows: vectors.
Does not know: masks, what the vectors are.
"""

import torch
from torch import Tensor

from otafl.gpu import masked, need_triton

try:
    need_triton()
    import triton

    from otafl.gpu import triton_dense as device
except ImportError:
    triton = None

SPAN = 4096  # values per program
possible = masked.possible
"""Whether the kernels accept these values."""


def uniform(normal: Tensor) -> Tensor:
    """Φ(x) of standard normal numbers, which is uniform in [0, 1)."""
    found = torch.empty_like(normal)
    below_one = 1 - torch.finfo(normal.dtype).eps / 2
    device.uniform[(triton.cdiv(normal.numel(), SPAN),)](
        normal.contiguous(), found, normal.numel(), below_one, SPAN=SPAN
    )
    return found


def quantised(values: Tensor, drawn: Tensor, scale: Tensor, levels: Tensor) -> Tensor:
    """Vectors [n, P] rounded to `levels` + 1 values from −scale to scale; levels [1] or [n, 1], scale [n, 1]."""
    num_rows, size = values.shape
    found = values.new_empty(num_rows, size)
    device.quantise[(num_rows, triton.cdiv(size, SPAN))](
        values, drawn, scale.contiguous(), levels.contiguous(), found, size, values.stride(0), drawn.stride(0),
        int(levels.numel() > 1), SPAN=SPAN,
    )  # fmt: skip
    return found
