"""Estimates how much memory a run will take, before it takes any.

The coefficients are bytes per element, measured on the CPU (float64 channels and their copies, masks, batches). The
sizes of the model and of the method's state come from torch's meta device, whose tensors have shapes but no storage.

Knows: configurations, and the sizes of data, models and states.
Does not know: the values in them.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from otafl.config.schema import Config
from otafl.core.contract import Problem
from otafl.core.state import tensors_of
from otafl.engine.fast.preactivation import CHUNK_BYTES, MOST_EXTRA_WORK
from otafl.engine.models import TaskShape, without_storage
from otafl.engine.objective import DTYPES, EVALUATION_IMAGES
from otafl.engine.training import CHUNK_ELEMENTS, THREADS_FROM
from otafl.errors import TooLargeError
from otafl.radio.csi import View
from otafl.radio.knowledge import QUANTITIES, Quantity
from otafl.world.data import Dataset, Sizes, sizes_of

GIB = 2**30
# Bytes per round, seed and device: CHANNEL for positions, gains, channels and copies; the others come on top.
CHANNEL, MOTION, IMPERFECT, MASKS, PLAN = 64, 16, 20, 42, 30
ANTENNA = 48  # bytes per round, seed, device and antenna, where there are several
DRAWING = 60  # bytes per round, device and antenna while one seed is drawn
WAVES = 9_800  # bytes per device of Clarke's model, counted for at least 1,920 devices
BATCHES = 24  # bytes per image index
SERVER_VECTORS = 7  # vectors as long as the model, per seed: received signal, noise, new model …
DEVICE_COPIES = 1.5  # copies of all devices' models, if a method keeps them: old and new anchors, a checkpoint's copy
WRITTEN_OUT = 4  # copies of all devices' models, if an imperfect radio or downlink changes single values
IMAGE = 36  # bytes per image and seed: shares and sampler
SHARE = 120  # bytes per device and class while images are shared out
ROW = 1_000  # bytes per seed and recorded row


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a run's memory, and the keys that make it smaller."""

    name: str
    size: float
    """Bytes."""
    lower: str


@dataclasses.dataclass(frozen=True)
class _Model:
    """Sizes of a model, known without its weights."""

    params: int
    activations: int
    """Number of values of one example in all layers, its features included."""
    widest: int
    first: int
    """Outputs of a linear first layer; 0 where there is none."""


def refuse_too_large(
    config: Config, device: torch.device, dataset: Dataset | None = None, model: nn.Module | None = None
) -> None:
    """Refuse a run that needs more memory than there is; the error says how much, and which keys to lower."""
    parts = estimate(config, dataset, model)
    host = [part for part in parts if device.type == "cpu" or part.name in ("data", "channels")]
    places = [("memory", host, free_bytes())]
    if device.type == "cuda":
        places.append(("memory of the GPU", parts, float(torch.cuda.mem_get_info(device)[1])))
    for where, needed, free in places:
        total = sum(part.size for part in needed)
        if total > free:
            largest = max(needed, key=lambda part: part.size)
            raise TooLargeError(
                f"this run needs about {total / GIB:.1f} GiB of {where}, of which {largest.size / GIB:.1f} for "
                f"{largest.name}, and {free / GIB:.1f} GiB are free; lower {largest.lower}"
            )


def estimate(config: Config, dataset: Dataset | None = None, model: nn.Module | None = None) -> list[Part]:
    """The parts of a run's memory; those that depend on a data set or model of unknown size are left out."""
    num_seeds, num_devices = len(config.experiment.seeds), config.cell.devices
    parts = [Part("channels", _channel_bytes(config), "experiment.rounds, experiment.seeds or cell.devices")]
    sizes = sizes_of(config.data.spec, num_devices) if dataset is None else Sizes.of(dataset)
    if sizes is None:
        return parts
    width = DTYPES[config.training.precision].itemsize
    kept = sizes.features * (sizes.train + 2.0 * sizes.test) * (4 if width == 4 else 12)
    drawn = sizes.features * max(16.0 * sizes.train, 4.0 * sizes.train + 20.0 * sizes.test)
    shares = IMAGE * sizes.train * num_seeds + SHARE * num_devices * max(1, sizes.classes)
    parts.append(Part("data", max(kept, drawn) + shares, f"{_data_keys(config)} or cell.devices"))
    known = _without_weights(config, sizes, model)
    if known is None:
        return parts
    state = _state_bytes(config, known.params)
    vector = float(num_seeds * known.params * width)
    own = state > num_devices * vector
    copies = DEVICE_COPIES * own + WRITTEN_OUT * (config.imperfect.dense or config.imperfect.downlink_std > 0)
    models = state + vector * (SERVER_VECTORS + num_devices * copies)
    parts.append(Part("models", models, "experiment.seeds, cell.devices or the model's size"))
    training = _training_bytes(config, sizes, known, own, width)
    evaluation = float(num_seeds * min(EVALUATION_IMAGES, sizes.test) * width * 2 * known.widest)
    lower = "training.batch_size, training.local_steps, experiment.seeds, cell.devices or the model's width"
    parts.append(Part("local training", max(training, evaluation), lower))
    return parts


def _channel_bytes(config: Config) -> float:
    """Bytes of worlds, channels, masks and recorded rows."""
    rounds, seeds, devices = config.experiment.rounds, len(config.experiment.seeds), config.cell.devices
    each = CHANNEL + MOTION * (config.mobility.name != "static") + IMPERFECT * (not config.imperfect.none)
    each += MASKS * hasattr(config.algorithm.spec, "active") + PLAN * hasattr(config.algorithm.spec, "plan")
    each += ANTENNA * config.radio.antennas * (config.radio.antennas > 1)
    while_drawn = CHANNEL // 2 * seeds + DRAWING * config.radio.antennas
    waves = WAVES * max(devices, 1_920) * (getattr(config.fading.spec, "memory", None) == "clarke")
    rows = ROW * seeds * (rounds // config.experiment.eval_every)
    return float(rounds * devices * max(each * seeds, while_drawn) + waves + rows)


def _training_bytes(config: Config, sizes: Sizes, model: _Model, own: bool, width: int) -> float:
    """Bytes of batches, activations and gradients of the devices that train at once."""
    training, seeds = config.training, len(config.experiment.seeds)
    devices = seeds * config.cell.devices
    trained = seeds * (config.cell.cohort or config.cell.devices)
    images = training.batch_size * (training.local_steps if training.batches == "per_step" else 1)
    batches, all_models = float(BATCHES * devices * images), float(width * trained * model.params)
    one_by_one = training.engine == "threads" or (
        training.engine == "auto" and model.activations * training.batch_size >= 4 * THREADS_FROM
    )
    together = min(trained, max(1, CHUNK_ELEMENTS["cpu"] // model.params))
    if training.engine == "reference" or one_by_one:
        together = 1 if training.engine == "reference" else torch.get_num_threads()
    plain = together * width * (training.batch_size * (sizes.features + 4.0 * model.activations) + 3.0 * model.params)
    plain += 0.0 if own else all_models
    extra = images**2 * (2 * sizes.features + model.first)
    suits = bool(model.first) and extra <= (MOST_EXTRA_WORK - 1) * 4 * images * sizes.features * model.first
    if training.engine not in ("auto", "preactivation") or not suits:
        return batches + plain
    tail = float(width * (model.params - model.first * sizes.features))
    row = width * images * (sizes.features + 3.0 * model.first + 2 * images) + 12.0 * images * sizes.classes
    at_once = min(devices, max(1, int(CHUNK_BYTES["cpu"] // row)))
    if own:
        return batches + at_once * row
    return batches + max(at_once * row, 3 * at_once * tail) + devices * (width * images * model.first + tail)


def _data_keys(config: Config) -> str:
    sized = ("features", "dimension", "train_images", "test_images", "samples_per_device")
    keys = [f"data.{f.name}" for f in dataclasses.fields(config.data.spec) if f.name in sized]
    return ", ".join(keys) or "the data set's size"


def _without_weights(config: Config, sizes: Sizes, model: nn.Module | None) -> _Model | None:
    """The model's sizes; None if it cannot be built without storage, as with some plug-ins."""
    shape = TaskShape(sizes.features, sizes.classes, sizes.image_shape)
    built = model
    if built is None:
        with contextlib.suppress(Exception), without_storage():
            built = config.model.spec.build(shape)
    if not isinstance(built, nn.Module):
        return None
    outputs, pixels = [sizes.features], sizes.features // (sizes.image_shape or (1,))[0]
    leaves = [module for module in built.modules() if not list(module.children())]
    for layer in leaves:  # as if each took the output of the one before
        if isinstance(layer, nn.Linear):
            outputs.append(layer.out_features)
        elif isinstance(layer, nn.Conv2d):
            pixels = max(1, pixels // (layer.stride[0] * layer.stride[-1]))
            outputs.append(-(-layer.out_channels // 16) * 16 * pixels)  # channels are kept in blocks
        elif isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            pixels = max(1, pixels // 4)
    first = leaves[0].out_features if isinstance(leaves[0], nn.Linear) else 0
    return _Model(max(1, sum(p.numel() for p in built.parameters())), sum(outputs), max(outputs), first)


def _state_bytes(config: Config, params: int) -> float:
    """Bytes of the method's state before round 0; one model per seed if it cannot be built without storage."""
    seeds, devices = len(config.experiment.seeds), config.cell.devices
    dtype = DTYPES[config.training.precision]
    with contextlib.suppress(Exception), without_storage():
        known: dict[Quantity, Tensor] = {
            name: torch.empty(seeds, devices, dtype=torch.complex128 if name == "h" else torch.float64)
            for name in QUANTITIES
        }
        problem = Problem(
            num_devices=devices,
            num_params=params,
            symbol_energy_j=config.radio.symbol_energy_j,
            noise_var_j=config.radio.noise_var_j,
            initial=torch.empty(seeds, params, dtype=dtype),
            server=View(config.algorithm.name, "server", config.algorithm.spec.knowledge.server, known),
        )
        state = tensors_of(config.algorithm.spec.init(problem))
        return float(sum(tensor.numel() * tensor.itemsize for tensor in state.values()))
    return float(seeds * params * dtype.itemsize)


def free_bytes() -> float:
    """Bytes that this process can still allocate: what the system has available, within a container's limit."""
    found = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            folder = Path("/sys/fs/cgroup")
            found.append(float((folder / limit).read_text()) - float((folder / used).read_text()))
    return max(0.0, min(found))
