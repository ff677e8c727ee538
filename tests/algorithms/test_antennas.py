"""Blind reception and receive beamforming: weights, noise after combining, vectors against a grid."""

import math

import pytest
import torch
from torch import Tensor

from otafl.algorithms.beamforming import receive_vectors
from tests.algorithms.worlds import NOISE_FREE, gradients, make


@pytest.mark.parametrize("antennas", [1, 4, 64])
def test_blind_reception_has_weights_that_sum_to_one(antennas: int) -> None:
    """w_i = Re Σ_n s_n* h_{i,n}/Σ_n |s_n|² sum to 1 surely, and are what the server's model moves by without noise."""
    sim = make("blind", {"radio.antennas": antennas, **NOISE_FREE})
    for t in range(3):
        h = torch.stack([torch.from_numpy(world.each[t]) for world in sim.worlds])
        s = h.sum(1, keepdim=True)
        weights = (s.conj() * h).sum(-1).real / s.abs().square().sum(-1)
        assert torch.allclose(weights.sum(-1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)
        moved = sim.step(sim.init(), t).state.params - sim.problem.initial
        expected = (weights[..., None] * gradients(sim, sim.problem.initial, t)).sum(1)
        assert torch.allclose(moved, sim.config.training.lr_at(t) * expected, rtol=1e-8, atol=1e-11)


def test_blind_weights_go_to_the_gains_as_one_over_the_root_of_antennas() -> None:
    """The weights that the model moves by, from the updates of six devices that lie in 53 dimensions."""
    off = []
    for antennas in (8, 128):
        places = [[at, 0.0] for at in (300.0, 310.0, 320.0, 350.0, 400.0, 450.0)]
        keys = {"cell.placement": "given", "cell.positions_m": places, "experiment.rounds": 150, **NOISE_FREE}
        sim = make("blind", {**keys, "radio.antennas": antennas, "experiment.seeds": [0]})
        gain = torch.from_numpy(sim.worlds[0].antenna_gain[0])
        found = []
        for t in range(150):
            moved = (sim.step(sim.init(), t).state.params - sim.problem.initial) / sim.config.training.lr_at(t)
            updates = gradients(sim, sim.problem.initial, t)[0]
            found.append(torch.linalg.lstsq(updates.t(), moved.t()).solution[:, 0])
        off.append(float((torch.stack(found) - gain / gain.sum()).abs().mean()))
    assert off[1] < 0.06
    assert off[0] / off[1] == pytest.approx(4.0, rel=0.2)


def test_beamforming_with_one_antenna_is_vanilla() -> None:
    """The same mean, noise and energy; z is turned by the phase of f, which has no meaning for a real sum."""
    one, other = make("beamforming"), make("vanilla")
    for t in range(4):
        step, same = one.step(one.init(), t), other.step(other.init(), t)
        assert torch.allclose(step.info.noise_std, same.info.noise_std, rtol=1e-9)
        assert torch.allclose(step.energy_ratio, same.energy_ratio, rtol=1e-9)
    one, other = make("beamforming", NOISE_FREE), make("vanilla", NOISE_FREE)
    assert torch.allclose(one.step(one.init(), 0).state.params, other.step(other.init(), 0).state.params, atol=1e-10)
    free, ideal = make("beamforming", {**NOISE_FREE, "radio.antennas": 3}), make("fedavg")
    assert torch.allclose(free.step(free.init(), 0).state.params, ideal.step(ideal.init(), 0).state.params, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["beamforming", "blind"])
def test_noise_after_combining_antennas_is_as_strong_as_reported(algorithm: str) -> None:
    """Over rounds from one model: (x^{t+1} − the same without noise)/η has standard deviation noise_std."""
    keys = {"radio.antennas": 4, "experiment.rounds": 60, "experiment.seeds": [0]}
    loud, quiet = make(algorithm, keys), make(algorithm, {**keys, **NOISE_FREE})
    ratios, smaller = [], []
    for t in range(60):
        step, free = loud.step(loud.init(), t), quiet.step(quiet.init(), t)
        noise = (step.state.params - free.state.params) / loud.config.training.lr_at(t)
        ratios.append(noise / step.info.noise_std[:, None])
        smaller.append(step.info.noise_std)
    values = torch.stack(ratios)
    assert abs(float(values.std()) - 1) < 5 / math.sqrt(2 * values.numel())
    if algorithm == "beamforming":
        one = make(algorithm, {**keys, "radio.antennas": 1})
        alone = torch.stack([one.step(one.init(), t).info.noise_std for t in range(60)])
        assert torch.stack(smaller).median() < 0.7 * alone.median()


def test_blind_reception_of_a_cohort_sums_to_one_over_the_cohort() -> None:
    sim = make("blind", {"radio.antennas": 4, "cell.cohort": 3, **NOISE_FREE})
    for t in range(5):
        round_ = sim.round_at(t)
        who = round_.everyone
        assert (who.sum(-1) == 3).all()
        h = torch.where(who[..., None], torch.stack([torch.from_numpy(world.each[t]) for world in sim.worlds]), 0.0)
        s = h.sum(1, keepdim=True)
        weights = (s.conj() * h).sum(-1).real / s.abs().square().sum(-1)
        assert torch.allclose(weights.sum(-1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)
        moved = sim.step(sim.init(), t).state.params - sim.problem.initial
        expected = (weights[..., None] * gradients(sim, sim.problem.initial, t)).sum(1)
        assert torch.allclose(moved, sim.config.training.lr_at(t) * expected, rtol=1e-8, atol=1e-11)


def least(f: Tensor, h: Tensor) -> Tensor:
    return torch.einsum("...n,...mn->...m", f.conj(), h).abs().square().amin(-1)


def test_receive_vectors_reach_the_best_of_a_fine_grid() -> None:
    """Two antennas, three devices: f = (cos a, e^{jb} sin a) over a grid; within one percent."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(40, 3, 2, generator=generator, dtype=torch.complex128)
    h = h * torch.rand(40, 3, 1, generator=generator, dtype=torch.float64).mul(2).exp()
    a, b = torch.meshgrid(torch.linspace(0, math.pi / 2, 241), torch.linspace(0, 2 * math.pi, 481), indexing="ij")
    a, b = a.double().flatten(), b.double().flatten()
    grid = torch.stack([a.cos().to(h.dtype), torch.polar(a.sin(), b)], -1)
    best = torch.einsum("kn,bmn->bkm", grid.conj(), h).abs().square().amin(-1).amax(-1)
    found = least(receive_vectors(h, torch.ones(40, 3, dtype=torch.bool), 60), h)
    assert (found > 0.99 * best).all()


def test_receive_vectors_are_never_below_a_start_and_improve_with_antennas() -> None:
    generator = torch.Generator().manual_seed(2)
    every = torch.ones(20, 8, dtype=torch.bool)
    h = torch.randn(20, 8, 16, generator=generator, dtype=torch.complex128)
    values = []
    for antennas in (1, 4, 16):
        part = h[..., :antennas]
        f = receive_vectors(part, every, 30)
        assert torch.allclose(torch.linalg.vector_norm(f, dim=-1), torch.ones(20, dtype=torch.float64))
        reached = least(f, part)
        starts = [part.sum(-2)] + [torch.eye(antennas, dtype=h.dtype)[n].expand(20, -1) for n in range(antennas)]
        for start in starts:
            start = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
            assert (reached >= least(start, part) * (1 - 1e-9)).all()
        values.append(float(reached.mean()))
    assert values[0] < values[1] < values[2]
