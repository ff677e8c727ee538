"""What holds for FedOAG and FedOAG-plus whatever the server keeps of old models, and where γ finds itself."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import otafl
from otafl.algorithms.parts.threshold import SPEED, first_gamma, next_gamma
from otafl.core.contract import Problem
from otafl.core.state import tensors_of
from otafl.errors import OtaflError
from otafl.simulation.build import Simulation
from tests.algorithms.test_fedoag import NOISE_FREE, noise, rounds
from tests.conftest import TINY_GAMMA, make_config, make_quadratic, simulate

METHODS = ("fedoag", "fedoag-plus")
FORMS: list[dict[str, Any]] = [
    {"algorithm.gamma": "adaptive"},
    {"algorithm.anchors": "float16"},
    {"algorithm.anchors": "bfloat16"},
    {"algorithm.anchors": "float16", "algorithm.gamma": "adaptive"},
]
forms = pytest.mark.parametrize("keys", FORMS, ids=[" ".join(map(str, keys.values())) for keys in FORMS])


def make(algorithm: str, keys: dict[str, Any]) -> Simulation:
    world = {"training.engine": "reference", "cell.devices": 6, "experiment.rounds": 12, "radio.noise_dbm_hz": -213.0}
    return simulate(make_config(algorithm, {**world, **keys}), noise=noise)


@forms
def test_f1_and_f4_whatever_innovations_are_measured_against(keys: dict[str, Any]) -> None:
    """x^{t+1} = mean_{i∈A} x̃_i + η B z/(γ_t|A|), with B = max ‖x̃_i − reference_i‖/η: only the noise feels it."""
    sim = make("fedoag", keys)
    sigma, seen = math.sqrt(sim.noise_var_j), 0
    for t, (before, after, info, ends) in enumerate(rounds(sim, 12)):
        z = sigma * noise(sim.seeds, "noise", t, sim.objective.num_params)
        lr = sim.config.training.lr_at(t)
        for s, active in enumerate(info.active):
            size = int(active.sum())
            if size == 0:
                assert torch.equal(after.params[s], before.params[s])
                continue
            gamma = float(before.gamma[s]) if keys.get("algorithm.gamma") == "adaptive" else TINY_GAMMA
            reference = before.devices.anchors.pool[s, before.devices.anchors.slot[s]]
            bound = float(((ends[s] - reference) / lr).norm(dim=-1)[active].max())
            expected = ends[s][active].mean(0) + lr * bound * z[s] / (gamma * size)
            assert torch.allclose(after.params[s], expected, rtol=1e-11, atol=1e-11)
            assert info.noise_std[s] == pytest.approx(bound * sigma / (gamma * size), rel=1e-9)
            seen += 1
    assert seen > 5


@forms
@pytest.mark.parametrize("algorithm", METHODS)
def test_f2_mean_of_the_devices_is_kept_but_for_the_noise(algorithm: str, keys: dict[str, Any]) -> None:
    """x̄^{t+1} = (1/m) Σ x̃_i + η · noise_std · z/σ_z · |A|/m."""
    sim = make(algorithm, keys)
    for t, (_, after, info, ends) in enumerate(rounds(sim, 12)):
        unit = noise(sim.seeds, "noise", t, sim.objective.num_params)
        share = info.active.double().mean(-1, keepdim=True)
        expected = ends.mean(1) + sim.config.training.lr_at(t) * share * info.noise_std[:, None] * unit
        assert torch.allclose(after.devices.models.mean(1), expected, rtol=1e-10, atol=1e-11)


@forms
@pytest.mark.parametrize("algorithm", METHODS)
def test_f9_mean_model_follows_the_quadratic(algorithm: str, keys: dict[str, Any]) -> None:
    sim = simulate(make_quadratic(algorithm, {"experiment.rounds": 40, "cell.devices": 7, **keys}))
    state, center = sim.init(), sim.test.features.mean(0)
    start = state.devices.models.mean(1) - center
    for t in range(40):
        state = sim.step(state, t).state
        expected = (1 - 0.05) ** (3 * (t + 1)) * start
        assert torch.allclose(state.devices.models.mean(1) - center, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("keys", FORMS[1:3], ids=[str(keys["algorithm.anchors"]) for keys in FORMS[1:3]])
def test_without_noise_all_references_give_the_same_models(keys: dict[str, Any]) -> None:
    """FedOAG sends everything, so that the server rebuilds the same mean from any reference."""
    ends = []
    for chosen in ({}, keys):
        sim = make("fedoag", {**NOISE_FREE, **chosen})
        state = sim.init()
        for t in range(12):
            state = sim.step(state, t).state
        ends.append(state)
    assert torch.allclose(ends[0].params, ends[1].params, rtol=0, atol=1e-11)
    assert torch.allclose(ends[0].devices.models, ends[1].devices.models, rtol=0, atol=1e-11)


@pytest.mark.parametrize("algorithm", METHODS)
def test_what_the_server_remembers(algorithm: str) -> None:
    """Each anchor, rounded."""
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        state, info, *_ = (sim := make(algorithm, {"algorithm.anchors": name})).step(sim.init(), 0)
        for s in range(2):
            heard = info.active[s].nonzero().flatten()
            expected = state.params[s].to(dtype).to(torch.float64)
            assert torch.equal(
                state.devices.anchors.pool[s, state.devices.anchors.slot[s, heard]], expected.expand(len(heard), -1)
            )
            assert len(heard)


def bounds_with_everybody_heard(gain: float) -> np.ndarray:
    """B_t of 60 rounds on a quadratic in 400 dimensions, √d σ_z/(γ|A|) = `gain`; local training contracts by 0.95³."""
    config = make_quadratic("fedoag", {"experiment.rounds": 60, "data.dimension": 400, "cell.radius_m": 20.0})
    noise_var = (gain * config.algorithm.spec.gamma * 4) ** 2 / 400
    sim = simulate(config.replace({"radio.noise_dbm_hz": 10 * math.log10(noise_var / 1e-3)}))
    state, bounds = sim.init(), []
    for t in range(60):
        state, info, *_ = sim.step(state, t)
        assert info.active.all()
        bounds.append(float(info.norm_bound.mean()))
    return np.array(bounds)


def test_noise_does_not_feed_itself() -> None:
    bounds = bounds_with_everybody_heard(2.0)
    assert bounds[30:].max() < 3 * bounds[:5].max()


def toy(noise_var_j: float = 1e-4, num_params: int = 10_000) -> Problem:
    start = torch.zeros(1, 1, dtype=torch.float64)
    return Problem(20, num_params, 1.0, noise_var_j, start, server=None)  # type: ignore[arg-type]


def test_gamma_moves_by_the_log_ratio_of_noise_and_waiting() -> None:
    """Rises where noise is more than waiting, falls where it is less, stays where they are equal."""
    gamma, active = torch.tensor([2.0], dtype=torch.float64), torch.tensor([9])
    waiting, level = (20 - 9 + 0.5) / 9.5, 0.1 * math.sqrt(10_000) * 1e-4
    for ratio in (0.5, 1.0, 2.0):
        energy = torch.tensor([level / (ratio * waiting)], dtype=torch.float64)
        found = float(next_gamma(gamma, active, energy, toy(), 0.1))
        assert found == pytest.approx(2.0 * ratio**SPEED, rel=1e-12)
    silent = next_gamma(gamma, torch.tensor([0]), torch.zeros(1, dtype=torch.float64), toy(), 0.1)
    assert float(silent) == 1.0
    quiet = next_gamma(gamma, active, torch.ones(1, dtype=torch.float64), toy(0.0), 0.1)
    assert float(quiet) == pytest.approx(2.0 * math.exp(-3 * SPEED))
    assert float(first_gamma(toy(), 0.1)[0]) ** 2 == pytest.approx(level)


@pytest.mark.parametrize("algorithm", METHODS)
def test_an_adaptive_gamma_has_no_units(algorithm: str) -> None:
    """Power and noise times 100 are the same world in other units: γ is 10 times as large, all else the same."""
    runs = []
    for shift_db in (0.0, 20.0):
        keys = {"radio.tx_power_dbm": shift_db, "radio.noise_dbm_hz": -193.0 + shift_db, "algorithm.gamma": "adaptive"}
        runs.append(otafl.run(make_config(algorithm, {**keys, "experiment.rounds": 40, "cell.devices": 8})))
    one, other = runs
    assert other.metrics["gamma"][:, 1:] == pytest.approx(10 * one.metrics["gamma"][:, 1:], rel=1e-9)
    assert np.array_equal(one.metrics["num_active"], other.metrics["num_active"], equal_nan=True)
    assert torch.allclose(one.params, other.params, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("algorithm", METHODS)
def test_gamma_forgets_where_it_started(algorithm: str) -> None:
    """From a hundred times too high and too low: the same γ after 300 rounds; and not one that hears all or nobody."""
    sim = simulate(
        make_config(algorithm, {"algorithm.gamma": "adaptive", "experiment.rounds": 300, "cell.devices": 12})
    )
    found = []
    for factor in (100.0, 0.01):
        state = sim.init()
        state.gamma.mul_(factor)
        sizes = []
        for t in range(300):
            state, info, *_ = sim.step(state, t)
            sizes.append(float(info.active.double().mean()))
        found.append(state.gamma)
        assert 0.05 < np.mean(sizes[200:]) < 0.95
    assert torch.allclose(found[0], found[1], rtol=0.15)


@pytest.mark.parametrize("algorithm", METHODS)
def test_more_noise_raises_gamma_over_the_noise_free_one(algorithm: str) -> None:
    """With hardly any noise everybody is heard; with more, fewer."""
    shares = []
    for level in (-260.0, -203.0, -193.0):  # beyond that a model this small explodes
        keys = {"algorithm.gamma": "adaptive", "radio.noise_dbm_hz": level, "experiment.rounds": 150}
        result = otafl.run(make_config(algorithm, keys))
        shares.append(float(result.metrics["num_active"][:, -50:].mean()) / 4)
    assert shares[0] > 0.95
    assert shares[0] > shares[1] > shares[2] > 0


@forms
@pytest.mark.parametrize("algorithm", METHODS)
def test_engines_agree(algorithm: str, keys: dict[str, Any]) -> None:
    runs = []
    for engine in ("reference", "batched", "preactivation"):
        config = make_config(algorithm, {"training.engine": engine, "cell.devices": 6, "experiment.rounds": 10, **keys})
        runs.append(otafl.run(config))
    for other in runs[1:]:
        assert torch.allclose(runs[0].params, other.params, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("keys", [FORMS[0], FORMS[1]], ids=["adaptive", "float16"])
@pytest.mark.parametrize("algorithm", METHODS)
def test_an_interrupted_run_continues_with_its_gamma_and_reference(
    algorithm: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    config = make_config(algorithm, {"experiment.rounds": 12, "experiment.checkpoint_s": 1e-9, **keys})

    def stop(done: int, row: Any) -> None:
        if done == 7:
            raise RuntimeError("stop")

    whole = otafl.run(config, out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stop"):
        otafl.run(config, out=tmp_path / "parts", observer=stop)
    parts = otafl.run(config, out=tmp_path / "parts")
    assert torch.equal(whole.params, parts.params)


def test_a_fixed_gamma_has_no_state_and_no_column() -> None:
    sim = simulate(make_config("fedoag"))
    assert "gamma" not in tensors_of(sim.init())
    assert "gamma" not in otafl.run(make_config("fedoag")).metrics


@pytest.mark.parametrize("keys", [{"algorithm.gamma": "adaptive"}, {"algorithm.anchors": "float16"}], ids=str)
def test_errors_of_the_downlink_are_refused_where_they_are_not_known(keys: dict[str, Any]) -> None:
    with pytest.raises(OtaflError, match=r"imperfect\.downlink_std"):
        simulate(make_config("fedoag", {"imperfect.downlink_std": 0.1, **keys}))


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm.gamma": "adaptiv"},
        {"algorithm.gamma": -1.0},
        {"algorithm.anchors": "some"},
        {"algorithm.name": "ota-fedavg", "algorithm.gamma": "adaptive"},
    ],
    ids=str,
)
def test_bad_values_are_one_line(keys: dict[str, Any]) -> None:
    with pytest.raises(OtaflError) as caught:
        make_config("fedoag", keys)
    line = str(caught.value)
    assert "\n" not in line
    assert next(reversed(keys)) in line
