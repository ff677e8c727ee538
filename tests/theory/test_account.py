"""The account of a configuration: its probabilities against activity, its staleness against a run's."""

import math

import numpy as np
import pytest

import otafl
from otafl.errors import ConfigError
from otafl.theory.account import account, uplink_probability
from tests.conftest import make_config, make_quadratic, simulate


def test_probabilities_are_those_of_the_activity() -> None:
    """p_i^t of a moving cell, summed over rounds, against how often devices were active; 5 standard errors."""
    walking = {"mobility.name": "bounded-waypoint", "mobility.speed_mps": [20.0, 30.0], "mobility.territory_m": 400.0}
    sim = simulate(make_quadratic("fedoag", {"experiment.rounds": 1500, "cell.devices": 8, **walking}))
    prob = uplink_probability(sim)
    assert sim._active is not None
    heard = np.mean([sim._active.at(r)[0].numpy() for r in range(1500)], axis=0)
    error = np.sqrt((prob * (1 - prob)).sum(0)) / 1500
    assert (np.abs(heard - prob.mean(0)) <= 5 * error + 1e-9).all()


def test_account_of_a_run() -> None:
    """Expected staleness is what a run of many seeds measures; the rows name every quantity."""
    seeds = list(range(60))
    config = make_config("fedoag", {"experiment.rounds": 40, "cell.devices": 6, "experiment.seeds": [0]})
    sim = simulate(config)
    found = account(sim, [sim.problem.initial[0]])
    shown = {symbol for symbol, _, _ in found.rows}
    assert {"c", "E|A|", "1 − ρ", "L", "σ²", "ζ²", "G²", "κ", "(A)", "(B)", "(C)", "(D)"} <= shown
    # the same positions for every seed, other fades
    places = sim.worlds[0].positions_m[0].tolist()
    fixed = {"cell.placement": "given", "cell.positions_m": places, "experiment.seeds": seeds}
    measured = otafl.run(config.replace(fixed)).metrics["staleness_mean"]
    expected = float(np.mean(found.staleness_mean))
    rows = measured[:, :-1].mean(1)  # r − τ of x^r, for r = 0 … T − 1
    assert abs(rows.mean() - expected) < 5 * rows.std(ddof=1) / math.sqrt(len(seeds)) + 1e-9


def test_only_methods_with_a_threshold_have_one() -> None:
    with pytest.raises(ConfigError, match="the analysis is FedOAG's"):
        uplink_probability(simulate(make_config("vanilla")))
