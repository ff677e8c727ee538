"""Named starting configurations. A preset holds what differs from the defaults, the paper's stationary setting.

Knows: sections and keys.
Does not know: how they are validated or run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from otafl.world.files import MNIST_FILES

Layer = dict[str, dict[str, Any]]
"""Section to its keys and values."""


class Preset(NamedTuple):
    """A one-line description, and a function that gives the keys which differ from the defaults."""

    summary: str
    layer: Callable[[], Layer]


WALK = {"name": "bounded-waypoint"}


def _world(name: str, **sections: dict[str, Any]) -> Callable[[], Layer]:
    return lambda: {"experiment": {"name": name}, **sections}


def _quick() -> Layer:
    found = MNIST_FILES.locate() is not None
    return {
        "experiment": {"name": "quick", "rounds": 100, "seeds": [0, 1]},
        "data": {"name": "mnist" if found else "digits"},
        "model": {"name": "mlp", "hidden": [256]},
        "training": {"lr": 0.5, "clip": 4.0, "warmup": 10},
        "algorithm": {"name": "fedoag-zero"},
    }


PRESETS = {
    "stationary": Preset("the paper's setting; devices do not move", dict),
    "nonstationary": Preset(
        "the paper's setting; every device walks in its territory",
        _world("nonstationary", mobility={**WALK, "moving_fraction": 1.0}),
    ),
    "mixed": Preset(
        "the paper's setting; half of the devices walk", _world("mixed", mobility={**WALK, "moving_fraction": 0.5})
    ),
    "rician": Preset(
        "the paper's cell with line of sight to everybody: Rician fading, K = 5",
        _world("rician", fading={"name": "rician", "k_factor": 5.0}),
    ),
    "nakagami": Preset(
        "the paper's cell with deeper fading than Rayleigh's: Nakagami, m = 1/2",
        _world("nakagami", fading={"name": "nakagami", "m": 0.5}),
    ),
    "shadowed": Preset(
        "the paper's walking devices under shadowing of 8 dB that changes over 50 m",
        _world("shadowed", pathloss={"name": "log-distance", "shadowing_db": 8.0}, mobility=WALK),
    ),
    "correlated": Preset(
        "the paper's cell with fading that lasts: Clarke's, Doppler 0.002 Hz, some 25 rounds",
        _world("correlated", fading={"name": "rayleigh", "memory": "clarke", "scatter_doppler_hz": 0.002}),
    ),
    "urban": Preset(
        "walking devices in an urban macro cell of TR 38.901: line of sight for some, shadowing",
        _world("urban", pathloss={"name": "uma"}, mobility=WALK),
    ),
    "quick": Preset("a minute: FedOAG-zero on MNIST if found, else digits; 256 units, 100 rounds, 2 seeds", _quick),
}
