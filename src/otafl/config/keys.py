"""What the keys of a configuration are: meaning, default and allowed values, read from the classes that have them.

The meaning of a key is the string under its field; its range is in the field's type. So what `otafl describe` says,
what `otafl config` shows and what the page docs/configuration.md lists are one text.

Knows: sections, the classes that a configuration can choose, where docstrings stand.
Does not know: how values are used.
"""

import ast
import dataclasses
import functools
import inspect
import re
import shlex
import textwrap
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from otafl import registry
from otafl.config.presets import PRESETS
from otafl.config.schema import (
    CHOSEN,
    PARTITION_KEYS,
    PLAIN,
    SECTIONS,
    as_toml,
    file_layer,
    load_config,
)
from otafl.errors import ConfigError
from otafl.world.partition import Partition

WIDTH = 100
KINDS = {"mobility": "kinds of motion", "pathloss": "laws of path loss", "fading": "laws of fading"}
LIMITS = ((Gt, "gt", "above"), (Ge, "ge", "at least"), (Lt, "lt", "below"), (Le, "le", "at most"))


class Key(NamedTuple):
    """A key of a section."""

    section: str
    name: str
    default: str
    """As TOML; "" if the key must be given, or is left out unless given."""
    allowed: str
    """Type and range, in words."""
    meaning: str

    @property
    def path(self) -> str:
        """The name by which --set reaches it."""
        return f"{self.section}.{self.name}"


def keys_of(section: str, cls: Any) -> list[Key]:
    """The keys that a class gives its section."""
    meanings = _meanings(cls)
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        value = field.default_factory() if callable(field.default_factory) else field.default
        default = "" if value in (dataclasses.MISSING, None) else as_toml(value)
        found.append(Key(section, field.name, default, _allowed(hints[field.name]), meanings.get(field.name, "")))
    return found


@functools.cache
def _meanings(cls: type[Any]) -> Mapping[str, str]:
    """Field to the string under it, also those of the classes it is made from."""
    found: dict[str, str] = {}
    part: Any
    for part in reversed(cls.__mro__):
        if part.__module__ in ("builtins", "typing") or not dataclasses.is_dataclass(part):
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cast(type, part)))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue  # made where there is no source, for instance at a prompt
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                value = text.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[field.target.id] = " ".join(value.value.split())
    return found


def _allowed(hint: Any) -> str:
    """A type and its range in words.

    >>> _allowed(Annotated[float, Gt(0), Le(5)]), _allowed(Literal["a", "b"]), _allowed(tuple[int, ...])
    ('number above 0 and at most 5', '"a" or "b"', 'list of whole numbers')
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        words, sizes = [], list[str]()
        for limit in parts[1:]:
            for kind, name, word in LIMITS:
                if isinstance(limit, kind):
                    value = getattr(limit, name)
                    words.append(f"{word} {value:,}" if isinstance(value, int) else f"{word} {value:g}")
            if isinstance(limit, MinLen):
                sizes.append(", not empty")
            if isinstance(limit, MaxLen):
                sizes.append(f", at most {limit.max_length:,} of them")
        return f"{_allowed(parts[0])} {' and '.join(words)}".strip() + "".join(sizes)
    if origin is Literal:
        return _either([as_toml(part) for part in parts])
    if origin in (Union, types.UnionType):
        return _either([_allowed(part) for part in parts if part is not type(None)])
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return "list of " + _plural(_allowed(parts[0]))
        return f"list of {len(parts)}: " + ", ".join(map(_allowed, parts))
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(hint, str(hint))


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _plural(text: str) -> str:
    for one in ("whole number", "number", "text"):
        if text.startswith(one):
            return {"text": "texts"}.get(one, f"{one}s") + text[len(one) :]
    return {"true or false": "true and false"}.get(text, text.replace("list of", "lists of", 1))


def section_keys(section: str, choice: str | None = None) -> list[Key]:
    """All keys of a section, with those of the class that `choice` names (default: the default one)."""
    if section in PLAIN:
        return keys_of(section, PLAIN[section])
    kind, default = CHOSEN[section]
    keys = [
        Key(section, "name", as_toml(default), f"see 'otafl list {kind}'", f"Which of the {KINDS.get(kind, kind)}.")
    ]
    keys += keys_of(section, registry.lookup(kind, choice or default, f"{section}.name"))
    return keys + (keys_of(section, Partition) if section == "data" else [])


def every_key() -> list[Key]:
    """All keys of all sections and of everything that can be chosen; of a name that several have, the first."""
    found: dict[str, Key] = {}
    for section in SECTIONS:
        for choice in registry.names(CHOSEN[section][0]) if section in CHOSEN else [None]:
            for key in section_keys(section, choice):
                found.setdefault(key.path, key)
    return list(found.values())


def sections_with(name: str) -> list[str]:
    """The keys, as section.key, that end in a name."""
    return [key.path for key in every_key() if key.name == name]


# --- one part, for `otafl describe` ---


def describe(topic: str) -> str:
    """What a section, a key, or a part that a configuration can choose is, with its keys, as lines of text.

    >>> print(describe("fading.k_factor").splitlines()[0])
    fading.k_factor (of rician)  default 5.0; number at least 0 and at most 1e+06
    """
    section, dot, rest = topic.partition(".")
    if topic in PRESETS:
        same = [part for part in CHOSEN if topic in registry.names(CHOSEN[part][0])]
        return "\n\n".join([_preset(topic), *(_part(part, topic) for part in same)])
    if not dot and section not in SECTIONS:
        return _part(*_owner(topic))
    if section not in SECTIONS:
        raise ConfigError(f"describe {topic}: unknown section{registry.nearest(section, SECTIONS)}")
    if not dot:
        return _section(section)
    if section in CHOSEN and rest in registry.names(CHOSEN[section][0]):
        return _part(section, rest)
    return _one_key(section, rest)


def _owner(name: str) -> tuple[str, str]:
    """The section and name of a part that was named alone."""
    having = [section for section in CHOSEN if name in registry.names(CHOSEN[section][0])]
    if len(having) == 1:
        return having[0], name
    if having:
        raise ConfigError(f"describe {name}: several have that name: {', '.join(f'{s}.{name}' for s in having)}")
    if keys := sections_with(name):
        raise ConfigError(f"describe {name}: a key is named with its section: {', '.join(keys)}")
    known = [*SECTIONS, *PRESETS, *(part for section in CHOSEN for part in registry.names(CHOSEN[section][0]))]
    raise ConfigError(
        f"describe {name}: unknown{registry.nearest(name, known)}; name a section ({', '.join(SECTIONS)}), "
        "section.key, a preset, or what 'otafl list' shows"
    )


def _preset(name: str) -> str:
    lines = [f"preset {name}: {PRESETS[name].summary}", ""]
    layer = PRESETS[name].layer()
    lines += [f"  {section}.{key} = {as_toml(value)}" for section, keys in layer.items() for key, value in keys.items()]
    rest = "all else as in the paper's stationary setting" if layer else "every key has its default"
    return "\n".join([*lines, f"  {rest}", "", f"all keys   otafl config {name}", f"run        otafl run {name}"])


def _section(section: str) -> str:
    if section in PLAIN:
        return "\n".join([_told(f"[{section}]  {first_paragraph(PLAIN[section])}"), "", *_rows(section_keys(section))])
    kind, default = CHOSEN[section]
    lines = [f"[{section}] chooses one of the {kind} by `name`; default {default}.", ""]
    names = registry.names(kind)
    width = max(map(len, names)) + 2
    lines += [_told(f"  {name:<{width}}{registry.summary(kind, name)}", width + 2) for name in names]
    if section == "data":
        lines += ["", "Whatever the data, devices get their images by:", "", *_rows(keys_of(section, Partition))]
    return "\n".join([*lines, "", f"keys of one   otafl describe {section}.{names[0]}"])


def _part(section: str, name: str) -> str:
    kind = CHOSEN[section][0]
    cls = registry.lookup(kind, name, f"{section}.name")
    keys = keys_of(section, cls)
    lines = [_told(f"{section}.{name}  {first_paragraph(cls)}"), ""]
    lines += _rows(keys) if keys else ["  It has no keys."]
    own = [key for key in keys if key.default and key.name in inspect.get_annotations(cls)]
    example = f"otafl run stationary --set {section}.name={name}"
    example += f" --set {own[0].path}={own[0].default}" if own else ""
    file = registry.file_of(cls)
    example += f" --plugin {shlex.quote(file)}" if file else ""
    lines += ["", f"use     {example}", f"source  {file or cls.__module__}:{cls.__qualname__}"]
    if section == "algorithm" and name in registry.BUILTIN[kind]:
        lines.append(f"page    docs/algorithms/{name}.md")
    return "\n".join(lines)


def _one_key(section: str, name: str) -> str:
    found: dict[Key, list[str]] = {}
    if section in PLAIN:
        found = {key: [] for key in section_keys(section) if key.name == name}
    else:
        for choice in registry.names(CHOSEN[section][0]):
            for key in section_keys(section, choice):
                if key.name == name:
                    found.setdefault(key, []).append(choice)
    if not found:
        known = sorted({key.name for key in every_key() if key.section == section})
        choices = registry.names(CHOSEN[section][0]) if section in CHOSEN else []
        raise ConfigError(
            f"describe {section}.{name}: unknown{registry.nearest(name, [*known, *choices])}; "
            f"[{section}] has {', '.join(known)}"
        )
    return "\n".join(_told_key(key, owners) for key, owners in found.items())


def _told_key(key: Key, owners: Sequence[str]) -> str:
    everyone = key.section not in CHOSEN or key.name in PARTITION_KEYS | {"name"}
    whose = "" if everyone else f" (of {', '.join(owners)})"
    return f"{key.path}{whose}  {_facts(key)}\n{_told('    ' + key.meaning, 4)}"


def _facts(key: Key) -> str:
    shown = key.default if len(key.default) < 60 else key.default[:56] + " …"
    return f"default {shown}; {key.allowed}" if shown else key.allowed


def _rows(keys: Sequence[Key]) -> list[str]:
    return [f"  {key.path}  {_facts(key)}\n{_told('      ' + (key.meaning or '(no description)'), 6)}" for key in keys]


def first_paragraph(cls: Any) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def _told(text: str, indent: int = 0) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


# --- a whole configuration, for `otafl config` ---


def explained(source: str | Path, overrides: Mapping[str, Any]) -> str:
    """A resolved configuration as TOML, every key with its meaning, range, and where its value came from."""
    config = load_config(source, overrides)
    given, place = file_layer(source), f"preset {source}" if str(source) in PRESETS else str(source)
    parts = []
    for section, values in config.to_dict().items():
        parts.append(f"[{section}]")
        known = {key.name: key for key in section_keys(section, values.get("name") if section in CHOSEN else None)}
        for name, value in values.items():
            key = known[name]
            if key.path in overrides:
                origin = "--set"
            elif name in given.get(section, {}) and as_toml(value) != key.default:
                origin = place
            else:
                origin = "default" if as_toml(value) == key.default else f"{place}, scaled"
            if origin != "default" and key.default:
                origin += f"; default {key.default}"
            parts += [f"# {line}" for line in textwrap.wrap(f"{key.meaning} ({key.allowed})", WIDTH - 2)]
            parts.append(f"{name} = {as_toml(value)}  # {origin}")
        parts += [
            f"# {name}: {key.meaning} ({key.allowed}; not set)" for name, key in known.items() if name not in values
        ]
        parts.append("")
    return "\n".join(parts)


# --- for completion in a shell ---


def section_choices(section: str) -> list[str]:
    """The keys of a section, as section.key, whatever class it chooses."""
    choices = registry.BUILTIN[CHOSEN[section][0]] if section in CHOSEN else [None]
    return list(dict.fromkeys(key.path for choice in choices for key in section_keys(section, choice)))


def values_of(path: str) -> list[str]:
    """The words that a key may have; [] for a number or a text."""
    section, _, name = path.partition(".")
    if section in CHOSEN and name == "name":
        return registry.names(CHOSEN[section][0])
    choices = registry.BUILTIN[CHOSEN[section][0]] if section in CHOSEN else [None]
    for key in (key for choice in choices for key in section_keys(section, choice) if key.name == name):
        words = re.findall(r'"([^"]*)"', key.allowed)
        return ["true", "false"] if key.allowed == "true or false" else words
    return []
