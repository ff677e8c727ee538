"""Cohorts: some devices, drawn anew in every round, are all that may take part in it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import otafl
from otafl.errors import ConfigError, PluginError
from otafl.random import Streams
from otafl.registry import BUILTIN
from otafl.simulation.build import Simulation
from otafl.world.placement import Cell
from tests.conftest import make_config, simulate

MANY = {"cell.devices": 8, "experiment.rounds": 3000, "experiment.seeds": [0], "training.local_steps": 1}


def make(algorithm: str, cohort: int, keys: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config(algorithm, {"cell.devices": 8, "cell.cohort": cohort, **(keys or {})}))


def test_every_choice_is_as_likely_and_addressed() -> None:
    masks = Cell(devices=10, cohort=3).cohorts(4000, Streams(5))
    assert (masks.sum(1) == 3).all()
    error = 5 * math.sqrt(0.3 * 0.7 / 4000)
    assert (np.abs(masks.mean(0) - 0.3) < error).all()
    together = (masks[:, 0] & masks[:, 1]).mean()  # 3 · 2/(10 · 9)
    assert abs(together - 1 / 15) < 5 * math.sqrt(1 / 15 / 4000)
    assert np.array_equal(Cell(devices=10, cohort=3).cohorts(7, Streams(5)), masks[:7])
    assert not np.array_equal(Cell(devices=10, cohort=3).cohorts(4000, Streams(6)), masks)
    with pytest.raises(ConfigError, match=r"cell\.cohort = 11: there are only 10 devices"):
        Cell(devices=10, cohort=11)


@pytest.mark.parametrize("algorithm", sorted(BUILTIN["algorithms"]))
def test_a_cohort_of_all_changes_nothing(algorithm: str) -> None:
    one, other = make(algorithm, 0), make(algorithm, 8)
    state, same = one.init(), other.init()
    for t in range(5):
        state, same = one.step(state, t).state, other.step(same, t).state
    assert torch.allclose(state.params, same.params, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "vanilla", "sca", "lcpc", "air-feel", "bb-interior", "bb-alternative"])
def test_weights_are_the_same_in_the_mean(algorithm: str) -> None:
    """From one state, over 3,000 rounds: E w_i with 3 of 8 devices is E w_i with all of them; 5 standard errors."""
    means = []
    for cohort in (0, 3):
        sim = make(algorithm, cohort, MANY)
        state = sim.init()
        weights = []
        for t in range(3000):
            round_ = sim.round_at(t)
            info = sim.algorithm.step(state, round_)[1]
            assert not bool((info.active & ~round_.everyone).any())
            weights.append(info.active.double() / info.active.sum() if info.weights is None else info.weights)
        found = torch.cat(weights)
        means.append((found.mean(0), found.std(0) / math.sqrt(3000)))
    (full, error), (some, other) = means
    assert float(full.sum()) > 0
    assert ((full - some).abs() <= 5 * torch.hypot(error, other) + 1e-12).all()


@pytest.mark.parametrize("algorithm", ["fedoag", "fedoag-plus", "fedpbc"])
def test_who_is_not_drawn_neither_trains_nor_hears(algorithm: str) -> None:
    sim = make(algorithm, 3, {"training.skip_unheard": False})
    state = sim.init()
    for t in range(5):
        before, outside = state.devices.models.clone(), ~sim.round_at(t).everyone
        state = sim.step(state, t).state
        assert torch.equal(state.devices.models[outside], before[outside])
        assert not torch.equal(state.devices.models[~outside], before[~outside])


@otafl.register_algorithm("test-greedy")
@dataclass(frozen=True)
class Greedy:
    """Does not ask who may take part."""

    knowledge = otafl.Knowledge(device={"h"})

    def init(self, problem: otafl.Problem) -> otafl.State:
        return otafl.State(problem.initial)

    def step(self, state: otafl.State, round: otafl.Round) -> tuple[otafl.State, otafl.Info]:  # noqa: A002
        who = torch.ones_like(round.everyone)
        heard = round.uplink(round.train(state.params), 1e-16 / round.device.h, who)
        return otafl.State(state.params + 0.0 * heard), otafl.Info(active=who)


def test_a_method_that_takes_others_is_refused() -> None:
    sim = simulate(make_config("test-greedy", {"cell.devices": 8, "cell.cohort": 2}))
    sim.step(sim.init(), 0)
    with pytest.raises(PluginError, match="the cohort keeps silent"):
        sim.check()
    notes = [finding for finding in otafl.check("test-greedy") if finding.name == "cohort"]
    assert notes[0].verdict == "note"
    assert "cell.cohort cannot be used with it" in notes[0].text


def test_a_thousand_devices_with_fifty_a_round() -> None:
    keys = {"cell.devices": 1000, "cell.cohort": 50, "data.train_images": 6000, "experiment.rounds": 3}
    result = otafl.run(make_config("fedavg", keys), device="cpu")
    assert (result.metrics["num_active"][:, 1:] == 50).all()
    assert result.status == "complete"
