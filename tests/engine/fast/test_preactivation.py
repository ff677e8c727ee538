"""Pre-activation-space training is plain SGD; its factored updates are the dense ones."""

from typing import Any

import pytest
import torch
from torch import nn

import otafl
from otafl.engine.devices import Anchors, Devices
from otafl.engine.fast.head import find_head
from otafl.engine.fast.preactivation import CHUNK_BYTES, GROUP_IMAGES, FactoredUpdates, PreactivationEngine
from otafl.engine.training import ChunkEngine
from otafl.errors import ConfigError
from tests.conftest import make_config, simulate


class Residual(nn.Module):
    """A first linear layer, then something that is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, bias=False)
        self.second = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        scores: torch.Tensor = self.last(torch.tanh(z) + self.second(z))
        return scores


class Functional(nn.Module):
    """The paper's network as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc2(nn.functional.relu(self.fc1(x)))
        return scores


class Swapped(nn.Module):
    """Its layers are laid out in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.a = nn.Linear(5, 3), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.b(self.a(x).relu())
        return scores


class Twice(nn.Module):
    """Uses its input, and its first layer, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.a(self.a(x))[..., :3]
        return scores


@pytest.mark.parametrize(
    ("module", "layers"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), 1),
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), 2),
        (nn.Sequential(nn.Linear(6, 3)), 0),
        (Functional(), 1),
        (Residual(), None),
        (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), None),
    ],
    ids=["mlp", "deep", "softmax", "functional", "residual", "tanh"],
)
def test_models_with_a_linear_first_layer_are_recognised(module: nn.Module, layers: int | None) -> None:
    head = find_head(module)
    assert head is not None
    assert (None if head.layers is None else len(head.layers)) == layers


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    module[2].weight = module[0].weight
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module.register_forward_hook(lambda module, inputs, output: output * 2)
    return module


class Scaled(Functional):
    """Takes a second, optional input."""

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return super().forward(x) * scale


class Unused(Functional):
    """Has a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(6, 3),  # has no layer of its own: it is one
        Swapped(),
        Twice(),
        nn.Sequential(nn.ReLU(), nn.Linear(6, 3)),
        nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)),
        tied(),
        hooked(),
        Scaled(),
        Unused(),
    ],
    ids=["bare linear", "swapped", "twice", "relu first", "norm first", "tied", "hooked", "two inputs", "unused layer"],
)
def test_others_are_not(module: nn.Module) -> None:
    assert find_head(module) is None


@pytest.mark.parametrize("batches", ["per_step", "per_round"])
@pytest.mark.parametrize(
    "module",
    [Residual(), Functional(), nn.Sequential(nn.Linear(6, 5), nn.ELU(inplace=True), nn.Linear(5, 3))],
    ids=["residual", "functional", "in place"],
)
@pytest.mark.parametrize("algorithm", ["fedoag", "ota-fedavg"])
def test_any_later_layers(module: nn.Module, batches: str, algorithm: str) -> None:
    """By automatic differentiation behind the first layer, with and without its bias: the reference's run."""
    keys = {"training.batches": batches, "training.lr": 0.02, "radio.noise_dbm_hz": float("-inf")}
    config = make_config(algorithm, {**keys, "experiment.rounds": 4})
    runs = [
        otafl.run(config.replace({"training.engine": engine}), model=module)
        for engine in ("preactivation", "reference")
    ]
    assert torch.allclose(runs[0].params, runs[1].params, rtol=0, atol=1e-9)


@pytest.mark.parametrize("batches", ["per_step", "per_round"])
@pytest.mark.parametrize("trained", ["all", "some"])
def test_factored_updates_are_the_dense_ones(batches: str, trained: str) -> None:
    """Norms by ⟨K G, G⟩ and weighted sums by one product equal those of end − start; of any subset."""
    sim = simulate(make_config("ota-fedavg", {"training.engine": "preactivation", "training.batches": batches}))
    round_ = sim.round_at(1)
    who = torch.tensor([[True, False, True, True], [False, True, True, False]])
    updates = round_.train(sim.problem.initial, None if trained == "all" else who)
    assert isinstance(updates, FactoredUpdates)
    dense = updates.dense()
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand((2, 4), dtype=torch.float64, generator=generator)
    for asked in (round_.everyone, who, torch.tensor([[True, True, False, False], [False, False, False, True]])):
        expected = torch.where(asked, dense.norm(dim=-1), 0.0)
        assert torch.allclose(updates.norms(asked), expected, rtol=1e-10, atol=1e-14)
        total = (torch.where(asked, weights, 0.0)[..., None] * dense).sum(1)
        assert torch.allclose(updates.superpose(weights, asked), total, rtol=0, atol=1e-12)
    nobody = torch.zeros_like(who)
    assert (updates.norms(nobody) == 0).all()
    assert (updates.superpose(weights, nobody) == 0).all()


@pytest.mark.parametrize("algorithm", ["fedavg", "ota-fedavg", "fedoag"])
@pytest.mark.parametrize("width", [None, 7])
def test_models_without_biases(algorithm: str, width: int | None) -> None:
    """With nothing at all after the first weight, and with a later layer."""
    layers = [nn.Linear(6, width or 3, bias=False)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(7, 3, bias=False)) if width else nn.Sequential(*layers)
    one, other = (
        otafl.run(make_config(algorithm, {"training.engine": engine}), device="cpu", model=model)
        for engine in ("reference", "preactivation")
    )
    assert torch.allclose(one.params, other.params, rtol=0, atol=1e-9)


@pytest.mark.parametrize("engine", ["preactivation", "batched"])
@pytest.mark.parametrize("case", ["own", "expanded", "the reference itself"])
def test_start_models_are_overwritten_only_where_they_can_be(engine: str, case: str) -> None:
    """With a reference an engine trains in place, unless the start is one model seen many times, or the reference."""
    changes = {}
    for name in (engine, "reference"):
        sim = simulate(make_config("fedoag", {"training.engine": name}))
        start = sim.problem.devices().models
        pool = sim.problem.devices().models
        if case == "expanded":
            start = sim.problem.initial[:, None].expand(-1, 4, -1)
        if case == "the reference itself":
            pool = start
        before = pool.clone()
        anchors = Anchors(pool, torch.arange(4).expand(2, 4), torch.arange(4).expand(2, 4))
        updates = sim.round_at(0).train(Devices(start, anchors))
        assert torch.equal(pool, before)
        assert (updates.end.data_ptr() == start.data_ptr()) == (case == "own" and name != "reference")
        changes[name] = updates.dense()
    assert float(changes[engine].abs().max()) > 0
    assert torch.allclose(changes[engine], changes["reference"], rtol=0, atol=1e-9)


def test_updates_of_two_trainings_live_side_by_side() -> None:
    """The engine does not take the memory of updates that somebody still has."""
    sim = simulate(make_config("fedavg", {"training.engine": "preactivation"}))
    one = sim.round_at(1).train(sim.problem.initial)
    before = one.dense().clone()
    other = sim.round_at(2).train(sim.problem.initial)
    assert torch.equal(one.dense(), before)
    assert not torch.equal(other.dense(), before)


def test_chunks_do_not_change_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices at once, or a few at a time."""
    config = make_config("fedoag", {"training.engine": "preactivation", "cell.devices": 11})
    ends = []
    for size in (2**30, 2**10, 1):
        monkeypatch.setitem(CHUNK_BYTES, "cpu", size)
        sim = simulate(config)
        round_ = sim.round_at(0)
        shared = round_.train(sim.problem.initial)
        mean = shared.superpose(round_.everyone / 11, round_.everyone)
        ends.append((round_.train(sim.problem.devices().models).end, shared.end, shared.norms(round_.everyone), mean))
    for other in ends[1:]:
        for one, two in zip(ends[0], other, strict=True):
            assert torch.allclose(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batches", ["per_step", "per_round"])
def test_groups_of_steps_do_not_change_a_device(batches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own models, passed over once a round, after every two steps or so, or after every step."""
    keys = {"training.local_steps": 5, "training.batches": batches, "training.batch_size": 4}
    ends = []
    for engine, images in (("reference", 1), ("preactivation", 2**30), ("preactivation", 8), ("preactivation", 1)):
        monkeypatch.setitem(GROUP_IMAGES, "cpu", images)
        sim = simulate(make_config("fedoag", {**keys, "training.engine": engine}))
        ends.append(sim.round_at(0).train(sim.problem.devices().models).end)
    for other in ends[1:]:
        assert torch.allclose(ends[0], other, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_float32_stays_within_its_rounding(mnist: Any) -> None:
    """The paper's network in float32 against the reference in float64.

    The median over devices: a unit at the edge of its ReLU may fall to either side in any float32 arithmetic.
    """
    changes = {}
    for engine, precision in (("reference", "float64"), ("reference", "float32"), ("preactivation", "float32")):
        keys = {"experiment.seeds": [0], "training.engine": engine, "training.precision": precision}
        sim = simulate(otafl.load_config("stationary", {**keys, "cell.devices": 6, "experiment.rounds": 2}))
        end = sim.round_at(1).train(sim.problem.initial).end
        changes[engine, precision] = (end - sim.problem.initial[:, None]).double()
    exact = changes["reference", "float64"]
    errors = {key: float(((c - exact).norm(dim=-1) / exact.norm(dim=-1)).median()) for key, c in changes.items()}
    assert errors["preactivation", "float32"] < 1e-5
    assert errors["preactivation", "float32"] < 30 * errors["reference", "float32"] + 1e-7


def test_the_engine_is_chosen_by_the_model_and_the_work() -> None:
    def engine(**overrides: Any) -> object:
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        return simulate(make_config("fedoag").replace(keys))._engine

    paper = {"data__features": 784, "model__hidden": [1024], "training__batch_size": 32, "training__local_steps": 10}
    assert isinstance(engine(**paper), PreactivationEngine)
    assert isinstance(engine(**paper, training__engine="batched"), ChunkEngine)
    assert isinstance(engine(**{**paper, "training__local_steps": 200}), ChunkEngine)
    assert isinstance(engine(data__name="digits", model__name="cnn"), ChunkEngine)


def test_an_engine_that_does_not_fit_is_refused() -> None:
    keys = {"data.name": "digits", "model.name": "cnn", "training.engine": "preactivation"}
    with pytest.raises(ConfigError, match="does not begin with a linear layer"):
        simulate(make_config("fedoag").replace(keys))
