"""The Triton code of convolution, normalisation and pooling, with weights of its own for every row.

A convolution is a matrix product of patches and weights, and patches are never written out. Where channels lie last in
memory and the stride is 1, the patches of one tap are the same pixels shifted by a constant: images lie on a grid with
a border of zeros, and a program computes all pixels of the grid, one after the other, of which it stores those inside
(`grid_*`). Everything else gathers its patches pixel by pixel (`gather_*`).

Knows: pointers, strides, tiles.
Does not know: tensors, launch grids, models.
"""

import triton
import triton.language as tl


@triton.jit
def product(left, right, total, PRECISION: tl.constexpr):
    """Add left · right to `total`; "bf16" rounds both factors first."""
    if PRECISION == "bf16":
        total = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), total)
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def store_pixels(
    y, at, y_channel, gate, gate_at, gate_channel, channel, total, bias, row, inside,
    OC: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Store a tile of pixels, perhaps with bias, ReLU, added to what is there, or 0 where `gate` is not positive."""
    if BIAS:
        total += tl.load(bias + row * OC + channel, mask=channel < OC, other=0.0)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    place = y + at[:, None] + channel[None, :] * y_channel
    written = inside[:, None] & (channel < OC)[None, :]
    if ADD:
        total += tl.load(place, mask=written, other=0.0)
    if GATE:
        open_ = tl.load(gate + gate_at[:, None] + channel[None, :] * gate_channel, mask=written, other=0.0)
        total = tl.where(open_ > 0, total, 0.0)
    tl.store(place, total, mask=written)


@triton.jit
def grid_convolve(
    x, weight, bias, y, gate, images, base, y_image, y_line, y_pixel, y_channel, g_image, g_line, g_pixel,
    g_channel,
    GH: tl.constexpr, GW: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr, KH:
    tl.constexpr, KW: tl.constexpr, SIGN: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, PRECISION: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of a convolution on a grid: BP pixels of one row times BO output channels.

    `x` describes [rows · images · GH · GW, C], `weight` [rows · OC, KH · KW · C]. Tap (a, b) of output pixel q is grid
    pixel q + base + SIGN (a GW + b); SIGN = −1 gives the gradient with respect to a convolution's input.
    """
    row = tl.program_id(2)
    first = tl.program_id(0) * BP
    start = row * images * (GH * GW) + first + base
    total = tl.zeros((BP, BO), dtype=tl.float32)
    for k in range(0, KH * KW * C, BK):
        tap = k // C
        left = x.load([start + SIGN * ((tap // KW) * GW + tap % KW), k % C])
        right = weight.load([row * OC + tl.program_id(1) * BO, k])
        total = product(left, right.T, total, PRECISION)
    pixel = first + tl.arange(0, BP)
    image, i, j = pixel // (GH * GW), pixel // GW % GH, pixel % GW
    inside = (image < images) & (i < OH) & (j < OW)
    at = (row * images + image).to(tl.int64) * y_image + i * y_line + j * y_pixel
    channel = tl.program_id(1) * BO + tl.arange(0, BO)
    gate_at = (row * images + image).to(tl.int64) * g_image + i * g_line + j * g_pixel
    store_pixels(
        y, at, y_channel, gate, gate_at, g_channel, channel, total, bias, row, inside, OC, BIAS, RELU, ADD, GATE
    )


@triton.jit
def grid_slopes(
    x, slopes, parts, pixels, base, shift,
    GW: tl.constexpr, C: tl.constexpr, OC: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PRECISION:
    tl.constexpr, PARTS: tl.constexpr, RAGGED: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradient of a line of taps of a weight over a share of a row's grid pixels, [BO, KW, BC]; KW is 1 or 3."""
    row, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    line, block = tl.program_id(0) % KH, tl.program_id(0) // KH
    out, channel = tl.program_id(1) * BO, block * BC
    share = (pixels + PARTS * BP - 1) // (PARTS * BP) * BP
    one = tl.zeros((BO, BC), dtype=tl.float32)
    two = tl.zeros((BO, BC), dtype=tl.float32)
    three = tl.zeros((BO, BC), dtype=tl.float32)
    for q in range(part * share, min((part + 1) * share, pixels), BP):
        own = q + base + line * GW  # of the row's pixels; the next row's must not count, even if they are NaN
        at = row * pixels + own
        place = own + tl.arange(0, BP)
        left = slopes.load([row * pixels + q + shift, out])
        if RAGGED:  # the last tile reaches into the next row's images
            left = tl.where((q + tl.arange(0, BP) < pixels)[:, None], left, 0.0)
        left = left.T
        one = product(left, tl.where((place < pixels)[:, None], x.load([at, channel]), 0.0), one, PRECISION)
        if KW == 3:
            second = tl.where((place + 1 < pixels)[:, None], x.load([at + 1, channel]), 0.0)
            two = product(left, second, two, PRECISION)
            third = tl.where((place + 2 < pixels)[:, None], x.load([at + 2, channel]), 0.0)
            three = product(left, third, three, PRECISION)
    rows = (row * PARTS + part).to(tl.int64) * OC + out + tl.arange(0, BO)
    to = parts + (rows[:, None] * KH + line) * (KW * C) + channel + tl.arange(0, BC)[None, :]
    tl.store(to, one)
    if KW == 3:
        tl.store(to + C, two)
        tl.store(to + 2 * C, three)


@triton.jit
def gather_convolve(
    x, weight, bias, y, gate, images, x_image, x_line, x_pixel, x_channel, y_image, y_line, y_pixel, y_channel,
    g_image, g_line, g_pixel, g_channel,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr, KH:
    tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, BIAS:
    tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr, BP:
    tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of a convolution of any stride: BP pixels of one row times BO output channels.

    With TURNED, output pixel (i, j) meets x at ((i + PAD − a)/STRIDE, (j + PAD − b)/STRIDE): the gradient with respect
    to a convolution's input. A program then has pixels of one remainder of i and j, so that most taps are skipped.
    """
    row = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BP + tl.arange(0, BP)
    if TURNED:
        tiles = tl.num_programs(0) // (STRIDE * STRIDE)
        kind = tl.program_id(0) // tiles
        pixel = tl.program_id(0) % tiles * BP + tl.arange(0, BP)
        rest_i, rest_j = kind // STRIDE, kind % STRIDE
        QH: tl.constexpr = (OH + STRIDE - 1) // STRIDE
        QW: tl.constexpr = (OW + STRIDE - 1) // STRIDE
        local = pixel // (QH * QW)
        i, j = pixel // QW % QH * STRIDE + rest_i, pixel % QW * STRIDE + rest_j
    else:
        local = pixel // (OH * OW)
        i, j = pixel // OW % OH, pixel % OW
    inside = (local < images) & (i < OH) & (j < OW)
    image = row * images + local
    x += image * x_image
    weight += row * OC * KH * KW * C
    out = tl.program_id(1) * BO + tl.arange(0, BO)
    total = tl.zeros((BP, BO), dtype=tl.float32)
    if C % BK == 0:  # a block of channels of one tap
        for tap in range(KH * KW):
            a, b = tap // KW, tap % KW
            useful = True
            if TURNED:
                useful = ((rest_i + PAD - a) % STRIDE == 0) & ((rest_j + PAD - b) % STRIDE == 0)
                up, left_ = i + PAD - a, j + PAD - b
                there = inside & (up >= 0) & (left_ >= 0)
                up, left_ = up // STRIDE, left_ // STRIDE
            else:
                up, left_ = i * STRIDE + a - PAD, j * STRIDE + b - PAD
                there = inside & (up >= 0) & (left_ >= 0)
            there = there & (up < H) & (left_ < W)
            if useful:
                for c in range(0, C, BK):
                    channel = c + tl.arange(0, BK)
                    place = (x + up * x_line + left_ * x_pixel)[:, None] + channel[None, :] * x_channel
                    left = tl.load(place, mask=there[:, None], other=0.0)
                    place = weight + out[:, None] * (KH * KW * C) + tap * C + channel[None, :]
                    right = tl.load(place, mask=(out < OC)[:, None], other=0.0)
                    total = product(left, tl.trans(right), total, PRECISION)
    else:  # few channels: a block of taps and channels
        for k in range(0, KH * KW * C, BK):
            flat = k + tl.arange(0, BK)
            a, b, channel = (flat // C // KW)[None, :], (flat // C % KW)[None, :], flat % C
            if TURNED:
                up, left_ = (i + PAD)[:, None] - a, (j + PAD)[:, None] - b
                there = inside[:, None] & (up >= 0) & (left_ >= 0) & (up % STRIDE == 0) & (left_ % STRIDE == 0)
                up, left_ = up // STRIDE, left_ // STRIDE
            else:
                up, left_ = (i * STRIDE - PAD)[:, None] + a, (j * STRIDE - PAD)[:, None] + b
                there = inside[:, None] & (up >= 0) & (left_ >= 0)
            known = flat < KH * KW * C
            there = there & (up < H) & (left_ < W) & known[None, :]
            place = x[:, None] + up * x_line + left_ * x_pixel + channel[None, :] * x_channel
            left = tl.load(place, mask=there, other=0.0)
            place = weight + out[:, None] * (KH * KW * C) + flat[None, :]
            right = tl.load(place, mask=(out < OC)[:, None] & known[None, :], other=0.0)
            total = product(left, tl.trans(right), total, PRECISION)
    at = image * y_image + i * y_line + j * y_pixel
    gate_at = image * g_image + i * g_line + j * g_pixel
    store_pixels(y, at, y_channel, gate, gate_at, g_channel, out, total, bias, row, inside, OC, BIAS, RELU, ADD, GATE)


@triton.jit
def gather_slopes(
    x, slopes, parts, images, x_image, x_line, x_pixel, x_channel, s_image, s_line, s_pixel, s_channel,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr, KH:
    tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr, PARTS:
    tl.constexpr, BP: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of a weight, slopesᵀ · patches(x), over a share of a row's pixels, [BO, BK]."""
    row, part = (tl.program_id(2) // PARTS).to(tl.int64), tl.program_id(2) % PARTS
    flat = tl.program_id(0) * BK + tl.arange(0, BK)
    out = tl.program_id(1) * BO + tl.arange(0, BO)
    a, b, channel = (flat // C // KW)[None, :], (flat // C % KW)[None, :], (flat % C)[None, :]
    known, wanted = (flat < KH * KW * C)[None, :], (out < OC)[None, :]
    pixels = images * OH * OW
    share = (pixels + PARTS * BP - 1) // (PARTS * BP) * BP
    total = tl.zeros((BO, BK), dtype=tl.float32)
    for first in range(part * share, min((part + 1) * share, pixels), BP):
        pixel = first + tl.arange(0, BP)
        inside = (pixel < pixels)[:, None]
        image = row * images + pixel // (OH * OW)
        i, j = pixel // OW % OH, pixel % OW
        place = slopes + (image * s_image + i * s_line + j * s_pixel)[:, None] + out[None, :] * s_channel
        left = tl.load(place, mask=inside & wanted, other=0.0)
        up, left_ = (i * STRIDE - PAD)[:, None] + a, (j * STRIDE - PAD)[:, None] + b
        there = inside & known & (up >= 0) & (left_ >= 0) & (up < H) & (left_ < W)
        place = x + (image * x_image)[:, None] + up * x_line + left_ * x_pixel + channel * x_channel
        right = tl.load(place, mask=there, other=0.0)
        total = product(tl.trans(left), right, total, PRECISION)
    place = ((row * PARTS + part) * OC + out)[:, None] * (KH * KW * C) + flat[None, :]
    tl.store(parts + place, total, mask=(out < OC)[:, None] & known)


@triton.jit
def channel_sums(
    x, sums, images, x_image, x_line, x_pixel, x_channel,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums over a share of a row's pixels, for every channel."""
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    channel = tl.arange(0, BC)
    pixels = images * H * W
    share = (pixels + PARTS * BP - 1) // (PARTS * BP) * BP
    total = tl.zeros((BP, BC), dtype=tl.float32)
    for first in range(part * share, min((part + 1) * share, pixels), BP):
        pixel = first + tl.arange(0, BP)
        image = row * images + pixel // (H * W)
        at = image * x_image + pixel // W % H * x_line + pixel % W * x_pixel
        inside = (pixel < pixels)[:, None] & (channel < C)[None, :]
        total += tl.load(x + at[:, None] + channel[None, :] * x_channel, mask=inside, other=0.0)
    tl.store(sums + (row * PARTS + part) * C + channel, tl.sum(total, axis=0), mask=channel < C)


@triton.jit
def mix(x):
    """The hash of `otafl.engine.dropout`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def drop(values, out, low, high, size, threshold, scale, SPAN: tl.constexpr):
    """Drop some of a row's values, and scale the others."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = place < size
    bits = mix(mix(place.to(tl.uint32) + tl.load(low + row).to(tl.uint32)) ^ tl.load(high + row).to(tl.uint32))
    value = tl.load(values + row * size + place, mask=inside, other=0.0)
    tl.store(out + row * size + place, tl.where(bits >= threshold, value * scale, 0.0), mask=inside)


@triton.jit
def pool_forward(
    x, y, chosen, x_image, x_line, x_pixel, x_channel, y_image, y_line, y_pixel, y_channel,
    OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr, BC:
    tl.constexpr,
):  # fmt: skip
    """Maximum of K × K pixels, and which one it is; with RELU at least 0, and number K² where it is not positive."""
    image = tl.program_id(1).to(tl.int64)
    pixel, channel = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BC)
    i, j = pixel // OW, pixel % OW
    inside = (pixel < OH * OW)[:, None] & (channel < C)[None, :]
    at = x + image * x_image + (i * K * x_line + j * K * x_pixel)[:, None] + channel[None, :] * x_channel
    best = tl.load(at, mask=inside, other=0.0)
    which = tl.zeros((BP, BC), dtype=tl.int8)
    for k in tl.static_range(1, K * K):
        value = tl.load(at + (k // K) * x_line + (k % K) * x_pixel, mask=inside, other=0.0)
        which = tl.where(value > best, k, which).to(tl.int8)
        best = tl.maximum(best, value)
    if RELU:
        which = tl.where(best > 0, which, K * K).to(tl.int8)
        best = tl.maximum(best, 0.0)
    place = image * y_image + (i * y_line + j * y_pixel)[:, None] + channel[None, :] * y_channel
    tl.store(y + place, best, mask=inside)
    tl.store(chosen + (image * (OH * OW) + pixel)[:, None] * C + channel[None, :], which, mask=inside)


@triton.jit
def pool_backward(
    slopes, chosen, x, s_image, s_line, s_pixel, s_channel, x_image, x_line, x_pixel, x_channel,
    OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Hand the slope of every maximum to the pixel that it came from."""
    image = tl.program_id(1).to(tl.int64)
    pixel, channel = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, BC)
    i, j = pixel // OW, pixel % OW
    inside = (pixel < OH * OW)[:, None] & (channel < C)[None, :]
    place = image * s_image + (i * s_line + j * s_pixel)[:, None] + channel[None, :] * s_channel
    slope = tl.load(slopes + place, mask=inside, other=0.0)
    which = tl.load(chosen + (image * (OH * OW) + pixel)[:, None] * C + channel[None, :], mask=inside, other=0)
    at = x + image * x_image + (i * K * x_line + j * K * x_pixel)[:, None] + channel[None, :] * x_channel
    for k in tl.static_range(K * K):
        tl.store(at + (k // K) * x_line + (k % K) * x_pixel, tl.where(which == k, slope, 0.0), mask=inside)


@triton.jit
def norm_forward(
    x, scale, offset, extra, y, moments, images, epsilon, x_image, x_line, x_pixel, x_channel, e_image, e_line,
    e_pixel, e_channel, y_image, y_line, y_pixel, y_channel,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """Group normalisation of one image: y = scale (x − mean)/√(variance + ε) + offset, plus `extra`, through ReLU.

    `moments` [images, 2, GROUPS] gets mean and 1/√(variance + ε). C is a power of two.
    """
    image = tl.program_id(0).to(tl.int64)
    row = image // images
    channel = tl.arange(0, C)
    size = H * W * (C // GROUPS)
    total = tl.zeros((BP, C), dtype=tl.float32)
    for first in range(0, H * W, BP):
        pixel = first + tl.arange(0, BP)
        at = (pixel // W * x_line + pixel % W * x_pixel)[:, None] + channel[None, :] * x_channel
        total += tl.load(x + image * x_image + at, mask=(pixel < H * W)[:, None], other=0.0)
    mean = tl.sum(tl.reshape(tl.sum(total, axis=0), (GROUPS, C // GROUPS)), axis=1) / size
    means = tl.reshape(tl.broadcast_to(mean[:, None], (GROUPS, C // GROUPS)), (C,))
    total = tl.zeros((BP, C), dtype=tl.float32)
    for first in range(0, H * W, BP):
        pixel = first + tl.arange(0, BP)
        inside = (pixel < H * W)[:, None]
        at = (pixel // W * x_line + pixel % W * x_pixel)[:, None] + channel[None, :] * x_channel
        away = tl.where(inside, tl.load(x + image * x_image + at, mask=inside, other=0.0) - means[None, :], 0.0)
        total += away * away
    variance = tl.sum(tl.reshape(tl.sum(total, axis=0), (GROUPS, C // GROUPS)), axis=1) / size
    rate = 1 / tl.sqrt(variance + epsilon)
    group = tl.arange(0, GROUPS)
    tl.store(moments + image * (2 * GROUPS) + group, mean)
    tl.store(moments + image * (2 * GROUPS) + GROUPS + group, rate)
    rates = tl.reshape(tl.broadcast_to(rate[:, None], (GROUPS, C // GROUPS)), (C,))
    factor = rates * tl.load(scale + row * C + channel)
    constant = tl.load(offset + row * C + channel) - means * factor
    for first in range(0, H * W, BP):
        pixel = first + tl.arange(0, BP)
        inside = (pixel < H * W)[:, None]
        i, j = pixel // W, pixel % W
        at = (i * x_line + j * x_pixel)[:, None] + channel[None, :] * x_channel
        value = tl.load(x + image * x_image + at, mask=inside, other=0.0) * factor[None, :] + constant[None, :]
        if ADD:
            at = (i * e_line + j * e_pixel)[:, None] + channel[None, :] * e_channel
            value += tl.load(extra + image * e_image + at, mask=inside, other=0.0)
        if RELU:
            value = tl.maximum(value, 0.0)
        at = (i * y_line + j * y_pixel)[:, None] + channel[None, :] * y_channel
        tl.store(y + image * y_image + at, value, mask=inside)


@triton.jit
def norm_backward(
    x, scale, y, slopes, moments, out, extra, sums, images, x_image, x_line, x_pixel, x_channel, y_image, y_line,
    y_pixel, y_channel, s_image, s_line, s_pixel, s_channel, o_image, o_line, o_pixel, o_channel, e_image, e_line,
    e_pixel, e_channel,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, RELU: tl.constexpr, EXTRA:
    tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Gradients of group normalisation of one image: `out` for its input, `sums` [images, 2, C] for offset and scale.

    With RELU slopes count only where the output y is positive. With EXTRA they are also handed to what was added: 1
    stores them, 2 adds them.
    """
    image = tl.program_id(0).to(tl.int64)
    row = image // images
    channel, group = tl.arange(0, C), tl.arange(0, GROUPS)
    size = H * W * (C // GROUPS)
    mean = tl.load(moments + image * (2 * GROUPS) + group)
    rate = tl.load(moments + image * (2 * GROUPS) + GROUPS + group)
    means = tl.reshape(tl.broadcast_to(mean[:, None], (GROUPS, C // GROUPS)), (C,))
    rates = tl.reshape(tl.broadcast_to(rate[:, None], (GROUPS, C // GROUPS)), (C,))
    plain = tl.zeros((BP, C), dtype=tl.float32)
    along = tl.zeros((BP, C), dtype=tl.float32)
    for first in range(0, H * W, BP):
        pixel = first + tl.arange(0, BP)
        inside = (pixel < H * W)[:, None]
        i, j = pixel // W, pixel % W
        at = (i * s_line + j * s_pixel)[:, None] + channel[None, :] * s_channel
        slope = tl.load(slopes + image * s_image + at, mask=inside, other=0.0)
        if RELU:
            at = (i * y_line + j * y_pixel)[:, None] + channel[None, :] * y_channel
            slope = tl.where(tl.load(y + image * y_image + at, mask=inside, other=0.0) > 0, slope, 0.0)
        at = (i * x_line + j * x_pixel)[:, None] + channel[None, :] * x_channel
        unit = (tl.load(x + image * x_image + at, mask=inside, other=0.0) - means[None, :]) * rates[None, :]
        plain += slope
        along += slope * unit
        if EXTRA > 0:
            at = (i * e_line + j * e_pixel)[:, None] + channel[None, :] * e_channel
            if EXTRA == 2:
                slope += tl.load(extra + image * e_image + at, mask=inside, other=0.0)
            tl.store(extra + image * e_image + at, slope, mask=inside)
    plain_sum, along_sum = tl.sum(plain, axis=0), tl.sum(along, axis=0)
    tl.store(sums + image * (2 * C) + channel, plain_sum)
    tl.store(sums + image * (2 * C) + C + channel, along_sum)
    factor = tl.load(scale + row * C + channel)
    level = tl.sum(tl.reshape(factor * plain_sum, (GROUPS, C // GROUPS)), axis=1) / size
    tilt = tl.sum(tl.reshape(factor * along_sum, (GROUPS, C // GROUPS)), axis=1) / size
    levels = tl.reshape(tl.broadcast_to(level[:, None], (GROUPS, C // GROUPS)), (C,))
    tilts = tl.reshape(tl.broadcast_to(tilt[:, None], (GROUPS, C // GROUPS)), (C,))
    for first in range(0, H * W, BP):
        pixel = first + tl.arange(0, BP)
        inside = (pixel < H * W)[:, None]
        i, j = pixel // W, pixel % W
        at = (i * s_line + j * s_pixel)[:, None] + channel[None, :] * s_channel
        slope = tl.load(slopes + image * s_image + at, mask=inside, other=0.0)
        if RELU:
            at = (i * y_line + j * y_pixel)[:, None] + channel[None, :] * y_channel
            slope = tl.where(tl.load(y + image * y_image + at, mask=inside, other=0.0) > 0, slope, 0.0)
        at = (i * x_line + j * x_pixel)[:, None] + channel[None, :] * x_channel
        unit = (tl.load(x + image * x_image + at, mask=inside, other=0.0) - means[None, :]) * rates[None, :]
        value = rates[None, :] * (factor[None, :] * slope - levels[None, :] - unit * tilts[None, :])
        at = (i * o_line + j * o_pixel)[:, None] + channel[None, :] * o_channel
        tl.store(out + image * o_image + at, value, mask=inside)
