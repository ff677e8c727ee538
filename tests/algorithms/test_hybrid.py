"""The analog-digital hybrid: bits, the split against all subsets, both limits."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from otafl.algorithms.design.bits import Cell, cost, spend, split
from otafl.errors import ConfigError
from tests.algorithms.worlds import channels, gradients, make
from tests.conftest import TINY_PARAMS


def rounding(error: np.ndarray, bits: np.ndarray) -> Any:
    """Σ A_i/(2^{r_i} − 1)²."""
    return (error / (2.0**bits - 1) ** 2).sum(-1)


def bits_of(error: np.ndarray, time: np.ndarray, budget: float) -> np.ndarray:
    numbers = (torch.from_numpy(values)[None] for values in (error, time))
    everybody = torch.ones(1, 1, len(error), dtype=torch.bool)
    return spend(*numbers, everybody, torch.full((1, 1), budget, dtype=torch.float64))[0, 0].numpy()


def relaxed(error: np.ndarray, time: np.ndarray, budget: float) -> float:
    """The least error with real r_i ≥ 1, by a general solver."""
    solved = minimize(
        lambda r: float(rounding(error, r)),
        np.full(len(error), 2.0),
        bounds=[(1, 30)] * len(error),
        constraints={"type": "ineq", "fun": lambda r: budget - float((time * r).sum())},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return float(solved.fun)


def test_whole_bits_are_nearly_the_best_there_are() -> None:
    """The optimum over reals is 0.0215596 for A = (1, 4, 0.3), τ = (1, 2, 0.5), T = 14; that over integers is above."""
    error, time = np.array([1.0, 4.0, 0.3]), np.array([1.0, 2.0, 0.5])
    assert relaxed(error, time, 14.0) == pytest.approx(0.0215596, abs=2e-7)
    rng, ratios = np.random.default_rng(5), []
    grid = np.array(list(itertools.product(range(1, 13), repeat=3)), dtype=float)
    for _ in range(40):
        budget = float(time.sum() * rng.uniform(1, 6))
        found = rounding(error, bits_of(error, time, budget))
        best = rounding(error, grid[grid @ time <= budget]).min()
        assert relaxed(error, time, budget) * (1 - 1e-6) <= best <= found * (1 + 1e-12)
        ratios.append(found / best)
        error, time = np.exp(rng.normal(0, 1, 3)), np.exp(rng.normal(0, 0.5, 3))
    assert np.mean(ratios) < 1.05
    assert max(ratios) < 1.6


def test_whole_bits_fit_and_leave_no_time_for_one_more() -> None:
    rng = np.random.default_rng(6)
    for _ in range(20):
        error, time = np.exp(rng.normal(0, 1, 5)), np.exp(rng.normal(0, 1, 5))
        budget = float(time.sum() * rng.uniform(1, 6))
        bits = bits_of(error, time, budget)
        assert (bits >= 1).all()
        assert (time * bits).sum() <= budget * (1 + 1e-12)
        assert (time > budget - (time * bits).sum()).all()
    assert bits_of(np.ones(2), np.array([1.0, 1e-3]), 1e9).tolist() == [24, 24]


def test_the_split_is_the_best_of_all_subsets() -> None:
    """Whatever the rates: a digital device that is no weaker than the weakest analog one is analog at no cost."""
    rng = np.random.default_rng(7)
    everyone, counts = torch.ones(1, 5, dtype=torch.bool), set()
    subsets = torch.tensor(list(itertools.product([False, True], repeat=5)))[None]
    for _ in range(30):
        strength, largest = (torch.from_numpy(np.exp(rng.normal(0, s, (1, 5)))) for s in (1.5, 0.7))
        cell = Cell(size=50, noise=0.02, peak=1.0, bandwidth_hz=50.0, deadline_s=float(rng.uniform(3, 40)))
        rate = torch.from_numpy(100.0 * np.exp(rng.normal(0, 0.7, (1, 5))))
        bits, found = split(strength, largest, rate, everyone, cell)
        every = cost(strength / largest, largest, rate, everyone, subsets, cell)[1]
        assert float(found) <= float(every.min()) * (1 + 1e-9)
        digital = bits[0] > 0
        used_s = ((bits * 50 + 32) / rate)[0, digital].sum() + float((~digital).any()) * 50 / 50.0
        assert float(used_s) <= cell.deadline_s * (1 + 1e-9)
        counts.add(int(digital.sum()))
    assert len(counts) > 2
    assert split(strength, largest, rate, everyone, cell._replace(noise=0.0))[0].tolist() == [[0] * 5]


def test_seeds_are_split_alone_and_devices_outside_the_cohort_do_not_count() -> None:
    rng = np.random.default_rng(8)
    strength, largest, rate = (torch.from_numpy(np.exp(rng.normal(0, 1, (4, 7)))) for _ in range(3))
    cell = Cell(size=50, noise=0.02, peak=1.0, bandwidth_hz=50.0, deadline_s=300.0)
    who = torch.from_numpy(rng.random((4, 7)) < 0.7)
    together, errors = split(strength, largest, rate, who, cell)
    assert (together[~who] == 0).all()
    assert bool((together > 0).any())
    for s in range(4):
        alone = who[s : s + 1]
        part = [values[s : s + 1, alone[0]] for values in (strength, largest, rate)]
        bits, error = split(*part, torch.ones(1, int(alone.sum()), dtype=torch.bool), cell)
        assert torch.equal(bits[0], together[s, who[s]])
        assert float(error) == pytest.approx(float(errors[s]), rel=1e-12)


def test_hybrid_without_digital_devices_is_vanilla_with_peaks() -> None:
    """K = 0: g = √E_s min |h_i|/‖Δ_i‖_∞, everybody inverts; noise g^{-1} σ_z/m, here by the noise itself."""
    sim = make("hybrid", {"radio.bandwidth_hz": 10.0, "radio.tx_power_dbm": -50.0, "algorithm.deadline_s": 8.0})
    updates = gradients(sim, sim.problem.initial)
    step = sim.step(sim.init(), 0)
    if float(step.info.extra["digital"].sum()):
        pytest.fail("a device went digital")
    h = torch.stack([torch.from_numpy(world.coeff[0]) for world in sim.worlds]).abs()
    gamma = sim.problem.symbol_energy_j**0.5 * (h / updates.abs().amax(-1)).amin(-1)
    noise = sim.air.noise(sim.seeds, "noise", 0, TINY_PARAMS) * sim.problem.noise_var_j**0.5
    mean = updates.mean(1) + noise / (6 * gamma[:, None])
    moved = (step.state.params - sim.problem.initial) / sim.config.training.lr_at(0)
    assert torch.allclose(moved, mean, rtol=1e-8, atol=1e-10)
    assert float(step.energy_ratio.max()) <= 1 + 1e-12


def test_hybrid_adds_both_kinds_and_keeps_both_limits() -> None:
    """D̂ = (Σ_digital Q(Δ_i) + Σ_analog Δ_i + z/γ)/m: within the grid's step of the mean; |x̂| ≤ √E_s for every entry."""
    keys = {"radio.bandwidth_hz": 1e4, "radio.tx_power_dbm": 10.0, "algorithm.deadline_s": 0.1, "experiment.rounds": 30}
    sim = make("hybrid", keys)
    seen = set()
    for t in range(30):
        updates, h = gradients(sim, sim.problem.initial, t), channels(sim, t).abs()
        peaks = updates.abs().amax(-1)
        round_ = sim.round_at(t)
        bits = sim.algorithm._bits(round_, peaks.double())
        step = sim.take(sim.init(), sim.round_at(t))
        digital = bits > 0
        assert torch.equal(step.info.extra["digital"], digital.sum(-1).double())
        gamma = sim.problem.symbol_energy_j**0.5 * torch.where(digital, torch.inf, h / peaks).amin(-1)
        sent = torch.where(digital, 0.0, gamma[:, None] / h * peaks)
        assert float(sent.max()) <= sim.problem.symbol_energy_j**0.5 * (1 + 1e-9)
        noise = sim.air.noise(sim.seeds, "noise", t, TINY_PARAMS) * sim.problem.noise_var_j**0.5
        noise = torch.where(gamma[:, None].isfinite(), noise / gamma[:, None], 0.0)
        moved = (step.state.params - sim.problem.initial) / sim.config.training.lr_at(t)
        grid = torch.where(digital, 2 * peaks / (2.0 ** bits.clamp(min=1) - 1), 0.0).sum(-1, keepdim=True)
        off = 6 * moved - updates.sum(1) - noise
        assert (off.abs() <= grid * (1 + 1e-6) + 1e-9).all()
        if digital.any():
            assert float(off.abs().max()) > 0
        seen |= set(digital.sum(-1).tolist())
    assert len(seen) > 1


def test_hybrid_refuses_a_deadline_in_which_no_upload_fits() -> None:
    with pytest.raises(ConfigError, match="an analog upload of 53 parameters takes 53 s"):
        make("hybrid", {"radio.bandwidth_hz": 1.0}).init()
