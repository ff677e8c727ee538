"""The kernels for convolutions, run by Triton's interpreter on a CPU, and how models are read."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from otafl.engine.dropout import with_addressed_dropout
from otafl.engine.fast.layers import read_layers
from otafl.engine.models import CNN, PflCNN, ResNet, TaskShape

SHAPE = TaskShape(3 * 12 * 12, 10, (3, 12, 12))

SCRIPT = """
import sys
import numpy as np
import torch
from torch import nn

import otafl
from otafl.engine.models import ResNet, _Block
from tests.conftest import make_config, simulate

torch.manual_seed(0)


def norm(channels):
    return nn.GroupNorm(4, channels)


def end():
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


MODELS = {
    # grid kernels with no padding, bias, pooling through ReLU, dropout on flat values
    "pfl": nn.Sequential(nn.Unflatten(-1, (3, 12, 12)), nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 24), nn.ReLU(),
                         nn.Dropout(0.5), nn.Linear(24, 10)),
    # few channels: everything gathers
    "small": nn.Sequential(nn.Unflatten(-1, (3, 12, 12)), nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
                           nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)),
    # normalisation, both kinds of shortcut, stride 2, the weight's gradient on a grid
    "resnet": nn.Sequential(nn.Unflatten(-1, (3, 12, 12)), nn.Conv2d(3, 16, 3, 1, 1, bias=False), norm(16), nn.ReLU(),
                            _Block(16, 16, 1, 4), _Block(16, 32, 2, 8), *end(), nn.Linear(32, 10)),
    # a mean of few pixels straight into the output
    "wide": nn.Sequential(nn.Unflatten(-1, (3, 12, 12)), nn.Conv2d(3, 32, 3, 1, 1), norm(32), nn.ReLU(),
                          nn.Conv2d(32, 64, 3, 1, 1, bias=False), norm(64), nn.ReLU(), *end(), nn.Linear(64, 10)),
}
net = MODELS[sys.argv[1]]
draw = np.random.default_rng(0)
X, y = draw.standard_normal((40, 432)).astype(np.float32), draw.integers(10, size=40)


def trained(engine):
    keys = {"training.engine": engine, "training.precision": "float32", "training.batch_size": 3, "cell.devices": 2,
            "training.local_steps": 2, "experiment.seeds": [0], "training.momentum": float(sys.argv[2])}
    data = otafl.Dataset(otafl.Split(X, y), otafl.Split(X, y), None, 10, (3, 12, 12))
    config = make_config("fedavg", {key: value for key, value in keys.items()})
    sim = simulate(config, model=net, dataset=data)
    assert type(sim._engine).__name__ == ("ReferenceEngine" if engine == "reference" else "ChunkEngine")
    round_ = sim.round_at(0)
    shared = round_.train(sim.problem.initial)
    return round_.train(sim.problem.devices().models).end, shared.end, shared.norms(round_.everyone)


for one, other in zip(trained("reference"), trained("layers")):
    worst = float((one - other).abs().max() / one.abs().max())
    assert worst < 3e-6, worst
"""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "momentum"), [("pfl", 0.0), ("small", 0.5), ("resnet", 0.0), ("wide", 0.0)])
def test_kernels_for_convolutions_equal_the_reference(model: str, momentum: float) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SCRIPT, model, str(momentum)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def kinds(module: nn.Module) -> list[str] | None:
    module = with_addressed_dropout(module)
    drops = [f"{name}.key" for name, part in module.named_modules() if type(part).__name__ == "Dropout"]
    found = read_layers(module, torch.randn(2, SHAPE.num_features), drops)
    return None if found is None else [layer.kind for layer in found.layers]


def test_built_in_models_are_read() -> None:
    """ReLU is done with the layer before it, an addition with a normalisation."""
    conv = ["input", "images", "conv", "pool", "conv", "pool", "flatten", "linear"]
    assert kinds(CNN().build(SHAPE)) == conv
    pfl = ["input", "images", "conv", "conv", "pool", "flatten", "drop", "linear", "drop", "linear"]
    assert kinds(PflCNN().build(SHAPE)) == pfl
    block = ["conv", "norm", "conv", "norm"]
    down = ["conv", "norm", "conv", "conv", "norm"]
    body, end = ["conv", "norm", *block, *down, *down], ["mean", "flatten", "linear"]
    assert kinds(ResNet(8).build(SHAPE)) == ["input", "images", *body, *end]


class Twice(nn.Module):
    """Uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(SHAPE.num_features, SHAPE.num_features), nn.Linear(SHAPE.num_features, 10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.inner(self.inner(features).relu()).relu())
        return scores


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Unflatten(-1, (3, 12, 12)), nn.Conv2d(3, 4, 3, dilation=2), nn.Flatten(), nn.Linear(256, 10)),
        nn.Sequential(nn.Unflatten(-1, (3, 12, 12)), nn.Conv2d(3, 6, 3, groups=3), nn.Flatten(), nn.Linear(600, 10)),
        nn.Sequential(nn.Linear(SHAPE.num_features, 8), nn.Tanh(), nn.Linear(8, 10)),
        Twice(),
    ],
)
def test_models_with_other_layers_are_left_to_other_engines(module: nn.Module) -> None:
    assert kinds(module) is None
