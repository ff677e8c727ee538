"""The Triton code of the kernels that `otafl.engine.fast.kernels` launches.

Knows: pointers, strides, tiles.
Does not know: tensors, launch grids, rounds.
"""

import triton
import triton.language as tl


@triton.jit
def descend(
    z, gram, bias, targets, rest, slopes, squares, scores, turns, scale, mask, counts, bias_stride, rest_stride,
    num_rows, STEPS: tl.constexpr, HIDDEN: tl.constexpr, KNOWN: tl.constexpr, BATCH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, CLASSES: tl.constexpr, MASKED: tl.constexpr, COUNTED: tl.constexpr, SQUARES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All steps of one row for one block of hidden units; in each step a row's blocks wait for each other's scores."""
    turn = tl.atomic_add(turns, 1)  # numbered as programs start, a row's together: none waits for one that cannot start
    row, block = (turn // BLOCKS).to(tl.int64), turn % BLOCKS
    arrived = turns + 1 + row
    image, label = tl.arange(0, BATCH), tl.arange(0, CLASSES)
    unit = block * BLOCK + tl.arange(0, BLOCK)
    inside, known = unit < HIDDEN, label < KNOWN
    num_images = STEPS * BATCH
    z += row * num_images * HIDDEN
    slopes += row * num_images * HIDDEN
    gram += row * num_images * num_images
    tile = image[:, None] * HIDDEN + unit[None, :]
    if MASKED:
        if tl.load(mask + row) == 0:
            nothing = tl.zeros((BATCH, BLOCK), dtype=tl.float32)
            for k in range(STEPS):
                tl.store(slopes + k * BATCH * HIDDEN + tile, nothing, mask=inside[None, :])
            if SQUARES:
                tl.store(squares + row * BLOCKS + block, (row * 0).to(tl.float64))
            return
    bias_at = bias + row * bias_stride + unit
    weight_at = rest + row * rest_stride + label[:, None] * HIDDEN + unit[None, :]
    later_at = rest + row * rest_stride + KNOWN * HIDDEN + label
    first = label * 0 + block == 0  # only block 0 holds the later layer's bias
    here = known[:, None] & inside[None, :]
    shift = tl.load(bias_at, mask=inside, other=0.0)
    weight = tl.load(weight_at, mask=here, other=0.0)
    later = tl.load(later_at, mask=known & first, other=0.0)
    step_size, count = tl.load(scale), STEPS
    if COUNTED:
        count = tl.load(counts + row)
    score_at = image[:, None] * CLASSES + label[None, :]
    moved = tl.zeros((BATCH, BLOCK), dtype=tl.float32)
    total = tl.zeros((BATCH, BLOCK), dtype=tl.float32)
    for k in range(STEPS):
        now = tl.load(z + k * BATCH * HIDDEN + tile, mask=inside[None, :], other=0.0) + shift[None, :] - moved
        part = tl.dot(tl.maximum(now, 0.0), tl.trans(weight), input_precision=PRECISION)
        part += tl.where(first, later, 0.0)[None, :]
        mine = scores + ((k % 2) * num_rows + row) * BLOCKS * BATCH * CLASSES
        tl.store(mine + block * BATCH * CLASSES + score_at, part)
        tl.debug_barrier()
        tl.atomic_add(arrived, 1, sem="release")

        # While waiting: the effect of the earlier steps on the next batch.
        gram_at = gram + ((k + 1) * BATCH + image[:, None]) * num_images + image[None, :]
        ahead = tl.zeros((BATCH, BLOCK), dtype=tl.float32)
        for j in range(0, tl.where(k + 1 < STEPS, k, 0)):
            earlier = tl.load(slopes + j * BATCH * HIDDEN + tile, mask=inside[None, :], other=0.0)
            ahead += tl.dot(tl.load(gram_at + j * BATCH), earlier, input_precision=PRECISION)
        wanted = tl.load(targets + row * num_images + k * BATCH + image)
        last = tl.load(gram_at + k * BATCH, mask=image[:, None] + (k + 1) * BATCH < num_images, other=0.0)
        if SQUARES:
            own = tl.load(gram_at + (k - num_images) * BATCH)

        seen = tl.atomic_add(arrived, 0, sem="acquire")
        while seen < (k + 1) * BLOCKS:
            seen = tl.atomic_add(arrived, 0, sem="acquire")
        output = tl.zeros((BATCH, CLASSES), dtype=tl.float32)
        for i in tl.static_range(BLOCKS):
            output += tl.load(mine + i * BATCH * CLASSES + score_at, cache_modifier=".cg")  # written by others
        output = tl.where(known[None, :], output, -float("inf"))
        share = tl.exp(output - tl.max(output, axis=1)[:, None])
        share = share / tl.sum(share, axis=1)[:, None]
        error = (share - tl.where(label[None, :] == wanted[:, None], 1.0, 0.0)) * tl.where(k < count, step_size, 0.0)
        slope = tl.where(now > 0, tl.dot(error, weight, input_precision=PRECISION), 0.0)
        tl.store(slopes + k * BATCH * HIDDEN + tile, slope, mask=inside[None, :])
        shift -= tl.sum(slope, axis=0)
        weight -= tl.dot(tl.trans(error), tl.maximum(now, 0.0), input_precision=PRECISION)
        later -= tl.sum(error, axis=0)
        if SQUARES:
            total += (2 * moved + tl.dot(own, slope, input_precision=PRECISION)) * slope
        moved = ahead + tl.dot(last, slope, input_precision=PRECISION)
        tl.debug_barrier()
    if SQUARES:
        by_weight = (weight - tl.load(weight_at, mask=here, other=0.0)).to(tl.float64)
        by_shift = (shift - tl.load(bias_at, mask=inside, other=0.0)).to(tl.float64)
        by_later = tl.where(known & first, later - tl.load(later_at, mask=known & first, other=0.0), 0.0).to(tl.float64)
        square = tl.sum(tl.sum(total.to(tl.float64), axis=1), axis=0)
        square += tl.sum(tl.sum(by_weight * by_weight, axis=1), axis=0)
        square += tl.sum(by_shift * by_shift, axis=0) + tl.sum(by_later * by_later, axis=0)
        tl.store(squares + row * BLOCKS + block, square)
        tl.debug_barrier()
    tl.store(bias_at, shift, mask=inside)
    tl.store(weight_at, weight, mask=here)
    tl.store(later_at, later, mask=known & first)


@triton.jit
def gather(
    features, images, inputs, turned, scales, num_images, size, each,
    IMAGES: tl.constexpr, SPAN: tl.constexpr, STRAIGHT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Copy one tile of a row's inputs: transposed (scaled if SCALED) and, if STRAIGHT, also unchanged."""
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
