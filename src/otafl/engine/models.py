"""The models a configuration can choose; each choice builds a plain `nn.Module`.

Knows: layers, initialisation.
Does not know: training, devices.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from otafl.engine.dropout import with_addressed_dropout
from otafl.errors import ConfigError, PluginError
from otafl.registry import guarded
from otafl.world.data import Dataset

Init = Literal["kaiming", "torch"]


@dataclass(frozen=True)
class TaskShape:
    """What a model must fit; the argument of a model's `build`.

    >>> MLP(hidden=(5,)).build(TaskShape(num_features=4, num_classes=3, image_shape=None))[0]
    Linear(in_features=4, out_features=5, bias=True)
    """

    num_features: int
    """Number of features of an example, F."""
    num_classes: int
    """Number of classes, which is that of outputs; 0 without classes."""
    image_shape: tuple[int, int, int] | None
    """(channels, height, width) if the features are pixels, else None."""


class ModelSpec(Protocol):
    """What `[model]` chooses: something that builds a module for a task."""

    def build(self, shape: TaskShape) -> nn.Module:
        """A freshly initialised module; its draws come from torch's default generator."""
        ...


def _initialise(layers: Sequence[nn.Module], init: str) -> nn.Sequential:
    """The layers in sequence; "kaiming" gives each He's normal weights and zero biases, "xavier" Glorot's uniform."""
    module = nn.Sequential(*layers)
    for layer in module.modules():
        if init != "torch" and isinstance(layer, nn.Linear | nn.Conv2d):
            if init == "kaiming":
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            else:
                nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


def _need_classes(name: str, shape: TaskShape) -> None:
    if shape.num_classes == 0:
        raise ConfigError(f'model.name = "{name}": the data set has no classes; use model "point"')


@dataclass(frozen=True)
class MLP:
    """Multi-layer perceptron with ReLU; the paper's is 784–1024–10."""

    hidden: tuple[Annotated[int, Ge(1), Le(10**6)], ...] = (1024,)
    """Widths of the hidden layers; paper: 1024."""
    init: Init = "kaiming"
    """Kaiming: He's normal weights, N(0, 2/inputs), and zero biases; or PyTorch's default, U(±1/√inputs)."""

    def build(self, shape: TaskShape) -> nn.Module:
        """Linear and ReLU layers from features to class scores."""
        _need_classes("mlp", shape)
        widths = (shape.num_features, *self.hidden)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return _initialise([*layers, nn.Linear(widths[-1], shape.num_classes)], self.init)


@dataclass(frozen=True)
class Softmax:
    """Softmax regression: one linear layer."""

    init: Init = "kaiming"
    """As for "mlp"."""

    def build(self, shape: TaskShape) -> nn.Module:
        """One linear layer from features to class scores."""
        _need_classes("softmax", shape)
        return _initialise([nn.Linear(shape.num_features, shape.num_classes)], self.init)


def _image_shape(name: str, shape: TaskShape) -> tuple[int, int, int]:
    """The shape of the images that a convolutional model needs."""
    _need_classes(name, shape)
    if shape.image_shape is None:
        raise ConfigError(
            f'model.name = "{name}": the data set has no images [N, channels, height, width]; use "mlp" or "softmax"'
        )
    return shape.image_shape


@dataclass(frozen=True)
class CNN:
    """Small convolutional network: convolutions with ReLU and 2 × 2 max-pooling, then linear layers."""

    channels: tuple[Annotated[int, Ge(1), Le(10**5)], ...] = (16, 32)
    """Output channels of the convolutions."""
    kernel: Annotated[int, Ge(1), Le(31)] = 3
    """Width of the convolutions' kernels, an odd number; images are padded with zeros, so that they keep their size."""
    dense: tuple[Annotated[int, Ge(1), Le(10**6)], ...] = ()
    """Widths of linear layers with ReLU before the last one."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability with which a value is dropped before each linear layer."""
    init: Init = "kaiming"
    """As for "mlp"."""

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise ConfigError(f"model.kernel = {self.kernel}: must be odd")

    def build(self, shape: TaskShape) -> nn.Module:
        """Convolutions on the image, then linear layers to class scores."""
        inputs, height, width = image = _image_shape("cnn", shape)
        layers: list[nn.Module] = [nn.Unflatten(-1, image)]
        for outputs in self.channels:
            if min(height, width) < 2:
                raise ConfigError(f"model.channels: too many layers for images of {image[1:]} pixels")
            layers += [nn.Conv2d(inputs, outputs, self.kernel, padding=self.kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
            inputs, height, width = outputs, height // 2, width // 2
        layers.append(nn.Flatten())
        drop = [nn.Dropout(self.dropout)] if self.dropout else []
        for before, after in pairwise((inputs * height * width, *self.dense)):
            layers += [*drop, nn.Linear(before, after), nn.ReLU()]
        last = self.dense[-1] if self.dense else inputs * height * width
        return _initialise([*layers, *drop, nn.Linear(last, shape.num_classes)], self.init)


@dataclass(frozen=True)
class PflCNN:
    """The network of pfl-research's CIFAR-10 benchmark: two convolutions, pooling, two linear layers, dropout."""

    dropout: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.25, 0.5)
    """Probabilities with which a value is dropped before the first and before the last linear layer."""

    def build(self, shape: TaskShape) -> nn.Module:
        """1,626,442 parameters for images of 3 × 32 × 32; Glorot's uniform weights, zero biases."""
        channels, height, width = image = _image_shape("pfl-cnn", shape)
        if min(height, width) < 6:
            raise ConfigError(f'model.name = "pfl-cnn": images of {height} × {width} are too small; 6 × 6 is the least')
        features = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        drops = [[nn.Dropout(p)] if p else [] for p in self.dropout]
        layers = [nn.Unflatten(-1, image), nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Flatten(), *drops[0], nn.Linear(features, 128), nn.ReLU(), *drops[1]]
        return _initialise([*layers, nn.Linear(128, shape.num_classes)], "xavier")


class _Block(nn.Module):
    """A residual block: two convolutions with GroupNorm, and a shortcut, by a 1 × 1 convolution if shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int, group: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(max(1, outputs // group), outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(max(1, outputs // group), outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        inner = torch.relu(self.first_norm(self.first(images)))
        return torch.relu(self.second_norm(self.second(inner)) + self.shortcut(images))


RESNETS: dict[int, tuple[tuple[int, ...], int]] = {
    8: ((16, 32, 64), 1),
    20: ((16, 32, 64), 3),
    18: ((64, 128, 256, 512), 2),
}
"""Depth to the widths of the stages and the number of blocks in each."""


@dataclass(frozen=True)
class ResNet:
    """Residual network for small images with GroupNorm, of depth 8, 20 (He et al.'s for CIFAR-10) or 18."""

    depth: Literal[8, 18, 20] = 8
    """Number of layers with weights; 8 has 77,850 parameters for images of 3 × 32 × 32, 20 has 272 thousand, 18 has 11
    million."""
    group: Annotated[int, Ge(1), Le(512)] = 8
    """Channels of a group that is normalised together."""

    def __post_init__(self) -> None:
        for width in RESNETS[self.depth][0]:
            if width % max(1, width // self.group):
                raise ConfigError(f"model.group = {self.group}: must divide the widths, or be wider than they are")

    def build(self, shape: TaskShape) -> nn.Module:
        """A convolution, stages of residual blocks of which all but the first halve the image, mean, linear layer."""
        channels, height, width = image = _image_shape("resnet", shape)
        widths, blocks = RESNETS[self.depth]
        if min(height, width) < 4:
            raise ConfigError(f'model.name = "resnet": images of {height} × {width} are too small; 4 × 4 is the least')
        layers: list[nn.Module] = [nn.Unflatten(-1, image), nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)]
        layers += [nn.GroupNorm(max(1, widths[0] // self.group), widths[0]), nn.ReLU()]
        inputs = widths[0]
        for outputs in widths:
            for number in range(blocks):
                stride = 2 if number == 0 and outputs != widths[0] else 1
                layers.append(_Block(inputs, outputs, stride, self.group))
                inputs = outputs
        return nn.Sequential(
            *_initialise(layers, "kaiming"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, shape.num_classes)
        )


_given: dict[str, nn.Module] = {}  # by digest; the four given last


@dataclass(frozen=True)
class Module:
    """Module that was given in Python: otafl.run(config, model=net)."""

    digest: str = ""
    """Digest of the module's layers, code and weights; a run with another one is another run."""

    def build(self, shape: TaskShape) -> nn.Module:
        """A copy of the module, with its weights."""
        if self.digest not in _given:
            raise ConfigError(
                'model.name = "module": this module was given in Python and is not here; give it again: '
                "otafl.run(config, model=net)"
            )
        return copy.deepcopy(_given[self.digest])


def remember(digest: str, module: nn.Module) -> None:
    """Keep a copy of a module, so that `Module` finds it."""
    _given.pop(digest, None)
    _given[digest] = copy.deepcopy(module)
    while len(_given) > 4:
        del _given[next(iter(_given))]


class _PointModule(nn.Module):
    """Output x − features, so that half the squared norm of the output is the quadratic loss."""

    def __init__(self, size: int, start: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((size,), start))

    def forward(self, features: Tensor) -> Tensor:
        return self.x - features


@dataclass(frozen=True)
class Point:
    """The parameter vector itself, for data set "quadratic"."""

    start: float = 0.0
    """Every coordinate of x^0."""

    def build(self, shape: TaskShape) -> nn.Module:
        """A module that holds x."""
        if shape.num_classes:
            raise ConfigError('model.name = "point" is for data.name = "quadratic"; use "mlp" for classes')
        return _PointModule(shape.num_features, self.start)


def builder(name: str, spec: ModelSpec, dataset: Dataset) -> Callable[[], nn.Module]:
    """A function that builds the configured model for a data set."""
    num_features = int(np.prod(dataset.train.features.shape[1:]))
    shape = TaskShape(num_features, dataset.num_classes, dataset.image_shape)
    return lambda: guarded(f"model {name}: build", spec, lambda: spec.build(shape))


def seeded_build(build: Callable[[], nn.Module], key: int) -> nn.Module:
    """Build a module with torch's default generator seeded by `key`, and leave that generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        module = build()
    if not isinstance(module, nn.Module):
        raise PluginError(f"model: build() returned {type(module).__name__}, must be an nn.Module")
    refuse_unsupported(module)
    return with_addressed_dropout(module).train()


class _NoDraws(TorchFunctionMode):
    """Context that skips initialisation, which has no effect without storage and is slow to load."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_storage() -> Iterator[None]:
    """Context in which tensors and modules have shapes but no storage, to find out how large they would be."""
    with torch.device("meta"), _NoDraws():
        yield


def refuse_unsupported(module: nn.Module) -> None:
    """Refuse layers whose behaviour is not a function of parameters and input alone."""
    for name, layer in module.named_modules():
        alpha = isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout)
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 and (alpha or layer.inplace):
            raise PluginError(
                f"model: layer {name!r} ({type(layer).__name__}{', in place' if layer.inplace else ''}) is not "
                "supported; use nn.Dropout, nn.Dropout1d, 2d or 3d, not in place"
            )
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats:
            raise PluginError(
                f"model: layer {name!r} ({type(layer).__name__}) keeps running statistics, which nobody "
                "transmits; use GroupNorm, or track_running_stats=False"
            )
    parameters = dict(module.named_parameters())
    if not parameters:
        raise PluginError("model: has no parameters to train")
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise PluginError(f"model: parameter {frozen[0]!r} is frozen; make it a buffer, or let it train")
