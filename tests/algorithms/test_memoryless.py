"""Limits and physics of the memoryless over-the-air methods, each from its own mathematics."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from otafl.algorithms.design import constant, sca
from otafl.algorithms.opc import best_scale
from otafl.simulation.build import Simulation
from tests.algorithms.design.test_sca import PLACES_M
from tests.conftest import TINY_PARAMS, make_config, simulate

NOISE_FREE = {"radio.noise_dbm_hz": float("-inf")}
MANY = {"experiment.rounds": 1500, "experiment.seeds": [0], "cell.devices": 6, "training.local_steps": 1}


def make(algorithm: str, keys: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config(algorithm, {"cell.devices": 6, **(keys or {})}))


def first_weights(sim: Simulation, rounds: int = 1) -> Tensor:
    """Weights of rounds from the initial model, [rounds, S, M]: the state stays, only the channel changes."""
    return torch.stack([sim.algorithm.step(sim.init(), sim.round_at(t))[1].weights for t in range(rounds)])


def amplitudes_at_full_energy(sim: Simulation, t: int) -> np.ndarray:
    h = np.stack([world.coeff[t] for world in sim.worlds])
    return np.abs(h) * math.sqrt(sim.problem.num_params * sim.problem.symbol_energy_j)


def reaches(sim: Simulation, t: int = 0) -> np.ndarray:
    gains = np.stack([world.mean_gain[t] for world in sim.worlds])
    return np.sqrt(gains * sim.problem.num_params * sim.problem.symbol_energy_j)


@pytest.mark.parametrize("rule", ["weakest", "tight"])
def test_vanilla_is_the_mean_of_all(rule: str) -> None:
    """w_i = 1/m surely (C5); without noise it is ideal FedAvg."""
    sim = make("vanilla", {"algorithm.rule": rule})
    assert torch.allclose(first_weights(sim, 5), torch.tensor(1 / 6, dtype=torch.float64), rtol=1e-12)
    one, other = make("vanilla", {"algorithm.rule": rule, **NOISE_FREE}), make("fedavg")
    state, ideal = one.init(), other.init()
    for t in range(5):
        state, ideal = one.step(state, t).state, other.step(ideal, t).state
    assert torch.allclose(state.params, ideal.params, rtol=0, atol=1e-11)


def test_vanilla_tight_uses_the_energy_and_has_less_noise() -> None:
    """Tight: one device at exactly the limit; its noise never exceeds that of the other rule."""
    loose, tight = make("vanilla"), make("vanilla", {"algorithm.rule": "tight"})
    less = 0
    for t in range(5):
        a, b = (sim.step(sim.init(), t) for sim in (loose, tight))
        assert torch.allclose(b.energy_ratio, torch.ones(2, dtype=torch.float64), rtol=1e-12)
        assert (b.info.noise_std <= a.info.noise_std * (1 + 1e-12)).all()
        less += int((b.info.noise_std < 0.99 * a.info.noise_std).sum())
    assert less > 0


def test_vanilla_noise_has_the_median_of_its_law() -> None:
    """|h|² of the weakest ~ Exp(R = Σ 1/Λ_i): noise norm/B has median √(σ² R/(E_s ln 2))/m, and no variance."""
    sim = make("vanilla", MANY)
    ratios = []
    for t in range(1500):
        h = np.abs(sim.worlds[0].coeff[t])
        ratios.append(math.sqrt(sim.noise_var_j / sim.problem.symbol_energy_j) / (6 * h.min()))
    step = sim.algorithm.step(sim.init(), sim.round_at(7))[1]
    reported = float(step.noise_std[0] / step.norm_bound[0]) * math.sqrt(TINY_PARAMS)
    assert reported == pytest.approx(ratios[7], rel=1e-9)
    rate = (1 / sim.worlds[0].mean_gain[0]).sum()
    median = math.sqrt(sim.noise_var_j * rate / (sim.problem.symbol_energy_j * math.log(2))) / 6
    below = np.mean(np.array(ratios) < median)
    assert abs(below - 0.5) < 5 * 0.5 / math.sqrt(1500)


def test_opc_golden() -> None:
    """C = (0.2, 0.5, 1, 3): a, b and the error J of four noise levels."""
    c = torch.tensor([[0.2, 0.5, 1.0, 3.0]], dtype=torch.float64)
    for noise, a, b, value in (
        (0.0, 5.0, [1, 1, 1, 1], 0.0),
        (0.05, 2.2222222, [0.444444, 1, 1, 1], 0.5555556),
        (1.0, 0.74235808, [0.148472, 0.371179, 0.742358, 1], 1.73799127),
        (100.0, 0.04261492, [0.0085230, 0.0213075, 0.0426149, 0.1278448], 3.79970986),
    ):
        found = best_scale(c, noise)
        assert float(found) == pytest.approx(a, abs=5e-8)
        arrived = (found * c).clamp(max=1)[0]
        assert arrived.tolist() == pytest.approx(b, abs=1e-6)
        assert float((1 - arrived).square().sum() + noise * found**2) == pytest.approx(value, abs=1e-7)


def test_opc_closed_form_is_the_minimum() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        c, noise = np.exp(rng.normal(0, 1, 7)), float(np.exp(rng.normal(0, 2)))
        found = float(best_scale(torch.from_numpy(c)[None], noise))

        def error(a: float, c: np.ndarray = c, noise: float = noise) -> float:
            return float((np.maximum(1 - a * c, 0) ** 2).sum() + noise * a**2)

        best = minimize_scalar(error, bounds=(0, 1 / c.min()), method="bounded", options={"xatol": 1e-12})
        assert error(found) <= best.fun * (1 + 1e-9)
        assert error(found) <= min(7.0, error(1 / c.min()))


def test_opc_limits() -> None:
    """No noise: vanilla. Much noise: all at full power, weights proportional to |h_i|, energies at the limit."""
    c = torch.tensor([[0.2, 0.5, 1.0, 3.0]], dtype=torch.float64)
    assert float(best_scale(c, 1e9)) == pytest.approx(4.7 / 1e9, rel=1e-6)  # a → Σ c_i/ν
    quiet, vanilla = make("opc", NOISE_FREE), make("vanilla", NOISE_FREE)
    assert torch.allclose(first_weights(quiet, 3), first_weights(vanilla, 3), rtol=1e-12)
    loud = make("opc", {"radio.noise_dbm_hz": -60.0, "algorithm.renormalise": True})
    step = loud.step(loud.init(), 0)
    full = torch.from_numpy(amplitudes_at_full_energy(loud, 0))
    assert torch.allclose(step.info.weights, full / full.sum(-1, keepdim=True), rtol=1e-9)
    norms = loud.round_at(0).train(loud.problem.initial).norms(torch.ones(2, 6, dtype=torch.bool))
    limit_j = TINY_PARAMS * loud.problem.symbol_energy_j
    expected = limit_j * (norms / norms.max(-1, keepdim=True).values).square()
    assert torch.allclose(step.spent.energy_j, expected, rtol=1e-9)


@pytest.mark.parametrize("keys", [{"renormalise": False}, {"renormalise": True}])
def test_opc_weights(keys: dict[str, bool]) -> None:
    """b_i/m as the closed form says; renormalised they sum to 1."""
    sim = make("opc", {f"algorithm.{key}": value for key, value in keys.items()})
    weights = first_weights(sim)[0]
    full = torch.from_numpy(amplitudes_at_full_energy(sim, 0))
    b = (best_scale(full, TINY_PARAMS * sim.noise_var_j)[:, None] * full).clamp(max=1)
    expected = b / b.sum(-1, keepdim=True) if keys["renormalise"] else b / 6
    assert torch.allclose(weights, expected, rtol=1e-9)


def test_sca_weights_have_their_designed_mean() -> None:
    """E w_i = p_i and P(active) = q_i ≥ e^{−½} on the channel it was designed for; 5 standard errors."""
    sim = make("sca", {**MANY, "algorithm.omega": 1.0})
    weights = first_weights(sim, 1500)[:, 0].numpy()
    s = reaches(sim)[0]
    gamma = sca.exact(s, TINY_PARAMS * sim.noise_var_j, 6.0, 1.0)
    p, q = sca.weights(gamma, s), sca.transmit_probability(gamma, s)
    assert (np.abs(weights.mean(0) - p) < 5 * p * np.sqrt((1 / q - 1) / 1500)).all()
    assert (np.abs((weights > 0).mean(0) - q) <= 5 * np.sqrt(q * (1 - q) / 1500) + 1e-12).all()
    assert q.min() >= math.exp(-0.5)


def test_sca_zero_bias_is_unbiased_and_min_noise_weighs_by_amplitude() -> None:
    """C5: the zero-bias design recovers the full average in the mean."""
    for design in ("zero-bias", "min-noise"):
        sim = make("sca", {**MANY, "algorithm.design": design})
        weights = first_weights(sim, 1500)[:, 0].numpy()
        s = reaches(sim)[0]
        gamma = sca.zero_bias(s) if design == "zero-bias" else s / math.sqrt(2)
        expected = np.full(6, 1 / 6) if design == "zero-bias" else s / s.sum()
        q = sca.transmit_probability(gamma, s)
        assert (np.abs(weights.mean(0) - expected) < 5 * expected * np.sqrt((1 / q - 1) / 1500)).all()


def test_sca_solvers_give_the_same_run() -> None:
    runs = [make("sca", {"algorithm.solver": solver}) for solver in ("exact", "successive")]
    gammas = [sim.problem.plan["gamma"] for sim in runs]
    assert torch.allclose(*gammas, rtol=1e-3, atol=0)


def test_sca_refreshes_when_told() -> None:
    """Never: the gains of round 0; every k: those of the last multiple of k; oracle: those of the round."""
    moving = {"mobility.name": "bounded-waypoint", "mobility.speed_mps": [5.0, 10.0], "mobility.territory_m": 300.0}
    moving |= {"experiment.rounds": 20}
    still = make("sca", moving).problem.plan
    every = make("sca", {**moving, "algorithm.refresh": "every", "algorithm.refresh_rounds": 8}).problem.plan
    sim = make("sca", {**moving, "algorithm.refresh": "oracle"})
    oracle = sim.problem.plan
    for t in range(20):
        assert torch.equal(still["gamma"][t], still["gamma"][0])
        assert torch.allclose(every["gamma"][t], oracle["gamma"][t - t % 8], rtol=1e-9, atol=0)
        s = reaches(sim, t)
        expected = sca.exact(s, TINY_PARAMS * sim.noise_var_j, 6.0, 1e-2)
        assert np.allclose(oracle["gamma"][t].numpy(), expected, rtol=1e-9, atol=0)
    assert not torch.allclose(oracle["gamma"][19], oracle["gamma"][0], rtol=1e-3, atol=0)


def test_clipping_leaves_short_vectors_and_shortens_long_ones() -> None:
    """Clip: w_i carries min(1, G/‖Δ_i‖); with G above all norms both forms differ only by the noise."""
    sim = make("vanilla", {"algorithm.norms": "clip", "algorithm.norm_limit": 3.0, **NOISE_FREE})
    norms = sim.round_at(0).train(sim.problem.initial).norms(torch.ones(2, 6, dtype=torch.bool))
    assert (norms > 3).any()
    assert (norms < 3).any()
    assert torch.allclose(first_weights(sim)[0], (3 / norms).clamp(max=1) / 6, rtol=1e-12)
    step = sim.step(sim.init(), 0)
    assert (step.spent.scalars == 0).all()  # no side link


def test_lcpc_forms_have_their_mean_weights() -> None:
    """Truncate: E w_i = q_i/Q; clip: E w_i ∝ E b_i; unrenormalised: times a γ Q/m and Σ E b_i/m."""
    for form in ("truncate", "clip"):
        for renormalise in (True, False):
            sim = make("lcpc", {**MANY, "algorithm.form": form, "algorithm.renormalise": renormalise})
            weights = first_weights(sim, 1500)[:, 0].numpy()
            s, noise = reaches(sim)[0], TINY_PARAMS * sim.noise_var_j
            if form == "truncate":
                gamma, a = constant.truncation(s, noise)
                b = float(a * gamma) * np.exp(-((float(gamma) / s) ** 2))
            else:
                b = constant.clipped_moments(constant.clipping(s, noise), s)[0]
            expected = b / b.sum() if renormalise else b / 6
            assert (np.abs(weights.mean(0) - expected) < 5 * weights.std(0) / math.sqrt(1500) + 1e-9).all()


def test_air_feel_unbiased_is_unbiased_and_biased_is_lcpc() -> None:
    sim = make("air-feel", MANY)
    weights = first_weights(sim, 1500)[:, 0].numpy()
    assert (np.abs(weights.mean(0) - 1 / 6) < 5 * weights.std(0) / math.sqrt(1500)).all()
    one = make("air-feel", {"algorithm.regime": "biased"})
    other = make("lcpc", {"algorithm.form": "clip", "algorithm.renormalise": False})
    assert torch.allclose(first_weights(one, 3), first_weights(other, 3), rtol=1e-9)
    one = make("air-feel", {"algorithm.regime": "biased", "algorithm.renormalise": True})
    other = make("lcpc", {"algorithm.form": "clip"})
    assert torch.allclose(first_weights(one, 3), first_weights(other, 3), rtol=1e-9)


INTERIOR = {"cell.devices": 8, "algorithm.interior_radius_m": 900.0}


def test_bb_hears_nobody_outside_the_interior() -> None:
    sim = make("bb-interior", {**INTERIOR, "experiment.rounds": 30})
    weights = first_weights(sim, 30)
    outside = torch.from_numpy(np.stack([world.distance_m[0] for world in sim.worlds])) > 900
    assert outside.any()
    assert (~outside).any()
    assert (weights[:, outside] == 0).all()
    assert (weights[:, ~outside] > 0).any()


@pytest.mark.parametrize("form", ["energy", "fading"])
def test_bb_mean_weights(form: str) -> None:
    """fading: unbiased over the interior, E w_i = 1/|I|; energy: E w_i = q_i/Σ q_j."""
    keys = {**MANY, "algorithm.form": form, "algorithm.interior_radius_m": 1200.0}
    sim = make("bb-interior", keys)
    weights = first_weights(sim, 1500)[:, 0].numpy()
    inside = sim.worlds[0].distance_m[0] <= 1200
    gain = sim.worlds[0].mean_gain[0]
    ratio = gain[inside].min() / gain if form == "energy" else np.ones(6)
    q = np.where(inside, np.exp(-0.5 * ratio), 0.0)
    assert (np.abs(weights.mean(0) - q / q.sum()) < 5 * weights.std(0) / math.sqrt(1500) + 1e-12).all()
    heard = (weights > 0).mean(0)
    assert (np.abs(heard - q) <= 5 * np.sqrt(q * (1 - q) / 1500) + 1e-12).all()


def test_bb_alternative_tosses_a_fair_coin() -> None:
    sim = make("bb-alternative", {**INTERIOR, "experiment.rounds": 2000})
    everybody = sim.problem.plan["scheduled"].all(-1).double()
    assert (abs(everybody.mean(0) - 0.5) < 3 * 0.5 / math.sqrt(2000)).all()
    assert not torch.equal(everybody[:, 0], everybody[:, 1])  # each seed its own
    strict = make("bb-alternative", {**INTERIOR, "experiment.rounds": 10, "algorithm.alternation": "strict"})
    assert strict.problem.plan["scheduled"].all(-1)[:, 0].tolist() == [False, True] * 5


def test_bb_with_a_large_interior_schedules_everybody_and_instantaneous_is_vanilla() -> None:
    wide = {"algorithm.interior_radius_m": 1e5}
    one, other = make("bb-interior", wide), make("bb-alternative", wide)
    assert torch.equal(first_weights(one, 4), first_weights(other, 4))
    now = make("bb-interior", {**wide, "algorithm.form": "instantaneous"})
    assert torch.allclose(first_weights(now, 4), first_weights(make("vanilla"), 4), rtol=1e-12)
    state, same = now.init(), make("vanilla").init()
    vanilla = make("vanilla")
    for t in range(4):
        state, same = now.step(state, t).state, vanilla.step(same, t).state
    assert torch.allclose(state.params, same.params, rtol=1e-12)


def test_bb_with_an_empty_interior_keeps_the_model() -> None:
    for norms in ("normalise", "clip"):
        sim = make("bb-interior", {"algorithm.interior_radius_m": 1.0, "algorithm.norms": norms})
        assert torch.equal(sim.step(sim.init(), 0).state.params, sim.problem.initial)


def test_bb_count_divides_by_who_came() -> None:
    sim = make("bb-interior", {"algorithm.divide_by": "count", "algorithm.interior_radius_m": 1500.0})
    for t in range(5):
        info = sim.step(sim.init(), t).info
        heard = info.active.any(-1)
        assert torch.allclose(info.weights.sum(-1), heard.double(), rtol=1e-12)


@pytest.mark.parametrize("algorithm", ["bb-interior", "bb-alternative"])
def test_bb_truncation_is_the_threshold_of_fedoag(algorithm: str) -> None:
    """Nobody left out, who came counted: OTA-FedAvg with γ² = g d E_s Λ_min; g = 1.366 is 3e-10 in the paper's cell."""
    keys = {"cell.devices": 30, "experiment.rounds": 6, "experiment.seeds": [0], "radio.noise_dbm_hz": -173.0}
    gamma = 3e-10 * math.sqrt(TINY_PARAMS / 814_090)
    one = simulate(make_config("ota-fedavg", {**keys, "algorithm.gamma": gamma}))
    truncation = (gamma / reaches(one).min()) ** 2
    assert truncation == pytest.approx(1.366, abs=0.001)
    chosen = {"interior_radius_m": 1500.0, "truncation": float(truncation), "divide_by": "count"}
    other = simulate(make_config(algorithm, {**keys, **{f"algorithm.{key}": value for key, value in chosen.items()}}))
    state, same = one.init(), other.init()
    for t in range(6):
        state, same = one.step(state, t).state, other.step(same, t).state
        assert torch.allclose(state.params, same.params, rtol=1e-10, atol=0)
    assert not torch.equal(state.params, one.init().params)


def test_bb_follows_devices_or_does_not() -> None:
    """current: the schedule follows the distance of the round; initial: that of round 0."""
    moving = {"mobility.name": "bounded-waypoint", "mobility.speed_mps": [20.0, 40.0], "mobility.territory_m": 900.0}
    moving |= {"experiment.rounds": 40, "cell.devices": 10}
    now, then = make("bb-interior", moving), make("bb-interior", {**moving, "algorithm.distances": "initial"})
    distance = torch.from_numpy(np.stack([world.distance_m for world in now.worlds], 1))
    assert torch.equal(now.problem.plan["scheduled"], distance <= 900)
    assert torch.equal(then.problem.plan["scheduled"], (distance[:1] <= 900).expand_as(distance))
    assert not torch.equal(now.problem.plan["scheduled"], then.problem.plan["scheduled"])


PAPER_CELL = {
    "cell.devices": 30,
    "cell.positions_m": [[float(r), 0.0] for r in PLACES_M],
    "cell.placement": "given",
    "data.features": 784,
    "data.classes": 10,
    "data.train_images": 1000,
    "model.hidden": [1024],
    "radio.noise_dbm_hz": -173.0,
    "experiment.seeds": [0],
    "experiment.rounds": 1500,
}


@pytest.mark.parametrize(
    ("algorithm", "keys", "noise", "active"),
    [
        ("bb-interior", {}, 15.8, 9.2),
        ("bb-interior", {"interior_radius_m": 1500.0}, 14.2, 25.2),
        ("bb-interior", {"form": "fading"}, 21.7, 11 * math.exp(-0.5)),
        ("sca", {"omega": 1e-2}, 8.27, 19.7),
        ("sca", {"design": "zero-bias"}, 19.6, 27.0),
        ("lcpc", {"form": "truncate"}, 10.5, 14.5),
    ],
    ids=str,
)
def test_noise_and_participation_in_the_papers_setting(
    algorithm: str, keys: dict[str, Any], noise: float, active: float
) -> None:
    """The method's own plan at the middle of 30 equal rings: noise norm over the bound; devices on the air."""
    sim = simulate(make_config(algorithm, {**PAPER_CELL, **{f"algorithm.{key}": value for key, value in keys.items()}}))
    size = math.sqrt(sim.problem.num_params * sim.noise_var_j)
    assert size * float(sim.problem.plan["rescale"][0, 0]) == pytest.approx(noise, rel=5e-3)
    assert sim._active is not None
    counts = sim._active.masks[:, 0].sum(-1).double().numpy()
    assert abs(counts.mean() - active) < 5 * counts.std() / math.sqrt(len(counts)) + 0.06  # given to one decimal


def test_vanilla_and_opc_in_the_papers_setting() -> None:
    """Median noise norms: vanilla 33.8; OPC 2.5, with everybody at full energy and a mean b of 0.0055."""
    sim = simulate(make_config("vanilla", PAPER_CELL))
    size, ratios, errors, scales = math.sqrt(sim.problem.num_params * sim.noise_var_j), [], [], []
    for t in range(1500):
        full = torch.from_numpy(amplitudes_at_full_energy(sim, t))
        ratios.append(size / (30 * float(full.min())))
        b = float(best_scale(full, size**2)) * full
        errors.append(size * float(best_scale(full, size**2)) / float(b.sum()))
        scales.append(float(b.mean()))
        assert float(b.max()) < 1
    assert abs(np.mean(np.array(ratios) < 33.8) - 0.5) < 5 * 0.5 / math.sqrt(1500)
    assert np.median(errors) == pytest.approx(2.5, rel=0.03)
    assert np.mean(scales) == pytest.approx(0.0055, rel=0.1)
