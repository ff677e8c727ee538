"""FedOAG-zero (docs/algorithms/fedoag-zero.md): its round by hand, energy, noise, limits, bias, reports."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from otafl.conformance import check
from otafl.simulation.build import Simulation
from tests.algorithms.test_fedoag import NOISE_FREE, noise, p_weighted_world
from tests.conftest import make_config, make_quadratic, simulate

KEYS = {"training.engine": "reference", "cell.devices": 6, "experiment.rounds": 12}
LEVELS = [(0.02, 1.0), (0.02, 3.0), (0.3, 1.2), (2.5, 3.0)]  # ν and b
ENDLESS = 1e12


def make(nu: float, backlog: float = 3.0, keys: dict[str, Any] | None = None) -> Simulation:
    wanted = {**KEYS, "algorithm.nu": nu, "algorithm.backlog": backlog, **(keys or {})}
    return simulate(make_config("fedoag-zero", wanted), noise=noise)


def rounds(sim: Simulation, num_rounds: int) -> list[tuple[Any, Any, Any, Tensor]]:
    """(state before, state after, info, progress p of every device from x^t) of every round, on the pure engine."""
    state, history = sim.init(), []
    for t in range(num_rounds):
        progress = sim.round_at(t).train(state.params).dense()
        after, info, *_ = sim.step(state, t)
        history.append((state, after, info, progress))
        state = after
    return history


def silence(seeds: Any, name: str, t: int, size: int) -> Tensor:
    """Noise that a server fears and that does not come."""
    return torch.zeros(len(seeds), size, dtype=torch.float64)


@pytest.mark.parametrize(("nu", "backlog"), LEVELS)
def test_round_is_its_definition(nu: float, backlog: float) -> None:
    """x^{t+1} = x^t + η mean θ_i Δ_i + noise of norm ν η B ‖z‖/(√d σ_z); devices keep η(1 − θ_i) Δ_i; energy."""
    sim = make(nu, backlog)
    d, limit_j = sim.problem.num_params, sim.problem.num_params * sim.problem.symbol_energy_j
    held = forgot = 0
    for t, (before, after, info, progress) in enumerate(rounds(sim, 12)):
        lr = sim.config.training.lr_at(t)
        unit = noise(sim.seeds, "noise", t, d)
        round_ = sim.round_at(t)
        sim.algorithm.step(before, round_)
        energy_j = round_._close(round_.everyone).energy_j
        assert info.active.all()
        for s in range(len(sim.seeds)):
            fresh = progress[s].norm(dim=-1)
            largest = float(fresh.max())
            kappa = math.sqrt(d * sim.noise_var_j) / (nu * 6 * largest)
            delta = (before.devices.models[s] - before.params[s]) / lr + progress[s]
            short = (backlog * largest / delta.norm(dim=-1)).clamp(max=1)
            delta = delta * short[:, None]
            norms = delta.norm(dim=-1)
            strength = torch.from_numpy(np.abs(sim.worlds[s].coeff[t]))
            theta = (math.sqrt(limit_j) * strength / (kappa * norms)).clamp(max=1)
            added = nu * lr * largest * unit[s] / math.sqrt(d)  # whatever the world
            expected = before.params[s] + lr * (theta[:, None] * delta).mean(0) + added
            assert torch.allclose(after.params[s], expected, rtol=1e-10, atol=1e-11)
            kept = after.params[s] + lr * (1 - theta[:, None]) * delta
            assert torch.allclose(after.devices.models[s], kept, rtol=1e-10, atol=1e-11)
            ratio = (kappa * theta * norms / strength).square() / limit_j
            assert torch.allclose(energy_j[s] / limit_j, ratio, rtol=1e-9)
            assert ratio.max() <= 1 + 1e-12
            assert torch.allclose(ratio[theta < 1], torch.ones_like(ratio[theta < 1]), rtol=1e-9)  # all they have
            columns = {
                "unsent_share": (1 - theta).mean(),
                "forgotten_share": (1 - short).mean(),
                "waiting": ((1 - theta) * norms / fresh).mean(),
                "progress_share": (fresh / largest).mean(),
                "largest_progress": fresh.max(),
            }
            for name, value in columns.items():
                assert float(info.extra[name][s]) == pytest.approx(float(value), rel=1e-9, abs=1e-12)
            assert float(info.norm_bound[s]) == pytest.approx(float(norms.max()))
            held, forgot = held + int((theta < 1).sum()), forgot + int((short < 1).sum())
    assert held > 0
    assert forgot > 0 or nu > 1


@pytest.mark.parametrize("nu", [0.02, 0.3, 2.5])
def test_nothing_is_lost_but_by_noise(nu: float) -> None:
    """With an endless memory (1/m) Σ (x^{t+1} + η e_i) = (1/m) Σ (x^t + η e_i + η p_i) + η · noise_std · z/σ_z."""
    sim = make(nu, ENDLESS)
    for t, (before, after, info, progress) in enumerate(rounds(sim, 12)):
        lr, unit = sim.config.training.lr_at(t), noise(sim.seeds, "noise", t, sim.problem.num_params)
        expected = (before.devices.models + lr * progress).mean(1) + lr * info.noise_std[:, None] * unit
        assert torch.allclose(after.devices.models.mean(1), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("keys", [{}, {"cell.devices": 1}, {"cell.cohort": 3}], ids=["all", "one device", "a cohort"])
def test_without_noise_it_is_error_free_averaging(keys: dict[str, Any]) -> None:
    """Everybody is heard whole: FedAvg, of one device, too, and of each round's cohort."""
    one = make(2.5, keys={**NOISE_FREE, **keys})
    other = simulate(make_config("fedavg", {**KEYS, **keys}))
    state, same = one.init(), other.init()
    for t in range(12):
        state, info, *_ = one.step(state, t)
        same = other.step(same, t).state
        assert float(info.extra["unsent_share"].abs().max()) == 0
        assert torch.allclose(state.params, same.params, rtol=0, atol=1e-11)


def test_a_cohort_sends_what_its_devices_kept() -> None:
    """Who is not in the cohort keeps everything, and m is the cohort's size."""
    sim = make(0.02, keys={"cell.cohort": 3})
    for before, after, info, _ in rounds(sim, 12):
        outside = ~info.active
        kept = [(state.devices.models - state.params[:, None])[outside] for state in (before, after)]
        assert torch.allclose(*kept, rtol=0, atol=1e-12)
        assert float(info.weights[outside].abs().max()) == 0
        assert float(info.weights.max()) <= 1 / 3
    assert float(kept[1].norm()) > 0


def test_much_noise_accepted_is_everybody_heard_whole() -> None:
    """ν → ∞: all shares are 1, and what is left to differ from FedAvg is the noise, ν η B z/(√d σ_z)."""
    sim = make(100.0)
    for t, (before, after, info, progress) in enumerate(rounds(sim, 3)):
        assert float(info.extra["unsent_share"].max()) == 0
        lr, unit = sim.config.training.lr_at(t), noise(sim.seeds, "noise", t, sim.problem.num_params)
        added = lr * info.noise_std[:, None] * unit
        assert float(added.norm()) > 50 * lr * float(progress.mean(1).norm())
        assert torch.allclose(after.params - added, before.params + lr * progress.mean(1), rtol=0, atol=1e-11)
        assert torch.allclose(after.devices.models, after.params[:, None].expand_as(after.devices.models))


def test_equal_channels_and_equal_norms_share_alike() -> None:
    """Devices at one place without fading, pulled equally far: every θ_i is the same, so x^{t+1} is not biased."""
    keys = {
        "data.dimension": 2, "data.centers": [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], "model.start": 0.0,
        "cell.devices": 4, "cell.placement": "given", "cell.positions_m": [[1500.0, 0.0]] * 4,
        "fading.name": "none", "radio.noise_dbm_hz": -120.0, "experiment.rounds": 5, "algorithm.nu": 0.01,
    }  # fmt: skip
    sim = simulate(make_quadratic("fedoag-zero", keys))
    _, info, *_ = sim.step(sim.init(), 0)
    a = 0.01 * 4 * math.sqrt(sim.problem.symbol_energy_j * 1e-5 * 1500.0**-3.5 / sim.noise_var_j)
    assert a < 1
    assert torch.allclose(info.weights, torch.full_like(info.weights, a / 4), rtol=1e-9)


def test_a_channel_of_zero_is_waited_for(tmp_path: Path) -> None:
    """A recorded channel may be 0: the device keeps everything until it has one."""
    strength = [[0.0 if i == 2 and t < 3 else 1e-6 for i in range(6)] for t in range(12)]
    rows = [f"{8 * t},{i},{value}" for t, row in enumerate(strength) for i, value in enumerate(row)]
    path = tmp_path / "channel.csv"
    path.write_text("\n".join(["time_s,device,magnitude", *rows]))
    measured = {"fading.name": "measured", "fading.file": str(path), "pathloss.name": "measured"}
    sim = make(0.3, keys={**measured, "pathloss.file": str(path)})
    state = sim.init()
    for t in range(4):
        state, info, *_ = sim.step(state, t)
        assert state.params.isfinite().all()
        assert bool((info.weights[:, 2] == 0).all()) == (t < 3)


def test_nothing_to_send_adds_no_noise_and_one_idle_device_is_no_harm() -> None:
    keys = {"data.centers": [[0.5] * 3] * 4, "radio.noise_dbm_hz": -173.0}
    sim = simulate(make_quadratic("fedoag-zero", keys))
    state = sim.init()
    for t in range(3):
        state, info, *_ = sim.step(state, t)
        assert (state.params == 0.5).all()
        assert (info.noise_std == 0).all()
    waiting = torch.arange(12.0, dtype=torch.float64).view(1, 4, 3).expand(len(sim.seeds), -1, -1).contiguous()
    state = replace(state, devices=replace(state.devices, models=waiting.clone()))
    state, info, *_ = sim.step(state, 3)  # no progress anywhere, but something waits: it goes on waiting
    assert (state.params == 0.5).all()
    assert torch.equal(state.devices.models, waiting)
    sim = simulate(make_quadratic("fedoag-zero", {**keys, "data.centers": [[0.5] * 3, *[[1.0] * 3] * 3]}))
    state, info, *_ = sim.step(sim.init(), 0)
    assert state.params.isfinite().all()
    assert float(info.weights[0, 0]) == 0.25  # whole, though there is nothing in it


def test_reports_do_not_depend_on_channels() -> None:
    """Given the model, devices report the same whatever their channels were and are, a hundred times farther away."""
    near = make(0.3)
    far = make(0.3, keys={"cell.radius_m": 150_000.0})
    for before, _, info, _ in rounds(near, 6):
        other = replace(before, devices=replace(before.devices, models=before.devices.models * 1.7))
        _, there, *_ = far.step(other, 0)
        _, here, *_ = near.step(before, 0)
        assert torch.equal(there.extra["largest_progress"], here.extra["largest_progress"])
        assert not torch.allclose(there.weights, here.weights)
        assert float(info.norm_bound.min()) > 0
    (finding,) = [f for f in check("fedoag-zero") if f.name == "reports"]
    assert finding.verdict == "ok"
    assert "no channel is in them" in finding.text


def weak_device(nu: float, lr: float, backlog: float) -> tuple[float, Any, Any]:
    """Constant channels, no noise comes, one device of six 30 dB weaker, with optimum 1 where the others have 0.

    Returns a, what it can send in a round over the largest progress, the last state and the last info.
    """
    gains, num_rounds = [1e-10] * 5 + [1e-13], int(25 / lr)
    keys = {
        "data.dimension": 1, "data.centers": [[0.0]] * 5 + [[1.0]], "model.start": 0.0, "fading.name": "none",
        "cell.devices": 6, "cell.radius_m": 1e7, "cell.placement": "given", "algorithm.nu": nu,
        "cell.positions_m": [[(1e-5 / gain) ** (1 / 3.5), 0.0] for gain in gains], "algorithm.backlog": backlog,
        "training.local_steps": 1, "training.lr": lr, "experiment.rounds": num_rounds, "radio.noise_dbm_hz": -160.0,
    }  # fmt: skip
    sim = simulate(make_quadratic("fedoag-zero", keys), noise=silence)
    state = sim.init()
    for t in range(num_rounds):
        state, info, *_ = sim.step(state, t)
    return nu * 6 * math.sqrt(sim.problem.symbol_energy_j * 1e-13 / sim.noise_var_j), state, info


@pytest.mark.parametrize("nu", [1.4, 0.1, 0.01])
@pytest.mark.parametrize("lr", [0.01, 0.5])
def test_a_device_that_cannot_keep_up_counts_less(nu: float, lr: float) -> None:
    """Its weight is a at any η, since it sends a B a round where it learns B; b B waits in the end."""
    a, state, info = weak_device(nu, lr, 3.0)
    assert a < 1
    assert float(state.params[0, 0]) == pytest.approx(a / (5 + a), rel=1e-6)
    assert 6 * float(info.extra["waiting"][0]) == pytest.approx(3 - a, rel=1e-4)


@pytest.mark.parametrize("lr", [0.01, 0.5])
def test_a_device_that_can_keep_up_counts_in_full(lr: float) -> None:
    a, state, info = weak_device(20.0, lr, 3.0)
    assert a > 1
    assert float(state.params[0, 0]) == pytest.approx(1 / 6, rel=1e-6)
    assert float(info.extra["waiting"][0]) == 0


def server_mean(lr: float, backlog: float) -> tuple[float, float, float]:
    """Mean of the server model on the two-device oracle, its standard error, and the share that waits; 80 seeds.

    Fading; the weaker device can send 1.3 times in the mean what it learns, and often less.
    """
    keys = {"experiment.rounds": 1500, "experiment.seeds": list(range(80)), "radio.noise_dbm_hz": -165.0}
    world = p_weighted_world(keys)
    del world["algorithm.gamma"]
    gain = 1e-5 * world["cell.positions_m"][1][0] ** -3.5
    sim = simulate(make_quadratic("fedoag-zero", world))
    nu = 1.3 / (2 * math.sqrt(sim.problem.symbol_energy_j / sim.noise_var_j) * math.sqrt(math.pi * gain) / 2)
    world |= {"training.lr": lr, "model.start": 0.5, "algorithm.nu": nu, "algorithm.backlog": backlog}
    sim = simulate(make_quadratic("fedoag-zero", world))
    state, server, unsent = sim.init(), *torch.zeros(2, 80, dtype=torch.float64)
    for t in range(1500):
        state, info, *_ = sim.step(state, t)
        if t >= 250:
            server += state.params[:, 0] / 1250
            unsent += info.extra["unsent_share"] / 1250
    return float(server.mean()), float(server.std()) / math.sqrt(80), float(unsent.mean())


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_bias_oracle(lr: float) -> None:
    """Two devices, optima 0 and 1: who keeps what it cannot send is unbiased at any η; who forgets it is not."""
    mean, error, unsent = server_mean(lr, ENDLESS)
    assert unsent > 0.1
    assert abs(mean - 0.5) < 5 * error
    assert error < 0.01
    shipped, error, _ = server_mean(lr, 3.0)
    assert abs(shipped - 0.499) < 5 * error < 0.002
    forgetful, error, _ = server_mean(lr, 1.0)
    assert forgetful < 0.5 - 5 * error
