"""FedAU, over the air, too, and FedVARP: their definitions and intervals."""

import math

import numpy as np
import pytest
import torch

from otafl.algorithms.parts.intervals import Intervals
from tests.algorithms.worlds import NOISE_FREE, gradients, make
from tests.conftest import TINY_GAMMA, TINY_PARAMS


def test_intervals_are_the_authors() -> None:
    """A device that is there every third round has intervals of 3; silence is cut at K; a new one counts next round."""
    mask = torch.tensor([[True, False, False]])
    found = Intervals.none(mask)
    history = []
    for t in range(9):
        history.append(found.mean[0].tolist())
        active = torch.tensor([[True, t % 3 == 2, False]])
        found = found.after(active, cutoff=4)
    assert history[0] == [1.0, 1.0, 1.0]
    assert [row[1] for row in history] == [1, 1, 1, 3, 3, 3, 3, 3, 3]
    assert [row[2] for row in history] == [1, 1, 1, 1, 4, 4, 4, 4, 4]
    assert all(row[0] == 1 for row in history)


def test_fedau_with_everybody_there_is_fedavg_and_its_weights_estimate_one_over_p() -> None:
    everybody = {"algorithm.gamma": 1e-25}
    one, other = make("fedau", everybody), make("fedavg")
    a, b = one.init(), other.init()
    for t in range(4):
        a, b = one.step(a, t).state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-12)
    rng = np.random.default_rng(3)
    found = Intervals.none(torch.zeros(1, 3, dtype=torch.bool))
    for _ in range(4000):
        found = found.after(torch.from_numpy(rng.random((1, 3)) < [0.9, 0.5, 0.2]), cutoff=50)
    for p, mean in zip((0.9, 0.5, 0.2), found.mean[0].tolist(), strict=True):  # geometric intervals
        assert abs(mean - 1 / p) < 5 * math.sqrt((1 - p) / p**2 / (4000 * p))


def test_fedaus_server_step_scales_the_first_round() -> None:
    one, other = make("fedau", {"algorithm.server_lr": 0.4}), make("fedau")
    start = one.problem.initial
    steps = [sim.step(sim.init(), 0).state.params - start for sim in (one, other)]
    assert torch.allclose(steps[0], 0.4 * steps[1], rtol=1e-9, atol=1e-14)
    assert float(steps[1].abs().max()) > 0


def test_fedau_over_the_air_without_noise_is_fedau() -> None:
    one, other = make("ota-fedau", NOISE_FREE), make("fedau")
    a, b = one.init(), other.init()
    for t in range(10):
        a, b = one.step(a, t).state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-10)


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_fedvarp_is_its_definition(server_lr: float) -> None:
    """D̂ = mean_A (Δ_i − y_i) + mean y; a round with nobody changes nothing."""
    sim = make("fedvarp", {"algorithm.server_lr": server_lr, "algorithm.gamma": 4 * TINY_GAMMA})
    state, server, empty = sim.init(), sim.problem.initial.clone(), 0
    y = torch.zeros(2, 6, TINY_PARAMS, dtype=torch.float64)
    for t in range(20):
        updates = gradients(sim, server, t)
        state, info, *_ = sim.step(state, t)
        for s in range(2):
            active = info.active[s]
            if not active.any():
                empty += 1
                continue
            mean = (updates[s] - y[s])[active].mean(0) + y[s].mean(0)
            server[s] = server[s] + server_lr * sim.config.training.lr_at(t) * mean
            y[s][active] = updates[s][active]
        assert torch.allclose(state.params, server, rtol=0, atol=1e-10)
    assert 0 < empty < 30
