"""Dropout whose masks are addressed: a function of (seed, device, round, step, layer), the same on every engine.

A mask is computed from a key by a hash of 32 bits (Chris Wellons's lowbias32), in integers that are the same on every
machine. Keys are folded: `fold(key, value)` is another key for every value.

    bits = mix(mix(index + low) ^ high)          low and high are the two halves of the key
    kept where bits ≥ p 2³²; kept values are divided by 1 − p

Knows: keys, shapes.
Does not know: models, rounds.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2³² over the golden ratio
PIECE = 2**14  # values whose mask is computed at once on a host


class Dropout(nn.Module):
    """Dropout with a key in a buffer; `whole_channels` drops whole channels, as `nn.Dropout2d` does."""

    key: Tensor

    def __init__(self, p: float, whole_channels: bool = False) -> None:
        super().__init__()
        self.p, self.whole_channels = p, whole_channels
        self.calls = 0
        self.on_host = False  # whether masks are computed by NumPy, which `vmap` and a GPU cannot do
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Drop values of a batch [B, ...], unless the module is in evaluation mode."""
        self.calls += 1
        if not self.training or self.p == 0:
            return values
        shape = values.shape[:2] + (1,) * (values.dim() - 2) if self.whole_channels else values.shape
        if self.on_host:
            return values * _host_factors(int(self.key), tuple(shape), self.p, values.dtype)
        return values * kept(self.key, shape, self.p).to(values.dtype) / (1 - self.p)


def with_addressed_dropout(module: nn.Module) -> nn.Module:
    """Replace PyTorch's dropout layers in a module by addressed ones, in place."""
    for name, child in module._modules.items():  # also one that has several names
        if child is None:
            continue
        if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d) and not child.inplace:
            setattr(module, name, Dropout(child.p, not isinstance(child, nn.Dropout)))
        else:
            with_addressed_dropout(child)
    return module


def keys(bases: Tensor, num_devices: int, t: int | Tensor) -> Tensor:
    """Keys of every device in round t, [S, M], from one key per seed [S]."""
    devices = torch.arange(num_devices, device=bases.device)
    return fold(fold(bases[:, None], devices), t)


def fold(key: Tensor, value: int | Tensor) -> Tensor:
    """Another key for every value."""
    low = _mix(((key & MASK) + GOLDEN * (value + 1)) & MASK)
    high = _mix(((key >> 32) ^ low) & MASK) & (MASK >> 2)
    return (high << 32) | low


def kept(key: Tensor, shape: torch.Size | tuple[int, ...], p: float) -> Tensor:
    """Mask of a key, True with probability 1 − p."""
    index = torch.arange(torch.Size(shape).numel(), device=key.device).view(shape)
    bits = _mix(_mix((index + (key & MASK)) & MASK) ^ (key >> 32))
    return bits >= threshold(p)


def _host_factors(key: int, shape: tuple[int, ...], p: float, dtype: torch.dtype) -> Tensor:
    """What `kept` gives, as factors 0 and 1/(1 − p): in 32 bits, by NumPy, in pieces that stay in a core's cache."""
    count, low, high = math.prod(shape), np.uint32(key & MASK), np.uint32(key >> 32)
    factors = torch.empty(count, dtype=dtype)
    found, first = factors.numpy(), np.uint32(threshold(p))
    for start in range(0, count, PIECE):
        bits = np.arange(start, min(start + PIECE, count), dtype=np.uint32)
        shifted = np.empty_like(bits)
        bits += low
        for other in (high, np.uint32(0)):
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
                bits ^= np.right_shift(bits, shift, out=shifted)
                if factor != 1:
                    bits *= np.uint32(factor)
            bits ^= other
        np.multiply(bits >= first, 1 / (1 - p), out=found[start : start + len(bits)], casting="same_kind")
    return factors.view(shape)


def threshold(p: float) -> int:
    """The least 32 bits that are kept."""
    return min(MASK, round(p * 2**32))


def _mix(x: Tensor) -> Tensor:
    """Hash of 32-bit integers, in int64; products wrap around, and only their lower half is used."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)
