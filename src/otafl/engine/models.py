"""The models a configuration can choose; each choice builds a plain `nn.Module`.

Knows: layers, initialisation.
Does not know: training, devices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from otafl.errors import ConfigError, PluginError
from otafl.registry import guarded
from otafl.world.data import Dataset

Init = Literal["kaiming", "torch"]


@dataclass(frozen=True)
class TaskShape:
    """What a model must fit: numbers of features and classes, and the image shape if features are pixels.

    >>> MLP(hidden=(5,)).build(TaskShape(num_features=4, num_classes=3, image_shape=None))[0]
    Linear(in_features=4, out_features=5, bias=True)
    """

    num_features: int
    num_classes: int
    image_shape: tuple[int, int, int] | None


class ModelSpec(Protocol):
    """What `[model]` chooses: something that builds a module for a task."""

    def build(self, shape: TaskShape) -> nn.Module:
        """A freshly initialised module; its draws come from torch's default generator."""
        ...


def _initialise(layers: list[nn.Module], init: Init) -> nn.Module:
    """The layers in sequence; "kaiming" gives each He's normal weights and zero biases."""
    for layer in layers:
        if init == "kaiming" and isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


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


@dataclass(frozen=True)
class CNN:
    """Small convolutional network: 3 × 3 convolutions with ReLU and 2 × 2 max-pooling, one linear layer."""

    channels: tuple[Annotated[int, Ge(1), Le(10**5)], ...] = (16, 32)
    """Output channels of the convolutions."""
    init: Init = "kaiming"
    """As for "mlp"."""

    def build(self, shape: TaskShape) -> nn.Module:
        """Convolutions on the image, then a linear layer to class scores."""
        _need_classes("cnn", shape)
        if shape.image_shape is None:
            raise ConfigError('model.name = "cnn": the data set has no images; use "mlp" or "softmax"')
        inputs, height, width = shape.image_shape
        layers: list[nn.Module] = [nn.Unflatten(-1, shape.image_shape)]
        for outputs in self.channels:
            if min(height, width) < 2:
                raise ConfigError(f"model.channels: too many layers for images of {shape.image_shape[1:]} pixels")
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            inputs, height, width = outputs, height // 2, width // 2
        layers += [nn.Flatten(), nn.Linear(inputs * height * width, shape.num_classes)]
        return _initialise(layers, self.init)


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
    return module.train()


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
        if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
            raise PluginError(
                f"model: layer {name!r} ({type(layer).__name__}) draws its own random numbers, so runs could "
                "not be repeated; remove it or set p = 0"
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
