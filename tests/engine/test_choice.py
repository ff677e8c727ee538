"""Which engine a run takes: a rule of model and batch, said in the summary, kept when a run is continued."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import otafl
from otafl.errors import ConfigError
from tests.conftest import make_config, simulate

IMAGES = {"data.name": "digits", "model.name": "cnn"}


def config_of(keys: dict[str, Any]) -> otafl.Config:
    """The tiny world with other keys; those that do not fit are dropped."""
    return make_config("fedavg").replace(keys)


@pytest.mark.parametrize(
    ("keys", "engine"),
    [
        ({"model.hidden": [50]}, "preactivation"),
        ({**IMAGES, "model.channels": [3]}, "batched"),
        ({**IMAGES, "model.channels": [32, 64], "training.batch_size": 32}, "threads"),
        ({"training.engine": "reference"}, "reference"),
    ],
)
def test_the_rule(keys: dict[str, Any], engine: str) -> None:
    assert simulate(config_of(keys)).engine_name == engine


def test_layers_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="its kernels need a GPU"):
        simulate(config_of({**IMAGES, "training.engine": "layers"}))


class View(nn.Module):
    """Flattens by hand, in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(64, 5), nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "view":
                x = x.view(x.size(0), -1)
            case "shape":
                x = x.reshape(x.shape[0], -1)
            case "number":
                x = x.view(-1, 64)
            case "flatten":
                x = torch.flatten(x, 1)
        scores: torch.Tensor = self.last(torch.relu(self.first(x)))
        return scores


@pytest.mark.parametrize("net", [nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))]
                         + [View(how) for how in ("view", "shape", "number", "flatten")])  # fmt: skip
def test_flattening_does_not_hide_a_linear_first_layer(net: nn.Module) -> None:
    config = config_of({"data.name": "digits", "experiment.rounds": 2})
    assert simulate(config, model=net).engine_name == "preactivation"
    one, other = (otafl.run(config.replace({"training.engine": e}), model=net) for e in ("auto", "reference"))
    assert torch.allclose(one.params, other.params, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 64)), nn.Linear(64, 10)),
        nn.Sequential(nn.Unflatten(-1, (8, 8)), nn.Linear(8, 10), nn.Flatten(), nn.Linear(80, 10)),
    ],
)
def test_other_reshapes_are_left_alone(net: nn.Module) -> None:
    assert simulate(config_of({"data.name": "digits"}), model=net).engine_name == "batched"


def test_a_run_says_its_engine_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version's rule may choose another one; the run goes on as it began, to the same bytes."""
    config = config_of({**IMAGES, "model.channels": [3], "experiment.checkpoint_s": 1e-9})
    whole = otafl.run(config, out=tmp_path / "whole", device="cpu")
    assert whole.summary["engine"] == "batched"

    class Stop(Exception):
        pass

    def until(done: int, row: Any) -> None:
        if done > 2:
            raise Stop

    with pytest.raises(Stop):
        otafl.run(config, out=tmp_path / "parts", device="cpu", observer=until)
    monkeypatch.setattr("otafl.simulation.build.THREADS_FROM", 0)
    assert simulate(config).engine_name == "threads"
    parts = otafl.run(config, out=tmp_path / "parts", device="cpu")
    assert parts.summary["engine"] == "batched"
    assert "engine batched" in (tmp_path / "parts" / "log.txt").read_text()
    assert (tmp_path / "parts" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


MEMORY = """
import json, resource, sys
import torch
import otafl
torch.set_num_threads(1)
keys = {"data.name": "synthetic", "data.features": 64, "data.train_images": 4000, "model.name": "mlp",
        "model.hidden": [1200], "training.engine": "batched", "training.local_steps": 1, "training.batch_size": 4,
        "cell.devices": int(sys.argv[1]), "cell.cohort": 10, "experiment.rounds": 2, "experiment.seeds": [0],
        "algorithm.name": sys.argv[2]}
result = otafl.run(otafl.load_config("stationary", keys), device="cpu")
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result.params.shape[1] * 4 / 2**20]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "opc"])
def test_devices_outside_the_cohort_cost_no_memory(algorithm: str) -> None:
    """800 devices more, of which none takes part in more rounds: less than a tenth of their models."""
    peaks = []
    for devices in ("200", "1000"):
        command = [sys.executable, "-c", MEMORY, devices, algorithm]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(json.loads(done.stdout))
    assert peaks[1][0] - peaks[0][0] < 0.1 * 800 * peaks[0][1]
