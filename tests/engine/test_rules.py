"""Rules of local steps: by their definition, against PyTorch's own optimiser, and the same on every engine."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from otafl.engine.devices import Anchors, Devices
from otafl.engine.fast.preactivation import PreactivationEngine
from otafl.engine.rows import all_rows
from otafl.engine.rule import LocalRule
from otafl.errors import ConfigError, PluginError
from tests.conftest import make_config, simulate

RULES: dict[str, dict[str, float]] = {
    "plain": {},
    "momentum": {"momentum": 0.6},
    "decay": {"weight_decay": 0.3},
    "proximal": {"proximal": 0.7},
    "clip": {"clip": 2.0},
    "all": {"momentum": 0.5, "weight_decay": 0.2, "proximal": 0.4, "clip": 3.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"model.hidden": [5]},
    "deep": {"model.hidden": [5, 4]},
    "softmax": {"model.name": "softmax"},
}


def trained(engine: str, keys: dict[str, Any], start: str, **more: Any) -> tuple[Tensor, Tensor]:
    """Updates [S, M, P] of round 1 and their norms, from a shared or from own models, some devices idle."""
    sim = simulate(make_config("fedoag").replace({"training.engine": engine, **keys}))
    round_, initial = sim.round_at(1), sim.problem.initial
    draw = torch.Generator().manual_seed(3)
    shape = (*round_.everyone.shape, initial.shape[1])
    who = torch.tensor([[True, True, False, True], [True, False, True, True]])
    chosen = {}
    if more.get("correction"):
        chosen["correction"] = torch.randn(shape, generator=draw, dtype=torch.float64)
    if more.get("steps"):
        chosen["steps"] = torch.tensor([[3, 1, 2, 0], [2, 3, 1, 2]])
    if start == "shared":
        updates = round_.train(initial, who, **chosen)
    else:
        own = initial[:, None] + 0.1 * torch.randn(shape, generator=draw, dtype=torch.float64)
        pool = torch.stack([initial, initial + 0.05], dim=1)
        slot = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]])
        updates = round_.train(Devices(own, Anchors(pool, slot, slot)), who, **chosen)
    return updates.dense().clone(), updates.measured_norms(who)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("start", ["shared", "own"])
@pytest.mark.parametrize("batches", ["per_step", "per_round"])
@pytest.mark.parametrize("model", ["mlp", "deep"])
def test_rows_outside_a_mask_stay_where_they_are(
    rule: str, start: str, batches: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a CUDA graph, where all rows are given, and a mask says which of them train."""
    keys = {**MODELS[model], "training.batches": batches, **{f"training.{k}": v for k, v in RULES[rule].items()}}
    for correction, steps in itertools.product((False, True), repeat=2):
        more = {"correction": correction, "steps": steps}
        expected = trained("preactivation", keys, start, **more)
        real = PreactivationEngine.train

        def padded(self: Any, work: Any, real: Any = real) -> Any:
            return real(self, dataclasses.replace(work, rows=all_rows(work.who), mask=work.who))

        with monkeypatch.context() as patch:
            patch.setattr(PreactivationEngine, "train", padded)
            found = trained("preactivation", keys, start, **more)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), more


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("start", ["shared", "own"])
@pytest.mark.parametrize("batches", ["per_step", "per_round"])
@pytest.mark.parametrize("model", MODELS)
def test_every_engine_does_the_same(rule: str, start: str, batches: str, model: str) -> None:
    keys = {**MODELS[model], "training.batches": batches, **{f"training.{k}": v for k, v in RULES[rule].items()}}
    for correction, steps in itertools.product((False, True), repeat=2):
        more = {"correction": correction, "steps": steps}
        dense, norms = trained("reference", keys, start, **more)
        assert float(dense.abs().max()) > 1e-3
        for engine in ("batched", "preactivation"):
            found, lengths = trained(engine, keys, start, **more)
            assert torch.allclose(found, dense, rtol=1e-9, atol=1e-11), (engine, more)
            assert torch.allclose(lengths, norms, rtol=1e-9), (engine, more)


def test_a_cnn_has_rules_too() -> None:
    keys = {"data.name": "digits", "model.name": "cnn", "model.channels": [3], "training.batch_size": 4}
    keys |= {f"training.{key}": value for key, value in RULES["all"].items()}
    sims = [simulate(make_config().replace({**keys, "training.engine": name})) for name in ("reference", "batched")]
    one, other = (sim.round_at(0).train(sim.problem.initial).dense() for sim in sims)
    assert torch.allclose(one, other, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_momentum_and_decay_are_those_of_pytorch(momentum: float, decay: float) -> None:
    keys = {"training.momentum": momentum, "training.weight_decay": decay, "training.engine": "reference"}
    sim = simulate(make_config("fedavg", keys))
    updates = sim.round_at(2).train(sim.problem.initial).dense()
    lr, (features, targets) = sim.config.training.lr_at(2), sim.objective.train
    for s, i in itertools.product(range(2), range(4)):
        flat = sim.problem.initial[s].clone().requires_grad_(True)
        optimiser = torch.optim.SGD([flat], lr=lr, momentum=momentum, weight_decay=decay)
        for batch in sim.sampler.at(2)[s, i]:
            optimiser.zero_grad()
            sim.objective.loss(sim.objective.unflatten(flat), features[batch], targets[batch]).backward()
            optimiser.step()
        assert torch.allclose(updates[s, i], (flat.detach() - sim.problem.initial[s]) / lr, rtol=1e-9, atol=1e-11)


def test_velocities_start_at_zero_in_every_round() -> None:
    """With one step a round there is nothing to remember."""
    configs = [make_config("fedavg", {"training.local_steps": 1, "training.momentum": value}) for value in (0.0, 0.9)]
    one, other = (simulate(config) for config in configs)
    state, same = one.init(), other.init()
    for t in range(3):
        state, same = one.step(state, t).state, other.step(same, t).state
    assert torch.allclose(state.params, same.params, rtol=1e-12)


def test_a_strong_pull_is_had_in_closed_form() -> None:
    """On ½ x² with x_0 = 1: w_{k+1} = w_k − η (w_k + ρ (w_k − 1)), a geometric series towards ρ/(1 + ρ)."""
    a, _ = LocalRule(proximal=3.0).unrolled(6, 0.1)
    w, gradients = 1.0, []
    for k in range(6):
        unrolled = 1.0 - 0.1 * sum(float(a[k, j]) * gradients[j] for j in range(k))
        assert unrolled == pytest.approx(w, rel=1e-12)
        gradients.append(w)
        w -= 0.1 * (w + 3.0 * (w - 1.0))
    assert w == pytest.approx(0.75 + 0.25 * (1 - 0.4) ** 6, rel=1e-12)


@pytest.mark.parametrize("start", ["shared", "own"])
@pytest.mark.parametrize("engine", ["reference", "batched", "preactivation"])
def test_progress_is_shortened_and_keeps_its_direction(start: str, engine: str) -> None:
    """From a start of its own it is the round's progress that is limited, not the distance to the reference."""
    plain, _ = trained(engine, {}, start)
    short, _ = trained(engine, {"training.clip": 1.5}, start)
    still, _ = trained(engine, {"training.clip": 1e-12}, start)  # where the start is measured against the reference
    progress, clipped = plain - still, short - still
    norms = progress.norm(dim=-1)
    assert bool((norms > 1.5).any())
    expected = progress * (1.5 / norms.clamp(min=1.5))[..., None]
    assert torch.allclose(clipped, expected, atol=1e-9)


def test_mistakes() -> None:
    for key, value in (
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("weight_decay", -1.0),
        ("clip", 0.0),
        ("clip", math.nan),
    ):
        with pytest.raises(ConfigError, match=f"training.{key}"):
            make_config("fedavg", {f"training.{key}": value})
    round_ = simulate(make_config("fedavg")).round_at(0)
    start = round_.problem.initial
    with pytest.raises(PluginError, match="corrections of shape"):
        round_.train(start, correction=start)
    with pytest.raises(PluginError, match="whole steps"):
        round_.train(start, steps=torch.ones(2, 4))
