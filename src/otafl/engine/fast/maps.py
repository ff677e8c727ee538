"""Stacks of images on a GPU, and the operations on them with weights of its own for every row.

Rows are (seed, device) pairs; a stack has `images` images of each. How a stack lies in memory is its form: channels
last with a border of zeros around every image, as convolutions on a grid want it, or channels first, as a linear layer
after flattening wants it. The kernels are in `otafl.engine.fast.triton_convolution`.

Knows: stacks of images, weights [rows, ...].
Does not know: models, training, devices.
"""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otafl.engine.dropout import MASK, threshold
from otafl.gpu import need_triton

try:
    need_triton()
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from otafl.engine.fast import triton_convolution as device
except ImportError:
    triton = None

INTERPRETED = "TRITON_INTERPRET" in os.environ
PIXELS = 128  # pixels of a tile of a convolution
PARTS = 4  # shares of a row's pixels in the gradient of a weight
SMALLEST_TILE = 1024  # least outputs × inputs of a tile of a weight's gradient for which a grid pays


def available(values: Tensor) -> bool:
    """Whether the kernels can be used for float32 values on this device."""
    return triton is not None and values.dtype == torch.float32 and (values.is_cuda or INTERPRETED)


def drop(values: Tensor, keys: Tensor, p: float) -> Tensor:
    """Values [R, ...] with some of them dropped, by keys [R], as `otafl.engine.dropout` does it."""
    values = values.contiguous()
    out, size = torch.empty_like(values), values[0].numel()
    device.drop[(len(values), triton.cdiv(size, 1024))](
        values, out, keys & MASK, keys >> 32, size, threshold(p), 1 / (1 - p), SPAN=1024
    )
    return out


class Form(NamedTuple):
    """How a stack lies in memory."""

    before: int = 0
    """Lines and columns of zeros above and left of every image."""
    after: int = 0
    """Lines and columns of zeros below and right of it."""
    channels_last: bool = True


@dataclass(frozen=True, eq=False)
class Map:
    """Images [number, height, width, channels] in some form."""

    data: Tensor
    height: int
    width: int
    channels: int
    form: Form

    @property
    def line(self) -> int:
        """Width of the grid."""
        return self.width + self.form.before + self.form.after

    @property
    def lines(self) -> int:
        """Height of the grid."""
        return self.height + self.form.before + self.form.after

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements from image to image, line to line, pixel to pixel and channel to channel."""
        if self.form.channels_last:
            return self.lines * self.line * self.channels, self.line * self.channels, self.channels, 1
        return self.channels * self.height * self.width, self.width, 1, self.height * self.width

    @property
    def images(self) -> Tensor:
        """The images without borders, a view [number, height, width, channels]."""
        size = (len(self.data), self.height, self.width, self.channels)
        return self.data.as_strided(size, self.strides, self.data.storage_offset() + self._first)

    @property
    def pointer(self) -> Tensor:
        """The data from the first pixel of the first image on."""
        return self.data.flatten()[self._first :]

    @property
    def pixels(self) -> Tensor:
        """The whole grid as [pixels, channels]."""
        return self.data.view(-1, self.channels)

    @property
    def _first(self) -> int:
        return self.form.before * (self.line + 1) * self.channels if self.form.channels_last else 0


def new_map(number: int, height: int, width: int, channels: int, form: Form, like: Tensor) -> Map:
    """A stack whose borders are 0 and whose images are yet to be written."""
    if not form.channels_last:
        return Map(like.new_empty(number, channels, height, width), height, width, channels, form)
    border = form.before + form.after
    make = like.new_zeros if border else like.new_empty
    return Map(make(number, height + border, width + border, channels), height, width, channels, form)


class Shape(NamedTuple):
    """A convolution's kernel, stride and padding, equal in both directions."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    padding: int

    @property
    def on_grid(self) -> bool:
        """Whether it can be done on a grid."""
        return self.stride == 1 and self.inputs % 16 == 0 and self.outputs % 16 == 0 and self.padding < self.kernel

    @property
    def form(self) -> Form:
        """The form that its input needs for that."""
        return Form(self.padding, self.kernel - 1 - self.padding) if self.on_grid else Form()

    def slope_form(self, x: Form) -> Form:
        """The form that the gradient at its output needs, for an input in a form: both have the same grid."""
        if not self.on_grid:
            return Form()
        return Form(self.kernel - 1 - self.padding, x.before + x.after - self.padding)

    def fits(self, x: Map) -> bool:
        """Whether an input lies on a grid that it can use."""
        form, needed = x.form, self.form
        return form.channels_last and form.before >= needed.before and form.after >= needed.after


def convolve(x: Map, weight: Tensor, bias: Tensor | None, y: Map, shape: Shape, relu: bool, precision: str) -> None:
    """Write a convolution with weights [R, outputs, inputs, kernel, kernel] and biases [R, outputs] into y."""
    packed = weight.permute(0, 1, 3, 4, 2).contiguous()
    flags = (bias is not None, relu, False, False, precision)
    _convolve(x, packed, bias, y, None, shape, 1, flags)


def convolve_back(
    slopes: Map, weight: Tensor, x: Map, gate: Map | None, shape: Shape, add: bool, precision: str
) -> None:
    """Write, or add, the gradient with respect to a convolution's input into x; 0 where `gate` is not positive."""
    packed = weight.permute(0, 2, 3, 4, 1).contiguous()
    _convolve(slopes, packed, None, x, gate, shape, -1, (False, False, add, gate is not None, precision))


def _convolve(
    x: Map, weight: Tensor, bias: Tensor | None, y: Map, gate: Map | None, shape: Shape, sign: int, flags: Any
) -> None:
    rows, kernel = len(weight), shape.kernel
    inputs, outputs = (shape.inputs, shape.outputs) if sign == 1 else (shape.outputs, shape.inputs)
    images = len(x.data) // rows
    block = _block(outputs, 64)
    sizes = (y.height, y.width, outputs, kernel, kernel)
    shut = (gate or y).strides
    pointers = (y.pointer, None if gate is None else gate.pointer)
    if shape.on_grid:
        depth = 32 if inputs % 32 == 0 else 16
        steps = x.form.before - shape.padding if sign == 1 else x.form.before + shape.padding
        tiles = (triton.cdiv(images * x.lines * x.line, PIXELS), outputs // block, rows)
        device.grid_convolve[tiles](
            TensorDescriptor.from_tensor(x.pixels, [PIXELS, depth]),
            TensorDescriptor.from_tensor(weight.view(rows * outputs, -1), [block, depth]),
            bias, *pointers, images, steps * (x.line + 1), *y.strides, *shut,
            x.lines, x.line, inputs, *sizes, sign, *flags, PIXELS, block, depth, num_warps=4, num_stages=3,
        )  # fmt: skip
        return
    depth = 32 if inputs % 32 == 0 or inputs % 16 else 16
    kinds = shape.stride**2 if sign == -1 else 1
    pixels = (
        images
        * -(-y.height // (shape.stride if sign == -1 else 1))
        * -(-y.width // (shape.stride if sign == -1 else 1))
    )
    tiles = (kinds * triton.cdiv(pixels, PIXELS), triton.cdiv(outputs, block), rows)
    device.gather_convolve[tiles](
        x.pointer, weight, bias, *pointers, images, *x.strides, *y.strides, *shut, x.height, x.width, inputs,
        *sizes, shape.stride, shape.padding, sign == -1, *flags, PIXELS, block, depth, num_warps=4, num_stages=3,
    )  # fmt: skip


def convolve_slopes(x: Map, slopes: Map, rows: int, shape: Shape, precision: str) -> Tensor:
    """The gradient of a convolution's weight, [R, outputs, inputs, kernel, kernel]."""
    images, kernel, size = len(x.data) // rows, shape.kernel, shape.kernel**2 * shape.inputs
    parts = x.data.new_empty(rows, PARTS, shape.outputs, size, dtype=torch.float32)
    block, across = _block(shape.outputs, 64), _block(shape.inputs, 64)
    if shape.on_grid and kernel in (1, 3) and block * across >= SMALLEST_TILE:
        finer = {"tf32": "bf16x3"}.get(precision, precision)  # TF32 would need both factors turned in memory
        depth = 64 if precision == "bf16" else 32
        device.grid_slopes[(kernel * shape.inputs // across, shape.outputs // block, rows * PARTS)](
            TensorDescriptor.from_tensor(x.pixels, [depth, across]),
            TensorDescriptor.from_tensor(slopes.pixels, [depth, block]),
            parts, images * x.lines * x.line, (x.form.before - shape.padding) * (x.line + 1),
            slopes.form.before * (slopes.line + 1), x.line, shape.inputs, shape.outputs, kernel, kernel, finer,
            PARTS, images * x.lines * x.line % depth != 0, depth, block, across, num_warps=4, num_stages=3,
        )  # fmt: skip
    else:
        across = min(64, triton.next_power_of_2(size))
        device.gather_slopes[(triton.cdiv(size, across), triton.cdiv(shape.outputs, block), rows * PARTS)](
            x.pointer, slopes.pointer, parts, images, *x.strides, *slopes.strides, x.height, x.width, shape.inputs,
            slopes.height, slopes.width, shape.outputs, kernel, kernel, shape.stride, shape.padding, precision,
            PARTS, 64, block, across, num_warps=4, num_stages=2,
        )  # fmt: skip
    total = parts.sum(1).view(rows, shape.outputs, kernel, kernel, shape.inputs)
    return total.permute(0, 1, 4, 2, 3)


def channel_sums(x: Map, rows: int) -> Tensor:
    """Sums over a row's images and pixels, [R, channels]."""
    sums = x.data.new_empty(rows, 4 * PARTS, x.channels, dtype=torch.float32)
    device.channel_sums[(rows * 4 * PARTS,)](
        x.pointer, sums, len(x.data) // rows, *x.strides, x.height, x.width, x.channels,
        4 * PARTS, 64, triton.next_power_of_2(x.channels),
    )  # fmt: skip
    return sums.sum(1)


def pool(x: Map, y: Map, kernel: int, relu: bool) -> Tensor:
    """Write the maxima of kernel × kernel pixels into y, through ReLU if asked; returns which pixels they are."""
    chosen = torch.empty(len(y.data), y.height, y.width, y.channels, dtype=torch.int8, device=y.data.device)
    sizes = (y.height, y.width, y.channels, kernel)
    tiles, block = _pool_tiles(y)
    device.pool_forward[tiles](x.pointer, y.pointer, chosen, *x.strides, *y.strides, *sizes, relu, *block)
    return chosen


def pool_back(slopes: Map, chosen: Tensor, x: Map, kernel: int) -> None:
    """Write the gradient with respect to a pooling's input into x."""
    x.images[:, slopes.height * kernel :] = 0.0  # lines and columns that no maximum was taken of
    x.images[:, :, slopes.width * kernel :] = 0.0
    sizes = (slopes.height, slopes.width, slopes.channels, kernel)
    tiles, block = _pool_tiles(slopes)
    device.pool_backward[tiles](slopes.pointer, chosen, x.pointer, *slopes.strides, *x.strides, *sizes, *block)


def _pool_tiles(y: Map) -> tuple[tuple[int, int], tuple[int, int]]:
    wide = triton.next_power_of_2(y.channels)
    tall = max(1, min(4096 // wide, triton.next_power_of_2(y.height * y.width)))
    return (triton.cdiv(y.height * y.width, tall), len(y.data)), (tall, wide)


def normalise(
    x: Map, scale: Tensor, offset: Tensor, extra: Map | None, y: Map, groups: int, epsilon: float, relu: bool
) -> Tensor:
    """Write group normalisation with scales and offsets [R, channels] into y; returns means and rates of the groups."""
    moments = x.data.new_empty(len(x.data), 2, groups, dtype=torch.float32)
    device.norm_forward[(len(x.data),)](
        x.pointer, scale.contiguous(), offset.contiguous(), None if extra is None else extra.pointer, y.pointer,
        moments, len(x.data) // len(scale), epsilon, *x.strides, *(extra or x).strides, *y.strides,
        x.height, x.width, x.channels, groups, extra is not None, relu, _norm_pixels(x),
    )  # fmt: skip
    return moments


def normalise_back(
    x: Map, scale: Tensor, y: Map, slopes: Map, moments: Tensor, out: Map, extra: Map | None, add: bool, relu: bool
) -> tuple[Tensor, Tensor]:
    """Write the gradient at a normalisation's input into `out`, and write or add that of what was added to `extra`.

    Returns the gradients of scale and offset, each [R, channels].
    """
    rows, groups = len(scale), moments.shape[2]
    sums = x.data.new_empty(rows, len(x.data) // rows, 2, x.channels, dtype=torch.float32)
    device.norm_backward[(len(x.data),)](
        x.pointer, scale.contiguous(), y.pointer, slopes.pointer, moments, out.pointer,
        None if extra is None else extra.pointer, sums, len(x.data) // rows, *x.strides, *y.strides,
        *slopes.strides, *out.strides, *(extra or x).strides, x.height, x.width, x.channels, groups, relu,
        0 if extra is None else 1 + add, _norm_pixels(x),
    )  # fmt: skip
    plain, along = sums.sum(1).unbind(1)
    return along, plain


def _norm_pixels(x: Map) -> int:
    return int(max(1, min(4096 // x.channels, triton.next_power_of_2(x.height * x.width))))


def _block(channels: int, most: int) -> int:
    """Channels of a tile: a power of two, from 16 to `most`, that divides their number if one does."""
    block = 16
    while block < most and channels % (2 * block) == 0:
        block *= 2
    return block
