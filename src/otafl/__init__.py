"""otafl: over-the-air federated learning, every method in one harness on the same wireless world.

    import otafl
    result = otafl.run(otafl.load_config("quick", {"algorithm.name": "fedavg"}))
    result.metrics["test_accuracy"]     # [seeds, recorded rounds]

Names are loaded when first used, so that `import otafl` is quick.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from otafl._version import __version__
from otafl.registry import register

if TYPE_CHECKING:
    from otafl.algorithms.parts.memoryless import State
    from otafl.algorithms.parts.truncated import above_threshold, full_amplitude, heard_mean
    from otafl.config.schema import Config, load_config
    from otafl.conformance import Finding, check
    from otafl.core.contract import Algorithm, Info, Problem
    from otafl.core.round import Round
    from otafl.engine.devices import Devices
    from otafl.engine.models import TaskShape
    from otafl.engine.updates import Updates
    from otafl.errors import OtaflError
    from otafl.radio.csi import Reports, View
    from otafl.radio.knowledge import Knowledge
    from otafl.radio.vectors import Vectors
    from otafl.random import Streams
    from otafl.report.compare import compare
    from otafl.report.plot import plot
    from otafl.report.runs import read_runs
    from otafl.report.statistics import compared, estimate, final_accuracy, last_accuracy, paired_difference
    from otafl.runs.result import Result, read_run
    from otafl.simulation.build import Simulation
    from otafl.simulation.run import run
    from otafl.world.channel import trajectory
    from otafl.world.data import Dataset, Split

_HOMES = {
    "Algorithm": "otafl.core.contract",
    "Reports": "otafl.radio.csi",
    "Simulation": "otafl.simulation.build",
    "State": "otafl.algorithms.parts.memoryless",
    "Updates": "otafl.engine.updates",
    "compared": "otafl.report.statistics",
    "compare": "otafl.report.compare",
    "plot": "otafl.report.plot",
    "read_runs": "otafl.report.runs",
    "estimate": "otafl.report.statistics",
    "final_accuracy": "otafl.report.statistics",
    "last_accuracy": "otafl.report.statistics",
    "paired_difference": "otafl.report.statistics",
    "read_run": "otafl.runs.result",
    "trajectory": "otafl.world.channel",
    "Info": "otafl.core.contract",
    "Problem": "otafl.core.contract",
    "Round": "otafl.core.round",
    "Config": "otafl.config.schema",
    "load_config": "otafl.config.schema",
    "Finding": "otafl.conformance",
    "check": "otafl.conformance",
    "TaskShape": "otafl.engine.models",
    "OtaflError": "otafl.errors",
    "Knowledge": "otafl.radio.knowledge",
    "Devices": "otafl.engine.devices",
    "Vectors": "otafl.radio.vectors",
    "above_threshold": "otafl.algorithms.parts.truncated",
    "full_amplitude": "otafl.algorithms.parts.truncated",
    "heard_mean": "otafl.algorithms.parts.truncated",
    "View": "otafl.radio.csi",
    "Streams": "otafl.random",
    "Result": "otafl.runs.result",
    "run": "otafl.simulation.run",
    "Dataset": "otafl.world.data",
    "Split": "otafl.world.data",
}
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


__all__ = [
    "Algorithm",
    "Config",
    "Dataset",
    "Devices",
    "Finding",
    "Info",
    "Knowledge",
    "OtaflError",
    "Problem",
    "Reports",
    "Result",
    "Round",
    "Simulation",
    "Split",
    "State",
    "Streams",
    "TaskShape",
    "Updates",
    "Vectors",
    "View",
    "__version__",
    "above_threshold",
    "check",
    "compare",
    "compared",
    "estimate",
    "final_accuracy",
    "full_amplitude",
    "heard_mean",
    "last_accuracy",
    "load_config",
    "paired_difference",
    "plot",
    "read_run",
    "read_runs",
    "register_algorithm",
    "register_dataset",
    "register_fading",
    "register_mobility",
    "register_model",
    "register_pathloss",
    "run",
    "trajectory",
]
