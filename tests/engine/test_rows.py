"""Masks whose rows the host knows, and what it may do with that knowledge."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import otafl
from otafl.algorithms.fedoag import FedOAG
from otafl.engine.rows import Schedule, all_rows, replace_rows, rows_of
from otafl.errors import ConfigError, PluginError
from tests.conftest import make_config, simulate


def masks() -> np.ndarray:
    return np.random.default_rng(0).random((6, 3, 5)) < 0.4


def test_known_rows_are_the_masks_own() -> None:
    known = masks()
    schedule = Schedule(known, torch.device("cpu"))
    for t, mask in enumerate(known):
        rows, looked = schedule.at(t).rows, rows_of(torch.from_numpy(mask))
        assert torch.equal(rows.index, looked.index)
        assert rows.bounds == looked.bounds
        assert rows.index.tolist() == np.flatnonzero(mask).tolist()


def test_a_mask_that_was_written_is_looked_at_again() -> None:
    sim = simulate(make_config("fedavg"))
    round_ = sim.round_at(0)
    round_.everyone[0, 1] = False
    updates = round_.train(sim.problem.initial, round_.everyone)
    norms = updates.norms(torch.ones_like(round_.everyone))
    assert float(norms[0, 1]) == 0
    assert (norms > 0).sum() == norms.numel() - 1


def test_all_rows() -> None:
    rows = all_rows(torch.zeros(2, 3, dtype=torch.bool))
    assert rows.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.bounds == (0, 3, 6)
    assert rows.complete


def test_padded_rows_hold_the_mask_and_are_equally_many() -> None:
    known = masks()
    schedule = Schedule(known, torch.device("cpu"))
    most = known.sum(-1).max()
    for t, mask in enumerate(known):
        known_mask = schedule.pick(torch.tensor(t))
        rows = known_mask.rows
        assert torch.equal(known_mask.mask, torch.from_numpy(mask))
        assert not known_mask.exact
        assert rows.even
        assert len(rows) == 3 * most
        assert len(set(rows.index.tolist())) == len(rows)
        assert set(np.flatnonzero(mask)) <= set(rows.index.tolist())
        for s in range(3):
            assert (rows.index[rows.bounds[s] : rows.bounds[s + 1]] // 5 == s).all()


def test_equally_many_rows_need_no_padding() -> None:
    known = np.array([[[1, 1, 0], [0, 1, 1]], [[1, 0, 1], [1, 1, 0]]], dtype=bool)
    picked = Schedule(known, torch.device("cpu")).pick(torch.tensor(1))
    assert picked.exact
    assert picked.rows.index.tolist() == np.flatnonzero(known[1]).tolist()


def test_replacing_rows_leaves_the_others() -> None:
    models, params = torch.zeros((2, 3, 4)), torch.tensor([[1.0], [2.0]]).expand(2, 4)
    who = torch.tensor([[True, False, True], [False, True, False]])
    replace_rows(models, who, params)
    assert models[..., 0].tolist() == [[1, 0, 1], [0, 2, 0]]


@pytest.mark.parametrize("algorithm", ["fedoag", "ota-fedavg"])
def test_devices_that_are_never_heard_again_need_no_training(algorithm: str) -> None:
    """x^t is the same to the last bit, and so is every column; fewer devices are trained."""
    config = make_config(algorithm, {"cell.devices": 10, "experiment.rounds": 20, "algorithm.gamma": 3e-11})
    trained: dict[bool, int] = {}
    results = {}
    for skip in (True, False):
        sim = simulate(config.replace({"training.skip_unheard": skip}))
        engine, count = sim._engine.train, 0

        def counting(work: Any, engine: Any = engine) -> Any:
            nonlocal count
            count += len(work.rows)
            return engine(work)

        sim._engine.train = counting  # type: ignore[method-assign]
        from otafl.simulation.run import _fold, _next

        rounds, result = _fold(sim, None, None, ()), None
        while result is None:
            result = _next(rounds)
        results[skip] = result
        trained[skip] = count
    assert torch.equal(results[True].params, results[False].params)
    for name, values in results[True].metrics.items():
        assert np.array_equal(values, results[False].metrics[name], equal_nan=True), name
    if algorithm == "fedoag":
        assert 0 < trained[True] < 0.8 * trained[False]


@pytest.mark.parametrize("record", ["mean", "consensus"])
def test_all_are_trained_where_their_models_are_recorded(record: str) -> None:
    keys = {
        "cell.devices": 10,
        "experiment.rounds": 12,
        "algorithm.gamma": 3e-11,
        "experiment.record": ["server", record],
    }
    runs = [otafl.run(make_config("fedoag", {**keys, "training.skip_unheard": skip})) for skip in (True, False)]
    for name, values in runs[0].metrics.items():
        assert np.array_equal(values, runs[1].metrics[name], equal_nan=True), name


@dataclass(frozen=True)
class Lying(FedOAG):
    """Says that nobody transmits, and then everybody does."""

    ideal_radio: ClassVar[bool] = False

    def active(self, device: Any, problem: Any) -> torch.Tensor:
        return torch.zeros(device.h.shape, dtype=torch.bool)

    def step(self, state: Any, round: Any) -> Any:  # noqa: A002
        round.report(torch.ones(round.everyone.shape), round.everyone)
        return super().step(state, round)


def test_a_method_that_breaks_its_word_about_who_transmits_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from otafl import registry

    monkeypatch.setitem(registry._registered["algorithms"], "lying", Lying)
    with pytest.raises(PluginError, match="`active` or the cohort keeps silent"):
        otafl.run(make_config("fedoag").replace({"algorithm.name": "lying"}))


def test_writing_into_the_active_mask_is_refused() -> None:
    sim = simulate(make_config("fedoag"))
    round_ = sim.round_at(0)
    round_.active[0, 0] = True
    with pytest.raises(PluginError, match="active was written"):
        round_.report(torch.ones((2, 4)), round_.everyone)


def test_a_wrong_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from otafl import registry

    wrong = type("Wrong", (FedOAG,), {"active": lambda self, device, problem: torch.zeros(3)})
    monkeypatch.setitem(registry._registered["algorithms"], "wrong", dataclass(frozen=True)(wrong))
    with pytest.raises(PluginError, match=r"active\(\) must give a boolean mask"):
        otafl.run(make_config("fedoag").replace({"algorithm.name": "wrong"}))


def test_the_mean_model_is_refused_where_devices_were_left_out() -> None:
    """Devices that will not be heard again are not trained: their models are no part of a mean."""
    sim = simulate(make_config("fedoag", {"training.skip_unheard": True}))
    with pytest.raises(ConfigError, match="needs all of them trained"):
        sim.mean_params(sim.init())
    recorded = simulate(make_config("fedoag", {"training.skip_unheard": True, "experiment.record": ["server", "mean"]}))
    assert torch.equal(recorded.mean_params(recorded.init()), recorded.problem.initial)
