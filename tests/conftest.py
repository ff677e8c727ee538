"""Small worlds that every suite uses."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import otafl
from otafl.config import Config, load_config
from otafl.simulation import Simulation
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
    "training.dtype": "float64",
    "cell.devices": 4,
    "radio.noise_dbm_hz": -193.0,  # 20 dB less than the paper's, so that a model this small learns something
}
TINY_PARAMS = 6 * 5 + 5 + 5 * 3 + 3
# γ that gives the tiny model the threshold of the paper's network: about half of four devices are heard
TINY_GAMMA = 1e-9 * (TINY_PARAMS / 814_090) ** 0.5 * 0.5


def make_config(algorithm: str = "fedoag", overrides: Mapping[str, Any] | None = None) -> Config:
    """The tiny configuration of an algorithm."""
    gamma = {"algorithm.gamma": TINY_GAMMA} if algorithm in ("fedoag", "ota-fedavg") else {}
    return load_config("stationary", {**TINY, "algorithm.name": algorithm, **gamma, **(overrides or {})})


def quadratic(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Overrides for a noise-free quadratic problem with full local gradients."""
    return {
        "data.name": "quadratic",
        "data.dimension": 3,
        "model.name": "point",
        "model.start": 0.5,
        "training.batch_size": 1,
        "training.lr": 0.05,
        "training.lr_schedule": "constant",
        "radio.noise_dbm_hz": float("-inf"),
        **(overrides or {}),
    }


# what the tiny overrides of data and model would not fit
def make_quadratic(algorithm: str = "fedoag", overrides: Mapping[str, Any] | None = None) -> Config:
    """The tiny world on a quadratic problem; γ such that the same devices are heard."""
    base = {key: value for key, value in TINY.items() if not key.startswith(("data.", "model."))}
    wanted = {**base, **quadratic(), "algorithm.name": algorithm, **(overrides or {})}
    if algorithm in ("fedoag", "ota-fedavg"):
        wanted.setdefault("algorithm.gamma", TINY_GAMMA * (wanted["data.dimension"] / TINY_PARAMS) ** 0.5)
    return load_config("stationary", wanted)


def simulate(config: Config, device: str = "cpu", **keys: Any) -> Simulation:
    """A simulation on a device."""
    return Simulation(config, torch.device(device), **keys)


@pytest.fixture(scope="session", autouse=True)
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST in OTAFL_DATA, fetched where it is not there yet."""
    if not os.environ.get("OTAFL_DATA"):
        os.environ["OTAFL_DATA"] = str(Path("~/.cache/otafl").expanduser())
    return Path(os.environ["OTAFL_DATA"])


@pytest.fixture(scope="session")
def mnist(data_directory: Path) -> Path:
    """The folder of the MNIST files."""
    return MNIST_FILES.fetch()


@pytest.fixture
def run_tiny() -> Callable[..., otafl.Result]:
    """Run the tiny configuration of an algorithm in memory."""

    def run(algorithm: str = "fedoag", overrides: Mapping[str, Any] | None = None, **keys: Any) -> otafl.Result:
        return otafl.run(make_config(algorithm, overrides), device="cpu", **keys)

    return run
