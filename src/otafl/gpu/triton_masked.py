"""The Triton code of the kernels that `otafl.gpu.masked` launches.

Knows: pointers, strides, spans.
Does not know: tensors, launch grids, what the vectors are.
"""

import triton
import triton.language as tl


@triton.jit
def squares(
    end, pool, slot, who, parts, size, num_devices, end_stride, pool_seed_stride, pool_stride,
    BLOCKS: tl.constexpr, SPAN: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """Part of one device's ‖end − pool[slot]‖², or ‖end‖²: the sum over every BLOCKS-th span."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    total = tl.zeros((SPAN,), dtype=tl.float64)
    if tl.load(who + row) != 0:
        mine = end + row * end_stride
        other = pool
        if RELATIVE:
            other += (row // num_devices) * pool_seed_stride + tl.load(slot + row) * pool_stride
        for start in range(block * SPAN, size, BLOCKS * SPAN):
            at = start + tl.arange(0, SPAN)
            inside = at < size
            difference = tl.load(mine + at, mask=inside, other=0.0)
            if RELATIVE:
                difference -= tl.load(other + at, mask=inside, other=0.0)
            wide = difference.to(tl.float64)
            total += wide * wide
    tl.store(parts + row * BLOCKS + block, tl.sum(total, axis=0))


@triton.jit
def weighted_sum(
    end, pool, slot, weights, who, total, size, num_devices, end_seed_stride, end_stride, pool_seed_stride,
    pool_stride,
    SPAN: tl.constexpr, RELATIVE: tl.constexpr,
):  # fmt: skip
    """One span of one seed's weighted sum."""
    seed = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
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


@triton.jit
def replace(
    models, fresh, who, size, num_devices, stride, fresh_stride,
    SPAN: tl.constexpr,
):  # fmt: skip
    """One span of one device's new model."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(who + row) != 0:
        at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        value = tl.load(fresh + (row // num_devices) * fresh_stride + at, mask=at < size)
        tl.store(models + row * stride + at, value, mask=at < size)


@triton.jit
def blend(
    models, fresh, who, kept, pool, slot, size, num_devices, stride, fresh_stride, pool_seed_stride, pool_stride,
    SPAN: tl.constexpr,
):  # fmt: skip
    """One span of one device's new model: the fresh one plus a share of what the device has not sent."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(who + row) != 0:
        at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        inside = at < size
        seed = row // num_devices
        value = tl.load(fresh + seed * fresh_stride + at, mask=inside)
        share = tl.load(kept + row)
        if share != 0:
            reference = pool + seed * pool_seed_stride + tl.load(slot + row) * pool_stride
            value += share * (tl.load(models + row * stride + at, mask=inside) - tl.load(reference + at, mask=inside))
        tl.store(models + row * stride + at, value, mask=inside)
