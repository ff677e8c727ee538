"""The objective: a model's loss on data, as a function of flat parameter vectors.

Knows: the module, its flat layout, losses, evaluation.
Does not know: devices, rounds, channels.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from otafl.engine.dropout import Dropout, fold, keys
from otafl.engine.fast.head import find_head
from otafl.engine.fast.layers import Layers, read_layers
from otafl.engine.fast.one_core import for_one_core
from otafl.engine.models import seeded_build
from otafl.errors import PluginError
from otafl.random import Streams
from otafl.registry import in_a_line
from otafl.world.data import Dataset, Loss, Split

EVALUATION_IMAGES = 2_000  # images per forward pass
Precision = Literal["float32", "tf32", "bf16", "float64"]
DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.float32,
    "float64": torch.float64,
}
"""Number type of models; products may be less precise."""


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, reduction="none")


def _half_squared_norm(output: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * output.square().sum(-1)


LOSSES: dict[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "half_squared_norm": _half_squared_norm,
}
"""Functions that give the loss of every example, [N]."""


class Scores(NamedTuple):
    """Mean loss and, where there are classes, accuracy, each [S]."""

    loss: Tensor
    accuracy: Tensor | None


class Examples(NamedTuple):
    """A split on the compute device."""

    features: Tensor
    targets: Tensor


class Objective:
    """A model's loss as a function of a flat parameter vector.

    Parameters are laid out in the order of `named_parameters()`.
    """

    def __init__(
        self, build: Callable[[], nn.Module], dataset: Dataset, device: torch.device, precision: Precision
    ) -> None:
        self.device, self.dtype = device, DTYPES[precision]
        self.tf32, self.bf16 = precision in ("tf32", "bf16"), precision == "bf16"
        self._build = build
        self._module = seeded_build(build, 0).to(device=device, dtype=self.dtype)
        self._drops = [f"{name}.key" for name, part in self._module.named_modules() if isinstance(part, Dropout)]
        self._still = copy.deepcopy(self._module).eval()
        """The module in evaluation mode."""
        self._shapes = {name: value.shape for name, value in self._module.named_parameters()}
        self.num_params = sum(shape.numel() for shape in self._shapes.values())
        self._example_loss = LOSSES[dataset.loss]
        self.classifies = dataset.loss == "cross_entropy"
        self.num_classes = dataset.num_classes
        self.head = None if self._drops else find_head(self._module)
        """First layer and rest, if the first layer is linear in the input; else None."""
        self._shape = self._fitting_shape(dataset)
        self.train = self.on_device(dataset.train)
        self._threads = threading.local()
        self.num_values = 0
        """Values that the layers with weights give for one example: what an engine's speed depends on."""
        self._bases: dict[tuple[int, ...], Tensor] = {}
        self._try()

    def read_layers(self) -> Layers | None:
        """The model as layers that the kernels for convolutions know; None if there is another one in it."""
        return read_layers(self._module, self.train.features[:2], self._drops)

    def on_device(self, split: Split) -> Examples:
        """A split as tensors of this objective's device and dtype, in the shape that the module takes."""
        features, targets = _on_device(split, self.device, self.dtype)
        return Examples(features.reshape(len(features), *self._shape), targets)

    def _fitting_shape(self, dataset: Dataset) -> tuple[int, ...]:
        """The shape of an example that the module takes: as it is, as an image, or as a row."""
        given = dataset.train.features.shape[1:]
        rows = (int(np.prod(given)),)
        if self.head is not None:
            return rows
        others = [shape for shape in (dataset.image_shape, rows) if shape is not None and shape != given]
        for shape in (given, *others):
            example = torch.from_numpy(dataset.train.features[:1].copy()).to(self.device, self.dtype).reshape(1, *shape)
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    self._module(example)
            except Exception:  # the shape as it is will say why
                continue
            return shape
        return given

    def products(self) -> AbstractContextManager[None]:
        """Context in which products, those of convolutions included, have this objective's precision."""
        return _products(self.tf32) if self.device.type == "cuda" else nullcontext()

    def _try(self) -> None:
        """Fail early, in one line, if the module does not fit the data or cannot be trained in a batch."""
        features, targets = self.train.features[:2].clone(), self.train.targets[:2]
        try:
            with torch.no_grad():
                output = self._still(features)
                if not isinstance(output, Tensor):
                    raise PluginError(f"model: returns a {type(output).__name__}; return class scores [n, classes]")
                drops = [part for part in self._module.modules() if isinstance(part, Dropout)]
                for part in drops:
                    part.calls = 0
                with torch.random.fork_rng(devices=[]), _counted(self._module) as counts:
                    one, other = self._module(features), self._module(features)
                if any(part.calls > 2 for part in drops):
                    raise PluginError("model: uses a dropout layer twice, which would drop the same values; use two")
                self.num_values = sum(counts) // (2 * len(features))
                if not torch.equal(features.nan_to_num(), self.train.features[:2].nan_to_num()):
                    raise PluginError("model: changes its input in place, and so the data; give it a copy")
                rounding = 1e-3 if self.device.type == "cuda" else 0.0
                if not torch.allclose(one, other, rtol=rounding, atol=rounding / 1000, equal_nan=True):
                    raise PluginError(
                        "model: gives other outputs for the same input, so it draws random numbers or counts its "
                        "calls; for dropout use layers of nn.Dropout, whose masks are addressed, instead of functions"
                    )
                if self.classifies and (output.ndim != 2 or len(output) != len(features)):
                    raise PluginError(
                        f"model: gives shape {tuple(output.shape)} for {len(features)} examples; return class scores "
                        f"[{len(features)}, {self.num_classes}]"
                    )
                if self.classifies and output.shape[-1] != self.num_classes:
                    labels = f"labels {int(self.train.targets.min())} … {int(self.train.targets.max())}, counted from 0"
                    raise PluginError(
                        f"model: gives {output.shape[-1]} class scores for {self.num_classes} classes ({labels})"
                    )
                if self.classifies and isinstance(list(self._module.modules())[-1], nn.Softmax):
                    raise PluginError(
                        "model: ends with a softmax, which the loss has already; leave it out, or training is slower"
                    )
                losses = self._example_loss(output, targets)
            if self.head is None or self.head.layers is None:  # linear layers and ReLU always can
                key = [torch.zeros(1, dtype=torch.int64, device=self.device)] if self._drops else []
                vmap(grad(self.loss))(self.unflatten(self.initial((0,))), features[None], targets[None], *key)
        except PluginError:
            raise
        except Exception as error:
            shape = tuple(features.shape[1:])
            hint = "; for images give a channel, X[:, None]" if len(shape) == 2 else ""
            raise PluginError(
                f"model: cannot be trained on features of shape {shape}: {in_a_line(error)}{hint}"
            ) from error
        if losses.shape != targets.shape:
            raise PluginError(f"model: output of shape {tuple(output.shape)} does not give one loss per example")

    def initial(self, seeds: tuple[int, ...]) -> Tensor:
        """Initial model x^0 of every seed, [S, P], drawn on the CPU in float32, the same for every device and dtype."""
        rows = []
        for seed in seeds:
            module = seeded_build(self._build, Streams(seed).key("init"))
            rows.append(torch.cat([p.detach().to("cpu", torch.float32).flatten() for p in module.parameters()]))
        return torch.stack(rows).to(device=self.device, dtype=self.dtype)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of [..., P] as named parameters [..., *shape]; fewer than P columns are the last parameters."""
        views, offset = {}, flat.shape[-1] - self.num_params
        for name, shape in self._shapes.items():
            if offset < 0:
                offset += shape.numel()
                continue
            views[name] = flat[..., offset : offset + shape.numel()].view(flat.shape[:-1] + shape)
            offset += shape.numel()
        return views

    def loss(self, params: dict[str, Tensor], features: Tensor, targets: Tensor, key: Tensor | None = None) -> Tensor:
        """Mean loss over a batch: what a local step descends; dropout needs the step's key."""
        return self.output_loss(functional_call(self._module, self._with_drops(params, key), (features,)), targets)

    def own_module(self, channels_last: bool) -> tuple[nn.Module, list[str]]:
        """A copy of the module for this thread, which may replace its parameters; and its buffers of dropout keys."""
        if not hasattr(self._threads, "module"):
            self._threads.module = for_one_core(self._module, channels_last)
        return self._threads.module, self._drops

    def _with_drops(self, params: dict[str, Tensor], key: Tensor | None) -> dict[str, Tensor]:
        """Parameters and, if the model has dropout, a key for each of its layers."""
        if not self._drops:
            return params
        assert key is not None
        return params | {name: fold(key, layer) for layer, name in enumerate(self._drops)}

    def dropout_keys(self, seeds: tuple[int, ...], num_devices: int, t: int | Tensor) -> Tensor | None:
        """Keys of every device in round t, int [S, M]; None if the model has no dropout."""
        if not self._drops:
            return None
        if seeds not in self._bases:
            self._bases[seeds] = torch.tensor([Streams(seed).key("dropout") for seed in seeds], device=self.device)
        return keys(self._bases[seeds], num_devices, t)

    def output_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a model's output."""
        return self._example_loss(output, targets).mean()

    def _outputs(self, flat: Tensor, features: Tensor) -> Tensor:
        """Outputs of every row of [S, P] for the same features, [S, N, ·]."""
        if self.head is None or self.head.layers is None:
            forward = vmap(lambda row: functional_call(self._still, self.unflatten(row), (features,)))
            outputs: Tensor = forward(flat)
            return outputs
        weight, bias, rest = self.head.split(flat)
        weight = weight.contiguous()  # aligned, for fast products
        output = flat.new_empty(len(flat), len(features), self.head.outputs)
        for s in range(len(flat)):  # a loop, so that features are not copied for each seed
            if bias is None:
                torch.mm(features, weight[s].t(), out=output[s])
            else:
                torch.addmm(bias[s, 0], features, weight[s].t(), out=output[s])
        for layer in self.head.layers:
            weight, bias = layer.split(rest)
            output = torch.baddbmm(bias, output.relu_(), weight.transpose(1, 2))
        return output

    def evaluate(self, flat: Tensor, examples: Examples) -> Scores:
        """Mean loss and accuracy of every row of [S, P] on a split."""
        total = torch.zeros(len(flat), dtype=torch.float64, device=self.device)
        correct = torch.zeros(len(flat), dtype=torch.int64, device=self.device)
        with torch.no_grad(), self.products():
            plain = self.head is not None and self.head.layers is not None and self.device.type != "cpu"
            for features, targets in _chunks(examples, len(examples.targets) if plain else EVALUATION_IMAGES):
                output = self._outputs(flat, features)
                repeated = targets.expand(output.shape[:2])
                total += self._example_loss(output.flatten(0, 1), repeated.flatten()).view(repeated.shape).sum(-1)
                correct += (output.argmax(-1) == targets).sum(-1)
        count = len(examples.targets)
        return Scores(total / count, correct.to(torch.float64) / count if self.classifies else None)

    def grad_norm_sq(self, flat: Tensor, weights: Tensor) -> Tensor:
        """Squared norms ‖∇F(x)‖² at the rows x of [S, P], for F = Σ_n weights_n · loss_n over training images."""

        def weighted(params: dict[str, Tensor], weight: Tensor, features: Tensor, targets: Tensor) -> Tensor:
            output = functional_call(self._still, params, (features,))
            return (weight * self._example_loss(output, targets)).sum()

        gradient_of = grad(weighted)
        result = []
        for row, weight in zip(flat, weights, strict=True):
            params = self.unflatten(row)
            total = {name: torch.zeros_like(value) for name, value in params.items()}
            start = 0
            for features, targets in _chunks(self.train):
                part = gradient_of(params, weight[start : start + len(targets)], features, targets)
                for name, value in part.items():
                    total[name] += value
                start += len(targets)
            result.append(sum(value.to(torch.float64).square().sum() for value in total.values()))
        return torch.stack([torch.as_tensor(value) for value in result])


@contextmanager
def _counted(module: nn.Module) -> Iterator[list[int]]:
    """Inside the `with` block, collect the number of values that each layer with weights gives."""
    counts: list[int] = []
    leaves = [part for part in module.modules() if list(part.parameters(recurse=False))]
    hooks = [
        leaf.register_forward_hook(
            lambda part, inputs, output: counts.append(output.numel() if isinstance(output, Tensor) else 0)
        )
        for leaf in leaves
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


@lru_cache(maxsize=6)
def _on_device(split: Split, device: torch.device, dtype: torch.dtype) -> Examples:
    """A split on a device, shared by the runs of a process."""
    features = torch.from_numpy(split.features).to(device=device, dtype=dtype)
    return Examples(features, torch.from_numpy(split.targets).to(device))


@contextmanager
def _products(tf32: bool) -> Iterator[None]:
    """Allow TF32 in products or not; cuDNN would use it in convolutions even where nobody asked for it."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = tf32
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def _chunks(examples: Examples, chunk: int = EVALUATION_IMAGES) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(examples.targets), chunk):
        stop = start + chunk
        yield examples.features[start:stop], examples.targets[start:stop]
