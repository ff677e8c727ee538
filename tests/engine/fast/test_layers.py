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

ODD = """
import torch

from otafl.engine.fast import maps
from otafl.engine.fast.maps import Form, Map, Shape, new_map

# pooling of odd sizes: what no maximum was taken of has no gradient, whatever was in memory
like = torch.zeros(1)
x, y = new_map(2, 5, 7, 3, Form(), like), new_map(2, 2, 3, 3, Form(), like)
x.images.copy_(torch.randn(2, 5, 7, 3))
chosen = maps.pool(x, y, 2, relu=False)
slopes, out = new_map(2, 2, 3, 3, Form(), like), new_map(2, 5, 7, 3, Form(), like)
slopes.images.copy_(torch.randn(2, 2, 3, 3))
out.images.fill_(1000.0)
maps.pool_back(slopes, chosen, out, 2)
plain = x.images.permute(0, 3, 1, 2).contiguous().requires_grad_(True)
torch.nn.functional.max_pool2d(plain, 2).backward(slopes.images.permute(0, 3, 1, 2))
assert torch.equal(out.images.permute(0, 3, 1, 2), plain.grad)

# a row that is not finite does not touch another one
shape = Shape(32, 32, 3, 1, 1)
x, s = new_map(4, 6, 5, 32, shape.form, like), new_map(4, 6, 5, 32, shape.slope_form(shape.form), like)
x.images.copy_(torch.randn(4, 6, 5, 32))
s.images.copy_(torch.randn(4, 6, 5, 32))
clean = maps.convolve_slopes(x, s, 2, shape, "ieee")
x.images[2:] = torch.nan
s.images[2:] = torch.nan
found = maps.convolve_slopes(x, s, 2, shape, "ieee")
assert torch.equal(found[0], clean[0])
"""

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


def interpreted(script: str, *arguments: str) -> None:
    """Run a script with Triton's interpreter."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_odd_sizes_and_rows_that_are_not_finite() -> None:
    interpreted(ODD)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "momentum"), [("pfl", 0.0), ("small", 0.5), ("resnet", 0.0), ("wide", 0.0)])
def test_kernels_for_convolutions_equal_the_reference(model: str, momentum: float) -> None:
    interpreted(SCRIPT, model, str(momentum))


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


class Odd(nn.Module):
    """Computes something in a way that a careless reader takes for another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.image = how, nn.Unflatten(-1, (3, 12, 12))
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)
        self.last, self.other = nn.Linear(400, 10), nn.Linear(400, 10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        z = self.conv(self.image(features))
        z = torch.add(z, self.norm(z), alpha=0.1) if self.how == "alpha" else self.norm(z)
        z = torch.flatten(z, 1)
        scores: torch.Tensor = self.last(z)
        _ = self.other(z)
        return scores


@pytest.mark.parametrize(
    "module",
    [
        Odd("alpha"),
        Odd("unused"),
        nn.Sequential(
            nn.Linear(432, 432), nn.Unflatten(1, (3, 12, 12)), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(400, 10)
        ),
        nn.Sequential(nn.Unflatten(-1, (3, 12, 12)), nn.Conv2d(3, 4, 3, dilation=2), nn.Flatten(), nn.Linear(256, 10)),
        nn.Sequential(nn.Unflatten(-1, (3, 12, 12)), nn.Conv2d(3, 6, 3, groups=3), nn.Flatten(), nn.Linear(600, 10)),
        nn.Sequential(nn.Linear(SHAPE.num_features, 8), nn.Tanh(), nn.Linear(8, 10)),
        Twice(),
    ],
)
def test_models_with_other_layers_are_left_to_other_engines(module: nn.Module) -> None:
    assert kinds(module) is None
