"""Triton kernels for work that PyTorch would split into many small kernels, or do for devices that are not needed.

One kernel does all steps of pre-activation-space training if one linear layer follows the first. In PyTorch a step is
ten small kernels, which take longer than the large products of the whole round. The kernel divides a row's hidden
units into blocks, one program each. Blocks exchange only class scores: in each step a program waits until the other
programs of its row have written theirs. The squared norm of the whole update costs little more: with
c_k = Σ_{j<k} K[k, j] G_j, which the steps compute anyway, ⟨K G, G⟩ = Σ_k ⟨2 c_k + K[k, k] G_k, G_k⟩.

Other kernels copy the inputs of mini-batches in the layouts that products want.

Knows: pre-activations, Gram matrices, inputs.
Does not know: rounds, channels, methods.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from otafl.engine.fast.head import Head
from otafl.engine.objective import Objective
from otafl.errors import TooLargeError
from otafl.gpu import need_triton

try:
    need_triton()
    import triton

    from otafl.engine.fast import triton_kernels as device
except ImportError:
    triton = None

BLOCK = 128  # hidden units per program
BATCHES = (16, 32, 64)
MOST_CLASSES = 64

_streams = 1


@contextmanager
def shared_by(streams: int) -> Iterator[None]:
    """Inside the `with` block, kernels of so many streams may be on the GPU at the same time."""
    global _streams
    before, _streams = _streams, streams
    try:
        yield
    finally:
        _streams = before


def suits(objective: Objective, head: Head, batch: int, z: Tensor) -> bool:
    """Whether the `descend` kernel can do the steps of this model."""
    found = (
        triton is not None
        and z.is_cuda
        and z.dtype == torch.float32
        and objective.classifies
        and head.layers is not None
        and len(head.layers) == 1
        and head.layers[0].outputs <= MOST_CLASSES
        and batch in BATCHES
        and triton.cdiv(head.outputs, BLOCK) <= _processors(z.device)  # a row's programs must all run at the same time
    )
    if found and _streams * triton.cdiv(head.outputs, BLOCK) > _processors(z.device):
        raise TooLargeError(f"{_streams} runs in turns are too many for a layer of {head.outputs}; lower --together")
    return found


@cache
def _processors(device: torch.device) -> int:
    """Number of programs that are sure to run at the same time."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    counts: Tensor | None,
    tf32: bool,
    squares: bool,
) -> Tensor | None:
    """Do all steps: from z = X W₁ᵀ at the start and X Xᵀ, both [R, r, ·], to G, which is written to `slopes`.

    The bias [R, 1, H] and the later layer [R, P_rest] are trained in place. `scale` is η/b, a float32 scalar. Rows
    outside the mask [R] do nothing, and their G is 0; with `counts` [R] a row makes so many steps. With `squares`,
    returns the updates' squared norms, float64 [R].
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
        scale if mask is None else mask, scale if counts is None else counts, bias.stride(0), rest.stride(0), num_rows,
        STEPS=num_images // batch, HIDDEN=hidden, KNOWN=num_classes, BATCH=batch, BLOCK=BLOCK, BLOCKS=blocks,
        CLASSES=classes, MASKED=mask is not None, COUNTED=counts is not None, SQUARES=squares,
        PRECISION="tf32" if tf32 else "ieee", num_warps=4,
    )  # fmt: skip
    return None if parts is None else parts.sum(-1)


def gather_both(features: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs X [R, r, n] of images [R, r], and a copy Xᵀ [R, n, r], with which TF32 products are faster."""
    inputs = features.new_empty(*images.shape, features.shape[1])
    turned = features.new_empty(len(images), features.shape[1], images.shape[1])
    _gather_into(features, images, inputs, turned, None, 1)
    return inputs, turned


def gather_turned(features: Tensor, images: Tensor, scales: Tensor, num_groups: int) -> Tensor:
    """Inputs (w X)ᵀ of images [R, r] with weights w [R], a group's rows side by side: [groups, n, R/groups · r]."""
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
