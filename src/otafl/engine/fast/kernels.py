"""GPU kernels (Triton) for what PyTorch would do in many small or many needless ones.

The steps of pre-activation-space training, where one linear layer follows the first: written out in PyTorch a
step is ten small kernels, which take longer than the large products of the whole round. Here all steps are one: its
programs share a row's hidden units out in blocks, and all but the class scores stays within a block. In each step a
program waits until the others of its row have written theirs. The squared norm of the whole update comes with it:
with c_k = Σ_{j<k} K[k, j] G_j, which the steps need, ⟨K G, G⟩ = Σ_k ⟨2 c_k + K[k, k] G_k, G_k⟩.

Norms, weighted sums and replacements of the devices in a mask: they touch only those devices' models, and nobody
has to ask the GPU how many these are.

Knows: pre-activations, Gram matrices, models, masks.
Does not know: where they come from.
"""

import os
from functools import cache

import torch
from torch import Tensor

from otafl.engine.fast.head import Head
from otafl.engine.objective import Objective

try:
    if torch.version.cuda is None and torch.version.hip is None and "TRITON_INTERPRET" not in os.environ:
        raise ImportError  # a PyTorch for a CPU: loading it for nothing would take 70 MB and a quarter of a second
    import triton

    from otafl.engine.fast import triton_kernels as device
except ImportError:
    triton = None

BLOCK = 128  # hidden units of a program
BATCHES = (16, 32, 64)
MOST_CLASSES = 64
SPAN = 4096  # parameters of a program that goes through models
NORM_BLOCKS = 32  # programs per model in a norm


def suits(objective: Objective, head: Head, batch: int, z: Tensor) -> bool:
    """Whether the kernel can do the steps of this model."""
    return (
        triton is not None
        and z.is_cuda
        and z.dtype == torch.float32
        and objective.classifies
        and head.layers is not None
        and len(head.layers) == 1
        and head.layers[0].outputs <= MOST_CLASSES
        and batch in BATCHES
        and triton.cdiv(head.outputs, BLOCK) <= _processors(z.device)  # a row's programs must all be there at once
    )


@cache
def _processors(device: torch.device) -> int:
    """Programs that surely run at the same time."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def can_mask(models: Tensor) -> bool:
    """Whether the kernels on masks of devices can do these models."""
    return triton is not None and models.is_cuda and models.dtype == torch.float32 and models.stride(-1) == 1


def descend(
    head: Head,
    batch: int,
    gram: Tensor,
    z: Tensor,
    bias: Tensor,
    targets: Tensor,
    rest: Tensor,
    slopes: Tensor,
    scale: Tensor,
    mask: Tensor | None,
    tf32: bool,
    squares: bool,
) -> Tensor | None:
    """All steps, from z = X W₁ᵀ at the start and X Xᵀ, both [R, r, ·], to G.

    Bias [R, 1, H] and later layer [R, P_rest] learn in place. `scale` is η/b, a float32 scalar. Rows outside the
    mask [R] do nothing: their G is 0. With `squares`, the whole updates' squared norms, float64 [R].
    """
    assert head.layers is not None
    num_rows, num_images, hidden = z.shape
    num_classes = head.layers[0].outputs
    blocks, classes = triton.cdiv(hidden, BLOCK), max(16, triton.next_power_of_2(num_classes))
    scores = z.new_empty(2, num_rows, blocks, batch, classes)
    turns = torch.zeros(1 + num_rows, dtype=torch.int32, device=z.device)
    parts = torch.empty((num_rows, blocks), dtype=torch.float64, device=z.device) if squares else None
    device.descend[(num_rows * blocks,)](
        z, gram, bias, targets, rest, slopes, scores if parts is None else parts, scores, turns, scale,
        scale if mask is None else mask, bias.stride(0), rest.stride(0), num_rows,
        STEPS=num_images // batch, HIDDEN=hidden, KNOWN=num_classes, BATCH=batch, BLOCK=BLOCK, BLOCKS=blocks,
        CLASSES=classes, MASKED=mask is not None, SQUARES=squares, PRECISION="tf32" if tf32 else "ieee", num_warps=4,
    )  # fmt: skip
    return None if parts is None else parts.sum(-1)


def gather_both(features: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs X [R, r, n] and Xᵀ [R, n, r], in the layout that products in TF32 want, of images [R, r]."""
    inputs = features.new_empty(*images.shape, features.shape[1])
    turned = features.new_empty(len(images), features.shape[1], images.shape[1])
    _gather_into(features, images, inputs, turned, None, 1)
    return inputs, turned


def gather_turned(features: Tensor, images: Tensor, scales: Tensor, num_groups: int) -> Tensor:
    """(w X)ᵀ of all rows of a group side by side, [groups, n, R/groups · r], of images [R, r] and weights w [R]."""
    each = len(images) // num_groups
    turned = features.new_empty(num_groups, features.shape[1], each * images.shape[1])
    _gather_into(features, images, None, turned, scales, each)
    return turned


def _gather_into(
    features: Tensor, images: Tensor, inputs: Tensor | None, turned: Tensor, scales: Tensor | None, each: int
) -> None:
    num_rows, num_images = images.shape
    size = features.shape[1]
    device.gather[(num_rows, triton.cdiv(num_images, 32), triton.cdiv(size, 64))](
        features, images, turned if inputs is None else inputs, turned, features if scales is None else scales,
        num_images, size, each, IMAGES=32, SPAN=64, STRAIGHT=inputs is not None, SCALED=scales is not None,
    )  # fmt: skip


def masked_squares(end: Tensor, pool: Tensor, slot: Tensor, who: Tensor) -> Tensor:
    """‖end_i − pool[slot_i]‖² of the devices `who`, accumulated in float64, [S, M]; 0 for the others."""
    num_seeds, num_devices, size = end.shape
    parts = torch.empty((num_seeds, num_devices, NORM_BLOCKS), dtype=torch.float64, device=end.device)
    device.squares[(num_seeds * num_devices, NORM_BLOCKS)](
        end, pool, slot, who.contiguous(), parts, size, num_devices, end.stride(1), pool.stride(0), pool.stride(1),
        BLOCKS=NORM_BLOCKS, SPAN=SPAN,
    )  # fmt: skip
    return parts.sum(-1)


def masked_sum(end: Tensor, pool: Tensor | None, slot: Tensor | None, weights: Tensor, who: Tensor) -> Tensor:
    """Σ_i weights_i (end_i − pool[slot_i]) over the devices `who`, [S, P]; weights float32 [S, M]; no pool is 0."""
    num_seeds, num_devices, size = end.shape
    who = who.contiguous()
    strides = (0, 0) if pool is None else pool.stride()[:2]
    total = end.new_empty(num_seeds, size)
    device.weighted_sum[(num_seeds, triton.cdiv(size, SPAN // 4))](
        end, end if pool is None else pool, who if slot is None else slot, weights.contiguous(), who, total,
        size, num_devices, end.stride(0), end.stride(1), *strides, SPAN=SPAN // 4, RELATIVE=pool is not None,
    )  # fmt: skip
    return total


def masked_replace(models: Tensor, params: Tensor, who: Tensor) -> None:
    """Give the devices `who` of [S, M, P] their seed's [S, P], in place."""
    num_seeds, num_devices, size = models.shape
    device.replace[(num_seeds * num_devices, triton.cdiv(size, SPAN))](
        models, params, who.contiguous(), size, num_devices, models.stride(1), params.stride(0), SPAN=SPAN
    )


def masked_blend(models: Tensor, params: Tensor, who: Tensor, kept: Tensor, pool: Tensor, slot: Tensor) -> None:
    """Give the devices `who` of [S, M, P] params + kept_i (model_i − reference_i), in place."""
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
