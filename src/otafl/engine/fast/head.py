"""Splits a model into its first linear layer and the rest, as pre-activation-space training needs it.

Knows: modules and their layout as flat vectors.
Does not know: training, devices.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

RELUS = (torch.relu, nn.functional.relu)


class Layer(NamedTuple):
    """A later linear layer: its weight [outputs, inputs] starts at `offset` of the flat rest, and its bias follows."""

    offset: int
    outputs: int
    inputs: int

    def split(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Views of weight [R, outputs, inputs] and bias [R, 1, outputs] in rows of [R, P_rest]."""
        middle, stop = self.offset + self.outputs * self.inputs, self.offset + self.outputs * (self.inputs + 1)
        weight = rest[:, self.offset : middle].view(-1, self.outputs, self.inputs)
        return weight, rest[:, None, middle:stop]


@dataclass(frozen=True)
class Head:
    """The first layer of a model, linear in the input, and what follows it."""

    outputs: int
    inputs: int
    bias: bool
    layers: tuple[Layer, ...] | None
    """The later linear layers, if the rest alternates ReLU and linear layers (or is empty); else None."""
    rest: Callable[[dict[str, Tensor], Tensor], Tensor]
    """The rest as a function of its parameters, by name, and the pre-activations."""

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Views of weight [R, H, n], bias [R, 1, H] and the rest [R, P_rest] in rows of [R, P]."""
        weight = flat[:, : self.outputs * self.inputs].view(-1, self.outputs, self.inputs)
        return weight, *self.split_tail(self.tail(flat))

    def tail(self, flat: Tensor) -> Tensor:
        """View of all that follows the first weight, its bias and the rest, [R, P_tail], in rows of [R, P]."""
        return flat[:, self.outputs * self.inputs :]

    def split_tail(self, tail: Tensor) -> tuple[Tensor | None, Tensor]:
        """Views of bias [R, 1, H] and the rest [R, P_rest] in rows of [R, P_tail]."""
        cut = self.outputs * self.bias
        return tail[:, None, :cut] if self.bias else None, tail[:, cut:]


def find_head(module: nn.Module) -> Head | None:
    """The first layer and the rest, if the first layer is an `nn.Linear` and alone uses the input; else None.

    Before it the input may be flattened: the features are then rows already.
    """
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception:  # a module that cannot be traced can still be trained by another engine
        return None
    nodes = list(graph.nodes)
    first = _flattened(module, nodes[0])
    linear = next(iter(first.users), None)
    inputs = sum(node.op == "placeholder" for node in nodes)
    if inputs != 1 or len(first.users) != 1 or linear is None or not _is(module, linear, nn.Linear):
        return None
    if is_hooked(module) or len(list(module.named_parameters(remove_duplicate=False))) != len(
        list(module.parameters())
    ):
        return None  # the graph does not contain hooks; tied parameters cannot be trained layer by layer
    layer = module.get_submodule(str(linear.target))
    assert isinstance(layer, nn.Linear)
    name = f"{linear.target}." if linear.target else ""
    expected = [name + "weight", name + "bias"] if layer.bias is not None else [name + "weight"]
    names = [key for key, _ in module.named_parameters()]
    shared = sum(node.target == linear.target for node in nodes) > 1
    if names[: len(expected)] != expected or shared or any(key in str(n.target) for n in nodes for key in expected):
        return None
    rest = _rest(module, linear)
    if rest is None:
        return None
    return Head(layer.out_features, layer.in_features, layer.bias is not None, _layers(module, linear), rest)


def _flattened(module: nn.Module, node: fx.Node) -> fx.Node:
    """The node that has the input as rows, after layers that only flatten it; the input itself where there are none."""
    while True:
        lengths = {user for user in node.users if _is_length(user)}  # x.size(0), or x.shape with its [0]
        others = [user for user in node.users if user not in lengths]
        if len(others) != 1 or not _flattens(module, others[0], lengths):
            return node
        node = others[0]


def _flattens(module: nn.Module, node: fx.Node, lengths: set[fx.Node]) -> bool:
    """Whether a node gives its input as rows; `lengths` are the nodes that look at the shape of that input."""
    arguments = node.args[1:]
    if node.kwargs:
        return False
    if node.op == "call_module":
        part = module.get_submodule(str(node.target))
        plain = type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)
        return not lengths and (plain or type(part) is nn.Identity)
    if node.target in (torch.flatten, "flatten"):
        return not lengths and arguments in ((1,), (1, -1))
    if node.target not in ("view", "reshape", torch.reshape) or len(arguments) != 2:
        return False
    if not lengths:  # x.view(-1, 784) before a layer with 784 inputs
        after = next(iter(node.users), None)
        layer = module.get_submodule(str(after.target)) if after is not None and after.op == "call_module" else None
        return isinstance(layer, nn.Linear) and arguments == (-1, layer.in_features)
    (length, *more) = lengths
    number = next(iter(length.users)) if length.target is getattr else length
    return not more and bool(arguments == (number, -1)) and list(number.users) == [node]


def _is_length(node: fx.Node) -> bool:
    """Whether a node is x.size(0), or x.shape of which only [0] is used."""
    if node.op == "call_method":
        return node.target == "size" and node.args[1:] == (0,)
    users = list(node.users)
    shape = node.target is getattr and bool(node.args[1] == "shape") and len(users) == 1
    return shape and users[0].target is operator.getitem and bool(users[0].args[1] == 0)


def _is(module: nn.Module, node: fx.Node, kind: type[nn.Module]) -> bool:
    if node.op != "call_module":
        return False
    layer = module.get_submodule(str(node.target))
    return type(layer) is kind and not is_hooked(layer)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, which a traced graph does not contain."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _layers(module: nn.Module, linear: fx.Node) -> tuple[Layer, ...] | None:
    """The linear layers of a rest that alternates ReLU and linear layers with bias; None for any other rest."""
    layers: list[Layer] = []
    chain = [str(linear.target)]
    offset, node = 0, linear
    while True:
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))
        if node.op == "output":
            owners = dict.fromkeys(name.rpartition(".")[0] for name, _ in module.named_parameters())
            return tuple(layers) if list(owners) == chain else None  # parameters lie in the order of use
        relu = _is(module, node, nn.ReLU) or (node.op == "call_function" and node.target in RELUS)
        if not relu or len(node.users) != 1:
            return None
        node = next(iter(node.users))
        if not _is(module, node, nn.Linear) or str(node.target) in chain:
            return None
        chain.append(str(node.target))
        layer = module.get_submodule(str(node.target))
        assert isinstance(layer, nn.Linear)
        if layer.bias is None:
            return None
        layers.append(Layer(offset, layer.out_features, layer.in_features))
        offset += layer.out_features * (layer.in_features + 1)


def _rest(module: nn.Module, linear: fx.Node) -> Callable[[dict[str, Tensor], Tensor], Tensor] | None:
    """The module without its first layer, taking pre-activations; None if a parameter is never used."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in linear.graph.nodes:
        if node.op == "placeholder" or (not copies and node is not linear):  # the input, and what only flattens it
            continue
        if node is not linear and not all(n in copies for n in node.all_input_nodes):
            return None  # something else is computed from the input, or before the first layer
        copies[node] = graph.placeholder("z") if node is linear else graph.node_copy(node, lambda n: copies[n])
    rest = fx.GraphModule(module, graph)
    first = f"{linear.target}."
    if {name for name, _ in rest.named_parameters()} != {
        name for name, _ in module.named_parameters() if not name.startswith(first)
    }:
        return None
    return lambda params, z: functional_call(rest, params, (z,), strict=False)
