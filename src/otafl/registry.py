"""The names of all classes that a configuration can choose.

The library's own are listed in names.toml, so that listing them imports nothing. Plug-ins are added in Python by
`register(kind, name)`, or for the command line by an entry point of the group `otafl.<kind>`.

Knows: names and where classes live.
Does not know: what the classes do.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tomllib
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from otafl.errors import ConfigError, OtaflError, PluginError, is_out_of_memory

Class = TypeVar("Class", bound=type)
Result = TypeVar("Result")

TOLD: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("names.toml").read_text(encoding="utf-8")
)
"""What names.toml says of the library's own names, by kind."""
BUILTIN = {kind: {name: told["class"] for name, told in names.items()} for kind, names in TOLD.items()}
"""Kind to the names of the library's own classes, and where each lives, as `module:class`."""
_registered: dict[str, dict[str, type]] = {kind: {} for kind in BUILTIN}


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The hint ' (did you mean X?)' with the nearest allowed word, or '' if none is near."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def register(kind: str, name: str) -> Callable[[Class], Class]:
    """Class decorator that registers a plug-in under a name."""

    def remember(cls: Class) -> Class:
        old = _registered[kind].get(name)
        again = old is not None and (old.__module__, old.__qualname__) == (cls.__module__, cls.__qualname__)
        if name in BUILTIN[kind] or (old is not None and not again):
            raise PluginError(f"{kind}: the name {name!r} is taken; register {cls.__name__} under another one")
        _registered[kind][name] = cls
        _stamp(cls)
        return cls

    return remember


_stamps: "weakref.WeakKeyDictionary[type, tuple[str, float, int] | None]" = weakref.WeakKeyDictionary()


def _stamp(cls: type) -> None:
    """Remember path, time and size of a class's file when the class is loaded."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    _stamps[cls] = None if file is None else _state(file)


def _state(file: str) -> tuple[str, float, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return file, found.st_mtime_ns, found.st_size


def changed_since_loaded(cls: type) -> str | None:
    """The file of a plug-in's class if it has changed since the class was loaded, else None."""
    stamp = _stamps.get(cls)
    return stamp[0] if stamp is not None and _state(stamp[0]) != stamp else None


_plugin_files: dict[str, ModuleType] = {}  # absolute path to the module loaded from it


def load_plugin(path: str | Path) -> None:
    """Run a Python file so that its classes are registered; a file that was run before is not run again."""
    file = os.path.abspath(path)
    if file in _plugin_files:
        return
    name = f"plugin_{Path(file).stem}_{zlib.crc32(os.fsencode(file)):08x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not os.path.isfile(file):
        raise PluginError(f"--plugin {path}: {'is not a Python file' if os.path.exists(file) else 'no such file'}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(Path(file).parent)) not in sys.path:
        sys.path.append(folder)  # so that it can import modules beside it
    try:
        spec.loader.exec_module(module)
    except OtaflError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"--plugin {path}: cannot be loaded: {in_a_line(error)}") from error
    _plugin_files[file] = module


def plugin_files() -> list[str]:
    """Files that `load_plugin` has run, so that worker processes can load them, too."""
    return list(_plugin_files)


def file_of(cls: type) -> str | None:
    """The plug-in file that a class comes from, as `--plugin` takes it; None if it was not loaded from one."""
    return next((_near(file) for file, module in _plugin_files.items() if module.__name__ == cls.__module__), None)


def _silent_files() -> list[str]:
    """Plug-in files that have classes and register none."""
    known = {cls.__module__ for found in _registered.values() for cls in found.values()}
    return [
        _near(file)
        for file, module in _plugin_files.items()
        if module.__name__ not in known
        and any(isinstance(value, type) and value.__module__ == module.__name__ for value in vars(module).values())
    ]


def _near(file: str) -> str:
    """A path as one would type it here."""
    near = os.path.relpath(file)
    return file if near.startswith("..") else near


@cache
def _entry_points(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    points = importlib.metadata.entry_points(group=f"otafl.{kind}")
    return {point.name: point for point in points if point.name not in BUILTIN[kind]}


def names(kind: str) -> list[str]:
    """All names of a kind: built in, registered, and from entry points."""
    return sorted({*BUILTIN[kind], *_registered[kind], *_entry_points(kind)})


def lookup(kind: str, name: str, place: str | None = None) -> Any:
    """The class of a kind under a name.

    Raises:
        ConfigError: nothing has that name.
        PluginError: an entry point has it but cannot be loaded.
    """
    if name in BUILTIN[kind]:
        module, cls = BUILTIN[kind][name].split(":")
        return getattr(importlib.import_module(module), cls)
    if name in _registered[kind]:
        return _registered[kind][name]
    point = _entry_points(kind).get(name)
    if point is None:
        known = names(kind)
        more = "and what --plugin FILE.py makes known"
        if silent := _silent_files():
            more += f"; {', '.join(silent)} registers nothing: is the line @otafl.register_… missing there?"
        raise ConfigError(
            f"{place or kind}: nothing is named {name!r}{nearest(name, known)}; there are {', '.join(known)}, {more}"
        )
    try:
        cls = point.load()
        if isinstance(cls, type) and cls not in _stamps:
            _stamp(cls)
        return cls
    except (Exception, SystemExit) as error:
        raise PluginError(f"{kind}: plug-in {name!r} ({point.value}) cannot be loaded: {in_a_line(error)}") from error


def summary(kind: str, name: str) -> str:
    """First line of a class's docstring."""
    if name in BUILTIN[kind]:
        return str(TOLD[kind][name]["summary"])
    try:
        return ((lookup(kind, name).__doc__ or "").strip().splitlines() or [""])[0]
    except PluginError as error:
        return str(error)


def channel(name: str) -> tuple[str, str] | None:
    """What a method of the library's own knows of the channel, as marks, and its fading; None for a plug-in."""
    if name not in BUILTIN["algorithms"]:
        return None
    marks, _, fading = TOLD["algorithms"][name]["channel"].partition(" ")
    return marks, fading


def guarded(what: str, spec: object, call: Callable[[], Result]) -> Result:
    """Call code of a chosen class; an error in a plug-in becomes one line, an error in the library stays as it is."""
    try:
        return call()
    except OtaflError:
        raise
    except (Exception, SystemExit) as error:
        cls = spec if isinstance(spec, type) else type(spec)
        if cls.__module__.startswith("otafl.") or is_out_of_memory(error):
            raise
        raise PluginError(f"{what} failed: {in_a_line(error)}{_place(error)}") from error


def _place(error: BaseException) -> str:
    """File and line of an error: the innermost frame that is neither in otafl nor in an installed package."""
    package = Path(__file__).parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    own = [frame for frame in frames if package not in Path(frame.filename).parents and frame.lineno]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def in_a_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
