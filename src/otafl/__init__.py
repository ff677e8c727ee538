"""otafl: over-the-air federated learning, every method in one harness on the same wireless world.

    import otafl
    result = otafl.run(otafl.load_config("quick", {"algorithm.name": "fedavg"}))
    result.metrics["test_accuracy"]     # [seeds, recorded rounds]

Names are loaded when first used, so that `import otafl` is quick.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from otafl._version import __version__ as __version__
from otafl.registry import register

if TYPE_CHECKING:
    from otafl.algorithms.parts.memoryless import State as State
    from otafl.algorithms.parts.truncated import (
        above_threshold as above_threshold,
        full_amplitude as full_amplitude,
        heard_mean as heard_mean,
    )
    from otafl.config.schema import Config as Config, load_config as load_config
    from otafl.conformance import Finding as Finding, check as check
    from otafl.core.contract import Algorithm as Algorithm, Info as Info, Problem as Problem
    from otafl.core.round import Round as Round
    from otafl.engine.devices import Devices as Devices
    from otafl.engine.models import TaskShape as TaskShape
    from otafl.engine.updates import Updates as Updates
    from otafl.errors import OtaflError as OtaflError
    from otafl.radio.csi import Reports as Reports, View as View
    from otafl.radio.knowledge import Knowledge as Knowledge
    from otafl.radio.vectors import Vectors as Vectors
    from otafl.random import Streams as Streams
    from otafl.report.compare import compare as compare
    from otafl.report.plot import plot as plot
    from otafl.report.runs import read_runs as read_runs
    from otafl.report.statistics import (
        compared as compared,
        estimate as estimate,
        final_accuracy as final_accuracy,
        last_accuracy as last_accuracy,
        paired_difference as paired_difference,
    )
    from otafl.runs.result import Result as Result, read_run as read_run
    from otafl.simulation.build import Simulation as Simulation
    from otafl.simulation.run import run as run
    from otafl.world.channel import trajectory as trajectory
    from otafl.world.data import Dataset as Dataset, Split as Split

_NAMES = {
    "otafl.algorithms.parts.memoryless": "State",
    "otafl.algorithms.parts.truncated": "above_threshold full_amplitude heard_mean",
    "otafl.config.schema": "Config load_config",
    "otafl.conformance": "Finding check",
    "otafl.core.contract": "Algorithm Info Problem",
    "otafl.core.round": "Round",
    "otafl.engine.devices": "Devices",
    "otafl.engine.models": "TaskShape",
    "otafl.engine.updates": "Updates",
    "otafl.errors": "OtaflError",
    "otafl.radio.csi": "Reports View",
    "otafl.radio.knowledge": "Knowledge",
    "otafl.radio.vectors": "Vectors",
    "otafl.random": "Streams",
    "otafl.report.compare": "compare",
    "otafl.report.plot": "plot",
    "otafl.report.runs": "read_runs",
    "otafl.report.statistics": "compared estimate final_accuracy last_accuracy paired_difference",
    "otafl.runs.result": "Result read_run",
    "otafl.simulation.build": "Simulation",
    "otafl.simulation.run": "run",
    "otafl.world.channel": "trajectory",
    "otafl.world.data": "Dataset Split",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
Class = TypeVar("Class", bound=type)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'otafl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def register_algorithm(name: str) -> Callable[[Class], Class]:
    """Class decorator that makes a method known: `[algorithm] name = "..."` then chooses it.

    The class is a frozen dataclass whose fields are the section's keys. It has what `Algorithm` lists::

        @otafl.register_algorithm("mine")
        @dataclass(frozen=True)
        class Mine:
            knowledge = otafl.Knowledge(device={"h"})
            gamma: float = 1e-9

            def init(self, problem): ...
            def step(self, state, round): ...

    Args:
        name: the name in a configuration.

    Raises:
        PluginError: another class has that name.
    """
    return register("algorithms", name)


def register_model(name: str) -> Callable[[Class], Class]:
    """Class decorator that makes a model known: `[model] name = "..."` then chooses it.

    The class is a frozen dataclass whose fields are the section's keys. It has `build(shape)`, which takes
    a `TaskShape` and returns a freshly initialised `nn.Module`.

    Args:
        name: the name in a configuration.

    Raises:
        PluginError: another class has that name.
    """
    return register("models", name)


def register_dataset(name: str) -> Callable[[Class], Class]:
    """Class decorator that makes a data set known: `[data] name = "..."` then chooses it.

    The class is a frozen dataclass whose fields are the section's keys. It has `load(num_devices)`, which
    returns a `Dataset`, the same for every seed.

    Args:
        name: the name in a configuration.

    Raises:
        PluginError: another class has that name.
    """
    return register("datasets", name)


def register_fading(name: str) -> Callable[[Class], Class]:
    """Class decorator that makes a fading law known: `[fading] name = "..."` then chooses it.

    The class is a frozen dataclass whose fields are the section's keys. It has two functions:
    `coefficients(positions_m, streams)` takes positions [T, M, 2] and `Streams` and returns fading g of unit mean
    power, complex [T, M]; `exceed_prob(power)` returns P(|g|² ≥ power) for an array of powers.

    Args:
        name: the name in a configuration.

    Raises:
        PluginError: another class has that name.
    """
    return register("fading", name)


def register_mobility(name: str) -> Callable[[Class], Class]:
    """Class decorator that makes a mobility law known: `[mobility] name = "..."` then chooses it.

    The class is a frozen dataclass whose fields are the section's keys. Its function
    `positions(start_m, cell_radius_m, num_rounds, streams)` returns positions [T, M, 2] in metres from first positions
    [M, 2]; the server is at the origin. The first rounds must not depend on `num_rounds`.

    Args:
        name: the name in a configuration.

    Raises:
        PluginError: another class has that name.
    """
    return register("mobility", name)


def register_pathloss(name: str) -> Callable[[Class], Class]:
    """Class decorator that makes a path-loss law known: `[pathloss] name = "..."` then chooses it.

    The class is a frozen dataclass whose fields are the section's keys. It has `mean_gain(distance_m)`,
    which returns the mean gain Λ, linear and positive, at each distance. A law that depends on more than distance also
    has `gains(positions_m, streams)`, which returns Λ [T, M] for positions [T, M, 2] and is then used instead.

    Args:
        name: the name in a configuration.

    Raises:
        PluginError: another class has that name.
    """
    return register("pathloss", name)


__all__ = sorted([*_HOMES, "__version__", *(name for name in vars() if name.startswith("register_"))])
