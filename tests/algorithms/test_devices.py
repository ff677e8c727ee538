"""What devices remember: who receives goes on from it, nothing is used twice, and mistakes are one line."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import otafl
from otafl.errors import PluginError
from otafl.simulation.build import own_models
from tests.conftest import TINY_GAMMA, make_config, simulate


@dataclass(frozen=True)
class Own:
    params: Tensor
    devices: Any


@dataclass(frozen=True)
class Air:
    """FedPBC over the air, written by a user: own models, FedOAG's uplink, updates against x^t."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(device={"h"})

    def init(self, problem: otafl.Problem) -> Own:
        return Own(problem.initial, problem.devices())

    def step(self, state: Own, round: otafl.Round) -> Any:  # noqa: A002
        who = round.everyone & otafl.above_threshold(round.device, round.problem, TINY_GAMMA)
        updates = round.train(state.devices, reference=state.params)
        heard = otafl.heard_mean(round, updates, TINY_GAMMA, who)
        params = torch.where(who.any(-1, keepdim=True), state.params + round.lr * heard.mean, state.params)
        return self.end(state, round, params, who, updates)

    def end(self, state: Own, round: Any, params: Tensor, who: Tensor, updates: Any) -> Any:  # noqa: A002
        return Own(params, round.broadcast(params, who, state.devices, updates)), otafl.Info(active=who)


def simulated(method: type, engine: str = "auto", **keys: Any) -> Any:
    config = make_config("fedavg", {"cell.devices": 6, "experiment.rounds": 8, "training.engine": engine, **keys})
    spec = method()
    return simulate(dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, spec=spec)))


@pytest.mark.parametrize("engine", ["reference", "batched", "preactivation"])
def test_a_users_method_without_noise_is_fedpbc(engine: str) -> None:
    """x^{t+1} = mean_{i∈A} x̃_i either way, and the same devices go on from it."""
    quiet = {"radio.noise_dbm_hz": float("-inf")}
    one = simulated(Air, engine, **quiet)
    keys = {"cell.devices": 6, "experiment.rounds": 8, "training.engine": engine, "training.skip_unheard": False}
    other = simulate(make_config("fedpbc", {**keys, **quiet}))
    state, same = one.init(), other.init()
    for t in range(8):
        state, same = one.step(state, t).state, other.step(same, t).state
    assert torch.allclose(state.params, same.params, rtol=0, atol=1e-11)
    assert torch.allclose(state.devices.models, same.devices.models, rtol=0, atol=1e-11)


def test_what_was_not_sent_is_kept() -> None:
    class Half(Air):
        def end(self, state: Own, round: Any, params: Tensor, who: Tensor, updates: Any) -> Any:  # noqa: A002
            expected = params[:, None] + 0.5 * round.lr * updates.dense()
            ends = updates.end.clone()
            devices = round.broadcast(params, who, state.devices, updates, unsent=0.5 * who)
            wanted = torch.where(who[..., None], expected, ends)
            assert torch.allclose(devices.models, wanted, rtol=0, atol=1e-12)
            return Own(params, devices), otafl.Info(active=who)

    sim = simulated(Half)
    state = sim.init()
    for t in range(4):
        state = sim.step(state, t).state


def trained_twice(self: Any, state: Own, round: Any, params: Any, who: Any, updates: Any) -> Any:  # noqa: A002
    round.train(state.devices, reference=state.params)


def handed_on(self: Any, state: Own, round: Any, params: Any, who: Any, updates: Any) -> Any:  # noqa: A002
    return Own(params, state.devices), otafl.Info(active=who)


def measured_late(self: Any, state: Own, round: Any, params: Any, who: Any, updates: Any) -> Any:  # noqa: A002
    return Own(params, round.broadcast(params, who, state.devices, updates)), otafl.Info(who, updates.norms(who))


def another_form(self: Any, state: Own, round: Any, params: Any, who: Any, updates: Any) -> Any:  # noqa: A002
    return Own(params, updates.end), otafl.Info(active=who)


def broadcasting(**changed: Any) -> Any:
    """A broadcast with other arguments."""

    def end(self: Any, state: Own, round: Any, params: Any, who: Any, updates: Any) -> Any:  # noqa: A002
        given = {"params": params, "who": who, "devices": state.devices, "trained": updates}
        given |= {name: change(params, who) for name, change in changed.items()}
        return Own(params, round.broadcast(**given)), otafl.Info(active=who)

    return end


def carrying(**changed: Any) -> Any:
    """What fresh devices have to send, with other arguments."""

    def end(self: Any, state: Own, round: Any, params: Any, who: Any, updates: Any) -> Any:  # noqa: A002
        given = {"devices": round.problem.devices(), "progress": updates, "reference": params}
        round.carry(**given | {name: change(state) for name, change in changed.items()})

    return end


def test_carried_is_what_devices_had_and_what_they_learnt() -> None:
    """(x_i + η p_i − reference)/η, on every engine; the reference engine leaves the devices as they are."""
    for engine in ("reference", "batched", "preactivation"):
        sim = simulated(Air, engine)
        round_, devices = sim.round_at(0), sim.problem.devices()
        devices.models.add_(torch.linspace(-1, 1, devices.models.numel(), dtype=torch.float64).view_as(devices.models))
        models, reference = devices.models.clone(), 0.5 * sim.problem.initial
        progress = round_.train(sim.problem.initial)
        expected = (models - reference[:, None]) / round_.lr + progress.dense()
        assert torch.allclose(round_.carry(devices, progress, reference).dense(), expected, rtol=0, atol=1e-10)
        assert torch.equal(devices.models, models) == (not sim._engine.donates)


@pytest.mark.parametrize("engine", ["reference", "preactivation"])
@pytest.mark.parametrize(
    ("end", "line"),
    [
        (carrying(devices=lambda s: s.devices), "with these devices already in this round"),
        (carrying(devices=lambda s: s.params), "needs the state's otafl.Devices, without anchors"),
        (carrying(progress=lambda s: s.params), r"needs what train\(\) returned, got a Tensor"),
        (carrying(reference=lambda s: s.params[0]), r"a reference of shape \[2, \d+\] and torch.float64"),
        (carrying(reference=lambda s: s.params.float()), "a reference of shape"),
        (trained_twice, "with these devices already in this round"),
        (handed_on, r"used up in this round; hand on what broadcast\(\) gives"),
        (measured_late, r"take norms and sums before round.broadcast\(\)"),
        (another_form, r"another form than init\(\): devices, devices.models"),
        (broadcasting(params=lambda p, w: p[0]), r"a model of shape \[2, \d+\] and torch.float64, got torch.float64"),
        (broadcasting(params=lambda p, w: p.float()), "got torch.float32"),
        (broadcasting(who=lambda p, w: w.double()), "needs a boolean mask"),
        (broadcasting(unsent=lambda p, w: torch.ones(2)), r"unsent shares of shape \[2, 6\], got torch.float32 \[2\]"),
        (broadcasting(unsent=lambda p, w: 0.5), r"unsent shares of shape \[2, 6\], got float"),
        (broadcasting(unsent=lambda p, w: 2.0 * torch.ones_like(w).double()), "are from 0 to 1"),
        (broadcasting(unsent=lambda p, w: w / 0.0), "are from 0 to 1"),
        (broadcasting(stored=lambda p, w: p), "have no anchors"),
        (broadcasting(devices=lambda p, w: p), "needs the state's otafl.Devices, got a Tensor"),
        (broadcasting(trained=lambda p, w: p), r"needs what train\(\) returned for these devices, got a Tensor"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_on_every_engine(engine: str, end: Any, line: str) -> None:
    sim = simulated(type("Mistaken", (Air,), {"end": end}), engine)
    with pytest.raises(PluginError, match=line):
        sim.step(sim.init(), 0)


def test_the_same_devices_twice_in_a_state_are_refused() -> None:
    @dataclass(frozen=True)
    class Two:
        params: Tensor
        one: otafl.Devices
        other: otafl.Devices

    class Twice(Air):
        def init(self, problem: otafl.Problem) -> Any:
            devices = problem.devices()
            return Two(problem.initial, devices, devices)

    with pytest.raises(PluginError, match="the same devices are twice"):
        simulated(Twice).init()


def test_devices_are_found_whatever_their_field_is_called() -> None:
    @dataclass(frozen=True)
    class Renamed:
        params: Tensor
        mine: otafl.Devices

    problem = simulate(make_config("fedpbc")).problem
    state = Renamed(problem.initial, problem.devices())
    assert own_models(state) is state.mine.models
    with pytest.raises(PluginError, match="an anchor is a model for each seed"):
        problem.devices(problem.initial[0])
