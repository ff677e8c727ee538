"""The Triton code of the kernels that `otafl.gpu.dense` launches.

Knows: pointers, strides, spans.
Does not know: tensors, launch grids, what the values are.
"""

import triton
import triton.language as tl


@triton.jit
def uniform(normal, found, count, most, SPAN: tl.constexpr):
    """One span of Φ(x), at most `most`."""
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = at < count
    value = tl.load(normal + at, mask=inside, other=0.0)
    tl.store(found + at, tl.minimum((1 + tl.erf(value * 0.7071067811865476)) * 0.5, most), mask=inside)


@triton.jit
def quantise(values, drawn, scales, levels, found, size, values_stride, drawn_stride, each, SPAN: tl.constexpr):
    """One span of one vector, rounded up or down by chance to one of its levels."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < size
    scale, top = tl.load(scales + row), tl.load(levels + row * each)
    value = tl.load(values + row * values_stride + at, mask=inside, other=0.0)
    chance = tl.load(drawn + row * drawn_stride + at, mask=inside, other=0.0)
    factor = top / (2 * tl.where(scale > 0, scale, 1.0))
    step = tl.maximum(tl.minimum(tl.floor(value * factor + chance + top / 2), top), 0)
    tl.store(found + row * size + at, step * (2 * scale / top) - scale, mask=inside)
