"""FedOAG-plus: energy, noise, which of FedOAG's identities it keeps, what drains residuals, what the server learns."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from otafl.algorithms.fedoag_plus import median
from otafl.engine.updates import Updates
from otafl.radio.csi import Reports
from otafl.simulation.build import Simulation
from tests.algorithms.test_fedoag import NOISE_FREE, noise, rounds
from tests.conftest import TINY_GAMMA, make_config, make_quadratic, simulate

THETAS = [0.25, 0.5, 1.0]
KEYS = {"training.engine": "reference", "cell.devices": 6, "experiment.rounds": 12}


def make(theta_min: float, keys: dict[str, Any] | None = None) -> Simulation:
    config = make_config("fedoag-plus", {**KEYS, "algorithm.theta_min": theta_min, **(keys or {})})
    return simulate(config, noise=noise)


def by_hand(sim: Simulation, before: Any, ends: Tensor, t: int, s: int) -> tuple[Tensor, Tensor, float, Tensor]:
    """Active devices, their innovations, κ and θ of one round, from the definitions."""
    active = (np.abs(sim.worlds[s].coeff[t]) >= TINY_GAMMA / math.sqrt(sim.problem.num_params * 1e-9)).nonzero()[0]
    anchors = before.devices.anchors.pool[s, before.devices.anchors.slot[s]]
    delta = ((ends[s] - anchors) / sim.config.training.lr_at(t))[active]
    ratios = delta.norm(dim=-1) / torch.from_numpy(np.abs(sim.worlds[s].coeff[t]))[active]
    middle, least = float(np.median(ratios)) if len(active) else 0.0, sim.algorithm.theta_min
    theta = (middle / ratios).clamp(max=1).clamp(min=least)
    kappa = math.sqrt(sim.problem.num_params * 1e-9) / max(middle, least * float(ratios.max())) if len(active) else 0.0
    return torch.from_numpy(active), delta, kappa, theta


@pytest.mark.parametrize("theta_min", THETAS)
def test_round_is_its_definition(theta_min: float) -> None:
    """x^{t+1} = mean anchor + η mean θ_i Δ_i + η z/(κ|A|); active devices keep η(1 − θ_i) Δ_i; energy κ² θ_i² r_i²."""
    sim = make(theta_min)
    limit_j = sim.problem.num_params * sim.problem.symbol_energy_j
    several, held = 0, 0
    for t, (before, after, info, ends) in enumerate(rounds(sim, 12)):
        lr = sim.config.training.lr_at(t)
        z = math.sqrt(sim.noise_var_j) * noise(sim.seeds, "noise", t, sim.objective.num_params)
        round_ = sim.round_at(t)
        sim.algorithm.step(before, round_)
        energy_j = round_._close(round_.everyone).energy_j
        for s in range(len(sim.seeds)):
            active, delta, kappa, theta = by_hand(sim, before, ends, t, s)
            assert info.active[s].nonzero().flatten().tolist() == active.tolist()
            silent = ~info.active[s]
            assert torch.equal(after.devices.models[s, silent], ends[s, silent])
            if not len(active):
                assert torch.equal(after.params[s], before.params[s])
                continue
            anchors = before.devices.anchors.pool[s, before.devices.anchors.slot[s]][active]
            sent = theta[:, None] * delta
            expected = anchors.mean(0) + lr * sent.mean(0) + lr * z[s] / (kappa * len(active))
            assert torch.allclose(after.params[s], expected, rtol=1e-10, atol=1e-11)
            kept = after.params[s] + lr * (delta - sent)
            assert torch.allclose(after.devices.models[s, active], kept, rtol=1e-10, atol=1e-11)
            strength = torch.from_numpy(np.abs(sim.worlds[s].coeff[t]))[active]
            ratio = (kappa * sent.norm(dim=-1) / strength).square() / limit_j
            assert torch.allclose(energy_j[s, active] / limit_j, ratio, rtol=1e-9)
            assert ratio.max() <= 1 + 1e-12
            bound = delta.norm(dim=-1).max()
            assert 1 / kappa <= bound / TINY_GAMMA * (1 + 1e-12)  # never more noise than FedOAG at the same state
            several += len(active) > 2
            held += int((theta < 1).sum())
    assert several > 3
    assert held > 0 or theta_min == 1


@pytest.mark.parametrize("theta_min", THETAS)
def test_f2_sum_of_the_models_is_kept(theta_min: float) -> None:
    """Σ x_i^{t+1} = Σ x̃_i + η z/κ: the mean model has the noise over m, whatever was held back."""
    sim = make(theta_min)
    for t, (before, after, _, ends) in enumerate(rounds(sim, 12)):
        z = math.sqrt(sim.noise_var_j) * noise(sim.seeds, "noise", t, sim.objective.num_params)
        for s in range(len(sim.seeds)):
            active, _, kappa, _ = by_hand(sim, before, ends, t, s)
            added = sim.config.training.lr_at(t) * z[s] / kappa if len(active) else torch.zeros_like(z[s])
            expected = ends[s].sum(0) + added
            assert torch.allclose(after.devices.models[s].sum(0), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("theta_min", THETAS)
def test_f9_mean_model_follows_the_quadratic(theta_min: float) -> None:
    config = make_quadratic(
        "fedoag-plus", {"experiment.rounds": 40, "cell.devices": 7, "algorithm.theta_min": theta_min}
    )
    sim = simulate(config)
    state = sim.init()
    center = sim.test.features.mean(0)
    start = state.devices.models.mean(1) - center
    for t in range(40):
        state = sim.step(state, t).state
        expected = (1 - 0.05) ** (3 * (t + 1)) * start
        assert torch.allclose(state.devices.models.mean(1) - center, expected, rtol=1e-9, atol=1e-13)


def test_tight_scaling_without_noise_is_fedoag() -> None:
    """θ_min = 1 sends everything: the same mean, only the noise differs."""
    one, other = make(1.0, NOISE_FREE), simulate(make_config("fedoag", {**KEYS, **NOISE_FREE}))
    state, same = one.init(), other.init()
    for t in range(12):
        state, same = one.step(state, t).state, other.step(same, t).state
        assert torch.allclose(state.params, same.params, rtol=0, atol=1e-11)
        assert torch.allclose(state.devices.models, same.devices.models, rtol=0, atol=1e-11)


def test_tight_scaling_spends_the_whole_limit() -> None:
    """θ_min = 1: the device with the largest r_i is at exactly d E_s in every round that has one."""
    sim = make(1.0)
    for t, (before, _, info, _) in enumerate(rounds(sim, 12)):
        ratio = sim.step(before, t).energy_ratio
        heard = info.active.any(-1)
        assert torch.allclose(ratio[heard], torch.ones_like(ratio[heard]), rtol=1e-9)


def test_nothing_to_send_adds_no_noise() -> None:
    """All r_i = 0: x^{t+1} is the mean anchor."""
    keys = {"data.centers": [[0.5] * 3] * 4, "radio.noise_dbm_hz": -173.0, "algorithm.gamma": 1e-20}
    sim = simulate(make_quadratic("fedoag-plus", keys))
    state = sim.init()
    for t in range(3):
        state, info, *_ = sim.step(state, t)
        assert info.active.all()
        assert (state.params == 0.5).all()


def test_median() -> None:
    """Middle one, mean of the two middle ones, 0 of none; others do not count."""
    values = torch.tensor([[5.0, 1.0, 3.0, 9.0], [5.0, 1.0, 3.0, 9.0], [5.0, 1.0, 3.0, 9.0], [5.0, 1.0, 3.0, 9.0]])
    who = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert median(Reports(values.double(), who)).tolist() == [4.0, 3.0, 9.0, 0.0]


class Disguised:
    """A Round in which device i has f_i times the channel and f_i times the innovation."""

    def __init__(self, sim: Simulation, t: int, factors: Tensor) -> None:
        self._round, self._factors = sim.round_at(t), factors
        self.told: list[Tensor] = []
        self._round.device._values = {"h": self._round.device._values["h"] * factors}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)

    def train(self, devices: Any) -> Updates:
        updates = self._round.train(devices)
        pool, slot = updates.reference
        anchors = pool[torch.arange(len(pool))[:, None], slot]
        return Updates(anchors + self._factors[..., None] * (updates.end - anchors), pool, slot, self._round.lr)

    def report(self, values: Tensor, who: Tensor) -> Reports:
        reports = self._round.report(values, who)
        self.told += [reports.values, reports.who]
        return reports


def test_what_the_server_is_told_reveals_no_channel() -> None:
    """Worlds whose |h_i| differ by any factors tell the server exactly the same: no |h_i| can be computed from it."""
    sim = make(0.5)
    state = sim.init()
    factors = torch.tensor([[1.0, 2.0, 3.0, 1.5, 7.0, 1.1], [4.0, 1.0, 1.2, 2.5, 1.3, 9.0]], dtype=torch.float64)
    one, other = Disguised(sim, 0, torch.ones_like(factors)), Disguised(sim, 0, factors)
    for disguise in (one, other):
        sim.algorithm.step(state, disguise)
    assert one.told[1].any()
    assert torch.equal(one.told[1], other.told[1])
    assert torch.allclose(one.told[0], other.told[0], rtol=1e-12)


def two_groups(theta_min: float | None, lr: float, num_rounds: int, seeds: int) -> Simulation:
    """20 devices heard with probability 0.9, optimum 0; 10 with 0.05, optimum 1; no noise; start at the truth, 1/3."""
    gamma, energy_j = 1e-9, 1e-9
    gains = [gamma**2 / (energy_j * -math.log(p)) for p in [0.9] * 20 + [0.05] * 10]
    keys = {
        "data.dimension": 1,
        "data.centers": [[0.0]] * 20 + [[1.0]] * 10,
        "model.start": 1 / 3,
        "cell.devices": 30,
        "cell.radius_m": 1e6,
        "cell.placement": "given",
        "cell.positions_m": [[(1e-5 / gain) ** (1 / 3.5), 0.0] for gain in gains],
        "training.local_steps": 1,
        "training.lr": lr,
        "algorithm.gamma": gamma,
        "experiment.rounds": num_rounds,
        "experiment.seeds": list(range(seeds)),
    }
    if theta_min is not None:
        keys["algorithm.theta_min"] = theta_min
    return simulate(make_quadratic("fedoag" if theta_min is None else "fedoag-plus", keys))


def settles_at(sim: Simulation, num_rounds: int, averaged: int) -> tuple[float, float]:
    """Mean over seeds of the server model over the last rounds, and its standard error."""
    state, total = sim.init(), torch.zeros(len(sim.seeds), dtype=torch.float64)
    for t in range(num_rounds):
        state = sim.step(state, t).state
        if t >= num_rounds - averaged:
            total += state.params[:, 0] / averaged
    return float(total.mean()), float(total.std()) / math.sqrt(len(total))


@pytest.mark.slow
def test_a_least_share_drains_the_residuals() -> None:
    """Server model at η = 0.001: FedOAG is off by what devices have not sent yet, θ_min = ½ by about twice that.

    A device heard with probability p has on average 1/p rounds of work unsent, each η times its distance from its
    optimum: FedOAG's offset from 1/3 is η [(1/3)(2/3)/0.05 − (2/3)(1/3)/0.9] = 0.0042. With θ_min = 0 what a rare
    device holds back is never drained, and the server model goes to 0, as if the rare devices did not exist.
    """
    mean, error = settles_at(two_groups(None, 0.001, 1500, 16), 1500, 1200)
    offset = 0.001 * (2 / 9) * (1 / 0.05 - 1 / 0.9)
    assert abs(mean - (1 / 3 - offset)) < 5 * error
    assert error < 0.0005
    mean, error = settles_at(two_groups(0.5, 0.001, 1500, 16), 1500, 1200)
    assert abs(mean - (1 / 3 - 2 * offset)) < 5 * error + 0.1 * offset
    mean, error = settles_at(two_groups(0.0, 0.005, 1500, 16), 1500, 100)
    assert mean < 0.02
