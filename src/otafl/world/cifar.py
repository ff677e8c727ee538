"""CIFAR-10 and CIFAR-100 in their binary form: finding, fetching and reading the files, and the data sets.

Knows: the binary format, the archives and their checksums, splits.
Does not know: devices.
"""

import hashlib
import os
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from otafl.errors import DataError
from otafl.world.data import Pictures
from otafl.world.files import DOWNLOADS as DOWNLOADS, data_directory, downloaded

PIXELS = 3 * 32 * 32  # bytes of an image: red, green and blue, line by line
DOWNLOAD_S = 1800.0


@dataclass(frozen=True, eq=False)
class CifarFiles:
    """An archive with files of (label bytes, 3,072 pixel bytes) for each image."""

    name: str
    archive: str
    md5: str
    """MD5 of the archive."""
    folder: str
    """Folder in the archive; it may also lie unpacked in the data directory."""
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: int
    """Label bytes of an image; the last one is the class."""
    classes: int
    mirror: str
    images: int = 10_000
    """Images in a file, but for CIFAR-100's training file."""

    def locate(self) -> dict[str, Path] | None:
        """Paths of the unpacked files, or of the archive; None if neither is there."""
        home = data_directory() / self.name
        try:
            for folder in (home / self.folder, home):
                unpacked = {file: folder / file for file in (*self.train, *self.test)}
                if all(path.is_file() for path in unpacked.values()):
                    return unpacked
            return {self.archive: home / self.archive} if (home / self.archive).is_file() else None
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"{home}: cannot be read ({why}); set OTAFL_DATA to a folder that can") from error

    def read(self) -> dict[str, NDArray[np.uint8]]:
        """Images [N, 3,072] and labels [N] of both splits, as train-images, train-labels, test-images, test-labels."""
        found = self.locate()
        if found is None:
            raise DataError(
                f"data.name = {self.name!r}: files not found in {data_directory() / self.name}; run "
                f"'otafl data get {self.name}', or set OTAFL_DATA to the folder that holds {self.name}/"
            )
        contents = dict(self._contents(found))
        arrays: dict[str, NDArray[np.uint8]] = {}
        for split, files in (("train", self.train), ("test", self.test)):
            rows = np.concatenate([self._rows(file, contents, found) for file in files])
            arrays[f"{split}-labels"], arrays[f"{split}-images"] = rows[:, self.labels - 1], rows[:, self.labels :]
        return arrays

    def _contents(self, found: dict[str, Path]) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the files."""
        wanted = {*self.train, *self.test}
        try:
            if self.archive not in found:
                for file, path in found.items():
                    yield file, path.read_bytes()
                return
            path = found[self.archive]
            self._verify(path.read_bytes(), path)
            with tarfile.open(path) as archive:
                for member in archive:
                    file = Path(member.name).name
                    stream = archive.extractfile(member) if file in wanted else None
                    if stream is not None:
                        yield file, stream.read()
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            place = next(iter(found.values()))
            raise DataError(
                f"{place}: cannot be read ({error}); delete it and run 'otafl data get {self.name}'"
            ) from error

    def _rows(self, file: str, contents: dict[str, bytes], found: dict[str, Path]) -> NDArray[np.uint8]:
        place, width = next(iter(found.values())), self.labels + PIXELS
        if file not in contents:
            raise DataError(f"{place}: has no {file}; delete it and run 'otafl data get {self.name}'")
        rows = np.frombuffer(contents[file], dtype=np.uint8)
        if not len(rows) or len(rows) % width or len(rows) // width % self.images:
            raise DataError(
                f"{place.with_name(file)}: has {len(rows)} bytes, which is not {self.images} images of {width}; delete "
                f"it and run 'otafl data get {self.name}'"
            )
        rows = rows.reshape(-1, width)
        if rows[:, self.labels - 1].max() >= self.classes:
            raise DataError(f"{place.with_name(file)}: has labels above {self.classes - 1}; it is not {self.name}")
        return rows

    def _verify(self, content: bytes, path: Path) -> None:
        actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if actual != self.md5:
            raise DataError(
                f"{path}: damaged or not {self.name} (MD5 is {actual}, not {self.md5}); delete it and run "
                f"'otafl data get {self.name}'"
            )

    def fetch(self) -> Path:
        """Put the archive into the data directory, verified; returns its folder."""
        target = data_directory() / self.name
        found = self.locate()
        if found is not None:
            self.read()
            return next(iter(found.values())).parent
        try:
            content = downloaded(f"{self.mirror}{self.archive}", 200 * 2**20, time.monotonic() + DOWNLOAD_S)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.name}: could not be downloaded ({error}); put {self.archive} into {target}"
            ) from error
        self._verify(content, target / self.archive)
        try:
            target.mkdir(parents=True, exist_ok=True)
            temporary = target / f".{self.archive}.tmp"
            temporary.write_bytes(content)
            os.replace(temporary, target / self.archive)
        except OSError as error:
            raise DataError(f"{target}: cannot be written ({error.strerror or error}); set OTAFL_DATA") from error
        return target

    @property
    def mirrors(self) -> tuple[str, ...]:
        """Where the archive can be had."""
        return (self.mirror,)


CIFAR10_FILES = CifarFiles(
    name="cifar10",
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{k}.bin" for k in range(1, 6)),
    test=("test_batch.bin",),
    labels=1,
    classes=10,
    mirror="https://www.cs.toronto.edu/~kriz/",
)
CIFAR100_FILES = CifarFiles(
    name="cifar100",
    archive="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    folder="cifar-100-binary",
    train=("train.bin",),
    test=("test.bin",),
    labels=2,
    classes=100,
    mirror="https://www.cs.toronto.edu/~kriz/",
)

DOWNLOADS |= {files.name: files for files in (CIFAR10_FILES, CIFAR100_FILES)}


@dataclass(frozen=True)
class CIFAR10(Pictures):
    """CIFAR-10: 32 × 32 colour pictures of ten kinds of things; the last 5,000 training images are for validation."""

    files = CIFAR10_FILES
    shape = (3, 32, 32)
    kept = (50_000, 5_000)
    moments = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    train_images: Annotated[int, Ge(1), Le(50_000)] = 45_000
    """Number of images for training, the first of the files; above 45,000 there is no validation set."""


@dataclass(frozen=True)
class CIFAR100(Pictures):
    """CIFAR-100: as CIFAR-10, with a hundred kinds of things."""

    files = CIFAR100_FILES
    shape = (3, 32, 32)
    classes = 100
    kept = (50_000, 5_000)
    moments = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)

    train_images: Annotated[int, Ge(1), Le(50_000)] = 45_000
    """Number of images for training, the first of the files; above 45,000 there is no validation set."""
