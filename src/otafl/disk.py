"""Reads regular files only, writes files whole or not at all, and locks them.

Knows: the file system and its errors.
Does not know: what the files contain.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from otafl.errors import RunBusyError, RunDirectoryError


def no_links(path: str, flags: int) -> int:
    """Opens a regular file, but never through a symbolic link."""
    return _regular(path, flags | os.O_NOFOLLOW)


def _regular(path: str, flags: int) -> int:
    """Opens a regular file; anything else is refused at once, for instance a pipe, which could block for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file")
    return descriptor


def content_of(path: Path) -> bytes:
    """The content of a regular file."""
    with open(path, "rb", opener=_regular) as file:
        return file.read()


def sha256(path: Path) -> str:
    """The digest of a regular file."""
    with open(path, "rb", opener=_regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write a file in place, and wait until it is on the disk."""
    with open(path, "wb", opener=no_links) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def put(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, so that it appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def locked(path: Path, taken: str, advice: str) -> IO[str]:
    """Lock a file for this process alone and return it, open; it contains the process id."""
    file = open(path, "a+", encoding="utf-8", opener=no_links)  # noqa: SIM115 - held as long as the caller keeps it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read(20).strip() or "?"
        file.close()
        raise RunBusyError(f"{taken} by process {owner}; wait for it or {advice}") from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors in reading a path into a one-line RunDirectoryError."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunDirectoryError(f"{path}: cannot be read ({why})") from error


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors in writing to a path into a one-line RunDirectoryError, with advice."""
    try:
        yield
    except ValueError as error:  # a name with a zero byte
        if "null byte" not in str(error):
            raise
        raise RunDirectoryError(f"{path}: no file can have this name; choose another with --out") from error
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _os_error_number(str(error))
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RunDirectoryError(
                f"{path}: the disk is full; nothing recorded is lost: free some space and run the same command again"
            ) from error
        if number == errno.ELOOP:
            raise RunDirectoryError(f"{path}: has a symbolic link where a file is to be written; remove it") from error
        reason = os.strerror(number) if number is not None else str(error)
        raise RunDirectoryError(f"{path}: cannot be written ({reason}); choose another place with --out") from error


def _os_error_number(message: str) -> int | None:
    """The number in '… (os error N)', the form in which safetensors reports errors of the system."""
    found = re.search(r"os error (\d+)", message)
    return int(found.group(1)) if found else None
