"""What decides a run's numbers besides its configuration: the code of its plug-ins, and the data they load.

A plug-in's digest follows what is executed, not the text of a file: the byte code of its class, of the functions,
classes and constants of the user's own modules that it reaches, and their defaults. Comments, other classes of the
file and line numbers do not count. Byte code differs between versions of Python, so that the version goes with it.

Knows: classes, code, arrays.
Does not know: what a plug-in does.
"""

import contextlib
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from otafl.config import CHOSEN, Config
from otafl.rundir import ARRAYS
from otafl.world.data import Dataset, load_dataset

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBRARY_FOLDERS = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
Plain = str | bytes | int | float | complex | bool | None


def is_plugin(spec: object) -> bool:
    """Whether a chosen class is a user's own."""
    return type(spec).__module__.partition(".")[0] != "otafl"


def sources(config: Config, dataset: Dataset | None = None) -> dict[str, str]:
    """Section of a configuration to the digest of its plug-in, and of the arrays that a data plug-in loads."""
    found = plugin_digests(config)
    if "data" in found:
        loaded = dataset or load_dataset(config.data.name, config.data.spec, config.cell.devices)
        found[ARRAYS] = data_digest(loaded)
    return found | {"python": PYTHON} if found else {}


def plugin_digests(config: Config) -> dict[str, str]:
    """Section to the digest of the plug-in that it chooses."""
    chosen = {section: getattr(config, section).spec for section in CHOSEN}
    return {section: code_digest(type(spec)) for section, spec in chosen.items() if is_plugin(spec)}


def name_hash(config: Config) -> str:
    """Eight characters that tell runs of different configurations or plug-ins apart, for names of folders."""
    plugins = plugin_digests(config)
    whole = f"{config.digest} {sorted(plugins.items())}" if plugins else ""
    return (hashlib.sha256(whole.encode()).hexdigest() if plugins else config.digest)[:8]


def data_digest(dataset: Dataset) -> str:
    """Of all arrays of a data set, and of what kind it is."""
    walk = _Walk("")
    for part in (dataset.train, dataset.test, dataset.validation):
        walk.take(None if part is None else (part.features, part.targets))
    walk.take((dataset.num_classes, dataset.image_shape, dataset.loss, dataset.owners))
    return walk.digest()


def code_digest(cls: type) -> str:
    """Of a class and everything of the user's own that it reaches."""
    walk = _Walk(cls.__module__.partition(".")[0])
    walk.take(cls)
    return walk.digest()


class _Walk:
    """A walk over values and code that feeds a hash; what was met before is named by its number."""

    def __init__(self, home: str) -> None:
        """Modules of the top-level package `home` are the user's own wherever they lie."""
        self._home, self._hash = home, hashlib.sha256()
        self._met: dict[int, int] = {}
        self._kept: list[object] = []  # so that no number is given twice

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _say(self, *words: object) -> None:
        self._hash.update(repr(words).encode(errors="surrogatepass"))

    def take(self, value: Any, names: frozenset[str] = frozenset()) -> None:
        """A value; of a module, only the `names` in it."""
        if isinstance(value, Plain):
            self._say(type(value).__name__, value)
            return
        if isinstance(value, ModuleType):
            self._module(value, names)
            return
        if not isinstance(value, tuple | frozenset | CodeType):  # constants, which Python may or may not share
            if id(value) in self._met:
                self._say("again", self._met[id(value)])
                return
            self._met[id(value)] = len(self._met)
            self._kept.append(value)
        self._say(type(value).__qualname__)
        match value:
            case tuple() | list():
                self._say(len(value))
                for item in value:
                    self.take(item)
            case set() | frozenset():
                self._say(*sorted(map(self._alone, value)))
            case Mapping():
                self._say(len(value))
                for key, item in sorted(value.items(), key=lambda entry: repr(entry[0])):
                    self.take(key)
                    self.take(item)
            case np.ndarray():
                self._say(value.dtype.str, value.shape)
                if value.dtype.hasobject:
                    self.take(value.tolist())
                else:
                    self._hash.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            case CodeType():
                self._say(value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
                for constant in value.co_consts:
                    self.take(constant)
            case FunctionType():
                self._function(value)
            case type():
                self._class(value)
            case property():
                self.take((value.fget, value.fset, value.fdel))
            case staticmethod() | classmethod() | MethodType():
                self.take(value.__func__)
            case functools.partial():
                self.take((value.func, value.args, value.keywords))
            case CellType():
                with contextlib.suppress(ValueError):  # of a cell that is still empty
                    self.take(value.cell_contents)
            case _ if hasattr(value, "__wrapped__"):
                self.take(value.__wrapped__)
            case _ if hasattr(value, "detach") and hasattr(value, "tolist"):  # a tensor
                self._say(str(value.dtype))
                self.take(np.asarray(value.detach().cpu().tolist()))
            case _:
                self._object(value)

    def _alone(self, value: Any) -> str:
        """The digest of a value by itself, where its order among others means nothing."""
        walk = _Walk(self._home)
        walk._met = dict(self._met)
        walk.take(value)
        return walk.digest()

    def _function(self, function: FunctionType) -> None:
        if not self._is_own(function.__module__):
            self._say(function.__module__, function.__qualname__)
            return
        self.take((function.__code__, function.__defaults__, function.__kwdefaults__, function.__closure__))
        names = frozenset(_names(function.__code__))
        for name in sorted(names & function.__globals__.keys()):
            self._say(name)
            self.take(function.__globals__[name], names)

    def _class(self, cls: type) -> None:
        self._say(cls.__qualname__)
        if not self._is_own(cls.__module__):
            self._say(cls.__module__)
            return
        self.take(cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            if not name.startswith("__") or _is_written(name, value):
                self._say(name)
                self.take(value)

    def _module(self, module: ModuleType, names: frozenset[str]) -> None:
        self._say("module", module.__name__.rpartition(".")[2])
        if self._is_own(module.__name__):
            for name in sorted(names & vars(module).keys()):
                self._say(name)
                self.take(vars(module)[name], names)

    def _object(self, value: Any) -> None:
        """An instance: its class, and what it holds or how it shows itself."""
        self.take(type(value))
        if hasattr(value, "__dict__"):
            self.take(vars(value))
        elif " at 0x" not in (shown := repr(value)):
            self._say(shown)

    def _is_own(self, module: str | None) -> bool:
        """Whether a module is the user's, and not a library's."""
        if module is None:  # code that was made from text
            return True
        top = module.partition(".")[0]
        if top == self._home:
            return True
        if top == "otafl" or top in sys.stdlib_module_names:
            return False
        file = getattr(sys.modules.get(module), "__file__", None)
        return file is None or not any(Path(file).is_relative_to(folder) for folder in LIBRARY_FOLDERS)


def _is_written(name: str, value: object) -> bool:
    """Whether a special attribute of a class is code that somebody wrote: not a docstring, nor made by `dataclass`."""
    made = isinstance(value, FunctionType) and value.__code__.co_filename == "<string>"
    return isinstance(value, FunctionType | classmethod) and not made and not name.startswith("__annotate")


def _names(code: CodeType) -> Iterator[str]:
    """Names that code may look up, that of nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
