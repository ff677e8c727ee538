"""Triton's own: what `otafl.engine.kernels` launches.

Knows: pointers, strides, tiles.
Does not know: what it is for.
"""

import triton
import triton.language as tl


@triton.jit
def step(
    z,
    gram,
    bias,
    targets,
    rest,
    slopes,
    scores,
    scale,
    mask,
    k,
    steps,
    hidden,
    num_classes,
    bias_stride,
    rest_stride,
    num_rows,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CLASSES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    if MASKED:
        if tl.load(mask + row) == 0:
            if k < steps:
                nothing = tl.zeros((BATCH, BLOCK), dtype=tl.float32)
                tl.store(slopes + k * BATCH * hidden + tile, nothing, mask=inside[None, :])
            return
    bias_at = bias + row * bias_stride + unit
    weight_at = rest + row * rest_stride + label[:, None] * hidden + unit[None, :]
    later_at = rest + row * rest_stride + num_classes * hidden + label
    first = label * 0 + block == 0  # the later layer's bias is that block's alone
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


@triton.jit
def gather(
    features,
    images,
    inputs,
    turned,
    scales,
    num_images,
    size,
    each,
    IMAGES: tl.constexpr,
    SPAN: tl.constexpr,
    STRAIGHT: tl.constexpr,
    SCALED: tl.constexpr,
):
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


@triton.jit
def squares(
    end,
    pool,
    slot,
    who,
    parts,
    size,
    num_devices,
    end_stride,
    pool_seed_stride,
    pool_stride,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
):
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


@triton.jit
def factored_squares(
    gram,
    slopes,
    parts,
    num_images,
    hidden,
    ones,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile's share of ⟨K, G Gᵀ⟩ of one row; both are symmetric, so that tiles above the diagonal do nothing."""
    row = tl.program_id(0).to(tl.int64)
    i, j, tiles = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    left, right, unit = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE), tl.arange(0, SPAN)
    share = tl.zeros((TILE, TILE), dtype=tl.float32)
    if j <= i:
        slopes += row * num_images * hidden
        for start in range(0, hidden, SPAN):
            inside = (start + unit < hidden)[None, :]
            at = start + unit[None, :]
            one = tl.load(slopes + left[:, None] * hidden + at, mask=inside & (left < num_images)[:, None], other=0.0)
            two = tl.load(slopes + right[:, None] * hidden + at, mask=inside & (right < num_images)[:, None], other=0.0)
            share += tl.dot(one, tl.trans(two), input_precision=PRECISION)
        at = gram + (row * num_images + left[:, None]) * num_images + right[None, :]
        inside = (left < num_images)[:, None] & (right < num_images)[None, :]
        share *= tl.load(at, mask=inside, other=0.0) + ones
    total = tl.sum(tl.sum(share.to(tl.float64), axis=1), axis=0)
    tl.store(parts + (row * tiles + i) * tiles + j, tl.where(j < i, 2.0, 1.0) * total)


@triton.jit
def weighted_sum(
    end,
    pool,
    slot,
    weights,
    who,
    total,
    size,
    num_devices,
    end_seed_stride,
    end_stride,
    pool_seed_stride,
    pool_stride,
    SPAN: tl.constexpr,
    RELATIVE: tl.constexpr,
):
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


@triton.jit
def replace(
    models,
    fresh,
    who,
    size,
    num_devices,
    stride,
    fresh_stride,
    SPAN: tl.constexpr,
):
    """One span of one device's new model."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(who + row) != 0:
        at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        value = tl.load(fresh + (row // num_devices) * fresh_stride + at, mask=at < size)
        tl.store(models + row * stride + at, value, mask=at < size)


@triton.jit
def blend(
    models,
    fresh,
    who,
    kept,
    pool,
    slot,
    size,
    num_devices,
    stride,
    fresh_stride,
    pool_seed_stride,
    pool_stride,
    SPAN: tl.constexpr,
):
    """One span of one device's new model: the fresh one and a share of what it had not sent."""
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
