"""GPU kernels (Triton) for what PyTorch would do in many small or many needless ones.

The steps of pre-activation-space training, where one linear layer follows the first: written out in PyTorch a
step is ten small kernels, which take longer than the large products of the whole round. Here it is one: its
programs share the hidden units out in blocks, and all but the class scores stays within a block. So launch k adds
up the blocks' scores of step k − 1, ends that step, and begins step k.

Norms, weighted sums and replacements of the devices in a mask: they touch only those devices' models, and nobody
has to ask the GPU how many these are.

Knows: pre-activations, Gram matrices, models, masks.
Does not know: where they come from.
"""

from typing import Any

import torch
from torch import Tensor

from otafl.engine.head import Head
from otafl.engine.objective import Objective

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for a CPU comes without it
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
    )


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
) -> None:
    """All steps, from z = X W₁ᵀ at the start and X Xᵀ, both [R, r, ·], to G.

    Bias [R, 1, H] and later layer [R, P_rest] learn in place. `scale` is η/b, a float32 scalar. Rows outside the
    mask [R] do nothing: their G is 0.
    """
    assert head.layers is not None
    num_rows, num_images, hidden = z.shape
    num_classes, steps = head.layers[0].outputs, num_images // batch
    blocks, classes = triton.cdiv(hidden, BLOCK), max(16, triton.next_power_of_2(num_classes))
    scores = z.new_empty(2, num_rows, blocks, batch, classes)
    for k in range(steps + 1):
        _step[(num_rows, blocks)](
            z, gram, bias, targets, rest, slopes, scores, scale, scale if mask is None else mask,
            k, steps, hidden, num_classes, bias.stride(0), rest.stride(0), num_rows,
            BATCH=batch, BLOCK=BLOCK, BLOCKS=blocks, CLASSES=classes, MASKED=mask is not None,
            PRECISION="tf32" if tf32 else "ieee", num_warps=4,
        )  # fmt: skip


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
    _gather[(num_rows, triton.cdiv(num_images, 32), triton.cdiv(size, 64))](
        features, images, turned if inputs is None else inputs, turned, features if scales is None else scales,
        num_images, size, each, IMAGES=32, SPAN=64, STRAIGHT=inputs is not None, SCALED=scales is not None,
    )  # fmt: skip


def masked_squares(end: Tensor, pool: Tensor, slot: Tensor, who: Tensor) -> Tensor:
    """‖end_i − pool[slot_i]‖² of the devices `who`, accumulated in float64, [S, M]; 0 for the others."""
    num_seeds, num_devices, size = end.shape
    parts = torch.empty((num_seeds, num_devices, NORM_BLOCKS), dtype=torch.float64, device=end.device)
    _squares[(num_seeds * num_devices, NORM_BLOCKS)](
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
    _sum[(num_seeds, triton.cdiv(size, SPAN // 4))](
        end, end if pool is None else pool, who if slot is None else slot, weights.contiguous(), who, total,
        size, num_devices, end.stride(0), end.stride(1), *strides, SPAN=SPAN // 4, RELATIVE=pool is not None,
    )  # fmt: skip
    return total


def masked_replace(models: Tensor, params: Tensor, who: Tensor) -> None:
    """Give the devices `who` of [S, M, P] their seed's [S, P], in place."""
    num_seeds, num_devices, size = models.shape
    _replace[(num_seeds * num_devices, triton.cdiv(size, SPAN))](
        models, params, who.contiguous(), size, num_devices, models.stride(1), params.stride(0), SPAN=SPAN
    )


def _step_source(
    z: "Any",
    gram: "Any",
    bias: "Any",
    targets: "Any",
    rest: "Any",
    slopes: "Any",
    scores: "Any",
    scale: "Any",
    mask: "Any",
    k: "Any",
    steps: "Any",
    hidden: "Any",
    num_classes: "Any",
    bias_stride: "Any",
    rest_stride: "Any",
    num_rows: "Any",
    BATCH: "tl.constexpr",
    BLOCK: "tl.constexpr",
    BLOCKS: "tl.constexpr",
    CLASSES: "tl.constexpr",
    MASKED: "tl.constexpr",
    PRECISION: "tl.constexpr",
) -> None:
    """End step k − 1 and begin step k, for one row and one block of hidden units."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    image, label = tl.arange(0, BATCH), tl.arange(0, CLASSES)
    unit = block * BLOCK + tl.arange(0, BLOCK)
    inside, known = unit < hidden, label < num_classes
    num_images = steps * BATCH
    z += row * num_images * hidden
    slopes += row * num_images * hidden
    gram += row * num_images * num_images
    tile = image[:, None] * hidden + unit[None, :]
    if MASKED:  # noqa: SIM102 - decided at compilation
        if tl.load(mask + row) == 0:
            if k < steps:
                nothing = tl.zeros((BATCH, BLOCK), dtype=tl.float32)
                tl.store(slopes + k * BATCH * hidden + tile, nothing, mask=inside[None, :])
            return
    bias_at = bias + row * bias_stride + unit
    weight_at = rest + row * rest_stride + label[:, None] * hidden + unit[None, :]
    later_at = rest + row * rest_stride + num_classes * hidden + label
    first = block == 0  # the later layer's bias is that block's alone
    shift = tl.load(bias_at, mask=inside, other=0.0)
    weight = tl.load(weight_at, mask=known[:, None] & inside[None, :], other=0.0)
    later = tl.load(later_at, mask=known & first, other=0.0)
    slope = tl.zeros((BATCH, BLOCK), dtype=tl.float32)
    score_at = image[:, None] * CLASSES + label[None, :]
    if k > 0:
        before = scores + (((k - 1) % 2) * num_rows + row) * BLOCKS * BATCH * CLASSES
        output = tl.zeros((BATCH, CLASSES), dtype=tl.float32)
        for i in range(BLOCKS):
            output += tl.load(before + i * BATCH * CLASSES + score_at)
        output = tl.where(known[None, :], output, -float("inf"))
        share = tl.exp(output - tl.max(output, axis=1)[:, None])
        share = share / tl.sum(share, axis=1)[:, None]
        wanted = tl.load(targets + row * num_images + (k - 1) * BATCH + image)
        error = (share - tl.where(label[None, :] == wanted[:, None], 1.0, 0.0)) * tl.load(scale)
        active = tl.load(z + (k - 1) * BATCH * hidden + tile, mask=inside[None, :], other=0.0)
        slope = tl.dot(error, weight, input_precision=PRECISION)
        slope = tl.where(active > 0, slope, 0.0)
        tl.store(slopes + (k - 1) * BATCH * hidden + tile, slope, mask=inside[None, :])
        shift -= tl.sum(slope, axis=0)
        tl.store(bias_at, shift, mask=inside)
        weight -= tl.dot(tl.trans(error), tl.maximum(active, 0.0), input_precision=PRECISION)
        tl.store(weight_at, weight, mask=known[:, None] & inside[None, :])
        later -= tl.sum(error, axis=0)
        tl.store(later_at, later, mask=known & first)
    if k < steps:
        now = tl.load(z + k * BATCH * hidden + tile, mask=inside[None, :], other=0.0) + shift[None, :]
        gram_at = gram + (k * BATCH + image[:, None]) * num_images + image[None, :]
        for j in range(0, k - 1):
            earlier = tl.load(slopes + j * BATCH * hidden + tile, mask=inside[None, :], other=0.0)
            now -= tl.dot(tl.load(gram_at + j * BATCH), earlier, input_precision=PRECISION)
        if k > 0:
            now -= tl.dot(tl.load(gram_at + (k - 1) * BATCH), slope, input_precision=PRECISION)
        tl.store(z + k * BATCH * hidden + tile, now, mask=inside[None, :])
        part = tl.dot(tl.maximum(now, 0.0), tl.trans(weight), input_precision=PRECISION)
        part += tl.where(first, later, 0.0)[None, :]
        after = scores + (((k % 2) * num_rows + row) * BLOCKS + block) * BATCH * CLASSES
        tl.store(after + score_at, part)


def _gather_source(
    features: "Any",
    images: "Any",
    inputs: "Any",
    turned: "Any",
    scales: "Any",
    num_images: "Any",
    size: "Any",
    each: "Any",
    IMAGES: "tl.constexpr",
    SPAN: "tl.constexpr",
    STRAIGHT: "tl.constexpr",
    SCALED: "tl.constexpr",
) -> None:
    """One tile of one row's inputs, transposed and perhaps scaled, and perhaps as they are."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * IMAGES + tl.arange(0, IMAGES)
    pixel = tl.program_id(2) * SPAN + tl.arange(0, SPAN)
    image = tl.load(images + row * num_images + place, mask=place < num_images, other=0)
    inside = (place < num_images)[:, None] & (pixel < size)[None, :]
    value = tl.load(features + image[:, None] * size + pixel[None, :], mask=inside, other=0.0)
    if STRAIGHT:
        tl.store(inputs + (row * num_images + place[:, None]) * size + pixel[None, :], value, mask=inside)
    if SCALED:
        value *= tl.load(scales + row)
    line = ((row // each) * size + pixel[:, None]) * each + row % each
    at = turned + line * num_images + place[None, :]
    tl.store(at, tl.trans(value), mask=(pixel < size)[:, None] & (place < num_images)[None, :])


def _squares_source(
    end: "Any",
    pool: "Any",
    slot: "Any",
    who: "Any",
    parts: "Any",
    size: "Any",
    num_devices: "Any",
    end_stride: "Any",
    pool_seed_stride: "Any",
    pool_stride: "Any",
    BLOCKS: "tl.constexpr",
    SPAN: "tl.constexpr",
) -> None:
    """Every BLOCKS-th span of one device's ‖end − pool[slot]‖²."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    total = tl.zeros((SPAN,), dtype=tl.float64)
    if tl.load(who + row) != 0:
        mine = end + row * end_stride
        other = pool + (row // num_devices) * pool_seed_stride + tl.load(slot + row) * pool_stride
        for start in range(block * SPAN, size, BLOCKS * SPAN):
            at = start + tl.arange(0, SPAN)
            inside = at < size
            difference = tl.load(mine + at, mask=inside, other=0.0) - tl.load(other + at, mask=inside, other=0.0)
            wide = difference.to(tl.float64)
            total += wide * wide
    tl.store(parts + row * BLOCKS + block, tl.sum(total, axis=0))


def _sum_source(
    end: "Any",
    pool: "Any",
    slot: "Any",
    weights: "Any",
    who: "Any",
    total: "Any",
    size: "Any",
    num_devices: "Any",
    end_seed_stride: "Any",
    end_stride: "Any",
    pool_seed_stride: "Any",
    pool_stride: "Any",
    SPAN: "tl.constexpr",
    RELATIVE: "tl.constexpr",
) -> None:
    """One span of one seed's weighted sum."""
    seed = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < size
    sum_here = tl.zeros((SPAN,), dtype=tl.float32)
    for i in range(num_devices):
        row = seed * num_devices + i
        if tl.load(who + row) != 0:
            mine_at = end + seed * end_seed_stride + (row - seed * num_devices) * end_stride + at
            mine = tl.load(mine_at, mask=inside, other=0.0)
            if RELATIVE:
                other = pool + seed * pool_seed_stride + tl.load(slot + row) * pool_stride
                mine -= tl.load(other + at, mask=inside, other=0.0)
            sum_here += tl.load(weights + row) * mine
    tl.store(total + seed * size + at, sum_here, mask=inside)


def _replace_source(
    models: "Any",
    fresh: "Any",
    who: "Any",
    size: "Any",
    num_devices: "Any",
    stride: "Any",
    fresh_stride: "Any",
    SPAN: "tl.constexpr",
) -> None:
    """One span of one device's new model."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(who + row) != 0:
        at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        value = tl.load(fresh + (row // num_devices) * fresh_stride + at, mask=at < size)
        tl.store(models + row * stride + at, value, mask=at < size)


def _compiled(source: Any) -> Any:
    return None if triton is None else triton.jit(source)


_step, _gather, _squares, _sum, _replace = (
    _compiled(source) for source in (_step_source, _gather_source, _squares_source, _sum_source, _replace_source)
)
