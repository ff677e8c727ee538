"""Norms, weighted sums and replacements of the vectors of the devices in a mask, by Triton kernels on a GPU.

They touch only these devices' vectors, and the host never has to ask the GPU how many these are.

Knows: vectors, masks.
Does not know: what the vectors are, rounds, channels.
"""

import torch
from torch import Tensor

from otafl.gpu import need_triton

try:
    need_triton()
    import triton

    from otafl.gpu import triton_masked as device
except ImportError:
    triton = None

SPAN = 4096  # parameters per program
NORM_BLOCKS = 32  # programs per vector in a norm


def possible(models: Tensor) -> bool:
    """Whether the kernels accept these vectors."""
    return triton is not None and models.is_cuda and models.dtype == torch.float32 and models.stride(-1) == 1


def squares(end: Tensor, pool: Tensor | None, slot: Tensor | None, who: Tensor) -> Tensor:
    """‖end_i − pool[slot_i]‖² of `who`, or ‖end_i‖² without a pool, in float64, [S, M]; 0 for the others."""
    num_seeds, num_devices, size = end.shape
    strides = (0, 0) if pool is None else pool.stride()[:2]
    apart = end.stride(0) if num_devices == 1 else end.stride(1)
    parts = torch.empty((num_seeds, num_devices, NORM_BLOCKS), dtype=torch.float64, device=end.device)
    device.squares[(num_seeds * num_devices, NORM_BLOCKS)](
        end, end if pool is None else pool, who if slot is None else slot, who.contiguous(), parts,
        size, num_devices, apart, *strides, BLOCKS=NORM_BLOCKS, SPAN=SPAN, RELATIVE=pool is not None,
    )  # fmt: skip
    return parts.sum(-1)


def weighted_sum(end: Tensor, pool: Tensor | None, slot: Tensor | None, weights: Tensor, who: Tensor) -> Tensor:
    """Sum Σ_i weights_i (end_i − pool[slot_i]) over `who`, [S, P]; without a pool Σ_i weights_i end_i."""
    num_seeds, num_devices, size = end.shape
    who = who.contiguous()
    strides = (0, 0) if pool is None else pool.stride()[:2]
    total = end.new_empty(num_seeds, size)
    device.weighted_sum[(triton.cdiv(size, SPAN // 4), num_seeds)](
        end, end if pool is None else pool, who if slot is None else slot, weights.contiguous(), who, total,
        size, num_devices, end.stride(0), end.stride(1), *strides, SPAN=SPAN // 4, RELATIVE=pool is not None,
    )  # fmt: skip
    return total


def replace(models: Tensor, params: Tensor, who: Tensor) -> None:
    """Set the models [S, M, P] of the devices `who` to their seed's `params` [S, P], in place."""
    num_seeds, num_devices, size = models.shape
    device.replace[(num_seeds * num_devices, triton.cdiv(size, SPAN))](
        models, params, who.contiguous(), size, num_devices, models.stride(1), params.stride(0), SPAN=SPAN
    )


def blend(models: Tensor, params: Tensor, who: Tensor, kept: Tensor, pool: Tensor, slot: Tensor) -> None:
    """Set the models [S, M, P] of the devices `who` to params + kept_i (model_i − reference_i), in place."""
    num_seeds, num_devices, size = models.shape
    device.blend[(num_seeds * num_devices, triton.cdiv(size, SPAN))](
        models,
        params,
        who.contiguous(),
        kept.contiguous(),
        pool,
        slot.contiguous(),
        size,
        num_devices,
        models.stride(1),
        params.stride(0),
        pool.stride(0),
        pool.stride(1),
        SPAN=SPAN,
    )
