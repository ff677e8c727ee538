"""A copy of a module that computes the same function and trains faster on one core.

    pooling before ReLU    max(ReLU(x)) = ReLU(max(x)), so that ReLU has a quarter of the values
    ReLU in place          behind layers that do not need their output for their gradient
    channels last          images, and gradients at images, where they are large
    large linear layers    W is written once a round: after steps with inputs A and η times the slopes G at the outputs
                           it is W − Gᵀ A, which forward and backward passes apply as factors, if they are thin
    dropout                masks in 32-bit integers of the host

The first two and the fourth need to know who uses what. A traced graph shows it; a module that cannot be traced, or
that has hooks, keeps its layers as they are.

Knows: modules, their graphs.
Does not know: devices, rounds.
"""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from otafl.engine.dropout import Dropout
from otafl.engine.fast.head import is_hooked
from otafl.engine.fast.layers import Tracer

LARGE = 2**18  # values of a weight that passes through memory in every step, because caches do not hold it
RELUS = (torch.relu, nn.functional.relu, "relu")
POOLS = (nn.functional.max_pool2d, torch.max_pool2d)
OUTPUT_UNUSED = (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.MaxPool2d)
"""Layers whose gradient does not need their output."""


def for_one_core(module: nn.Module, channels_last: bool) -> nn.Module:
    """A copy of a module in training mode, with the same names of parameters."""
    module = _rewritten(copy.deepcopy(module))
    for part in module.modules():
        if isinstance(part, Dropout):
            part.on_host = True
        if channels_last and isinstance(part, nn.Conv2d | nn.Flatten | nn.AdaptiveAvgPool2d):
            part.register_forward_pre_hook(_to_channels_last)
    return module


def _rewritten(module: nn.Module) -> nn.Module:
    """The module as a graph in which ReLU and large linear layers are replaced; the module itself if that is unsafe."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(module.parameters())) or any(is_hooked(part) for part in module.modules()):
        return module
    try:
        graph = Tracer().trace(module)
    except Exception:  # its control flow depends on values
        return module
    traced = fx.GraphModule(module, graph)
    if {name for name, _ in traced.named_parameters()} != set(names):  # a parameter that nothing uses
        return module
    parts = dict(traced.named_modules())

    def kind(node: Any) -> Any:
        return type(parts[str(node.target)]) if node.op == "call_module" else node.target

    for node in list(graph.nodes):
        if _is_relu(node, kind) and len(node.users) == 1:
            _pool_first(graph, node, kind)
    for node in list(graph.nodes):
        if _is_relu(node, kind) and len(node.args[0].users) == 1 and kind(node.args[0]) in (*OUTPUT_UNUSED, *POOLS):
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_function(torch.relu_, node.args))
            graph.erase_node(node)
    uses = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    for name in uses:
        part = parts[name]
        if type(part) is nn.Linear and part.weight.numel() >= LARGE and uses.count(name) == 1:
            traced.set_submodule(name, FactoredLinear(part))
    traced.recompile()
    return traced


def _is_relu(node: Any, kind: Any) -> bool:
    return (kind(node) is nn.ReLU or kind(node) in RELUS) and len(node.args) == 1 and not node.kwargs


def _pool_first(graph: fx.Graph, relu: Any, kind: Any) -> None:
    """Exchange a ReLU and the max-pooling that alone uses it."""
    (pool,) = relu.users
    if kind(pool) is not nn.MaxPool2d and kind(pool) not in POOLS:
        return
    if (kind(pool) is nn.MaxPool2d and len(pool.args) != 1) or len(pool.all_input_nodes) != 1:
        return
    pool.replace_input_with(relu, relu.args[0])
    with graph.inserting_after(pool):
        after = graph.call_function(torch.relu, (pool,))
    pool.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)
    graph.erase_node(relu)


class FactoredLinear(nn.Module):
    """A linear layer whose weight can wait for its steps until `finish`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.lr: float | None = None
        self.inputs: list[Tensor] = []
        self.slopes: list[Tensor] = []

    def begin(self, images: int, lr: float | None) -> None:
        """Keep the steps of a round as factors if it has few images; without a learning rate never."""
        self.lr = lr if 2 * images <= len(self.weight) else None

    def finish(self) -> None:
        """Write the weight."""
        if self.inputs:
            self.weight.data.addmm_(torch.cat(self.slopes).t(), torch.cat(self.inputs), alpha=-1)
        self.inputs.clear()
        self.slopes.clear()

    def forward(self, values: Tensor) -> Tensor:
        """Outputs for values [B, inputs]."""
        if self.lr is None or values.dim() != 2:
            return nn.functional.linear(values, self.weight, self.bias)
        output: Tensor = _Factored.apply(values, self)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


class _Factored(torch.autograd.Function):
    """x Wᵀ − (x Aᵀ) G for the weight W − Gᵀ A; the backward pass notes the step's factors."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layer: FactoredLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(values)
        output = values @ layer.weight.detach().t()
        for inputs, slopes in zip(layer.inputs, layer.slopes, strict=True):
            output.addmm_(values @ inputs.t(), slopes, alpha=-1)
        return output

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        layer, (values,) = ctx.layer, ctx.saved_tensors
        before = slope @ layer.weight.detach()
        for inputs, slopes in zip(layer.inputs, layer.slopes, strict=True):
            before.addmm_(slope @ slopes.t(), inputs, alpha=-1)
        layer.inputs.append(values)
        layer.slopes.append(slope * layer.lr)
        return before, None


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
