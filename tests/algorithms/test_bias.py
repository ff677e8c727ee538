"""The quadratic bias oracle: where each method's long-run model lands between two devices' optima.

Two devices, ½(x − c_i)² with c = (0, 1), so the truth is ½, and gains such that |h_i| exceeds FedOAG's threshold with
probability 0.9 and 0.3. With weights w_i that do not depend on x, E x = E w_2/(E w_1 + E w_2) in the long run, exactly:
that is what a method's mean weights predict. Methods with memory have an offset of order η, known at η = 0.01.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from otafl.algorithms.design import constant, sca
from tests.algorithms.test_fedoag import p_weighted_world
from tests.conftest import make_quadratic, simulate

SEEDS = 60
NOISE_DBM_HZ = -165.0
NOISE = 10 ** (NOISE_DBM_HZ / 10) * 1e-3  # ν, as there is one parameter
REACH = np.array([1e-9 / math.sqrt(-math.log(p)) for p in (0.9, 0.3)])
DISTANCE_M = (1e-5 * 1e-9 / REACH**2) ** (1 / 3.5)
FADES = np.random.default_rng(0).exponential(size=(400_000, 2))


def share(mean_weights: np.ndarray) -> float:
    return float(mean_weights[1] / mean_weights.sum())


def opc(renormalise: bool) -> float:
    """By simulation of the closed form: c_i = S_i √x_i, two devices."""
    c = np.sort(REACH * np.sqrt(FADES), axis=1)
    sums, squares = np.cumsum(c, 1), np.cumsum(c**2, 1)
    a = (sums / (NOISE + squares)).max(1, keepdims=True)
    b = np.minimum(1, a * REACH * np.sqrt(FADES))
    return share((b / b.sum(1, keepdims=True)).mean(0) if renormalise else b.mean(0))


def lcpc(form: str) -> float:
    if form == "truncate":
        gamma = float(constant.truncation(REACH, NOISE)[0])
        return share(np.exp(-((gamma / REACH) ** 2)))
    return share(constant.clipped_moments(constant.clipping(REACH, NOISE), REACH)[0])


def truncated(g: float) -> float:
    """BB's energy form with everybody scheduled: q_i = exp(−g Λ_min/Λ_i)."""
    return share(np.exp(-g * (REACH.min() / REACH) ** 2))


BETWEEN = float(DISTANCE_M.mean())
CASES: list[tuple[str, dict[str, Any], Callable[[], float]]] = [
    ("fedavg", {}, lambda: 0.5),
    ("vanilla", {}, lambda: 0.5),
    ("vanilla", {"rule": "tight"}, lambda: 0.5),
    ("sca", {"omega": 1.0}, lambda: share(sca.weights(sca.exact(REACH, NOISE, 2.0, 1.0), REACH))),
    ("sca", {"design": "zero-bias"}, lambda: 0.5),
    ("sca", {"design": "min-noise"}, lambda: share(REACH)),
    ("opc", {"renormalise": True}, lambda: opc(True)),
    ("opc", {}, lambda: opc(False)),
    ("lcpc", {"form": "truncate"}, lambda: lcpc("truncate")),
    ("lcpc", {"form": "clip"}, lambda: lcpc("clip")),
    ("air-feel", {}, lambda: 0.5),
    ("air-feel", {"regime": "biased"}, lambda: lcpc("clip")),
    ("bb-interior", {"interior_radius_m": 1e6}, lambda: truncated(0.5)),
    # a common γ whose expected count is 1.2 of 2: the fixed factor Σ q gives 0.3/1.2
    ("bb-interior", {"interior_radius_m": 1e6, "truncation": -math.log(0.3)}, lambda: 0.25),
    ("bb-interior", {"interior_radius_m": 1e6, "form": "fading"}, lambda: 0.5),
    ("bb-interior", {"interior_radius_m": BETWEEN}, lambda: 0.0),
    ("bb-alternative", {"interior_radius_m": BETWEEN, "form": "fading"}, lambda: 0.25),
    ("ota-fedavg", {"gamma": 1e-9}, lambda: 0.17742),
    ("mifa", {"gamma": 1e-9}, lambda: 0.5),
    ("cotaf", {"gamma": 1e-9}, lambda: 0.17742),
    ("gbma", {}, lambda: share(REACH)),  # E|h_i|
    ("blind", {}, lambda: share(REACH**2)),  # E[h_i | Σ h] = Λ_i/Σ Λ · Σ h, for any number of antennas
    ("beamforming", {}, lambda: 0.5),
    ("hybrid", {}, lambda: 0.5),
    ("fedvarp", {"gamma": 1e-9}, lambda: 0.5),
]


def long_run(
    algorithm: str, keys: dict[str, Any], num_rounds: int, lr: float, start: float, radio: dict[str, Any]
) -> tuple[float, float]:
    """Mean over seeds of the server model after the first quarter, and its standard error."""
    world = p_weighted_world({"experiment.rounds": num_rounds, "experiment.seeds": list(range(SEEDS))})
    del world["algorithm.gamma"]
    world |= {
        "training.lr": lr,
        "model.start": start,
        **radio,
        **{f"algorithm.{key}": value for key, value in keys.items()},
    }
    sim = simulate(make_quadratic(algorithm, world))
    state, total = sim.init(), torch.zeros(SEEDS, dtype=torch.float64)
    first = num_rounds // 4
    for t in range(num_rounds):
        state = sim.step(state, t).state
        if t >= first:
            total += state.params[:, 0]
    means = (total / (num_rounds - first)).numpy()
    return float(means.mean()), float(means.std(ddof=1)) / math.sqrt(SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "keys", "theory"), CASES, ids=[" ".join([n, *map(str, k.values())]) for n, k, _ in CASES]
)
def test_long_run_model_is_where_its_weights_say(
    algorithm: str, keys: dict[str, Any], theory: Callable[[], float]
) -> None:
    radio = {"radio.noise_dbm_hz": NOISE_DBM_HZ} | ({"radio.antennas": 8} if algorithm == "blind" else {})
    mean, error = long_run(algorithm, keys, 1600, 0.02, 0.9, radio)
    assert abs(mean - theory()) < 5 * error + 3e-3  # the start at 0.9 is mostly forgotten
    assert error < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "keys", "lr", "target"),
    [
        ("fedoag", {}, 0.01, 0.4885),
        ("fedpbc", {}, 0.01, 0.4885),
        ("fedawe", {}, 0.01, 0.4938),
        ("fedoag-plus", {"theta_min": 1.0}, 0.01, 0.4885),
        ("fedoag-plus", {}, 0.01, 0.4830),
        ("fedpbc", {}, 0.001, 0.4988),
        ("fedawe", {}, 0.001, 0.4994),
        ("mifa", {}, 0.001, 0.5000),
        ("fedau", {}, 0.001, 0.5000),
    ],
)
def test_methods_with_memory_stay_near_the_truth(
    algorithm: str, keys: dict[str, Any], lr: float, target: float
) -> None:
    """Server model without noise, where FedOAG-plus with θ_min = 1 is FedOAG; from the truth, 0.5."""
    rounds = 5000 if (algorithm, lr) == ("fedawe", 0.001) else 1200  # its mean model settles over 1/η rounds
    mean, error = long_run(algorithm, {"gamma": 1e-9, **keys}, rounds, lr, 0.5, {})
    assert abs(mean - target) < 5 * error + 1e-4
    assert error < 0.002
