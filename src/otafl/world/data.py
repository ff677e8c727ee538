"""Data sets: what the devices learn from and what the model is tested on.

Knows: files, splits, standardisation.
Does not know: devices' shares, models, channels.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, get_args

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from otafl.errors import ConfigError, PluginError
from otafl.random import Streams
from otafl.registry import guarded
from otafl.world.files import FASHION_MNIST_FILES, MNIST_FILES, Download

Loss = Literal["cross_entropy", "half_squared_norm"]


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled examples of one part of a data set; `len` gives their number N.

    >>> len(Split(np.zeros((3, 2), dtype=np.float32), np.array([0, 1, 1])))
    3
    """

    features: NDArray[np.floating]
    """Features, float32 or float64, finite, [N, F] or [N, ...]; the library's own data sets are standardised."""
    targets: NDArray[np.int64]
    """Class labels from 0, int64, [N]; not used by the loss "half_squared_norm"."""

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A task: training, validation and test examples, and the loss of a model's output.

    >>> part = Split(np.zeros((3, 2), dtype=np.float32), np.array([0, 1, 1]))
    >>> Dataset(train=part, test=part, validation=None, num_classes=2).loss
    'cross_entropy'
    """

    train: Split
    """Examples that are shared out to the devices."""
    test: Split
    """Examples on which x^t is scored."""
    validation: Split | None
    """Examples for choosing keys, scored if `experiment.record` has "validation"; None if there are none."""
    num_classes: int
    """Number of classes; 0 without classes."""
    image_shape: tuple[int, int, int] | None = None
    """(channels, height, width) if the features are pixels, else None."""
    loss: Loss = "cross_entropy"
    """Loss of a model's output: "cross_entropy" with the label, or "half_squared_norm", ½‖output‖², without labels."""
    owners: NDArray[np.int64] | None = None
    """Device 0 … m − 1 of each training example, int [N], if the data set says so; None: `[data]` shares them out."""


class Sizes(NamedTuple):
    """What can be known of a data set before it is loaded."""

    features: int
    classes: int
    image_shape: tuple[int, int, int] | None
    train: int
    test: int

    @staticmethod
    def of(dataset: Dataset) -> "Sizes":
        """Sizes of a loaded data set."""
        features = int(np.prod(dataset.train.features.shape[1:]))
        return Sizes(features, dataset.num_classes, dataset.image_shape, len(dataset.train), len(dataset.test))


class DataSource(Protocol):
    """What `[data]` chooses: something that can load a data set."""

    def load(self, num_devices: int) -> Dataset:
        """The data set, the same for every seed."""
        ...


def sizes_of(source: DataSource, num_devices: int) -> Sizes | None:
    """Sizes of a data set before it is loaded, if its class has `sizes(num_devices)`; else None."""
    told: Sizes | None = source.sizes(num_devices) if hasattr(source, "sizes") else None
    return told


def load_dataset(name: str, source: DataSource, num_devices: int) -> Dataset:
    """Load a data set, and refuse it if it is malformed."""
    dataset = guarded(f"data set {name}: load", source, lambda: source.load(num_devices))
    what = f"data set {name}"
    if not isinstance(dataset, Dataset):
        raise PluginError(f"{what}: load() returned {type(dataset).__name__}, not a Dataset")
    if dataset.loss not in get_args(Loss):
        raise PluginError(f"{what}: loss {dataset.loss!r} is none of {', '.join(get_args(Loss))}")
    if not isinstance(dataset.num_classes, int):
        raise PluginError(f"{what}: num_classes must be an int")
    for part in ("train", "test", "validation"):
        split = getattr(dataset, part)
        if split is not None or part != "validation":
            _check_split(f"{what}: {part}", split, dataset)
    if not type(source).__module__.startswith(
        "otafl."
    ):  # a plug-in may change its arrays: new Split objects, so that no cache returns old values
        again = {part: getattr(dataset, part) for part in ("train", "test", "validation")}
        dataset = replace(dataset, **{part: split and replace(split) for part, split in again.items()})
    if dataset.owners is not None:
        owners = np.asarray(dataset.owners)
        counted = owners.shape == (len(dataset.train),) and set(np.unique(owners)) == set(range(num_devices))
        if not counted:
            raise PluginError(
                f"{what}: owners must name a device 0 … {num_devices - 1} for every training example, and every device"
            )
    return dataset


def _check_split(what: str, split: object, dataset: Dataset) -> None:
    features, targets = getattr(split, "features", None), getattr(split, "targets", None)
    if not isinstance(features, np.ndarray) or not isinstance(targets, np.ndarray):
        raise PluginError(f"{what} must be a Split of NumPy arrays")
    if features.dtype not in (np.float32, np.float64) or targets.dtype != np.int64:
        raise PluginError(
            f"{what} has {features.dtype} features and {targets.dtype} labels; give float32 (or float64) and int64"
        )
    if len(features) != len(targets) or not len(targets) or targets.ndim != 1:
        raise PluginError(
            f"{what} has {len(features)} examples and {len(targets)} labels; it needs as many of each, and at least one"
        )
    if features.shape[1:] != dataset.train.features.shape[1:]:
        raise PluginError(f"{what} has features of another shape than train")
    if not np.isfinite(features).all():
        raise PluginError(f"{what} has features that are not finite")
    if dataset.loss == "cross_entropy" and not 0 <= targets.min() <= targets.max() < dataset.num_classes:
        raise PluginError(f"{what} has labels outside 0 … {dataset.num_classes - 1}")


def standardised(pixels: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Bytes [N, channels, height, width] as rows of standardised numbers [N, F]; mean and std are those of 0 … 1."""
    values = pixels.astype(np.float32)
    values /= np.float32(255)
    values -= np.asarray(mean, dtype=np.float32)[:, None, None]
    values /= np.asarray(std, dtype=np.float32)[:, None, None]
    return values.reshape(len(values), -1)


class Pictures(ABC):
    """A data set of standardised images in files, of which the last are for validation unless they are trained on."""

    files: ClassVar[Download]
    shape: ClassVar[tuple[int, int, int]]
    classes: ClassVar[int] = 10
    kept: ClassVar[tuple[int, int]] = (60_000, 10_000)
    """Images in the training files, and how many of them are for validation."""
    moments: ClassVar[tuple[Sequence[float], Sequence[float]]]
    """Mean and standard deviation of the pixels of each colour."""

    train_images: int

    def sizes(self, num_devices: int) -> Sizes:
        """Sizes, known without loading."""
        return Sizes(int(np.prod(self.shape)), self.classes, self.shape, self.train_images, 10_000)

    def load(self, num_devices: int) -> Dataset:
        """The data set, the same for every seed."""
        return _pictures(type(self), self.train_images)


@lru_cache(maxsize=4)
def _pictures(kind: type[Pictures], train_images: int) -> Dataset:
    arrays, last = kind.files.read(), kind.kept[0] - kind.kept[1]

    def examples(split: str, first: int, stop: int | None) -> Split:
        pixels = arrays[f"{split}-images"][first:stop].reshape(-1, *kind.shape)
        return Split(standardised(pixels, *kind.moments), arrays[f"{split}-labels"][first:stop].astype(np.int64))

    return Dataset(
        train=examples("train", 0, train_images),
        validation=examples("train", last, None) if train_images <= last else None,
        test=examples("test", 0, None),
        num_classes=kind.classes,
        image_shape=kind.shape,
    )


@dataclass(frozen=True)
class MNIST(Pictures):
    """MNIST: 28 × 28 handwritten digits, standardised; the last 10,000 training images are for validation."""

    files = MNIST_FILES
    shape = (1, 28, 28)
    moments = (0.1307,), (0.3081,)

    train_images: Annotated[int, Ge(1), Le(60_000)] = 50_000
    """Number of images for training, the first of the file; above 50,000 there is no validation set; paper: 50,000."""


@dataclass(frozen=True)
class FashionMNIST(Pictures):
    """Fashion-MNIST: 28 × 28 pictures of clothes, in MNIST's format and splits."""

    files = FASHION_MNIST_FILES
    shape = (1, 28, 28)
    moments = (0.2860,), (0.3530,)

    train_images: Annotated[int, Ge(1), Le(60_000)] = 50_000
    """Number of images for training, the first of the file; above 50,000 there is no validation set."""


@lru_cache(maxsize=1)
def _digits() -> Dataset:
    with np.load(str(resources.files("otafl.world") / "digits.npz")) as stored:
        pixels, targets = stored["features"], stored["targets"].astype(np.int64)
    features = (pixels.astype(np.float32) - np.float32(4.884)) / np.float32(6.017)  # mean and std of the pixels
    order = Streams(0).at("digits split").permutation(len(targets))
    train, validation, test = np.split(order, [1197, 1497])
    return Dataset(
        train=Split(features[train], targets[train]),
        validation=Split(features[validation], targets[validation]),
        test=Split(features[test], targets[test]),
        num_classes=10,
        image_shape=(1, 8, 8),
    )


@dataclass(frozen=True)
class Digits:
    """The 1,797 digits of 8 × 8 pixels that scikit-learn also ships; part of the package."""

    def sizes(self, num_devices: int) -> Sizes:
        """Sizes, known without loading."""
        return Sizes(64, 10, (1, 8, 8), 1_197, 300)

    def load(self, num_devices: int) -> Dataset:
        """1,197 training, 300 validation and 300 test images."""
        return _digits()


@dataclass(frozen=True)
class Synthetic:
    """Gaussian classes around random means: no files, any size."""

    features: Annotated[int, Ge(1), Le(10**6)] = 20
    """Numbers of an example."""
    classes: Annotated[int, Ge(2), Le(10**5)] = 10
    """Number of classes."""
    train_images: Annotated[int, Ge(1), Le(10**8)] = 5_000
    """Training examples of all devices together."""
    test_images: Annotated[int, Ge(1), Le(10**8)] = 1_000
    """Test examples, and as many for validation."""
    separation: Annotated[float, Ge(0)] = 1.0
    """Standard deviation of the class means, in units of the noise within a class."""
    data_seed: Annotated[int, Ge(0)] = 0
    """Seed of the data, which are the same for every seed of the run."""

    def sizes(self, num_devices: int) -> Sizes:
        """Sizes, known without loading."""
        return Sizes(self.features, self.classes, None, self.train_images, self.test_images)

    def load(self, num_devices: int) -> Dataset:
        """Training, validation (as large as test) and test examples."""
        rng = Streams(self.data_seed).at("synthetic data")
        means = self.separation * rng.standard_normal((self.classes, self.features))

        def draw(count: int) -> Split:
            targets = rng.integers(self.classes, size=count)
            features = means[targets] + rng.standard_normal((count, self.features))
            return Split(features.astype(np.float32), targets)

        sizes = (self.train_images, self.test_images, self.test_images)
        train, validation, test = (draw(count) for count in sizes)
        return Dataset(train=train, validation=validation, test=test, num_classes=self.classes)


@dataclass(frozen=True)
class Quadratic:
    """Device i minimises ½‖x − c_i‖²: the optimum, the mean of the c_i, is known. Needs model "point"."""

    dimension: Annotated[int, Ge(1), Le(10**8)] = 10
    """Number of coordinates, and of the model's parameters d."""
    spread: Annotated[float, Ge(0)] = 1.0
    """Standard deviation of the centres' coordinates."""
    centers: tuple[tuple[float, ...], ...] = ()
    """The c_i themselves, one per device, instead of random ones."""
    samples_per_device: Annotated[int, Ge(1), Le(10**6)] = 1
    """Samples of every device."""
    sample_noise: Annotated[float, Ge(0)] = 0.0
    """Standard deviation of a device's samples around its centre: the noise of stochastic gradients."""
    sample_tail: Annotated[float, Ge(0)] = 0.0
    """Degrees of freedom of Student's t for that noise (then `sample_noise` is its scale); 0 is the normal law."""
    data_seed: Annotated[int, Ge(0)] = 0
    """Seed of centres and samples, which are the same for every seed of the run."""

    def sizes(self, num_devices: int) -> Sizes:
        """Sizes, known without loading."""
        return Sizes(self.dimension, 0, None, 2 * num_devices * self.samples_per_device, num_devices)  # float64

    def load(self, num_devices: int) -> Dataset:
        """Samples whose mean over a device is exactly its centre; testing on the centres gives F(x) itself."""
        rng = Streams(self.data_seed).at("quadratic data")
        centers = self.spread * rng.standard_normal((num_devices, self.dimension))
        if self.centers:
            if len(self.centers) != num_devices or any(len(c) != self.dimension for c in self.centers):
                raise ConfigError(
                    f"data.centers: give {num_devices} centres (cell.devices) of {self.dimension} numbers "
                    "(data.dimension)"
                )
            centers = np.array(self.centers)
        shape = (num_devices, self.samples_per_device, self.dimension)
        tail = self.sample_tail
        noise = self.sample_noise * (rng.standard_t(tail, shape) if tail > 0 else rng.standard_normal(shape))
        with np.errstate(over="ignore", invalid="ignore"):  # heavy tails may overflow; `load_dataset` refuses that
            samples = centers[:, None] + noise - noise.mean(axis=1, keepdims=True)

        def examples(points: NDArray[np.float64]) -> Split:
            return Split(points, np.zeros(len(points), dtype=np.int64))

        return Dataset(
            train=examples(samples.reshape(-1, self.dimension)),
            validation=None,
            test=examples(centers),
            num_classes=0,
            loss="half_squared_norm",
            owners=np.repeat(np.arange(num_devices), self.samples_per_device),
        )
