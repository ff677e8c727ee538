"""Data of the user's own: folders of images, tables in files, arrays given in Python.

Knows: files, columns, splits.
Does not know: how images are decoded, devices' shares.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray

from otafl.errors import ConfigError, DataError, OtaflError
from otafl.random import Streams
from otafl.world import images
from otafl.world.data import Dataset, Split, load_dataset, standardised


@dataclass(frozen=True)
class ImageFolder:
    """Folder of images, plain or in a tar or zip file: train/CLASS/IMAGE and test/CLASS/IMAGE, or CLASS/IMAGE."""

    path: str
    """The folder or archive, as a path or within the data directory (`OTAFL_DATA`)."""
    height: Annotated[int, Ge(0), Le(4096)] = 0
    """Height that images are resized to, in pixels; 0 if all have one size."""
    width: Annotated[int, Ge(0), Le(4096)] = 0
    """Width that images are resized to, in pixels; 0 if all have one size."""
    channels: Literal[1, 3] = 3
    """Colours, or 1 for grey."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of the images that are for testing, if the folder does not say which."""
    validation_share: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the training images that are for validation."""
    data_seed: Annotated[int, Ge(0)] = 0
    """Seed of the draw of test and validation images, which are the same for every seed of the run."""

    def __post_init__(self) -> None:
        if (self.height == 0) != (self.width == 0):
            raise ConfigError("data.height and data.width: give both, or neither")

    def content_digest(self) -> str:
        """Digest of the files."""
        return images.content_digest(self.path)

    def load(self, num_devices: int) -> Dataset:
        """The data set, standardised by mean and standard deviation of each colour of its training images."""
        return _image_folder(self, self.content_digest())


@lru_cache(maxsize=2)
def _image_folder(spec: ImageFolder, digest: str) -> Dataset:
    size = (spec.height, spec.width) if spec.height else None
    found = images.decoded(spec.path, size, spec.channels)
    train, test, classes = found
    streams = Streams(spec.data_seed)
    if test is None:
        test, train = _drawn(train, spec.test_share, streams, "test images")
    validation, train = _drawn(train, spec.validation_share, streams, "validation images")
    few = train.pixels[:: max(1, len(train.pixels) // 10_000)].astype(np.float64) / 255
    mean, std = few.mean((0, 2, 3)), np.maximum(few.std((0, 2, 3)), 1e-3)

    def examples(part: images.Images) -> Split:
        return Split(standardised(part.pixels, mean, std), part.labels)

    return Dataset(
        train=examples(train),
        validation=examples(validation) if len(validation.labels) else None,
        test=examples(test),
        num_classes=len(classes),
        image_shape=train.pixels.shape[1:],
    )


def _drawn(all_: images.Images, share: float, streams: Streams, name: str) -> tuple[images.Images, images.Images]:
    """A share of some images, drawn at random, and the rest; both in the order that they had."""
    count = round(share * len(all_.labels))
    order = streams.at(name).permutation(len(all_.labels))
    some, rest = np.sort(order[:count]), np.sort(order[count:])
    return images.Images(all_.pixels[some], all_.labels[some]), images.Images(all_.pixels[rest], all_.labels[rest])


@dataclass(frozen=True)
class Table:
    """Table in a NumPy (.npz) or Parquet file, with an optional column that says whose example each row is.

    A .npz file has arrays: `features` [N, ...] and the label, perhaps the owner, and perhaps `features_test` and the
    label with `_test`. A Parquet file has columns: the label, perhaps the owner, and as features numbers, or lists of
    numbers of one length.
    """

    path: str
    """The file, as a path or within the data directory (`OTAFL_DATA`)."""
    label: str = "label"
    """Name of the array or column with the classes: whole numbers, or words."""
    owner: str = ""
    """Name of the array or column with the owners: writers, speakers, sensors. Devices then have whole owners."""
    features: str = "features"
    """Name of the array with the features, in a .npz file."""
    standardise: bool = True
    """Give every feature of the training examples mean 0 and standard deviation 1."""
    test_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Share of the examples that are for testing, if the file does not say which."""
    validation_share: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of the training examples that are for validation."""
    data_seed: Annotated[int, Ge(0)] = 0
    """Seed of the draw of test and validation examples, which are the same for every seed of the run."""

    def __post_init__(self) -> None:
        if not self.path.endswith((".npz", ".parquet")):
            raise ConfigError(f"data.path = {self.path!r}: name a .npz or a .parquet file")

    def content_digest(self) -> str:
        """Digest of the file."""
        return images.content_digest(self.path)

    def load(self, num_devices: int) -> Dataset:
        """The data set; with owners, each device has one or more of them."""
        found, owners = _table(self, self.content_digest())
        if owners is None:
            return found
        names, number = np.unique(owners, return_inverse=True)
        if len(names) < num_devices:
            raise ConfigError(
                f"data.owner = {self.owner!r}: has {len(names)} owners for {num_devices} devices; set cell.devices = "
                f"{len(names)} or less"
            )
        return replace(found, owners=(number % num_devices).astype(np.int64))


Columns = dict[str, NDArray[Any]]


@lru_cache(maxsize=2)
def _table(spec: Table, digest: str) -> tuple[Dataset, NDArray[Any] | None]:
    """The data set of a file, and the owner of each training example."""
    columns = _read_npz(spec) if spec.path.endswith(".npz") else _read_parquet(spec)
    for name in filter(None, (spec.label, f"{spec.label}_test", spec.owner)):
        _check_names(spec, name, columns.get(name))
    classes, labels = np.unique(columns[spec.label], return_inverse=True)
    owners = columns.get(spec.owner)
    features = np.asarray(columns[spec.features], dtype=np.float64)  # float32 would lose the mean of large numbers
    streams, count = Streams(spec.data_seed), len(labels)
    if f"{spec.features}_test" in columns:
        test = np.asarray(columns[f"{spec.features}_test"], dtype=np.float64)
        place = np.searchsorted(classes, columns[f"{spec.label}_test"])
        if not np.array_equal(classes[np.minimum(place, len(classes) - 1)], columns[f"{spec.label}_test"]):
            raise DataError(f"data.path = {spec.path!r}: {spec.label}_test has classes that {spec.label} has not")
        test_labels, left = place.astype(np.int64), np.arange(count)
    else:
        order = streams.at("test rows").permutation(count)
        cut = round(spec.test_share * count)
        test, test_labels, left = features[np.sort(order[:cut])], labels[np.sort(order[:cut])], np.sort(order[cut:])
    order = left[streams.at("validation rows").permutation(len(left))]
    cut = round(spec.validation_share * len(left))
    validation, train = np.sort(order[:cut]), np.sort(order[cut:])
    if not (len(train) and len(test)):
        raise DataError(f"data.path = {spec.path!r}: {count} rows are too few for training and testing")
    mean: NDArray[np.float64] | float = 0.0
    std: NDArray[np.float64] | float = 1.0
    if spec.standardise:
        mean, std = features[train].mean(0), features[train].std(0)
        std = np.where(std > 1e-12 * np.abs(mean), std, 1.0)  # of a constant, which becomes 0

    def split(values: NDArray[np.float64], targets: NDArray[Any]) -> Split:
        return Split(((values - mean) / std).astype(np.float32), targets.astype(np.int64))

    shape = features.shape[1:]
    found = Dataset(
        train=split(features[train], labels[train]),
        validation=split(features[validation], labels[validation]) if len(validation) else None,
        test=split(test, test_labels),
        num_classes=len(classes),
        image_shape=shape if len(shape) == 3 else None,
    )
    return found, None if owners is None else owners[train]


def _read_npz(spec: Table) -> Columns:
    place = images.found_at(spec.path)
    try:
        with np.load(place, allow_pickle=False) as stored:
            columns = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"data.path = {spec.path!r}: is no .npz file that can be read ({error})") from error
    needed = [spec.features, spec.label, *filter(None, [spec.owner])]
    if f"{spec.features}_test" in columns:
        needed.append(f"{spec.label}_test")
    _check_columns(spec, columns, needed)
    for name in (spec.features, f"{spec.features}_test"):
        if name in columns and (columns[name].ndim < 2 or columns[name].dtype.kind not in "fiub"):
            raise DataError(f"data.path = {spec.path!r}: {name} must be numbers of shape [N, ...]")
    return columns


def _read_parquet(spec: Table) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise OtaflError("Parquet files need PyArrow: pip install 'otafl[parquet]'") from error
    try:
        table = parquet.read_table(images.found_at(spec.path))
    except (OSError, ArrowException) as error:
        raise DataError(f"data.path = {spec.path!r}: is no Parquet file that can be read ({error})") from error
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    _check_columns(spec, columns, [spec.label, *filter(None, [spec.owner])])
    parts = []
    for name, values in columns.items():
        if name in (spec.label, spec.owner):
            continue
        if values.dtype.kind in "mM":
            raise DataError(f"data.path = {spec.path!r}: column {name} has dates or times; give numbers")
        try:
            rows = np.stack(values) if values.dtype == object else values
            parts.append(np.asarray(rows, dtype=np.float64).reshape(len(values), -1))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"data.path = {spec.path!r}: column {name} has no numbers, or lists of different lengths"
            ) from error
    if not parts:
        raise DataError(f"data.path = {spec.path!r}: has no column of features beside {spec.label}")
    kept = {name: columns[name] for name in (spec.label, spec.owner) if name}
    return kept | {spec.features: np.concatenate(parts, axis=1)}


def _check_names(spec: Table, name: str, values: NDArray[Any] | None) -> None:
    """Refuse labels and owners that are missing in some rows, or numbers with decimals."""
    if values is None:
        return
    blank = values.dtype == object and any(value is None or value != value for value in values)
    if blank or (values.dtype.kind == "f" and np.isnan(values).any()):
        raise DataError(f"data.path = {spec.path!r}: {name} is missing in some rows")
    if values.dtype.kind == "f" and (values != np.floor(values)).any():
        raise DataError(f"data.path = {spec.path!r}: {name} has numbers with decimals; give whole numbers or words")


def _check_columns(spec: Table, columns: Columns, needed: Sequence[str]) -> None:
    for name in needed:
        if name not in columns:
            raise DataError(f"data.path = {spec.path!r}: has no {name!r}; there are {', '.join(columns)}")
    lengths = {name: len(columns[name]) for name in (spec.features, *needed) if name in columns}
    lengths = {name: length for name, length in lengths.items() if not name.endswith("_test")}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"data.path = {spec.path!r}: needs as many rows of each, and at least one ({told})")


_given: dict[str, Dataset] = {}  # by digest; the four given last


@dataclass(frozen=True)
class Arrays:
    """Arrays that were given in Python: otafl.run(config, data=(X, y, X_test, y_test))."""

    digest: str = ""
    """Digest of the arrays; a run with others is another run."""

    def load(self, num_devices: int) -> Dataset:
        """The arrays, if they were given in this process."""
        if self.digest not in _given:
            raise ConfigError(
                'data.name = "arrays": these data were given in Python and are not here; give them again: '
                "otafl.run(config, data=(X, y, X_test, y_test))"
            )
        return _given[self.digest]


def remember(digest: str, dataset: Dataset) -> None:
    """Keep a data set, so that `Arrays` finds it."""
    _given.pop(digest, None)
    _given[digest] = dataset
    while len(_given) > 4:
        del _given[next(iter(_given))]


def dataset_of(data: object) -> Dataset:
    """A data set from (X, y, X_test, y_test), NumPy arrays or tensors; a `Dataset` is taken as it is, but checked.

    Images are [N, channels, height, width]; bytes are divided by 255. Labels are whole numbers from 0.
    """
    if isinstance(data, Dataset):
        count = 0 if data.owners is None or not len(data.owners) else int(np.max(data.owners)) + 1
        return load_dataset("given", _Given(data), count)
    if not isinstance(data, tuple | list) or len(data) != 4:
        raise ConfigError("data: give (X, y, X_test, y_test), or an otafl.Dataset")
    x, y, x_test, y_test = (np.asarray(part.detach().cpu() if hasattr(part, "detach") else part) for part in data)
    for name, values in (("X", x), ("X_test", x_test)):
        if values.ndim < 2 or values.dtype.kind not in "fiub":
            raise ConfigError(f"data: {name} has shape {list(values.shape)} and {values.dtype}; give numbers [N, ...]")
        if values.shape[1:] != x.shape[1:]:
            raise ConfigError(f"data: X_test has examples of shape {list(values.shape[1:])}, X {list(x.shape[1:])}")
    for name, labels, values in (("y", y, x), ("y_test", y_test, x_test)):
        if labels.dtype.kind not in "iub" or labels.shape != (len(values),):
            raise ConfigError(
                f"data: {name} has shape {list(labels.shape)} and {labels.dtype}; give {len(values)} whole numbers"
            )
    if (x.dtype == np.uint8) != (x_test.dtype == np.uint8):
        raise ConfigError("data: of X and X_test one is bytes, which are divided by 255; give both alike")
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        raise ConfigError(
            f"data: X has shape {list(x.shape)}; give images as [N, channels, height, width], "
            "for instance X.transpose(0, 3, 1, 2)"
        )
    top = int(max(y.max(initial=0), y_test.max(initial=0)))

    def split(values: NDArray[Any], labels: NDArray[Any]) -> Split:
        scale = np.float32(255) if values.dtype == np.uint8 else np.float32(1)
        wide = values.copy() if values.dtype == np.float64 else values.astype(np.float32) / scale
        return Split(wide, labels.astype(np.int64))

    shape = x.shape[1:] if x.ndim == 4 else None
    found = Dataset(split(x, y), split(x_test, y_test), None, top + 1, shape)
    return load_dataset("given", _Given(found), 0)


@dataclass(frozen=True, eq=False)
class _Given:
    """A source that has its data already."""

    dataset: Dataset

    def load(self, num_devices: int) -> Dataset:
        """The data."""
        return self.dataset
