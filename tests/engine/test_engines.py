"""All engines do the same SGD; float64 to 1e-9."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import otafl
from otafl import registry
from otafl.engine.batches import BatchSampler
from otafl.engine.training import ChunkEngine, one_by_one
from otafl.engine.updates import RowUpdates
from otafl.errors import PluginError
from tests.conftest import make_config, simulate

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"model.name": "mlp", "model.hidden": [6, 5]},
    "default": {"model.name": "mlp", "model.hidden": [6], "model.init": "torch"},
    "softmax": {"model.name": "softmax"},
    "cnn": {"model.name": "cnn", "model.channels": [2, 3], "data.name": "digits"},
    "dropout": {
        "model.name": "cnn",
        "model.channels": [2],
        "model.dense": [7],
        "model.dropout": 0.4,
        "data.name": "digits",
    },
    "resnet": {"model.name": "resnet", "data.name": "digits", "training.local_steps": 2},
}
DENSE = ("mlp", "default", "softmax")


def config_of(model: str, **overrides: Any) -> otafl.Config:
    keys = {**MODELS[model], **{key.replace("__", "."): value for key, value in overrides.items()}}
    config = make_config("fedoag")
    if keys.get("data.name") == "digits":
        return config.replace(keys | {"experiment.rounds": 2})
    return config.replace(keys)


ENGINES = [("batched", 0), ("threads", 0), ("threads", 10**9), ("preactivation", 0)]
"""And from how many values on channels lie last in memory."""


@pytest.mark.parametrize("algorithm", sorted(registry.BUILTIN["algorithms"]))
def test_every_device_trains_once_a_round(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads, where devices train as late as when something is asked of their updates, and for a sum again."""
    sim = simulate(make_config(algorithm, {"training.engine": "threads"}))
    trained: list[int] = []
    real = ChunkEngine._train_rows

    def counted(self: Any, work: Any, rows: Any, flat: Any) -> None:
        trained.extend(rows.tolist())
        real(self, work, rows, flat)

    monkeypatch.setattr(ChunkEngine, "_train_rows", counted)
    state = sim.init()
    for t in range(2):
        trained.clear()
        state = sim.step(state, t).state
        assert trained
        assert len(set(trained)) == len(trained)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_is_asked_late_is_what_was_trained(threads: int) -> None:
    """Sums, norms and end points in any order and number; a sum alone keeps no end points."""
    sim = simulate(make_config("fedavg", {"training.engine": "threads"}))
    sim._engine = ChunkEngine(one_by_one, chunk=1, threads=threads)
    eager = simulate(make_config("fedavg", {"training.engine": "batched"})).round_at(1)
    who = torch.tensor([[True, False, True, True], [False, False, True, False]])
    weights = torch.rand(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    everyone = eager.everyone
    expected = eager.train(sim.problem.initial)
    asks: dict[str, Any] = {
        "sum": lambda updates: updates.superpose(weights, who),
        "norms": lambda updates: updates.norms(everyone),
        "dense": lambda updates: updates.dense(),
    }
    for order in itertools.permutations(["sum", "sum", "norms", "dense"]):
        updates = sim.round_at(1).train(sim.problem.initial)
        for ask in order:
            assert torch.allclose(asks[ask](updates), asks[ask](expected), rtol=1e-9, atol=1e-12), order
    updates = sim.round_at(1).train(sim.problem.initial)
    asks["sum"](updates)
    assert isinstance(updates, RowUpdates)
    assert updates._known is None
    start = sim.problem.initial.clone()
    late = sim.round_at(1).train(start)
    start += 1
    with pytest.raises(RuntimeError, match="no longer valid"):
        asks["sum"](late)


@pytest.mark.parametrize("batches", ["per_step", "per_round"])
@pytest.mark.parametrize(
    ("model", "engine", "channels_last_from"),
    [(model, *engine) for model in MODELS for engine in ENGINES if model in DENSE or engine[0] != "preactivation"],
)
def test_fast_engines_equal_the_reference(
    model: str, engine: str, channels_last_from: int, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From shared starts, from own starts, and with some devices not trained."""
    monkeypatch.setattr("otafl.engine.training.CHANNELS_LAST_FROM", channels_last_from)
    ends = {}
    for name in ("reference", engine):
        sim = simulate(config_of(model, training__engine=name, training__batches=batches))
        shared = sim.problem.initial
        own = shared[:, None] + 0.01 * torch.arange(4, dtype=torch.float64)[:, None]
        who = torch.tensor([[True, False, True, True], [False, False, True, False]])
        round_ = sim.round_at(1)
        ends[name] = [round_.train(shared).end, round_.train(own).end, round_.train(shared, who).end]
        assert torch.equal(ends[name][2][~who], shared[:, None].expand(-1, 4, -1)[~who])
        assert not torch.equal(ends[name][0][0, 0], shared[0])
    for one, other in zip(*ends.values(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fast", ["batched", "threads", "preactivation"])
@pytest.mark.parametrize("algorithm", ["fedoag", "ota-fedavg", "fedavg"])
def test_whole_runs_agree(algorithm: str, fast: str) -> None:
    one, other = (
        otafl.run(make_config(algorithm, {"training.engine": engine}), device="cpu") for engine in ("reference", fast)
    )
    assert torch.allclose(one.params, other.params, rtol=0, atol=1e-9)


def test_local_sgd_by_hand() -> None:
    """Softmax regression: one step is W −= η (softmax(Wx + b) − onehot) xᵀ averaged over the batch."""
    sim = simulate(config_of("softmax", training__local_steps=1))
    end = sim.round_at(0).train(sim.problem.initial).end
    batch = sim.sampler.at(0)[1, 2, 0]
    features, targets = sim.objective.train.features[batch], sim.objective.train.targets[batch]
    params = sim.problem.initial[1]
    weight, bias = params[:18].view(3, 6), params[18:]
    error = torch.softmax(features @ weight.T + bias, -1) - nn.functional.one_hot(targets, 3)
    lr = sim.config.training.lr
    expected = torch.cat([(weight - lr * error.T @ features / len(batch)).flatten(), bias - lr * error.mean(0)])
    assert torch.allclose(end[1, 2], expected, rtol=0, atol=1e-14)


def test_batches_come_from_the_own_images_with_replacement() -> None:
    shares = [[np.arange(3), np.arange(3, 50)]]
    sampler = BatchSampler((4,), shares, local_steps=200, batch_size=32, batches="per_step")
    drawn = sampler.at(7)[0].numpy()
    assert drawn.shape == (2, 200, 32)
    assert set(drawn[0].ravel()) == {0, 1, 2}
    assert set(drawn[1].ravel()) == set(range(3, 50))
    share = (drawn[0] == 1).mean()
    assert abs(share - 1 / 3) < 5 * math.sqrt(2 / 9 / drawn[0].size)
    assert not np.array_equal(drawn, sampler.at(8)[0].numpy())


def test_per_round_takes_all_steps_on_one_batch() -> None:
    sampler = BatchSampler((0,), [[np.arange(9)]], local_steps=5, batch_size=4, batches="per_round")
    assert sampler.at(0).shape == (1, 1, 1, 4)


def test_learning_rate_schedules() -> None:
    training = make_config().training
    assert [training.lr_at(t) for t in (0, 10, 30)] == pytest.approx([0.1, 0.1 / math.sqrt(2), 0.05])
    assert make_config("fedoag", {"training.lr_schedule": "constant"}).training.lr_at(99) == 0.1
    warm = make_config("fedoag", {"training.warmup": 4, "training.lr_schedule": "constant"}).training
    assert [warm.lr_at(t) for t in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    both = make_config("fedoag", {"training.warmup": 4}).training
    assert [both.lr_at(t) for t in (1, 3, 10)] == pytest.approx(
        [0.05 / math.sqrt(1.1), training.lr_at(3), training.lr_at(10)]
    )


def test_paper_network_has_814090_parameters_and_starts_alike_everywhere(mnist: Any) -> None:
    config = otafl.load_config("stationary", {"experiment.seeds": [0], "experiment.rounds": 1})
    single, double = simulate(config), simulate(config.replace({"training.precision": "float64"}))
    assert single.objective.num_params == 814_090
    assert torch.equal(single.problem.initial.to(torch.float64), double.problem.initial)


def test_kaiming_initialisation_has_its_variance() -> None:
    """N inputs: weights ~ N(0, 2/n), biases 0; with "torch": U(±1/√n)."""
    sim = simulate(config_of("mlp", model__hidden=[4000], experiment__seeds=[0]))
    flat = sim.problem.initial[0]
    first, biases, last = flat[: 6 * 4000], flat[6 * 4000 : 7 * 4000], flat[7 * 4000 : 10 * 4000]
    for weights, inputs in ((first, 6), (last, 4000)):
        assert float(weights.square().mean()) == pytest.approx(2 / inputs, rel=5 * math.sqrt(2 / len(weights)))
    assert (biases == 0).all()
    default = simulate(config_of("default", model__hidden=[4000], experiment__seeds=[0])).problem.initial[0]
    assert default[: 7 * 4000].abs().max() <= 1 / math.sqrt(6)
    assert default[7 * 4000 :].abs().max() <= 1 / math.sqrt(4000)


def test_evaluation_is_mean_loss_and_share_of_right_answers() -> None:
    sim = simulate(config_of("mlp"))
    scores = sim.objective.evaluate(sim.problem.initial, sim.test)
    for s in range(2):
        params = sim.problem.initial[s]
        with torch.no_grad():
            output = torch.func.functional_call(
                sim.objective._module, sim.objective.unflatten(params), (sim.test.features,)
            )
        assert float(scores.accuracy[s]) == pytest.approx(
            float((output.argmax(-1) == sim.test.targets).double().mean())
        )
        assert float(scores.loss[s]) == pytest.approx(float(nn.functional.cross_entropy(output, sim.test.targets)))


def test_gradient_norm_of_the_quadratic_is_known() -> None:
    """∇F(x) = x − mean c_i."""
    from tests.conftest import make_quadratic

    result = otafl.run(make_quadratic("fedoag", {"experiment.record": ["server", "mean", "gradient", "consensus"]}))
    sim = simulate(make_quadratic("fedoag"))
    center = sim.test.features.mean(0)
    assert result.metrics["grad_norm_sq"][:, -1] == pytest.approx(
        (result.params - center).square().sum(-1).numpy(), rel=1e-6
    )
    start = float((0.5 - center).square().sum())
    # F9 once more: x̄ descends deterministically, (1 − η)^{s t}
    expected = [start * (1 - 0.05) ** (2 * 3 * r) for r in result.rounds]
    assert result.metrics["mean_grad_norm_sq"][0] == pytest.approx(expected, rel=1e-6)
    assert result.metrics["consensus"][0, 0] == 0 < result.metrics["consensus"][0, -1]


class Odd(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features


class Itemising(nn.Linear):
    """Reads a number out of a tensor, which a batched engine cannot."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = super().forward(features)
        return scores * (2.0 if features.sum().item() > 0 else 1.0)


class FunctionalDropout(nn.Linear):
    """Draws from the default generator, unseen by anybody."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(features), 0.5, self.training)


class Pair(nn.Module):
    """Returns more than scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(features), features


def infinite() -> nn.Module:
    module = nn.Linear(6, 3)
    with torch.no_grad():
        module.bias[1] = torch.inf
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 3))
    module[0].bias.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.AlphaDropout(0.5)), "AlphaDropout.*use nn.Dropout"),
        (FunctionalDropout(), "draws random numbers"),
        (nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), "running statistics"),
        (nn.Linear(7, 3), "cannot be trained on features of shape"),
        (nn.Linear(6, 4), "4 class scores for 3 classes"),
        (nn.Linear(6, 1), "1 class scores for 3 classes"),
        (nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1)), "ends with a softmax"),
        (infinite(), "weights that are not finite"),
        (Pair(), "returns a tuple; return class scores"),
        (nn.Sequential(nn.Linear(6, 3), nn.Flatten(0)), r"gives shape \(6,\) for 2 examples"),
        (Odd(), "no parameters"),
        (Itemising(), "cannot be trained on features"),
        (frozen(), "'0.bias' is frozen"),
    ],
)
def test_modules_that_cannot_be_used_are_refused(module: nn.Module, line: str) -> None:
    with pytest.raises(PluginError, match=line):
        otafl.run(make_config("fedavg", {"training.precision": "float32"}), model=module)


def test_any_module_can_be_passed() -> None:
    """It starts from its present weights; LayerNorm and scalars are fine."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.inner(features) * self.temperature
            return scores

    net = Net()
    config = make_config("fedavg", {"experiment.rounds": 3})
    result = otafl.run(config, model=net)
    size = sum(p.numel() for p in net.parameters())
    assert result.params.shape == (2, size)
    reference = otafl.run(config.replace({"training.engine": "reference"}), model=net)
    assert torch.allclose(result.params, reference.params, rtol=0, atol=1e-9)
    assert net.temperature.item() == 1.5  # the user's module is left alone
    assert net.temperature.dtype == torch.float32


class Scaled(nn.Module):
    """Computes something from a parameter before its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, 5), nn.Linear(5, 3), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.exp()
        scores: torch.Tensor = self.last(torch.relu(self.first(x))) * scale
        return scores


class Unused(nn.Sequential):
    """Has a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.extra = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("module", [Scaled(), Unused()])
@pytest.mark.parametrize("engine", ["auto", "batched", "threads"])
def test_unusual_modules_are_trained_alike(module: nn.Module, engine: str) -> None:
    config = make_config("fedavg", {"experiment.rounds": 2})
    one, other = (otafl.run(config.replace({"training.engine": e}), model=module) for e in ("reference", engine))
    assert torch.allclose(one.params, other.params, rtol=0, atol=1e-9)


def test_a_model_that_changes_its_input_is_refused() -> None:
    """It would change the data of every later run."""
    with pytest.raises(PluginError, match="changes its input in place"):
        otafl.run(make_config("fedavg"), model=nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)))


def test_evaluation_is_in_evaluation_mode() -> None:
    class Modes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.0 if self.training else 0.0)

    sim = simulate(make_config("fedavg"), model=Modes(6, 3))
    loss = sim.objective.evaluate(sim.problem.initial, sim.test).loss
    assert loss.tolist() == pytest.approx([math.log(3)] * 2)


def test_sums_and_norms_as_on_a_gpu_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch for masks that the host does not read: some devices trained, one of them with NaN outside the mask."""
    sim = simulate(make_config("fedavg", {"training.engine": "batched", "model.hidden": [4, 4]}))
    trained = torch.tensor([[True, False, True, True], [False, True, True, False]])
    who, weights = trained.clone(), torch.arange(8.0, dtype=torch.float64).view(2, 4)
    who[0, 3] = False
    found = []
    for looks in (True, False):
        monkeypatch.setattr("otafl.engine.updates.can_look", lambda values, looks=looks: looks)
        updates = sim.round_at(0).train(sim.problem.initial, trained)
        updates._ends[2] = torch.nan
        updates._versions = updates._current_versions()
        found.append((updates.norms(who), updates.superpose(weights, who)))
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["batched", "threads"])
def test_rounds_in_which_nobody_trains_have_updates_of_zero(engine: str) -> None:
    round_ = simulate(make_config("fedavg", {"training.engine": engine, "model.hidden": [4, 4]})).round_at(0)
    nobody = torch.zeros_like(round_.everyone)
    updates = round_.train(round_.problem.initial, nobody)
    assert not updates.norms(~nobody).any()
    assert not updates.superpose(torch.ones(2, 4), ~nobody).any()
