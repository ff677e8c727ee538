"""A copy of a module that computes the same function and trains faster on one core.

    pooling before ReLU    max(ReLU(x)) = ReLU(max(x)), so that ReLU has a quarter of the values
    ReLU in place          behind layers that do not need their output for their gradient
    channels last          images, and gradients at images, where they are large
    large linear layers    W is written once a round: after steps with inputs A and η times the slopes G at the outputs
                           it is W − Gᵀ A, which forward and backward passes apply as factors, if they are thin
    dropout                masks in 32-bit integers of the host

The first two are done inside `nn.Sequential`, where it is known who uses a value. A module's own `forward` is never
replaced, and whoever goes through a sequence by hand finds its layers as they were. A weight waits for its steps only
in models without code of their own, which could read it.

Knows: modules.
Does not know: devices, rounds.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from otafl.engine.dropout import Dropout
from otafl.engine.fast.head import is_hooked

LARGE = 2**18  # values of a weight that passes through memory in every step, because caches do not hold it
OUTPUT_UNUSED = (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.MaxPool2d)
"""Layers whose output is new, and not needed for their gradient."""


def for_one_core(module: nn.Module, channels_last: bool) -> nn.Module:
    """A copy of a module, with the same names of parameters."""
    module = copy.deepcopy(module)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    known = all(_is_known(part) for part in module.modules()) and len(names) == len(list(module.parameters()))
    for part in module.modules():
        if isinstance(part, Dropout):
            part.on_host = True
        elif type(part) is nn.Sequential and not is_hooked(part):
            part.__class__ = Chain
        elif type(part) is nn.Linear and known and part.weight.numel() >= LARGE:
            part.__class__ = FactoredLinear
    for part in module.modules():
        if isinstance(part, Chain):
            part.steps = tuple(_steps(list(_layers(part))))
    for part in module.modules():
        if channels_last and isinstance(part, nn.Conv2d | nn.Flatten | nn.AdaptiveAvgPool2d):
            part.register_forward_pre_hook(_to_channels_last)
    return module


def _is_known(part: nn.Module) -> bool:
    """Whether a module's code is PyTorch's or ours, and it has no hooks."""
    return type(part).__module__.startswith(("torch.nn.", "otafl.engine.")) and not is_hooked(part)


class Chain(nn.Sequential):
    """A sequence of layers that pools before ReLU and does ReLU in place, where that changes nothing."""

    steps: tuple[Callable[[Tensor], Tensor], ...] | None = None
    """None for a part of a chain, cut out by its user."""

    def forward(self, values: Any) -> Any:
        """What the layers give, one after the other."""
        for step in self if self.steps is None else self.steps:
            values = step(values)
        return values


def _layers(chain: Chain) -> Iterator[nn.Module]:
    """The layers of a chain and of the chains in it, in their order."""
    for part in chain:
        if isinstance(part, Chain):
            yield from _layers(part)
        else:
            yield part


def _steps(layers: list[nn.Module]) -> Iterator[Callable[[Tensor], Tensor]]:
    """The functions of layers, with pooling before ReLU and ReLU in place."""
    for position, (layer, after) in enumerate(pairwise(layers)):
        pools = type(after) is nn.MaxPool2d and not after.return_indices and not is_hooked(after)
        if pools and _is_relu(layer):
            layers[position : position + 2] = after, layer
    for before, layer in zip([nn.Identity(), *layers], layers, strict=False):
        fresh = type(before) in (*OUTPUT_UNUSED, FactoredLinear) and not is_hooked(before)
        yield torch.relu_ if fresh and _is_relu(layer) else layer


def _is_relu(layer: nn.Module) -> bool:
    return type(layer) is nn.ReLU and not layer.inplace and not is_hooked(layer)


class FactoredLinear(nn.Linear):
    """A linear layer whose weight can wait for its steps until `finish`; it is an `nn.Linear` until `begin`."""

    waits = False

    def begin(self, images: int, lr: float) -> None:
        """Keep the steps of a round as factors if it has few images."""
        self.waits = 2 * images <= self.out_features
        self.lr = lr
        self.inputs: list[Tensor] = []
        self.slopes: list[Tensor] = []

    def finish(self) -> None:
        """Write the weight."""
        if self.inputs:
            self.weight.data.addmm_(torch.cat(self.slopes).t(), torch.cat(self.inputs), alpha=-1)
        self.waits = False

    def forward(self, values: Tensor) -> Tensor:
        """Outputs [..., outputs] for values [..., inputs]."""
        if not self.waits:
            return linear(values, self.weight, self.bias)
        output: Tensor = _Factored.apply(values.reshape(-1, self.in_features), self.weight, self)  # type: ignore[no-untyped-call]
        return (output if self.bias is None else output + self.bias).view(*values.shape[:-1], -1)


class _Factored(torch.autograd.Function):
    """x Wᵀ − (x Aᵀ) G for the weight W − Gᵀ A; the backward pass notes the step's factors."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, layer: FactoredLinear) -> Tensor:
        ctx.layer, ctx.known = layer, len(layer.inputs)
        ctx.save_for_backward(values)
        output = values @ weight.t()
        for inputs, slopes in zip(layer.inputs, layer.slopes, strict=True):
            output.addmm_(values @ inputs.t(), slopes, alpha=-1)
        return output

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        layer, (values,), before = ctx.layer, ctx.saved_tensors, None
        if ctx.needs_input_grad[0]:
            before = slope @ layer.weight.detach()
            for inputs, slopes in zip(layer.inputs[: ctx.known], layer.slopes[: ctx.known], strict=True):
                before.addmm_(slope @ slopes.t(), inputs, alpha=-1)
        layer.inputs.append(values)
        layer.slopes.append(slope * layer.lr)
        return before, None, None


class _ChannelsLast(torch.autograd.Function):
    """The same images, channels last in memory, and so their gradient."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last).view_as(images)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.contiguous(memory_format=torch.channels_last)


def _to_channels_last(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    images = inputs[0]
    if images.dim() != 4:
        return inputs
    return _ChannelsLast.apply(images), *inputs[1:]  # type: ignore[no-untyped-call]
