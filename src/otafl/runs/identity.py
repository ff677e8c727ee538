"""Digests of what decides a run's numbers besides its configuration: the code of its plug-ins, and the data they load.

A plug-in's digest is a hash of source text without comments and docstrings. It covers the plug-in's class, every
statement of its module that defines a name which the class reaches, and the whole of each user's module that one of
these imports. If such a statement computes an array, for instance from a file, the array is hashed, too. Other classes
of the file are not covered. The digest is computed once per process, when it is first needed.

Knows: source text, arrays.
Does not know: what a plug-in does.
"""

import ast
import hashlib
import importlib.util
import inspect
import linecache
import secrets
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otafl.config.schema import CHOSEN, Config
from otafl.errors import PluginError
from otafl.registry import changed_since_loaded
from otafl.runs.directory import ARRAYS
from otafl.world.data import Dataset, load_dataset

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
STANDARD = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
BY_NAME = frozenset(
    {"globals", "vars", "eval", "exec", "getattr", "locals", "__import__", "import_module", "attrgetter"}
)
"""Code that uses one of these may reach anything in its module, so the whole module is hashed."""
_known: "weakref.WeakKeyDictionary[type, str]" = weakref.WeakKeyDictionary()


def is_plugin(spec: object) -> bool:
    """Whether the class of a spec comes from outside otafl."""
    return type(spec).__module__.partition(".")[0] != "otafl"


def sources(config: Config, dataset: Dataset | None = None) -> dict[str, str]:
    """Digests of a configuration's plug-ins by section, with data arrays and Python version; empty without plug-ins."""
    found = plugin_digests(config)
    if "data" in found:
        loaded = dataset or load_dataset(config.data.name, config.data.spec, config.cell.devices)
        found[ARRAYS] = data_digest(loaded)
    elif hasattr(config.data.spec, "content_digest"):  # the user's own files
        found[ARRAYS] = config.data.spec.content_digest()
    return found | {"python": PYTHON} if found else {}


def plugin_digests(config: Config) -> dict[str, str]:
    """Section to the digest of the plug-in that it chooses."""
    chosen = {section: getattr(config, section).spec for section in CHOSEN}
    return {section: code_digest(type(spec)) for section, spec in chosen.items() if is_plugin(spec)}


def name_hash(config: Config) -> str:
    """Eight characters for folder names, which differ between configurations and between plug-ins."""
    plugins = plugin_digests(config)
    whole = hashlib.sha256(f"{config.digest} {sorted(plugins.items())}".encode()).hexdigest()
    return (whole if plugins else config.digest)[:8]


def data_digest(dataset: Dataset) -> str:
    """Digest of all arrays of a data set, its number of classes, image shape and loss."""
    digest = hashlib.sha256(repr((dataset.num_classes, dataset.image_shape, dataset.loss)).encode())
    for part in (dataset.train, dataset.test, dataset.validation):
        for array in (None, None) if part is None else (part.features, part.targets):
            digest.update(_of_array(array))
    digest.update(_of_array(dataset.owners))
    return digest.hexdigest()


DERIVED = frozenset({"_modules", "training", "_flat_weights", "_flat_weight_refs", "_flat_weights_names"})
"""Attributes of modules that say nothing of their own."""


def module_digest(module: nn.Module) -> str:
    """Digest of a module: its layers with all their attributes, its user's own code, its parameters and buffers.

    An attribute that cannot be hashed gives another digest every time, so that no old result is ever taken for it.
    """
    digest = hashlib.sha256()
    places: dict[int, int] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        told = f"{name} {type(part).__module__} {type(part).__qualname__} {_code_of(type(part))}"
        attributes = {key: value for key, value in vars(part).items() if key not in DERIVED}
        digest.update(f"{told} {_told(attributes, places)}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _told(value: Any, places: dict[int, int]) -> str:
    """A value in words that are the same for equal values; tensors by content, and by which are one and the same."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        content = hashlib.sha256(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        place = places.setdefault(id(value), len(places))
        return f"tensor {place} {value.dtype} {tuple(value.shape)} {value.requires_grad} {content.hexdigest()}"
    if isinstance(value, np.ndarray):
        return f"array {_of_array(value).hex()}"
    if isinstance(value, Mapping):
        return f"map {[(str(key), _told(item, places)) for key, item in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[_told(item, places) for item in value]}"
    if isinstance(value, set | frozenset):
        return f"set {sorted(_told(item, places) for item in value)}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, nn.Module):
        return f"module {module_digest(value)}"
    if isinstance(value, FunctionType) and value.__closure__ is None:
        code = value.__code__
        return f"function {value.__module__} {value.__qualname__} {code.co_code.hex()} {code.co_consts} {code.co_names}"
    if isinstance(value, type | BuiltinFunctionType):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return f"unknown {secrets.token_hex(8)}"


def _code_of(cls: type) -> str:
    """Digest of a class's code if it is the user's own; of nothing where there is no source, as at a prompt."""
    if cls.__module__.partition(".")[0] in ("otafl", "torch"):
        return ""
    try:
        return code_digest(cls)
    except PluginError:
        return secrets.token_hex(8)


def _of_array(array: Any) -> bytes:
    if array is None:
        return b"none"
    values = np.asarray(array.detach().cpu().tolist() if isinstance(array, Tensor) else array)
    digest = hashlib.sha256(repr((values.dtype.str, values.shape)).encode())
    digest.update(repr(values.tolist()).encode() if values.dtype.hasobject else np.ascontiguousarray(values).tobytes())
    return digest.digest()


def code_digest(cls: type) -> str:
    """Digest of a class and of all the user's own code that it reaches."""
    if cls not in _known:
        file = changed_since_loaded(cls)
        if file is not None:
            raise PluginError(f"{file}: has changed since it was loaded; load it again, in a new process at best")
        _known[cls] = _Reach(cls).digest()
    return _known[cls]


class _Reach:
    """Collects the source text and the arrays that a class reaches."""

    def __init__(self, cls: type) -> None:
        self._home = cls.__module__.partition(".")[0]
        self._texts: list[str] = []
        self._arrays: list[bytes] = []
        self._met: set[tuple[str, str]] = set()
        for base in cls.__mro__:
            if self._is_own(base.__module__):
                self._definition(base)

    def digest(self) -> str:
        whole = hashlib.sha256("\0".join(sorted(self._texts)).encode(errors="surrogatepass"))
        for array in sorted(self._arrays):
            whole.update(array)
        return whole.hexdigest()

    def _definition(self, thing: Any) -> None:
        """Add the statement that defines a user's class or function, and what it reaches."""
        filename, name = _place(thing), thing.__qualname__.partition(".")[0]
        body = _statements(filename)
        if body is None and not _functions(thing):
            return  # a class that was created without source code
        if body is None:
            raise PluginError(
                f"{thing.__module__}.{thing.__qualname__}: its source cannot be found, so that a run directory could "
                "not say what made it; put it into a file, or run without a directory"
            )
        space = vars(sys.modules[thing.__module__]) if thing.__module__ in sys.modules else {}
        package = space.get("__package__") or ""
        if not any(name in _bound(statement) for statement in body):  # defined in a function: take the whole module
            self._all(filename, body, package)
            return
        self._names({name}, filename, body, space, package)

    def _names(
        self, wanted: set[str], filename: str, body: list[ast.stmt], space: dict[str, Any], package: str
    ) -> None:
        """Add the statements of a module that bind the wanted names, and what these statements reach."""
        waiting = list(wanted)
        while waiting:
            name = waiting.pop()
            if (filename, name) in self._met:
                continue
            self._met.add((filename, name))
            mine = [statement for statement in body if name in _bound(statement)]
            value = space.get(name)
            if not mine and isinstance(value, type | FunctionType) and self._is_own(value.__module__):
                self._definition(value)  # from another notebook cell, or by a star import
                continue
            if mine and isinstance(value, np.ndarray | Tensor):
                self._arrays.append(_of_array(value))
            for statement in mine:
                used = _used(statement)
                if used & BY_NAME:
                    self._all(filename, body, package)
                    return
                self._texts.append(ast.unparse(statement))
                self._imports([statement], package)
                waiting += used

    def _all(self, filename: str, body: list[ast.stmt], package: str) -> None:
        """Add a whole module, and what it imports."""
        if (filename, "") not in self._met:
            self._met.add((filename, ""))
            self._texts.append("\n".join(map(ast.unparse, body)))
            self._imports(body, package)

    def _imports(self, statements: Iterable[ast.stmt], package: str) -> None:
        """Add the user's own modules that some statements import, also inside functions."""
        for statement in statements:
            for node in ast.walk(statement):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                    base = ".".join(part for part in (above, node.module) if part)
                    names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
                for name in filter(None, names):
                    self._module(name)

    def _module(self, name: str) -> None:
        if not self._is_own(name):
            return
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or _found(name)
        body = None if file is None else _statements(file)
        if file is not None and body is not None:
            inside = getattr(module, "__package__", None) or name.rpartition(".")[0]
            self._all(file, body, inside)
            values = vars(module).values() if isinstance(module, ModuleType) else ()
            self._arrays += [_of_array(value) for value in values if isinstance(value, np.ndarray | Tensor)]

    def _is_own(self, module: str) -> bool:
        """Whether a module is the user's own and not an installed library."""
        top = module.partition(".")[0]
        if top == self._home:
            return True
        if top == "otafl" or top in sys.stdlib_module_names:
            return False
        file = getattr(sys.modules.get(top), "__file__", None) or _found(top)
        if file is None:
            return top in sys.modules  # typed at a prompt or in a notebook
        path = Path(file)
        folder = path.parent.parent if path.stem == "__init__" else path.parent
        library = {"site-packages", "dist-packages"} & set(path.parts) or any(map(path.is_relative_to, STANDARD))
        return not library and not any(folder.glob(f"{top}-*.dist-info"))


def _functions(thing: Any) -> list[FunctionType]:
    """A function itself, or the functions in a class that were written and not generated."""
    found = [thing] if isinstance(thing, FunctionType) else filter(inspect.isfunction, vars(thing).values())
    unwrapped = [inspect.unwrap(function) for function in found]
    made = {function for function in unwrapped if function.__name__.startswith("__")}  # perhaps by `dataclass`
    return [function for function in unwrapped if function not in made or function.__code__.co_filename != "<string>"]


def _place(thing: Any) -> str:
    """The file, or the cell of a notebook, in which a class or function was written."""
    for function in _functions(thing):
        return function.__code__.co_filename
    return str(getattr(sys.modules.get(thing.__module__), "__file__", ""))


def _statements(filename: str) -> list[ast.stmt] | None:
    """The statements of a file or cell, without docstrings; None where there is no source."""
    text = "".join(linecache.getlines(filename)) if filename.startswith("<") else _text(filename)
    if not text:
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # for instance notebook magic
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree.body


def _text(filename: str) -> str:
    try:
        return Path(filename).read_bytes().decode()
    except (OSError, ValueError):
        return ""


def _found(name: str) -> str | None:
    """The file of a module that is not loaded yet."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement binds or modifies."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    return {root for node in ast.walk(statement) for root in _written(node)}


def _written(node: ast.AST) -> Iterator[str]:
    """Names that a node binds or may modify: a in `a.b[c] = …`, and every name in a bare call such as `a.append(x)`."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from (inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name))
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute | ast.Subscript):
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield inner.id


def _used(statement: ast.stmt) -> set[str]:
    """All names in a statement, and those attributes that are in BY_NAME."""
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return names | {
        node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute) and node.attr in BY_NAME
    }
