"""Gradient steps of convolutional models for many rows at once, layer by layer with kernels of our own.

A model is read as a chain of known layers with branches that meet by addition. ReLU is done with the layer before it,
or with the pooling after it; an addition with the normalisation before it. A step is a forward pass, a backward pass,
and in it the change of every weight as soon as its gradient is known: gradients of large weights are never stored.
A model with any other layer is not read (`read_layers` gives None) and is trained by `torch.func`.

Knows: layers, their parameters by name, stacks of images.
Does not know: devices, rounds, rules of local steps.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from otafl.engine.dropout import Dropout, fold
from otafl.engine.fast import maps
from otafl.engine.fast.head import is_hooked
from otafl.engine.fast.maps import Form, Map, Shape, new_map

Params = dict[str, Tensor]
MOST_CHANNELS = 512  # of a normalised or pooled image


@dataclass(eq=False)
class Layer:
    """One operation of a model: what it reads, and who reads it."""

    kind: str
    inputs: list["Layer"]
    shape: tuple[int, ...]
    """Shape of its output without the batch: (features,) or (channels, height, width)."""
    name: str = ""
    """Name of its module, for its parameters."""
    module: nn.Module | None = None
    relu: bool = False
    number: int = 0
    """Number of a dropout layer."""
    users: list["Layer"] = field(default_factory=list)
    form: Form = field(default_factory=Form)
    """How its output lies in memory, where that is images."""

    @property
    def conv(self) -> Shape:
        """Numbers of a convolution."""
        assert isinstance(self.module, nn.Conv2d)
        m = self.module
        return Shape(m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0], int(m.padding[0]))


@dataclass(eq=False)
class Layers:
    """A model as a list of layers, in the order in which they are computed."""

    layers: list[Layer]

    @property
    def convolutions(self) -> int:
        """Number of convolutions."""
        return sum(layer.kind == "conv" for layer in self.layers)

    @property
    def row_elements(self) -> int:
        """Values that a step keeps for one image of a row."""
        total = 0
        for layer in self.layers:
            if len(layer.shape) == 3:
                channels, height, width = layer.shape
                border = layer.form.before + layer.form.after
                total += 2 * channels * (height + border + 2) * (width + border + 2)
            else:
                total += 2 * layer.shape[0]
        return total


class Tracer(fx.Tracer):
    """Does not look into addressed dropout."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node of the graph."""
        return isinstance(m, Dropout) or super().is_leaf_module(m, module_qualified_name)


def read_layers(module: nn.Module, features: Tensor, drops: list[str]) -> Layers | None:
    """The layers of a model, given some features; None if one is not known.

    `drops` are the names of the buffers with dropout keys, in the order of their numbers.
    """
    try:
        traced = fx.GraphModule(module, Tracer().trace(module))
    except Exception:  # a module that cannot be traced can still be trained by another engine
        return None
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(module.parameters())) or any(is_hooked(part) for part in module.modules()):
        return None
    shapes: dict[fx.Node, tuple[int, ...]] = {}

    class Shapes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                shapes[n] = tuple(value.shape[1:])
            return value

    with torch.no_grad():
        Shapes(traced).run(features)
    known: dict[fx.Node, Layer] = {}
    for node in traced.graph.nodes:
        layer = _read(module, node, known, shapes)
        if layer is None:
            return None
        if layer.kind == "drop":
            layer.number = drops.index(f"{layer.name}.key")
        known[node] = layer
    layers = list(dict.fromkeys(known.values()))
    _note_users(layers)
    last = layers.pop()
    if last.kind != "output" or last.inputs[0] is not layers[-1] or any(not layer.users for layer in layers):
        return None  # something is computed that is not part of the output
    trained = [layer.name for layer in layers if layer.kind in ("conv", "norm", "linear")]
    if len(set(trained)) < len(trained):  # a layer that is used twice
        return None
    used = {layer.name for layer in layers}
    if any(name.rpartition(".")[0] not in used for name in names) or layers[-1].kind != "linear" or layers[-1].relu:
        return None
    return _arranged(layers)


def _read(
    module: nn.Module, node: fx.Node, known: dict[fx.Node, Layer], shapes: dict[fx.Node, tuple[int, ...]]
) -> Layer | None:
    """One node of a traced model as a layer; None if it is not known."""
    inputs = [known[n] for n in node.all_input_nodes]
    shape = shapes.get(node, ())
    if node.op == "placeholder":
        return Layer("input", [], shape)
    if node.op == "output":
        return Layer("output", inputs, ()) if len(inputs) == 1 else None
    if node.op == "call_module":
        part = module.get_submodule(str(node.target))
        kind = _kind(part, shapes[node.all_input_nodes[0]], shape) if len(inputs) == 1 else None
        if kind == "same":
            return inputs[0]
        if kind == "images" and inputs[0].kind != "input":  # what is before it would have to be trained
            return None
        return None if kind is None else Layer(kind, inputs, shape, str(node.target), part)
    target = node.target
    if node.kwargs:
        return None
    if target in (torch.relu, nn.functional.relu, "relu") and len(inputs) == 1:
        return Layer("relu", inputs, shape)
    if target in (operator.add, operator.iadd, torch.add, "add") and len(inputs) == 2 and len(node.args) == 2:
        return Layer("add", inputs, shape) if inputs[0].shape == inputs[1].shape else None
    if target in (torch.flatten, "flatten") and tuple(node.args[1:]) == (1,):
        return Layer("flatten", inputs, shape)
    if target in (torch.mean, "mean") and tuple(node.args[1:]) in (([2, 3],), ((2, 3),), ([-2, -1],), ((-2, -1),)):
        return Layer("mean", inputs, shape)
    return None


def _kind(part: nn.Module, before: tuple[int, ...], after: tuple[int, ...]) -> str | None:
    """What a module does to an input of a shape; "same" if nothing, None if it is not known."""
    if isinstance(part, nn.Identity) or (isinstance(part, Dropout) and part.p == 0):
        return "same"
    if isinstance(part, Dropout):
        return "drop" if len(before) == 1 and not part.whole_channels else None
    if type(part) is nn.Conv2d:
        square = len({*part.kernel_size}) == len({*part.stride}) == 1
        pads = not isinstance(part.padding, str) and len({*part.padding}) == 1 and part.padding_mode == "zeros"
        return "conv" if square and pads and part.groups == 1 and part.dilation == (1, 1) else None
    if type(part) is nn.GroupNorm:
        channels = before[0]
        power = channels & (channels - 1) == 0 and part.num_groups & (part.num_groups - 1) == 0
        return "norm" if part.affine and len(before) == 3 and power and channels <= MOST_CHANNELS else None
    if type(part) is nn.MaxPool2d:
        kernel = part.kernel_size
        plain = isinstance(kernel, int) and part.stride == kernel and part.padding == 0 and part.dilation == 1
        return "pool" if plain and not part.ceil_mode and 1 < int(kernel) < 11 and before[0] <= MOST_CHANNELS else None  # type: ignore[arg-type]
    if type(part) is nn.AdaptiveAvgPool2d:
        return "mean" if after[1:] == (1, 1) else None
    if type(part) is nn.ReLU:
        return "relu"
    if type(part) is nn.Flatten:
        return "flatten" if part.start_dim == 1 and len(after) == 1 else None
    if type(part) is nn.Unflatten:
        return "images" if len(before) == 1 and len(after) == 3 else None
    if type(part) is nn.Linear:
        return "linear" if part.bias is not None and len(before) == 1 else None
    return None


def _arranged(layers: list[Layer]) -> Layers | None:
    """Do ReLU and additions with other layers, and choose how images lie in memory."""
    _note_users(layers)
    for layer in list(layers):
        if layer.kind != "relu":
            continue
        before = layer.inputs[0]
        if before.kind in ("conv", "norm", "add", "linear") and before.users == [layer]:
            before.relu = True
            _replace(layers, layer, before)
    for layer in list(layers):
        first = layer.inputs[0] if layer.inputs else None
        if layer.kind == "pool" and first is not None and first.kind == "conv" and first.users == [layer]:
            first.relu, layer.relu = False, first.relu
        if layer.kind == "add":
            hosts = [n for n in layer.inputs if n.kind == "norm" and n.users == [layer] and not n.relu]
            if not hosts or layer.inputs[0] is layer.inputs[1]:
                return None
            host = hosts[-1]
            host.inputs.append(next(n for n in layer.inputs if n is not host))
            host.relu = layer.relu
            layers.remove(host)  # it is done where the addition stood: by then both parts are known
            layers[layers.index(layer)] = host
            for user in layer.users:
                user.inputs[user.inputs.index(layer)] = host
    if any(layer.kind in ("relu", "add") for layer in layers):
        return None
    _note_users(layers)
    for layer in layers:
        if len(layer.shape) == 3:
            forms = [user.conv.form for user in layer.users if user.kind == "conv"]
            if forms:
                layer.form = Form(max(f.before for f in forms), max(f.after for f in forms))
            elif all(user.kind == "flatten" for user in layer.users):
                layer.form = Form(channels_last=False)
    return Layers(layers)


def _note_users(layers: list[Layer]) -> None:
    for layer in layers:
        layer.users = []
    for layer in layers:
        for n in layer.inputs:
            n.users.append(layer)


def _replace(layers: list[Layer], old: Layer, new: Layer) -> None:
    """Let the users of one layer read another."""
    layers.remove(old)
    new.users = old.users
    for user in old.users:
        user.inputs = [new if n is old else n for n in user.inputs]


class Steps:
    """Steps of SGD on some rows' parameters; its buffers serve all steps of a round."""

    def __init__(self, model: Layers, params: Params, precision: str) -> None:
        """Take parameters by name, each [R, ...], which steps change in place."""
        self._layers, self._params, self._precision = model.layers, params, precision
        self._rows = len(next(iter(params.values())))
        self._buffers: dict[tuple[Layer, str], Map] = {}
        self._values: dict[Layer, Any] = {}
        self._slopes: dict[Layer, Any] = {}
        self._kept: dict[Layer, Any] = {}

    def step(
        self,
        features: Tensor,
        slope_of: Callable[[Tensor], Tensor],
        lr: float | Tensor,
        keys: Tensor | None = None,
    ) -> None:
        """One step on features [R, B, ...]; `slope_of` gives the loss gradient at the outputs [R, B, classes].

        `keys` are those of the dropout masks, int [R].
        """
        self._keys = keys
        self._number = features.shape[0] * features.shape[1]
        for layer in self._layers:
            self._values[layer] = self._forward(layer, features)
        last = self._layers[-1]
        self._slopes = {last: slope_of(self._values[last])}
        for layer in reversed(self._layers):
            if layer in self._slopes:
                self._backward(layer, lr)
        self._values.clear()
        self._slopes.clear()
        self._kept.clear()

    def _of(self, layer: Layer, name: str) -> Tensor:
        return self._params[f"{layer.name}.{name}" if layer.name else name]

    def _buffer(self, layer: Layer, what: str, shape: tuple[int, ...], form: Form) -> Map:
        """A stack that all steps share."""
        key = layer, what
        if key not in self._buffers:
            channels, height, width = shape
            like = next(iter(self._params.values()))
            self._buffers[key] = new_map(self._number, height, width, channels, form, like)
        return self._buffers[key]

    def _forward(self, layer: Layer, features: Tensor) -> Any:
        values = [self._values[n] for n in layer.inputs]
        if layer.kind == "input":
            return _as_map(features.flatten(0, 1), layer.shape) if len(layer.shape) == 3 else features
        if layer.kind == "images":
            return _as_map(values[0].reshape(self._number, *layer.shape), layer.shape)
        if layer.kind == "flatten" and isinstance(values[0], Tensor):  # after a mean: flat already
            return values[0]
        if layer.kind == "flatten":
            return values[0].images.permute(0, 3, 1, 2).reshape(self._rows, -1, layer.shape[0])
        if layer.kind == "mean":
            return values[0].images.mean((1, 2)).view(self._rows, -1, values[0].channels)
        if layer.kind == "drop":
            return self._dropped(layer, values[0])
        if layer.kind == "linear":
            output = torch.baddbmm(self._of(layer, "bias")[:, None], values[0], self._of(layer, "weight").mT)
            return output.relu_() if layer.relu else output
        out = self._buffer(layer, "value", layer.shape, layer.form)
        if layer.kind == "conv":
            x = self._fitting(layer, values[0])
            bias = (
                self._of(layer, "bias").contiguous()
                if layer.module is not None and layer.module.bias is not None
                else None
            )
            maps.convolve(x, self._of(layer, "weight"), bias, out, layer.conv, layer.relu, self._precision)
            self._kept[layer] = x
        elif layer.kind == "pool":
            self._kept[layer] = maps.pool(values[0], out, int(layer.module.kernel_size), layer.relu)  # type: ignore[union-attr,arg-type]
        else:
            assert isinstance(layer.module, nn.GroupNorm)
            extra = values[1] if len(values) == 2 else None
            groups, epsilon = layer.module.num_groups, layer.module.eps
            scale, offset = self._of(layer, "weight"), self._of(layer, "bias")
            self._kept[layer] = maps.normalise(values[0], scale, offset, extra, out, groups, epsilon, layer.relu)
        return out

    def _dropped(self, layer: Layer, values: Tensor) -> Tensor:
        """Values or gradients [R, B, features] with some of them dropped."""
        assert self._keys is not None
        assert isinstance(layer.module, Dropout)
        return maps.drop(values, fold(self._keys, layer.number), layer.module.p)

    def _fitting(self, layer: Layer, x: Map) -> Map:
        """The input of a convolution, copied onto a grid if it must be and does not lie on one."""
        if not layer.conv.on_grid or layer.conv.fits(x):
            return x
        copy = self._buffer(layer, "input", (x.channels, x.height, x.width), layer.conv.form)
        copy.images.copy_(x.images)
        return copy

    def _slope(self, layer: Layer) -> tuple[Map, bool]:
        """Where the gradient at a layer's output goes, and whether there is a part of it already."""
        if layer in self._slopes:
            return self._slopes[layer], True
        form = Form()
        if layer.kind == "conv":
            form = layer.conv.slope_form(self._kept[layer].form)
        self._slopes[layer] = self._buffer(layer, "slope", layer.shape, form)
        return self._slopes[layer], False

    def _backward(self, layer: Layer, lr: float | Tensor) -> None:
        """Hand a layer's gradient on to its inputs, and step its parameters."""
        slope = self._slopes[layer]
        before = layer.inputs[0] if layer.inputs else None
        if layer.kind in ("input", "images") or before is None:
            return
        wanted = before.kind not in ("input", "images")
        if layer.kind == "linear":
            if layer.relu:
                slope = torch.where(self._values[layer] > 0, slope, 0.0)
            weight = self._of(layer, "weight")
            if wanted:
                self._pass_on(before, torch.bmm(slope, weight))
            scaled = slope * lr
            weight.baddbmm_(scaled.mT, self._values[before], alpha=-1)
            self._of(layer, "bias").sub_(scaled.sum(1))
        elif layer.kind == "drop" and wanted:
            self._pass_on(before, self._dropped(layer, slope))
        elif layer.kind == "flatten" and before.kind == "mean":
            self._pass_on(before, slope)
        elif layer.kind == "flatten" and wanted:
            self._pass_on(before, _as_map(slope.reshape(self._number, *before.shape), before.shape))
        elif layer.kind == "mean" and wanted:
            out, add = self._slope(before)
            part = (slope / (out.height * out.width)).view(self._number, 1, 1, out.channels)
            out.images.add_(part) if add else out.images.copy_(part.expand_as(out.images))
        elif layer.kind == "pool" and wanted:
            out, add = self._slope(before)
            target = self._buffer(layer, "pooled", before.shape, out.form) if add else out
            maps.pool_back(slope, self._kept[layer], target, int(layer.module.kernel_size))  # type: ignore[union-attr,arg-type]
            if add:
                out.images.add_(target.images)
        elif layer.kind == "norm":
            self._norm_back(layer, slope, lr)
        elif layer.kind == "conv":
            self._conv_back(layer, slope, lr, wanted)

    def _pass_on(self, before: Layer, slope: Any) -> None:
        """Hand a gradient on as it is, or add it to what is there."""
        if before not in self._slopes:
            if isinstance(slope, Map) and before.kind == "conv":  # which needs it in a form of its own
                self._slope(before)[0].images.copy_(slope.images)
            else:
                self._slopes[before] = slope
        elif isinstance(slope, Map):
            self._slopes[before].images.add_(slope.images)
        else:
            self._slopes[before] = self._slopes[before] + slope

    def _norm_back(self, layer: Layer, slope: Map, lr: float | Tensor) -> None:
        x, scale = self._values[layer.inputs[0]], self._of(layer, "weight")
        extra, add = None, False
        if len(layer.inputs) == 2 and layer.inputs[1].kind not in ("input", "images"):
            extra, add = self._slope(layer.inputs[1])
        out, more = self._slope(layer.inputs[0])
        target = self._buffer(layer, "normalised", layer.shape, out.form) if more else out
        kept, y = self._kept[layer], self._values[layer]
        along, plain = maps.normalise_back(x, scale, y, slope, kept, target, extra, add, layer.relu)
        if more:
            out.images.add_(target.images)
        scale.sub_(along * lr)
        self._of(layer, "bias").sub_(plain * lr)

    def _conv_back(self, layer: Layer, slope: Map, lr: float | Tensor, wanted: bool) -> None:
        weight, x, before = self._of(layer, "weight"), self._kept[layer], layer.inputs[0]
        if layer.relu and not _gates(layer):
            slope.images.mul_(self._values[layer].images > 0)
        if wanted:
            out, add = self._slope(before)
            gate = self._values[before] if _gates(before) else None
            maps.convolve_back(slope, weight, out, gate, layer.conv, add, self._precision)
        gradient = maps.convolve_slopes(x, slope, self._rows, layer.conv, self._precision)
        if layer.module is not None and layer.module.bias is not None:
            self._of(layer, "bias").sub_(maps.channel_sums(slope, self._rows) * lr)
        weight.sub_(gradient * lr)


def _gates(layer: Layer) -> bool:
    """Whether a convolution's ReLU is taken account of by the convolution after it."""
    return layer.kind == "conv" and layer.relu and [user.kind for user in layer.users] == ["conv"]


def _as_map(images: Tensor, shape: tuple[int, ...]) -> Map:
    """Images [number, channels, height, width] as a stack."""
    channels, height, width = shape
    return Map(
        images.contiguous().view(-1, channels, height, width), height, width, channels, Form(channels_last=False)
    )
