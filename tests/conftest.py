"""Small worlds that every suite uses."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from otafl import registry
from otafl.config.schema import Config, load_config
from otafl.simulation.build import Simulation
from otafl.world.files import MNIST_FILES

torch.set_num_threads(1)  # two test processes share two cores

TINY = {
    "experiment.name": "tiny",
    "experiment.rounds": 5,
    "experiment.seeds": [0, 1],
    "experiment.eval_every": 1,
    "data.name": "synthetic",
    "data.train_images": 200,
    "data.test_images": 50,
    "data.features": 6,
    "data.classes": 3,
    "model.name": "mlp",
    "model.hidden": [5],
    "training.local_steps": 3,
    "training.batch_size": 4,
    "training.precision": "float64",
    "training.skip_unheard": False,  # the laws are about all devices
    "cell.devices": 4,
    "radio.noise_dbm_hz": -193.0,  # 20 dB less than the paper's, so that a model this small learns something
}
TINY_PARAMS = 6 * 5 + 5 + 5 * 3 + 3
# γ that gives the tiny model the threshold of the paper's network: about half of four devices are heard
TINY_GAMMA = 1e-9 * (TINY_PARAMS / 814_090) ** 0.5 * 0.5


def has_gamma(algorithm: str) -> bool:
    """Whether a method takes FedOAG's threshold."""
    return any(field.name == "gamma" for field in dataclasses.fields(registry.lookup("algorithms", algorithm)))


def make_config(algorithm: str = "fedoag", overrides: Mapping[str, Any] | None = None) -> Config:
    """The tiny configuration of an algorithm."""
    gamma = {"algorithm.gamma": TINY_GAMMA} if has_gamma(algorithm) else {}
    more = {"algorithm.deadline_s": 0.2} if algorithm == "hybrid" else {}  # some devices go digital, and some do not
    return load_config("stationary", {**TINY, "algorithm.name": algorithm, **gamma, **more, **(overrides or {})})


def make_quadratic(algorithm: str = "fedoag", overrides: Mapping[str, Any] | None = None) -> Config:
    """The tiny world on a noise-free quadratic problem with full local gradients; the same devices are heard."""
    wanted = {
        **{key: value for key, value in TINY.items() if not key.startswith(("data.", "model."))},
        "data.name": "quadratic",
        "data.dimension": 3,
        "model.name": "point",
        "model.start": 0.5,
        "training.batch_size": 1,
        "training.lr": 0.05,
        "training.lr_schedule": "constant",
        "radio.noise_dbm_hz": float("-inf"),
        "algorithm.name": algorithm,
        **(overrides or {}),
    }
    if has_gamma(algorithm):
        wanted.setdefault("algorithm.gamma", TINY_GAMMA * (wanted["data.dimension"] / TINY_PARAMS) ** 0.5)
    return load_config("stationary", wanted)


def simulate(config: Config, device: str = "cpu", **keys: Any) -> Simulation:
    """A simulation on a device."""
    return Simulation(config, torch.device(device), **keys)


@pytest.fixture(scope="session")
def mnist() -> Path:
    """The folder of the MNIST files, fetched where they are not there yet."""
    return MNIST_FILES.fetch()


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the library's own names are known, whatever other tests have registered, and what the test adds is lost."""
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry.BUILTIN})
