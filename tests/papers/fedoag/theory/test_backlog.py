"""FedOAG-zero's queues: their fixed points, and what runs measure; its bound against a run."""

import math

import numpy as np
import pytest

import otafl
from otafl.errors import ConfigError
from otafl.papers.fedoag.theory.account import account
from otafl.papers.fedoag.theory.backlog import bound, queues
from tests.algorithms.test_fedoag_zero import weak_device
from tests.conftest import make_config, make_quadratic, simulate


@pytest.mark.parametrize("aligned", [True, False])
def test_who_can_send_what_it_learns_has_no_queue(aligned: bool) -> None:
    found = queues(np.full((50, 3), 1.2), limit=3.0, aligned=aligned)
    assert (found.unsent_share == 0).all()
    assert (found.waiting == 0).all()
    assert (found.forgotten_share == 0).all()
    assert found.heard == pytest.approx([1, 1, 1])


def test_who_cannot_has_all_it_may_remember_waiting() -> None:
    """Progress in one direction: n = b, of which a is sent, so that a/q is heard and q − a is forgotten each round."""
    a, q, b, rounds = 0.25, 0.8, 3.0, 20_000
    found = queues(np.full((rounds, 1), a), limit=b, aligned=True, progress=q)
    assert found.heard[0] == pytest.approx(a / q, rel=1e-3)
    assert found.unsent_share[0] == pytest.approx(1 - a / b, rel=1e-3)
    assert found.waiting[0] == pytest.approx((b - a) / q, rel=1e-2)
    assert found.forgotten_share[0] == pytest.approx((q - a) / (b - a + q), rel=1e-2)


def test_progress_across_what_waits_adds_squares() -> None:
    """n² = (n − a)² + q² has n = (a² + q²)/(2a)."""
    a, q = 0.4, 0.9
    found = queues(np.full((20_000, 1), a), limit=100.0, aligned=False, progress=q)
    n = (a * a + q * q) / (2 * a)
    assert found.unsent_share[0] == pytest.approx(1 - a / n, rel=1e-3)
    assert found.waiting[0] == pytest.approx((n - a) / q, rel=1e-2)


@pytest.mark.parametrize("nu", [1.4, 0.1])
def test_queue_of_a_run_in_one_dimension(nu: float) -> None:
    """The weak device's progress is the largest, and points one way: at the end its queue is the aligned one's."""
    a, _, info = weak_device(nu, 0.1, 3.0)
    found = queues(np.full((20_000, 1), a), limit=3.0, aligned=True)
    assert 6 * float(info.extra["waiting"][0]) == pytest.approx(found.waiting[0], rel=1e-2)
    assert 6 * float(info.extra["forgotten_share"][0]) == pytest.approx(found.forgotten_share[0], rel=1e-2)


def test_account_of_a_run_has_what_it_predicts_beside_what_was_measured() -> None:
    """With a small η progress hardly turns: the aligned queue; what is predicted for another ν was not measured."""
    keys = {"experiment.rounds": 60, "algorithm.nu": 2.0, "cell.devices": 8, "training.clip": 0.5}
    config = make_config("fedoag-zero", {**keys, "training.lr": 0.01, "experiment.seeds": [0]})
    result = otafl.run(config)
    found = account(simulate(config), result)
    others = [account(simulate(config.replace({"algorithm.nu": nu})), result) for nu in (1.0, 4.0)]
    for column in ("unsent_share", "waiting", "forgotten_share"):
        measured = float(result.metrics[column][0, 1:].mean())
        assert measured == pytest.approx(found.predicted[column][1], rel=0.1)
        assert all(abs(other.predicted[column][1] - measured) > 0.3 * measured for other in others)
    shown = {symbol for symbol, _, _ in found.rows}
    assert {"a", "q", "unsent", "waiting", "forgotten", "heard", "ν", "(A)", "(B)", "(C)", "(D)", "sum"} <= shown
    assert any("not clipped" in warning for warning in found.warnings)
    assert "q" in {symbol for symbol, _, _ in account(simulate(config)).rows}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("radio.noise_dbm_hz", -math.inf, "without noise"),
        ("cell.cohort", 3, "always take part"),
        ("radio.antennas", 2, "one antenna"),
    ],
)
def test_what_it_says_nothing_about(key: str, value: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        account(simulate(make_config("fedoag-zero", {key: value})))


def test_the_bound_holds_on_quadratics() -> None:
    """Mean of ‖∇F(x^t)‖² of a run in which nobody forgets against (A) to (D), with G of the gradients along the run.

    The bound must say something: more than that gradients are at most G long.
    """
    nu, lr, rounds = 2.5, 0.001, 3000
    keys = {"experiment.rounds": rounds, "algorithm.nu": nu, "cell.devices": 6, "fading.name": "none"}
    keys |= {"radio.noise_dbm_hz": -193.0, "cell.radius_m": 300.0}
    sim = simulate(make_quadratic("fedoag-zero", {**keys, "training.lr": lr, "training.local_steps": 2}))
    centers, state = sim.test.features, sim.init()
    mean, gradient, largest, forgotten = centers.mean(0), 0.0, 0.0, 0.0
    gap = 0.5 * float((state.params[0] - mean).square().sum())
    for t in range(rounds):
        gradient += float((state.params[0] - mean).square().sum()) / rounds
        largest = max(largest, float((state.params[0] - centers).norm(dim=-1).max()))
        state, info, *_ = sim.step(state, t)
        forgotten = max(forgotten, float(info.extra["forgotten_share"][0]))
    assert forgotten == 0
    terms = bound(
        smoothness=1.0, gradient=largest, gap=gap, step=2 * lr, rounds=rounds, nu=nu, limit=3.0, lost=0.0
    )  # fmt: skip
    assert gradient <= sum(terms.values()) < 0.6 * largest**2


def test_terms_of_the_bound_by_hand() -> None:
    """ℓ = 2, G = 3, F(x⁰) − F* = 5, η s = 0.1, T = 50, ν = 4, b = 1.5, f = 0.2."""
    keys = {"smoothness": 2.0, "gradient": 3.0, "gap": 5.0, "step": 0.1, "rounds": 50, "nu": 4.0}
    assert bound(**keys, limit=1.5, lost=0.2) == pytest.approx({"A": 2.0, "B": 0.81, "C": 0.81, "D": 45.0})
