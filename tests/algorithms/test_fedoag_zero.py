"""FedOAG-zero (docs/algorithms/fedoag-zero.md): its round by hand, energy, noise, sums, limits, guards, bias."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from otafl.simulation import Simulation
from tests.algorithms.test_fedoag import NOISE_FREE, noise, p_weighted_world, rounds
from tests.conftest import make_config, make_quadratic, simulate

KEYS = {"training.engine": "reference", "cell.devices": 6, "experiment.rounds": 12}
LEVELS = [0.02, 0.3, 1.4]


def make(nu: float, keys: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config("fedoag-zero", {**KEYS, "algorithm.nu": nu, **(keys or {})}), noise=noise)


def silence(seeds: Any, name: str, t: int, size: int) -> Tensor:
    """Noise that a server fears and that does not come."""
    return torch.zeros(len(seeds), size, dtype=torch.float64)


def by_hand(sim: Simulation, before: Any, ends: Tensor, t: int, s: int) -> tuple[Tensor, float, Tensor]:
    """Innovations, κ and θ of one round, from the definitions."""
    delta = (ends[s] - before.params[s]) / sim.config.training.lr_at(t)
    norms, d = delta.norm(dim=-1), sim.problem.num_params
    kappa = math.sqrt(d * sim.noise_var_j) / (sim.algorithm.nu * len(norms) * float(norms.max()))
    strength = torch.from_numpy(np.abs(sim.worlds[s].coeff[t]))
    return delta, kappa, (math.sqrt(d * 1e-9) * strength / (kappa * norms)).clamp(max=1)


@pytest.mark.parametrize("nu", LEVELS)
def test_round_is_its_definition(nu: float) -> None:
    """x^{t+1} = x^t + η mean θ_i Δ_i + noise of norm ν η B ‖z‖/(√d σ_z); devices keep η(1 − θ_i) Δ_i; energy."""
    sim = make(nu)
    d, limit_j = sim.problem.num_params, sim.problem.num_params * sim.problem.symbol_energy_j
    held = 0
    for t, (before, after, info, ends) in enumerate(rounds(sim, 12)):
        lr = sim.config.training.lr_at(t)
        unit = noise(sim.seeds, "noise", t, d)
        round_ = sim.round_at(t)
        sim.algorithm.step(before, round_)
        energy_j = round_._close(round_.everyone).energy_j
        assert info.active.all()
        for s in range(len(sim.seeds)):
            delta, kappa, theta = by_hand(sim, before, ends, t, s)
            bound = float(delta.norm(dim=-1).max())
            added = nu * lr * bound * unit[s] / math.sqrt(d)  # whatever the world
            expected = before.params[s] + lr * (theta[:, None] * delta).mean(0) + added
            assert torch.allclose(after.params[s], expected, rtol=1e-10, atol=1e-11)
            kept = after.params[s] + lr * (1 - theta[:, None]) * delta
            assert torch.allclose(after.devices.models[s], kept, rtol=1e-10, atol=1e-11)
            strength = torch.from_numpy(np.abs(sim.worlds[s].coeff[t]))
            ratio = (kappa * theta * delta.norm(dim=-1) / strength).square() / limit_j
            assert torch.allclose(energy_j[s] / limit_j, ratio, rtol=1e-9)
            assert ratio.max() <= 1 + 1e-12
            assert torch.allclose(ratio[theta < 1], torch.ones_like(ratio[theta < 1]), rtol=1e-9)  # all they have
            assert float(info.extra["unsent_share"][s]) == pytest.approx(float((1 - theta).mean()), abs=1e-12)
            held += int((theta < 1).sum())
    assert held > 0 or nu == 1.4


@pytest.mark.parametrize("nu", LEVELS)
def test_f2_sum_of_the_models_is_kept_but_for_the_noise(nu: float) -> None:
    """(1/m) Σ x_i^{t+1} = (1/m) Σ x̃_i + η · noise_std · z/σ_z."""
    sim = make(nu)
    for t, (_, after, info, ends) in enumerate(rounds(sim, 12)):
        unit = noise(sim.seeds, "noise", t, sim.problem.num_params)
        expected = ends.mean(1) + sim.config.training.lr_at(t) * info.noise_std[:, None] * unit
        assert torch.allclose(after.devices.models.mean(1), expected, rtol=1e-10, atol=1e-11)


def test_f9_mean_model_follows_the_quadratic_whatever_is_kept() -> None:
    """A server that fears noise which then does not come: shares are small, and the mean model does not mind."""
    keys = {"experiment.rounds": 40, "cell.devices": 7, "algorithm.nu": 0.01, "radio.noise_dbm_hz": -173.0}
    sim = simulate(make_quadratic("fedoag-zero", keys), noise=silence)
    state, center, least = sim.init(), sim.test.features.mean(0), 1.0
    start = state.devices.models.mean(1) - center
    for t in range(40):
        state, info, *_ = sim.step(state, t)
        least = min(least, 7 * float(info.weights.min()))
        expected = (1 - 0.05) ** (3 * (t + 1)) * start
        assert torch.allclose(state.devices.models.mean(1) - center, expected, rtol=1e-9, atol=1e-12)
    assert least < 0.5


@pytest.mark.parametrize("keys", [{}, {"cell.devices": 1}, {"cell.cohort": 3}], ids=["all", "one device", "a cohort"])
def test_without_noise_it_is_error_free_averaging(keys: dict[str, Any]) -> None:
    """Everybody is heard whole: FedAvg, of one device, too, and of each round's cohort."""
    one = make(1.4, {**NOISE_FREE, **keys})
    other = simulate(make_config("fedavg", {**KEYS, **keys}))
    state, same = one.init(), other.init()
    for t in range(12):
        state, info, *_ = one.step(state, t)
        same = other.step(same, t).state
        assert float(info.extra["unsent_share"].abs().max()) == 0
        assert torch.allclose(state.params, same.params, rtol=0, atol=1e-11)


def test_much_noise_accepted_is_everybody_heard_whole() -> None:
    """ν → ∞: all shares are 1, and what is left to differ from FedAvg is the noise, ν η B z/(√d σ_z)."""
    sim = make(100.0)
    for t, (before, after, info, ends) in enumerate(rounds(sim, 3)):
        assert float(info.extra["unsent_share"].max()) == 0
        unit = noise(sim.seeds, "noise", t, sim.problem.num_params)
        added = sim.config.training.lr_at(t) * info.noise_std[:, None] * unit
        assert float(added.norm()) > 100 * float((ends.mean(1) - before.params).norm()) / 2
        assert torch.allclose(after.params - added, ends.mean(1), rtol=0, atol=1e-11)
        assert torch.allclose(after.devices.models, after.params[:, None].expand_as(ends))


def test_equal_channels_and_equal_norms_share_alike() -> None:
    """Devices at one place without fading, pulled equally far: every θ_i is the same, so x^{t+1} is not biased."""
    keys = {
        "data.dimension": 2, "data.centers": [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], "model.start": 0.0,
        "cell.devices": 4, "cell.placement": "given", "cell.positions_m": [[1500.0, 0.0]] * 4,
        "fading.name": "none", "radio.noise_dbm_hz": -120.0, "experiment.rounds": 5, "algorithm.nu": 0.01,
    }  # fmt: skip
    sim = simulate(make_quadratic("fedoag-zero", keys))
    _, info, *_ = sim.step(sim.init(), 0)
    assert 0 < float(info.weights[0, 0]) < 0.25
    assert torch.allclose(info.weights, info.weights[:, :1].expand_as(info.weights), rtol=1e-9)


def test_nothing_to_send_adds_no_noise_and_one_idle_device_is_no_harm() -> None:
    keys = {"data.centers": [[0.5] * 3] * 4, "radio.noise_dbm_hz": -173.0}
    sim = simulate(make_quadratic("fedoag-zero", keys))
    state = sim.init()
    for t in range(3):
        state, info, *_ = sim.step(state, t)
        assert (state.params == 0.5).all()
        assert (info.noise_std == 0).all()
    sim = simulate(make_quadratic("fedoag-zero", {**keys, "data.centers": [[0.5] * 3, *[[1.0] * 3] * 3]}))
    state, info, *_ = sim.step(sim.init(), 0)
    assert state.params.isfinite().all()
    assert float(info.weights[0, 0]) == 0.25  # whole, though there is nothing in it


@pytest.mark.parametrize("nu", [1.4, 0.1, 0.01])
def test_a_device_that_waits_counts_less(nu: float) -> None:
    """Constant channels, no noise, one device 30 dB weaker: its weight is 1/(1 + η w), w = (1 − θ)/θ rounds of waiting.

    Its innovation is the largest, so that θ = ν m √E_s |h|/σ_z; every other device sends all it has.
    """
    gains, lr = np.array([1e-10] * 5 + [1e-13]), 0.01
    keys = {
        "data.dimension": 1, "data.centers": [[0.0]] * 5 + [[1.0]], "model.start": 0.0, "fading.name": "none",
        "cell.devices": 6, "cell.radius_m": 1e7, "cell.placement": "given", "algorithm.nu": nu,
        "cell.positions_m": [[(1e-5 / gain) ** (1 / 3.5), 0.0] for gain in gains],
        "training.local_steps": 1, "training.lr": lr, "experiment.rounds": 4000, "radio.noise_dbm_hz": -160.0,
    }  # fmt: skip
    sim = simulate(make_quadratic("fedoag-zero", keys), noise=silence)
    state = sim.init()
    for t in range(4000):
        state, info, *_ = sim.step(state, t)
    theta = nu * 6 * math.sqrt(sim.problem.symbol_energy_j * 1e-13 / sim.noise_var_j)
    assert theta < 1
    assert 6 * info.weights[0].numpy() == pytest.approx([1.0] * 5 + [theta], rel=1e-6)
    weight = 1 / (1 + lr * (1 - theta) / theta)
    assert float(state.params[0, 0]) == pytest.approx(weight / (5 + weight), rel=1e-6)
    assert float(state.devices.models.mean(1)[0, 0]) == pytest.approx(1 / 6, rel=1e-6)  # F9: the truth
    assert float(info.norm_bound[0]) == pytest.approx(
        (1 - float(state.params[0, 0])) / (theta + (1 - theta) * lr), rel=1e-4
    )


def offset(lr: float) -> tuple[float, float]:
    """Of the server model from the truth on the two-device oracle, over η, and its standard error; 80 seeds."""
    keys = {"experiment.rounds": 1500, "experiment.seeds": list(range(80)), "radio.noise_dbm_hz": -165.0}
    world = p_weighted_world(keys)
    del world["algorithm.gamma"]
    world |= {"training.lr": lr, "model.start": 0.5, "algorithm.nu": 0.03}  # so little noise that shares are small
    sim = simulate(make_quadratic("fedoag-zero", world))
    state, server, mean, unsent = sim.init(), *torch.zeros(3, 80, dtype=torch.float64)
    for t in range(1500):
        state, info, *_ = sim.step(state, t)
        if t >= 250:
            server += (state.params[:, 0] - 0.5) / 1250
            mean += (state.devices.models.mean(1)[:, 0] - 0.5) / 1250
            unsent += info.extra["unsent_share"] / 1250
    assert 0.2 < float(unsent.mean()) < 0.6
    assert abs(float(mean.mean())) < 5 * float(mean.std()) / math.sqrt(80)  # the mean model is the truth
    return float(server.mean()) / lr, float(server.std()) / math.sqrt(80) / lr


@pytest.mark.slow
def test_bias_oracle() -> None:
    """Two devices, optima 0 and 1: the server model lacks what devices have not sent yet, in proportion to η."""
    (one, error), (other, other_error) = offset(0.01), offset(0.001)
    assert one < -5 * error
    assert abs(one - other) < 5 * math.hypot(error, other_error)
    assert one == pytest.approx(-0.65, abs=5 * error)
