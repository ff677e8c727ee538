"""States of methods as trees of tensors: dataclasses whose fields are tensors, such dataclasses, or None.

Knows: dataclasses and tensors.
Does not know: what a method keeps in them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from otafl.errors import PluginError

Part = TypeVar("Part")


def tensors_of(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a state, by dotted names."""
    named: dict[str, Tensor] = {}
    for f in dataclasses.fields(state):
        value = getattr(state, f.name)
        if isinstance(value, Tensor):
            named[prefix + f.name] = value
        elif dataclasses.is_dataclass(value):
            named |= tensors_of(value, f"{prefix}{f.name}.")
        elif value is not None:
            raise PluginError(
                f"state field {prefix}{f.name} is a {type(value).__name__}; only tensors and dataclasses of tensors "
                "can be saved in a checkpoint"
            )
    return named


def parts_of(state: Any, kind: type[Part]) -> list[Part]:
    """The parts of a state that are instances of a class, in the order of the fields."""
    found: list[Part] = []
    for f in dataclasses.fields(state):
        value = getattr(state, f.name)
        if isinstance(value, kind):
            found.append(value)
        elif dataclasses.is_dataclass(value):
            found += parts_of(value, kind)
    return found


def rebuilt(state: Any, new: Callable[[str, Tensor], Tensor], prefix: str = "") -> Any:
    """A state of the same form, with `new(name, tensor)` in place of each tensor."""
    values = {}
    for f in dataclasses.fields(state):
        value, name = getattr(state, f.name), prefix + f.name
        if isinstance(value, Tensor):
            values[f.name] = new(name, value)
        elif dataclasses.is_dataclass(value):
            values[f.name] = rebuilt(value, new, f"{name}.")
    return dataclasses.replace(state, **values)


def continued(template: Any, saved: Any) -> Any:
    """Adapt a saved state to this machine; a part of the template with a method `continued` converts its saved part."""
    values = {}
    for f in dataclasses.fields(template):
        value = getattr(template, f.name)
        if dataclasses.is_dataclass(value):
            values[f.name] = continued(value, getattr(saved, f.name))
    saved = dataclasses.replace(saved, **values)
    return template.continued(saved) if hasattr(template, "continued") else saved


def copied(state: Any) -> Any:
    """A copy of a state, with its own memory and the same layout."""

    def same(_: str, value: Tensor) -> Tensor:
        if value.is_contiguous() or 0 in value.stride():
            return value.clone()
        place = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return place.copy_(value)

    return rebuilt(state, same)


def unaliased(state: Any) -> Any:
    """A state whose tensors share no memory with one another, so that each can be overwritten."""
    seen: set[int] = set()

    def own(_: str, value: Tensor) -> Tensor:
        place = value.untyped_storage().data_ptr()
        alone = place not in seen and 0 not in value.stride()
        seen.add(place)
        return value if alone else value.clone()

    return rebuilt(state, own)


def overwrite(old: Any, new: Any) -> None:
    """Copy the tensors of the state `new` into those of `old`, which has the same form."""
    fresh = tensors_of(new)
    pairs = [(kept, fresh[name]) for name, kept in tensors_of(old).items()]
    memory = {kept.untyped_storage().data_ptr() for kept, _ in pairs}
    moved = [
        (kept, value.clone() if value.untyped_storage().data_ptr() in memory else value)
        for kept, value in pairs
        if (kept.data_ptr(), kept.stride()) != (value.data_ptr(), value.stride())
    ]
    for kept, value in moved:
        kept.copy_(value)
