"""Recorded rounds are the usual ones, or are given up; continuing finds the memory that this machine wants."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import otafl
from otafl import registry
from otafl.algorithms.fedavg import FedAvg
from otafl.core.metrics import Ledger
from otafl.core.state import copied, overwrite, tensors_of, unaliased
from otafl.engine.devices import FREE, Anchors
from otafl.engine.updates import Updates
from otafl.errors import PluginError
from otafl.simulation.graph import Rounds
from otafl.simulation.run import _restore
from tests.conftest import make_config, simulate


@dataclass(frozen=True)
class Inner:
    latest: Tensor


@dataclass(frozen=True)
class State:
    params: Tensor
    previous: Tensor
    history: Tensor
    inner: Inner


def test_a_state_with_shared_memory_is_overwritten_as_if_it_were_new() -> None:
    """Params ← params + 1, previous ← params, latest ← a view of the old history, over three rounds."""
    x = torch.zeros(2, 3)
    state = unaliased(State(x, x, torch.zeros(2, 4, 3), Inner(x)))
    pointers = [t.data_ptr() for t in (state.params, state.previous, state.history, state.inner.latest)]
    assert len(set(pointers)) == 4
    for r in range(1, 4):
        history = torch.roll(state.history, 1, dims=1)
        history[:, 0] = state.params
        new = State(state.params + 1, state.params, history, Inner(state.history[:, -1]))
        expected = [t.clone() for t in (new.params, new.previous, new.history, new.inner.latest)]
        overwrite(state, new)
        found = [state.params, state.previous, state.history, state.inner.latest]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert [t.data_ptr() for t in found] == pointers
        assert float(state.params[0, 0]) == r
        assert float(state.previous[0, 0]) == r - 1


def test_restoring_a_template_with_shared_memory() -> None:
    x = torch.zeros(2, 3)
    template = State(x, x, torch.zeros(2, 1, 3).expand(2, 4, 3), Inner(x))
    saved = {
        "state.params": torch.full((2, 3), 1.0),
        "state.previous": torch.full((2, 3), 2.0),
        "state.history": torch.full((2, 4, 3), 3.0),
        "state.inner.latest": torch.full((2, 3), 4.0),
    }
    state = _restore(template, saved, torch.device("cpu"))
    values = [float(t.mean()) for t in (state.params, state.previous, state.history, state.inner.latest)]
    assert values == [1.0, 2.0, 3.0, 4.0]


def test_anchors_saved_with_few_rows_get_those_that_this_machine_wants() -> None:
    """A CPU's buffer grows as it must; a GPU's has all its rows from the start."""
    params = torch.arange(6.0).view(2, 3)
    small = Anchors(
        params[:, None].clone(), torch.zeros((2, 1), dtype=torch.int64), torch.zeros((2, 4), dtype=torch.int64)
    )
    large = Anchors(torch.ones(2, 5, 3), torch.full((2, 5), FREE), torch.zeros((2, 4), dtype=torch.int64))
    grown = large.continued(small)
    assert grown.pool.shape == (2, 5, 3)
    assert grown.number.tolist() == [[0] + [FREE] * 4] * 2
    assert torch.equal(grown.pool[:, 0], params)
    assert small.continued(large).pool.shape == (2, 5, 3)


def test_a_gpu_has_room_for_as_many_anchors_as_rounds_can_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six devices, three rounds, four rows: the same means as with a row for every device."""
    monkeypatch.setattr("otafl.engine.devices.can_look", lambda values: False)
    params = torch.arange(6.0).view(2, 3)
    few, many = Anchors.initial(params, 6, 4), Anchors.initial(params, 6, 6)
    assert (few.pool.shape[1], many.pool.shape[1]) == (4, 6)
    draw = torch.Generator().manual_seed(0)
    for t in range(3):
        who, sent = torch.rand(2, 6, generator=draw) < 0.4, params + 10 * (t + 1)
        few, many = few.after(sent, who, True), many.after(sent, who, True)
        for part in (who, ~who):
            assert torch.equal(few.mean(part), many.mean(part))
        assert torch.equal(few.count_since_oldest(), many.count_since_oldest())
    for i in range(5):  # a round more than there is room for is seen
        few = few.after(params, torch.arange(6).expand(2, 6) == i, True)
    assert few.mean(torch.ones(2, 6, dtype=torch.bool)).isnan().any()


def test_a_second_anchor_in_a_round_is_refused_where_there_is_room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulate(make_config("fedoag", {"experiment.rounds": 2}))
    monkeypatch.setattr("otafl.engine.devices.can_look", lambda values: False)
    devices, now, params = sim.problem.devices(sim.problem.initial), sim.round_at(0), sim.problem.initial
    assert devices.anchors is not None
    assert devices.anchors.pool.shape[1] == 3 < sim.problem.num_devices
    trained = now.train(devices)
    monkeypatch.setattr("otafl.core.round.can_look", lambda values: False)
    after = now.broadcast(params, now.active, devices, trained)
    with pytest.raises(PluginError, match="stores a second anchor in a round"):
        now.broadcast(params, ~now.active, after, Updates(after.models, *trained.reference, now.lr))


def test_a_copy_of_a_state_has_its_layout() -> None:
    """Rows of device models are aligned for matrix products, in a copy, too."""
    state: Any = simulate(make_config("fedoag")).init()
    other = copied(state)
    for name, value in tensors_of(state).items():
        mine = tensors_of(other)[name]
        assert torch.equal(mine, value)
        assert mine.data_ptr() != value.data_ptr()
        assert mine.stride() == value.stride() or 0 in value.stride(), name
    assert not state.devices.models.is_contiguous()


def test_device_models_keep_their_layout_when_continued() -> None:
    sim = simulate(make_config("fedoag"))
    template: Any = sim.init()
    strides = template.devices.models.stride()
    assert strides[1] % 32 == 0
    saved = {
        "state.params": template.params.clone(),
        "state.devices.models": torch.ones_like(template.devices.models).contiguous(),
        **{
            f"state.devices.anchors.{n}": getattr(template.devices.anchors, n).clone()
            for n in ("pool", "number", "slot")
        },
    }
    state = _restore(template, saved, torch.device("cpu"))
    assert state.devices.models.stride() == strides
    assert (state.devices.models == 1).all()


class Counting(FedAvg):
    """Keeps something of its own: a recorded round would not know of it."""

    turns: ClassVar[list[int]] = []

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        self.turns.append(0)
        return dataclasses.replace(after, params=after.params * (1 + 0.1 * len(self.turns))), info


class Branching(FedAvg):
    """Does something else in every third round, as the host sees it."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        after, info = super().step(state, round)
        return (after if isinstance(round.t, int) and round.t % 3 == 0 else state), info


class Drawing(FedAvg):
    """Draws numbers of its own."""

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        drawn = torch.tensor([rng.random() for rng in round.draw("step")], dtype=torch.float64)
        after, info = super().step(state, round)
        return dataclasses.replace(after, params=after.params * (1 + 0.01 * drawn[:, None])), info


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are tried as on a GPU, with a stand-in for a CUDA graph that does the recorded round again."""

    def record(self: Any, state: Any, ledger: Ledger) -> Any:
        return SimpleNamespace(replay=lambda: self._round(None, state, ledger))

    monkeypatch.setattr("otafl.engine.devices.can_look", lambda values: False)
    monkeypatch.setattr("otafl.simulation.build.Simulation.recordable", True)
    monkeypatch.setattr("otafl.simulation.graph._RecordedRounds._record", record)


def taken(config: otafl.Config, recordable: bool) -> tuple[Rounds, Ledger]:
    """Eight rounds."""
    sim = simulate(config)
    ledger = Ledger.empty(len(sim.seeds), config.cell.devices, sim.device)
    with pytest.MonkeyPatch.context() as patch:
        if not recordable:
            patch.setattr("otafl.simulation.build.Simulation.recordable", False)
        rounds = Rounds(sim, sim.init(), ledger)
    for t in range(8):
        rounds.advance(t)
    return rounds, ledger


@pytest.mark.parametrize("cohort", [0, 3])
@pytest.mark.parametrize("algorithm", sorted(registry.BUILTIN["algorithms"]))
@pytest.mark.usefixtures("recording")
def test_recorded_rounds_are_the_usual_ones(algorithm: str, cohort: int) -> None:
    """The same models and the same ledger; rows of padded size, where rounds have different ones."""
    keys = {"training.engine": "batched", "cell.devices": 6, "experiment.rounds": 8, "cell.cohort": cohort}
    config = make_config(algorithm, keys)
    (one, kept), (other, expected) = (taken(config, recordable) for recordable in (True, False))
    assert one.replayed
    assert not other.replayed
    assert torch.allclose(one.state.params, other.state.params, rtol=1e-9, atol=1e-10)
    for name, value in expected.tensors().items():
        assert torch.allclose(kept.tensors()[name].double(), value.double(), rtol=1e-7, equal_nan=True), name


@pytest.mark.parametrize(
    ("method", "why"),
    [(Counting, "led elsewhere"), (Branching, "led elsewhere"), (Drawing, "the method draws random numbers")],
)
@pytest.mark.usefixtures("recording")
def test_rounds_that_cannot_be_recorded_stay_as_they_are(method: Any, why: str) -> None:
    config = make_config("fedavg", {"experiment.rounds": 8})
    config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, spec=method()))
    Counting.turns.clear()
    rounds, ledger = taken(config, recordable=True)
    assert not rounds.replayed
    assert why in str(rounds.how)
    if method is Counting:  # counted while it was tried: there is nothing to compare with
        return
    other, expected = taken(config, recordable=False)
    assert torch.equal(rounds.state.params, other.state.params)
    for name, value in expected.tensors().items():
        assert torch.equal(ledger.tensors()[name].nan_to_num(), value.nan_to_num()), name
