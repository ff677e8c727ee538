"""The account of a configuration: its probabilities against activity, its staleness against a run's."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import otafl
from otafl.errors import ConfigError
from otafl.papers.fedoag.theory import staleness
from otafl.papers.fedoag.theory.account import account
from tests.conftest import make_config, make_quadratic, simulate


def test_probabilities_are_those_of_the_activity() -> None:
    """p_i^t of a moving cell, summed over rounds, against how often devices were active; 5 standard errors."""
    walking = {"mobility.name": "bounded-waypoint", "mobility.speed_mps": [20.0, 30.0], "mobility.territory_m": 400.0}
    sim = simulate(make_quadratic("fedoag", {"experiment.rounds": 1500, "cell.devices": 8, **walking}))
    prob = sim.uplink_probability()
    assert prob is not None
    assert sim._active is not None
    heard = np.mean([sim._active.at(r).mask[0].numpy() for r in range(1500)], axis=0)
    error = np.sqrt((prob * (1 - prob)).sum(0)) / 1500
    assert (np.abs(heard - prob.mean(0)) <= 5 * error + 1e-9).all()


def test_account_of_a_run() -> None:
    """Expected staleness is what a run of many seeds measures; the rows name every quantity."""
    seeds = list(range(60))
    config = make_config("fedoag", {"experiment.rounds": 40, "cell.devices": 6, "experiment.seeds": [0]})
    sim = simulate(config)
    found = account(sim)
    shown = {symbol for symbol, _, _ in found.rows}
    assert {"c", "E|A|", "1 − ρ", "L", "σ²", "ζ²", "G²", "κ", "(A)", "(B)", "(C)", "(D)"} <= shown
    # the same positions for every seed, other fades
    places = sim.worlds[0].positions_m[0].tolist()
    fixed = {"cell.placement": "given", "cell.positions_m": places, "experiment.seeds": seeds}
    measured = otafl.run(config.replace(fixed)).metrics["staleness_mean"]
    prob = sim.uplink_probability()
    assert prob is not None
    expected = float(staleness.moments(prob)[0][:-1].mean())
    assert dict((symbol, value) for symbol, value, _ in found.rows)["staleness"] == f"{expected:.3g}"
    rows = measured[:, :-1].mean(1)  # r − τ of x^r, for r = 0 … T − 1
    assert abs(rows.mean() - expected) < 5 * rows.std(ddof=1) / math.sqrt(len(seeds)) + 1e-9


def test_only_methods_with_a_threshold_have_one() -> None:
    sim = simulate(make_config("vanilla"))
    assert sim.uplink_probability() is None
    with pytest.raises(ConfigError, match="the analysis is FedOAG's"):
        account(sim)


@pytest.mark.parametrize("gamma", [1e-10, 1e-6])
def test_a_device_that_is_never_heard_has_no_bound(gamma: float) -> None:
    """P down to 0 in floating point: the bound is infinite, and no division fails."""
    found = account(simulate(make_config("fedoag", {"algorithm.gamma": gamma})))
    assert ("sum", "∞") in [row[:2] for row in found.rows]
    assert "not be heard once" in found.warnings[0]


def test_a_run_is_shown_beside_and_a_diverged_one_refused() -> None:
    config = make_config("fedoag", {"experiment.seeds": [0], "experiment.record": ["server", "mean", "gradient"]})
    sim, result = simulate(config), otafl.run(config)
    shown = [(symbol, value) for symbol, value, text in account(sim, result).rows if symbol == "measured"]
    assert len(shown) == 3
    assert shown[2] == ("measured", f"{np.nanmean(result.metrics['mean_grad_norm_sq']):.3g}")
    assert shown[1] == ("measured", "–")  # the consensus distance was not recorded
    broken = dataclasses.replace(result, params=result.params * torch.nan)
    with pytest.raises(ConfigError, match="diverged"):
        account(sim, broken)


def test_what_the_analysis_does_not_cover_is_said() -> None:
    plain = account(simulate(make_config())).warnings
    lasting = account(simulate(make_config(overrides={"fading.memory": "autoregressive"}))).warnings
    flawed = account(simulate(make_config(overrides={"imperfect.phase_std_rad": 0.1}))).warnings
    assert not any("memory" in line or "imperfect" in line for line in plain)
    assert any("fading has a memory" in line for line in lasting)
    assert any("the radio is imperfect" in line for line in flawed)
