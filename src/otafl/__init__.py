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
    from otafl.report.compare import comparison
    from otafl.report.figures import accuracy_over_rounds
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
    "accuracy_over_rounds": "otafl.report.figures",
    "compared": "otafl.report.statistics",
    "comparison": "otafl.report.compare",
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
    """Class decorator: `[algorithm] name = "..."` chooses this class."""
    return register("algorithms", name)


def register_model(name: str) -> Callable[[Class], Class]:
    """Class decorator: `[model] name = "..."` chooses this class."""
    return register("models", name)


def register_dataset(name: str) -> Callable[[Class], Class]:
    """Class decorator: `[data] name = "..."` chooses this class."""
    return register("datasets", name)


def register_fading(name: str) -> Callable[[Class], Class]:
    """Class decorator: `[fading] name = "..."` chooses this class."""
    return register("fading", name)


def register_mobility(name: str) -> Callable[[Class], Class]:
    """Class decorator: `[mobility] name = "..."` chooses this class."""
    return register("mobility", name)


def register_pathloss(name: str) -> Callable[[Class], Class]:
    """Class decorator: `[pathloss] name = "..."` chooses this class."""
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
    "accuracy_over_rounds",
    "check",
    "compared",
    "comparison",
    "estimate",
    "final_accuracy",
    "full_amplitude",
    "heard_mean",
    "last_accuracy",
    "load_config",
    "paired_difference",
    "read_run",
    "register_algorithm",
    "register_dataset",
    "register_fading",
    "register_mobility",
    "register_model",
    "register_pathloss",
    "run",
    "trajectory",
]
