"""Modules rewritten for one core compute the same function, and are left alone where that cannot be known."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from otafl.engine.dropout import fold, kept, with_addressed_dropout
from otafl.engine.fast.one_core import Chain, FactoredLinear, for_one_core
from otafl.engine.training import ChunkEngine, one_by_one
from tests.conftest import make_config, simulate


def chain(*tail: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, padding=1), *tail)


class Functional(nn.Module):
    """Functions instead of layers, and a sum of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.first(x)), 2)
        return self.last(torch.flatten(functional.max_pool2d(torch.relu(x + self.second(x).relu()), 3, 1, 1), 1))


class Kept(nn.Module):
    """Goes through a sequence by hand and uses what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = chain(nn.ReLU()), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer(x)
            seen.append(x)
        return self.last(x.flatten(1)) + seen[0].sum() + seen[1].mean() * seen[3].square().mean()


class Depends(nn.Module):
    """Its control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(chain(nn.ReLU(), nn.Flatten()), nn.Linear(36, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (2.0 if bool(x.sum() > 0) else 3.0)


class Tied(nn.Module):
    """A parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = chain(nn.ReLU(), nn.Flatten(), nn.Linear(36, 36))
        self.last = nn.Linear(36, 36)
        self.last.weight = self.first[-1].weight  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class Reads(nn.Module):
    """Has a state, takes a part of a sequence, and reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = chain(nn.ReLU(), nn.Flatten(), nn.Linear(36, 36)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return functional.linear(self.net[:6](x), self.net[6].weight) * self.calls  # type: ignore[arg-type,index]


again = nn.ReLU()
NETS: dict[str, Any] = {
    "chain": lambda: chain(nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)),
    "one ReLU for all": lambda: nn.Sequential(chain(again, nn.Flatten()), again, nn.Linear(36, 8), again),
    "norms": lambda: chain(nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    "padded pooling": lambda: chain(nn.ReLU(), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.Flatten(), nn.Linear(16, 3)),
    "functions": Functional,
    "kept between": Kept,
    "depends on values": Depends,
    "tied": Tied,
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_the_same_function_and_gradients(name: str, channels_last: bool) -> None:
    torch.manual_seed(0)
    module = NETS[name]().double()
    other = for_one_core(module, channels_last)
    images = torch.randn(5, 2, 8, 8, dtype=torch.float64)
    out, again_out = module(images), other(images)
    assert torch.allclose(out, again_out, rtol=0, atol=1e-12)
    goal = torch.randn_like(out)
    mine = torch.autograd.grad((out * goal).sum(), list(module.parameters()))
    names = [key for key, _ in module.named_parameters()]
    theirs = torch.autograd.grad((again_out * goal).sum(), [other.get_parameter(key) for key in names])
    for one, two in zip(mine, theirs, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-12)
        assert bool(one.any())


def test_what_is_rewritten() -> None:
    """Pooling goes before ReLU and ReLU is done in place, but not where the value before is used or hooks are."""

    def steps(module: Any) -> list[Any]:
        return [step if step is torch.relu_ else type(step) for step in module.steps]

    found = steps(for_one_core(NETS["chain"](), False))
    assert found[:5] == [nn.Conv2d, nn.MaxPool2d, torch.relu_, nn.Conv2d, torch.relu_]
    found = steps(for_one_core(nn.Sequential(nn.Identity(), nn.ReLU(), nn.Tanh(), nn.ReLU()), False))
    assert torch.relu_ not in found  # an identity gives what the caller has, and tanh needs its output
    found = steps(for_one_core(nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)), False))
    assert found == [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    hooked = NETS["chain"]()
    hooked[0].register_forward_hook(lambda part, inputs, output: output * 2)
    hooked[1].register_forward_hook(lambda part, inputs, output: output * 2)
    assert steps(for_one_core(hooked, False))[:4] == [nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Conv2d]
    images = torch.randn(3, 2, 8, 8)
    assert torch.equal(for_one_core(hooked, False)(images), hooked(images))


def test_code_of_its_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module's code looks at is as it was: its layers, its weights, a slice of a sequence, a counter."""
    monkeypatch.setattr("otafl.engine.fast.one_core.LARGE", 1)
    other = for_one_core(Reads(), False)
    assert not [part for part in other.modules() if isinstance(part, FactoredLinear)]
    images = torch.randn(2, 2, 8, 8)
    first, second = other(images), other(images)
    assert torch.equal(second, 2 * first)
    assert [part for part in for_one_core(NETS["chain"](), False).modules() if isinstance(part, FactoredLinear)]


def test_a_large_layer_used_twice_in_a_step() -> None:
    """Its gradient is that of the weight before the step, at both places."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 6).double()
    net = nn.Sequential(nn.Unflatten(1, (3, 6)), layer, nn.ReLU(), layer, nn.Flatten(), nn.Linear(18, 2).double())
    other, images = copy.deepcopy(net), torch.randn(4, 4, 18, dtype=torch.float64)
    other[1].__class__ = FactoredLinear
    other[1].begin(1, 0.1)  # type: ignore[operator]
    for step in images:
        for module in (net, other):
            slopes = torch.autograd.grad(module(step).square().sum(), list(module.parameters()), allow_unused=True)
            for parameter, slope in zip(module.parameters(), slopes, strict=True):
                if slope is not None:
                    parameter.data.sub_(slope, alpha=0.1)
    assert not torch.equal(other[1].weight, net[1].weight)
    other[1].finish()  # type: ignore[operator]
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rule", [{}, {"training.clip": 0.5}, {"training.momentum": 0.5}])
@pytest.mark.parametrize("first", [False, True], ids=["behind others", "first of all"])
@pytest.mark.parametrize("batch", [2, 16])
def test_large_linear_layers_wait_with_their_weight(
    batch: int, first: bool, rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As factors where they are thin and steps are plain; the same SGD in any case."""
    monkeypatch.setattr("otafl.engine.fast.one_core.LARGE", 1)
    noted = []
    finish = FactoredLinear.finish
    monkeypatch.setattr(FactoredLinear, "finish", lambda self: (noted.append(len(self.inputs)), finish(self)))
    ends = []
    for engine in ("reference", "threads"):
        net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        net += nn.Sequential(nn.Linear(144, 30), nn.ReLU(), nn.Linear(30, 10))
        keys = {"training.engine": engine, "training.local_steps": 3, "training.batch_size": batch, **rule}
        keys |= {"data.name": "digits", "training.precision": "float64", "experiment.rounds": 2}
        torch.manual_seed(1)
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.2)
        sim = simulate(make_config("fedavg").replace(keys), model=net)
        ends.append(sim.round_at(0).train(sim.problem.initial).end)
    assert torch.allclose(*ends, rtol=0, atol=1e-11)
    few = {0, 3} if batch == 2 else {0}  # 6 images are few for 30 outputs, not for 10
    assert set(noted) == (set() if "training.momentum" in rule else few)


def test_masks_on_the_host_are_those_of_every_engine() -> None:
    """Of whole channels, too, and of more values than are computed at once."""
    key = fold(fold(torch.tensor(12345678901), 3), 7)
    for shape in ((3, 5), (7, 40_000), (4, 6, 3, 3)):
        for whole in (False, True):
            plain = nn.Dropout2d(0.3) if whole else nn.Dropout(0.3)
            (layer,) = with_addressed_dropout(nn.Sequential(plain))  # type: ignore[misc]
            layer.key.copy_(key)
            values = torch.ones(shape)
            if whole and len(shape) == 2:
                continue
            slow = layer(values)
            layer.on_host = True
            assert torch.equal(layer(values), slow)
            assert not whole or torch.equal(slow[:, :, 0, 0] > 0, kept(key, (*shape[:2], 1, 1), 0.3)[..., 0, 0])


def test_the_engine_uses_rewritten_modules() -> None:
    sim = simulate(make_config("fedavg", {"training.engine": "threads"}))
    sim.round_at(0).train(sim.problem.initial)
    assert [part for part in sim.objective.own_module(False)[0].modules() if isinstance(part, Chain)]


def test_modules_do_not_keep_a_rounds_models() -> None:
    """After a round a thread's module has no view of the memory in which the devices' models lay."""
    sim = simulate(make_config("fedavg", {"training.engine": "threads"}))
    sim._engine = ChunkEngine(one_by_one, chunk=1, threads=1)
    updates = sim.round_at(0).train(sim.problem.initial)
    assert bool(updates.norms(sim.round_at(0).everyone).all())
    module, _ = sim.objective.own_module(False)
    assert [parameter.numel() for parameter in module.parameters()] == [0] * len(list(module.parameters()))
