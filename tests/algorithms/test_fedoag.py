"""FedOAG's identities F1–F10 (docs/algorithms/fedoag.md), checked on the mathematics, not on the code's own numbers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from otafl.radio.link import inversion_threshold
from otafl.random import Streams
from otafl.simulation.build import Simulation
from tests.conftest import TINY_GAMMA, make_config, make_quadratic, simulate

NOISE_FREE = {"radio.noise_dbm_hz": float("-inf")}


def noise(seeds: Sequence[int], name: str, t: int, size: int) -> Tensor:
    """Unit noise a test can repeat."""
    return torch.from_numpy(np.stack([Streams(seed).at(f"test {name}", t).standard_normal(size) for seed in seeds]))


def rounds(sim: Simulation, num_rounds: int) -> list[tuple[Any, Any, Any, Tensor]]:
    """(state before, state after, info, end points x̃) of every round, on the pure reference engine."""
    state, history = sim.init(), []
    for t in range(num_rounds):
        ends = sim.round_at(t).train(state.devices.models).end
        after, info, *_ = sim.step(state, t)
        history.append((state, after, info, ends))
        state = after
    return history


@pytest.fixture
def noisy() -> tuple[Simulation, list[tuple[Any, Any, Any, Tensor]]]:
    config = make_config("fedoag", {"training.engine": "reference", "cell.devices": 6, "experiment.rounds": 12})
    sim = simulate(config, noise=noise)
    return sim, rounds(sim, 12)


def test_f1_and_f4_server_model_is_the_mean_end_point_plus_scaled_noise(noisy: Any) -> None:
    """F1: x^{t+1} = mean_{i∈A} x̃_i + η B z/(γ|A|); F4 is that factor; an empty round keeps x^t."""
    sim, history = noisy
    sigma = math.sqrt(sim.noise_var_j)
    sizes = set()
    for t, (before, after, info, ends) in enumerate(history):
        z = sigma * noise(sim.seeds, "noise", t, sim.objective.num_params)
        for s in range(len(sim.seeds)):
            active = info.active[s]
            size = int(active.sum())
            sizes.add(size)
            if size == 0:
                assert torch.equal(after.params[s], before.params[s])
                continue
            anchors = before.devices.anchors.pool[s, before.devices.anchors.slot[s]]
            lr = sim.config.training.lr_at(t)
            bound = ((ends[s] - anchors) / lr).norm(dim=-1)[active].max()
            expected = ends[s][active].mean(0) + lr * bound * z[s] / (TINY_GAMMA * size)
            assert torch.allclose(after.params[s], expected, rtol=1e-12, atol=1e-12)
            assert info.norm_bound[s] == pytest.approx(float(bound), rel=1e-12)
    assert len(sizes) > 2  # the identity was seen for several sizes of the active set


def test_f2_mean_model_has_the_noise_over_m(noisy: Any) -> None:
    """F2: x̄^{t+1} = (1/m) Σ x̃_i + η B z/(γ m)."""
    sim, history = noisy
    sigma = math.sqrt(sim.noise_var_j)
    for t, (_, after, info, ends) in enumerate(history):
        z = sigma * noise(sim.seeds, "noise", t, sim.objective.num_params)
        heard = info.active.any(-1, keepdim=True)
        added = sim.config.training.lr_at(t) * info.norm_bound[:, None] * z / (TINY_GAMMA * ends.shape[1])
        expected = ends.mean(1) + torch.where(heard, added, 0.0)
        assert torch.allclose(after.devices.models.mean(1), expected, rtol=1e-11, atol=1e-12)


def test_f3_devices_gossip_with_a_doubly_stochastic_idempotent_matrix() -> None:
    """F3: without noise X^{t+1} = W X̃ with W = 1/|A| on A × A and the identity elsewhere."""
    sim = simulate(make_config("fedoag", {"training.engine": "reference", "cell.devices": 6, **NOISE_FREE}))
    for _, after, info, ends in rounds(sim, 5):
        for s in range(len(sim.seeds)):
            active = info.active[s].to(torch.float64)
            mixing = torch.diag(1 - active) + torch.outer(active, active) / active.sum().clamp(min=1)
            assert torch.allclose(mixing.sum(0), torch.ones(6, dtype=torch.float64))
            assert torch.allclose(mixing @ mixing, mixing)
            assert torch.allclose(after.devices.models[s], mixing @ ends[s], rtol=1e-11, atol=1e-12)


def test_f5_energy_is_the_formula_and_below_the_limit(noisy: Any) -> None:
    """F5: ‖x̂_i‖² = γ²‖Δ_i‖²/(B²|h_i|²) ≤ d E_s."""
    sim, history = noisy
    limit_j = sim.problem.num_params * sim.problem.symbol_energy_j
    for t, (before, _, info, ends) in enumerate(history):
        round_ = sim.round_at(t)
        sim.algorithm.step(before, round_)
        energy_j = round_._close(round_.everyone).energy_j
        anchors = torch.stack(
            [before.devices.anchors.pool[s, before.devices.anchors.slot[s]] for s in range(len(sim.seeds))]
        )
        norms = ((ends - anchors) / sim.config.training.lr_at(t)).norm(dim=-1)
        bound = info.norm_bound[:, None].clamp(min=1e-200)
        expected = torch.where(info.active, (TINY_GAMMA * norms / bound / round_.device.h.abs()) ** 2, 0.0)
        assert torch.allclose(energy_j, expected, rtol=1e-9)
        assert (energy_j <= limit_j * (1 + 1e-12)).all()
        assert (energy_j[info.active] > 0).all()


def test_f6_without_noise_it_is_fedpbc() -> None:
    """F6: same activations, no noise: identical to FedPBC, which averages models of active devices digitally."""
    config = make_config("fedoag", {"cell.devices": 6, "experiment.rounds": 20, **NOISE_FREE})
    sim = simulate(config)
    threshold = inversion_threshold(TINY_GAMMA, sim.problem.num_params, sim.problem.symbol_energy_j)
    state, local = sim.init(), sim.problem.initial[:, None].repeat(1, 6, 1)
    server = sim.problem.initial.clone()
    for t in range(20):
        # FedPBC in five lines
        local = sim.round_at(t).train(local).end
        for s, active in enumerate((np.abs(np.stack([w.coeff[t] for w in sim.worlds])) >= threshold).tolist()):
            if any(active):
                server[s] = local[s, active].mean(0)
                local[s, active] = server[s]
        state, *_ = sim.step(state, t)
        assert torch.allclose(state.params, server, rtol=0, atol=1e-10)
        assert torch.allclose(state.devices.models, local, rtol=0, atol=1e-10)


def test_f7_everybody_heard_without_noise_is_ideal_fedavg() -> None:
    """F7: γ → 0 and no noise give ideal FedAvg."""
    everyone = {"algorithm.gamma": 1e-20, "experiment.rounds": 8, **NOISE_FREE}
    one = simulate(make_config("fedoag", everyone))
    other = simulate(make_config("fedavg", {"experiment.rounds": 8, **NOISE_FREE}))
    state, ideal = one.init(), other.init()
    for t in range(8):
        state, info, *_ = one.step(state, t)
        ideal, *_ = other.step(ideal, t)
        assert info.active.all()
        assert torch.allclose(state.params, ideal.params, rtol=0, atol=1e-11)


def test_f8_activation_probability_under_rayleigh_fading() -> None:
    """F8: q_i = exp(−γ²/(d Λ_i E_s)), for every device; tolerance 5 standard errors."""
    num_rounds = 1500
    config = make_quadratic("fedoag", {"experiment.rounds": num_rounds, "experiment.seeds": [0], "cell.devices": 8})
    sim = simulate(config)
    problem = sim.problem
    gain = sim.worlds[0].mean_gain[0]
    prob = np.exp(-(sim.algorithm.gamma**2) / (problem.num_params * gain * problem.symbol_energy_j))
    state, counts = sim.init(), np.zeros(8)
    for t in range(num_rounds):
        state, info, *_ = sim.step(state, t)
        counts += info.active[0].numpy()
    error = 5 * np.sqrt(prob * (1 - prob) / num_rounds) + 1e-12
    assert (np.abs(counts / num_rounds - prob) <= error).all()
    assert ((prob > 0.05) & (prob < 0.95)).sum() >= 2


def test_f9_mean_model_follows_the_quadratic_deterministically() -> None:
    """F9: without noise x̄^t − c = (1 − η)^{s t} (x̄^0 − c) whatever the activations."""
    config = make_quadratic("fedoag", {"experiment.rounds": 60, "cell.devices": 7, "training.local_steps": 3})
    sim = simulate(config)
    state = sim.init()
    center = sim.test.features.mean(0)  # testing on the centres: their mean is the optimum
    start = state.devices.models.mean(1) - center
    patterns = set()
    for t in range(60):
        state, info, *_ = sim.step(state, t)
        patterns.add(tuple(info.active[0].tolist()))
        expected = (1 - 0.05) ** (3 * (t + 1)) * start
        assert torch.allclose(state.devices.models.mean(1) - center, expected, rtol=1e-9, atol=1e-13)
    assert len(patterns) > 5


def test_f10_anchors_are_the_right_models_and_bounded() -> None:
    """Every anchor is x^{τ_i+1}; held is one per distinct τ_j, at most m; line 21 of the paper keeps all since then."""
    num_rounds = 40
    sim = simulate(make_config("fedoag", {"experiment.rounds": num_rounds, "cell.devices": 6}))
    state = sim.init()
    seeds = len(sim.seeds)
    history = [state.params.clone()]
    stored: list[set[int]] = [{0} for _ in range(seeds)]  # rounds r whose x^r the paper's server keeps
    last_active, most = -np.ones((seeds, 6), dtype=int), 0
    for t in range(num_rounds):
        state, info, *_ = sim.step(state, t)
        history.append(state.params.clone())
        last_active[info.active.numpy()] = t
        for s in range(seeds):
            if info.active[s].any():
                stored[s] = {r for r in {*stored[s], t + 1} if r >= last_active[s].min() + 1}
            for i in range(6):
                anchor = state.devices.anchors.pool[s, state.devices.anchors.slot[s, i]]
                assert torch.equal(anchor, history[last_active[s, i] + 1][s])
            assert int(info.anchors[s]) == len(set(last_active[s])) <= 6
            assert int(info.extra["anchors_paper"][s]) == len(stored[s])
            most = max(most, len(stored[s]))
    assert state.devices.anchors.pool.shape[1] <= 6
    assert most > 6  # a silent device pins the history: what counting references mends


def test_empty_rounds_keep_the_model_and_let_devices_go_on() -> None:
    """Nobody above the threshold: x^t stays, devices keep what they trained, nothing is sent."""
    sim = simulate(make_config("fedoag", {"algorithm.gamma": 1.0, "training.engine": "reference"}))
    for before, after, info, ends in rounds(sim, 3):
        assert not info.active.any()
        assert torch.equal(after.params, before.params)
        assert torch.equal(after.devices.models, ends)
        assert (info.anchors == 1).all()


def test_nothing_to_send_adds_no_noise() -> None:
    """B = 0 (devices sit at their optimum): the aggregate is 0 and x^{t+1} is the mean anchor, without noise."""
    config = make_quadratic(
        "fedoag",
        {"data.centers": [[0.5] * 3] * 4, "radio.noise_dbm_hz": -173.0, "algorithm.gamma": 1e-20},
    )
    sim = simulate(config)
    state = sim.init()
    for t in range(3):
        state, info, *_ = sim.step(state, t)
        assert info.active.all()
        assert (state.params == 0.5).all()


@pytest.mark.parametrize("algorithm", ["fedoag", "ota-fedavg", "fedavg"])
def test_one_heard_device_is_local_sgd(algorithm: str) -> None:
    """Limit: a single device without noise is plain SGD on its own data."""
    config = make_config(algorithm, {"cell.devices": 1, "experiment.rounds": 4, **NOISE_FREE}
                         | ({} if algorithm == "fedavg" else {"algorithm.gamma": 1e-20}))  # fmt: skip
    sim = simulate(config)
    state, plain = sim.init(), sim.problem.initial
    for t in range(4):
        state = sim.step(state, t)[0]
        plain = sim.round_at(t).train(plain).end[:, 0]
        assert torch.allclose(state.params, plain, rtol=0, atol=1e-12)


def test_hand_computed_round() -> None:
    """Two devices, three parameters, both heard, one step of η = 0.1 on ½‖x − c_i‖² from x = (½, ½, ½).

    c_1 = (1, 0, 0), c_2 = (0, 2, 0): x̃_1 = x − 0.1 (x − c_1) = (0.55, 0.45, 0.45), x̃_2 = (0.45, 0.65, 0.45).
    Δ_1 = (0.5, −0.5, −0.5), Δ_2 = (−0.5, 1.5, −0.5), ‖Δ_1‖ = √0.75, B = ‖Δ_2‖ = √2.75.
    Without noise x^1 = mean = (0.5, 0.55, 0.45).
    """
    config = make_quadratic(
        "fedoag",
        {
            "data.centers": [[1, 0, 0], [0, 2, 0]],
            "cell.devices": 2,
            "training.local_steps": 1,
            "training.lr": 0.1,
            "algorithm.gamma": 1e-20,
            "experiment.seeds": [0],
        },
    )
    sim = simulate(config)
    state, info, spent, *_ = sim.step(sim.init(), 0)
    assert torch.allclose(state.params, torch.tensor([[0.5, 0.55, 0.45]], dtype=torch.float64), atol=1e-12)
    assert info.norm_bound[0] == pytest.approx(math.sqrt(2.75))
    energies = spent.energy_j[0] * sim.round_at(0).device.h[0].abs() ** 2 / 1e-40
    assert energies.tolist() == pytest.approx([0.75 / 2.75, 1.0])


def p_weighted_world(overrides: dict[str, Any]) -> dict[str, Any]:
    """Two devices with activation probabilities 0.9 and 0.3, by their distances."""
    symbol_energy_j, gamma = 1e-9, 1e-9
    gains = [gamma**2 / (symbol_energy_j * -math.log(p)) for p in (0.9, 0.3)]
    places = [[(1e-5 / gain) ** (1 / 3.5), 0.0] for gain in gains]
    return {
        "data.dimension": 1,
        "data.centers": [[0.0], [1.0]],
        "cell.devices": 2,
        "cell.radius_m": 1e5,
        "cell.placement": "given",
        "cell.positions_m": places,
        "training.local_steps": 1,
        "training.lr": 0.001,
        "algorithm.gamma": gamma,
        **overrides,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "target"), [("fedoag", 0.4988), ("ota-fedavg", 0.1774)])
def test_bias_oracle(algorithm: str, target: float) -> None:
    """30,000 rounds from 0.5, second half: FedOAG stays at 0.4988, the memoryless average drifts to 0.1774."""
    num_rounds, seeds = 30_000, list(range(4))
    config = make_quadratic(algorithm, p_weighted_world({"experiment.rounds": num_rounds, "experiment.seeds": seeds}))
    sim = simulate(config)
    state, total = sim.init(), torch.zeros(len(seeds), dtype=torch.float64)
    for t in range(num_rounds):
        state = sim.step(state, t)[0]
        if t >= num_rounds // 2:
            total += state.params[:, 0]
        if algorithm == "fedoag" and t % 1000 == 0:
            assert torch.allclose(state.devices.models.mean(1), torch.tensor(0.5, dtype=torch.float64), atol=1e-12)
    means = (total / (num_rounds // 2)).numpy()
    error = means.std(ddof=1) / math.sqrt(len(seeds))
    assert abs(means.mean() - target) < 5 * error
    assert error < 0.002  # the test can tell 0.4988 from 0.1774, and from any p-weighted optimum
