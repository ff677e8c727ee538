"""Folders of images: decoding them once, and finding the result again.

    FOLDER/train/CLASS/*.jpg   FOLDER/test/CLASS/*.jpg      or      FOLDER/CLASS/*.jpg, of which some are for testing

The folder may be packed into a tar (also compressed) or zip file. Decoded images are kept in the data directory under
the digest of what they were decoded from.

Knows: archives, image files, the cache.
Does not know: standardisation, devices.
"""

import contextlib
import hashlib
import io
import itertools
import logging
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otafl.errors import DataError, OtaflError
from otafl.world.files import data_directory

log = logging.getLogger(__name__)

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
MOST_BYTES = 2**26  # of an image file
TEST_NAMES = ("test", "val", "valid", "validation")


class Images(NamedTuple):
    """Decoded images of one split."""

    pixels: NDArray[np.uint8]
    """[N, channels, height, width]."""
    labels: NDArray[np.int64]


class Decoded(NamedTuple):
    """All images of a folder."""

    train: Images
    test: Images | None
    """None if the folder has no test images of its own."""
    classes: tuple[str, ...]


def found_at(path: str) -> Path:
    """The place of a data file: as it is, or in the data directory."""
    given = Path(path).expanduser()
    inside = data_directory() / path
    return given if given.exists() or not inside.exists() else inside


@lru_cache(maxsize=16)
def _file_digest(place: Path, size: int, modified_ns: int) -> str:
    with place.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(path: str) -> str:
    """Digest of a file's content, or of the names, sizes and times of the files in a folder."""
    place = found_at(path)
    try:
        if place.is_dir():
            lines = []
            for file in sorted(place.rglob("*")):
                if file.is_file():
                    told = file.stat()
                    lines.append(f"{file.relative_to(place)} {told.st_size} {told.st_mtime_ns}")
            return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()
        told = place.stat()
        return _file_digest(place.resolve(), told.st_size, told.st_mtime_ns)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"data.path = {path!r}: cannot be read ({why}); looked in {place}") from error


def decoded(path: str, size: tuple[int, int] | None, channels: int) -> Decoded:
    """The images of a folder or archive, resized to (height, width) if asked for."""
    key = hashlib.sha256(f"1 {content_digest(path)} {size} {channels}".encode()).hexdigest()[:32]
    kept = data_directory() / "decoded" / f"{key}.npz"
    unreadable = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
    with contextlib.suppress(*unreadable), np.load(kept, allow_pickle=False) as stored:
        test = Images(stored["test"], stored["test_labels"]) if "test" in stored else None
        return Decoded(Images(stored["train"], stored["train_labels"]), test, tuple(stored["classes"].tolist()))
    found = _decode(path, size, channels)
    arrays = {"train": found.train.pixels, "train_labels": found.train.labels, "classes": np.array(found.classes)}
    if found.test is not None:
        arrays |= {"test": found.test.pixels, "test_labels": found.test.labels}
    temporary = kept.with_name(f".{key}.{os.getpid()}.npz")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(temporary, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, kept)
    except OSError as error:  # a read-only data directory: decode again next time
        log.info("%s: decoded images cannot be kept (%s)", kept, error)
        with contextlib.suppress(OSError):
            temporary.unlink()
    return found


def _decode(path: str, size: tuple[int, int] | None, channels: int) -> Decoded:
    try:
        from PIL import Image
    except ImportError as error:
        raise OtaflError("folders of images need Pillow: pip install 'otafl[images]'") from error

    def pixels(named: tuple[PurePosixPath, bytes]) -> tuple[PurePosixPath, NDArray[np.uint8]]:
        name, content = named
        try:
            with Image.open(io.BytesIO(content)) as image:
                if image.mode.startswith(("I", "F")):
                    raise ValueError("more than 8 bits for a colour; convert it")
                plain = image.convert("L" if channels == 1 else "RGB")
                if size is not None and plain.size != (size[1], size[0]):
                    plain = plain.resize((size[1], size[0]), Image.Resampling.BILINEAR)
                values = np.asarray(plain, dtype=np.uint8)
        except Exception as error:  # whatever a damaged file makes Pillow raise
            why = "" if "BytesIO" in str(error) else f" ({error})"
            raise DataError(f"data.path = {path!r}: {name} is no image that can be read{why}") from error
        return name, values[None] if channels == 1 else values.transpose(2, 0, 1)

    place = found_at(path)
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            files = _files(place)  # some at a time, so that an archive's content is never in memory as a whole
            some = iter(lambda: list(itertools.islice(files, 4096)), [])
            images = [image for part in some for image in pool.map(pixels, part)]
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"data.path = {path!r}: cannot be read ({why}); looked in {place}") from error
    return _sorted_out(path, images)


def _files(place: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Names and contents of all image files."""
    if place.is_dir():
        for path in sorted(place.rglob("*")):
            name = PurePosixPath(path.relative_to(place).as_posix())
            if _is_image(name) and path.is_file():
                yield name, path.read_bytes()[:MOST_BYTES]
    elif zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive:
            for inner in sorted(archive.namelist()):
                if _is_image(PurePosixPath(inner)):
                    with archive.open(inner) as stream:
                        yield PurePosixPath(inner), stream.read(MOST_BYTES)
    else:
        with tarfile.open(place) as packed:
            for member in packed:
                inside = PurePosixPath(member.name)
                file = packed.extractfile(member) if _is_image(inside) else None
                if file is not None:
                    yield inside, file.read(MOST_BYTES)


def _is_image(name: PurePosixPath) -> bool:
    """Whether a file counts: not those that systems and editors hide beside the user's own."""
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in name.parts)
    return name.suffix.lower() in SUFFIXES and not hidden


def _sorted_out(path: str, images: list[tuple[PurePosixPath, NDArray[np.uint8]]]) -> Decoded:
    """Images by split and class, in the order of their names."""
    if not images:
        raise DataError(f"data.path = {path!r}: has no image files")
    images.sort(key=lambda named: named[0])
    folders = [name.parts[:-2] for name, _ in images]
    levels = zip(*folders, strict=False)  # from the outermost, as many as all have
    outer = len(list(itertools.takewhile(lambda names: len(set(names)) == 1, levels)))
    names = [PurePosixPath(*name.parts[outer:]) for name, _ in images]  # without the folder that all lie in
    tops = {name.parts[0] for name in names if len(name.parts) > 2}
    tests = [top for top in TEST_NAMES if top in tops]
    split = "train" in tops and bool(tests)
    wrong = next((name for name in names if len(name.parts) != (3 if split else 2)), None)
    if wrong is not None:
        raise DataError(
            f"data.path = {path!r}: {wrong} is neither CLASS/IMAGE nor train/CLASS/IMAGE with a test folder beside"
        )
    shapes = {values.shape for _, values in images}
    if len(shapes) > 1:
        raise DataError(
            f"data.path = {path!r}: images have {len(shapes)} different sizes; set data.height and data.width"
        )
    classes = sorted({name.parts[-2] for name in names})
    number = {name: k for k, name in enumerate(classes)}

    def of(top: str | None) -> Images:
        rows = [k for k, name in enumerate(names) if top is None or name.parts[0] == top]
        labels = np.array([number[names[k].parts[-2]] for k in rows], dtype=np.int64)
        return Images(np.stack([images[k][1] for k in rows]), labels)

    if split:
        there = {name.parts[-2] for name in names if name.parts[0] == "train"}
        extra = next((kind for kind in classes if kind not in there), None)
        if extra is not None:
            raise DataError(f"data.path = {path!r}: class {extra!r} has images for testing, but none for training")
    return Decoded(of("train") if split else of(None), of(tests[0]) if split else None, tuple(classes))
