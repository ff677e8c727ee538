"""Named starting points: what differs from the defaults, which are the paper's stationary setting.

Knows: sections and keys.
Does not know: how they are validated or run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from otafl.world.files import MNIST_FILES

Layer = dict[str, dict[str, Any]]
"""Sections of keys."""


class Preset(NamedTuple):
    """One line about it, and the layer it puts on the defaults."""

    summary: str
    layer: Callable[[], Layer]


def _moving(name: str, fraction: float) -> Layer:
    return {
        "experiment": {"name": name},
        "mobility": {"name": "bounded-waypoint", "moving_fraction": fraction},
    }


def _quick() -> Layer:
    found = MNIST_FILES.locate() is not None
    return {
        "experiment": {"name": "quick", "rounds": 100, "seeds": [0, 1]},
        "data": {"name": "mnist" if found else "digits"},
        "model": {"name": "mlp", "hidden": [128]},
    }


PRESETS = {
    "stationary": Preset("the paper's setting; devices do not move", dict),
    "nonstationary": Preset(
        "the paper's setting; every device walks in its territory", lambda: _moving("nonstationary", 1.0)
    ),
    "mixed": Preset("the paper's setting; half of the devices walk", lambda: _moving("mixed", 0.5)),
    "quick": Preset("a minute: MNIST if found, else digits; 128 hidden units, 100 rounds, 2 seeds", _quick),
}
