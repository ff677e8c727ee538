"""The second circle of methods: each against what its paper's equations say exactly, and its limits."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm
from torch import Tensor

from otafl.algorithms.beamforming import receive_vectors
from otafl.algorithms.design.bits import Cell, best_bits, cost, relaxed_bits, split
from otafl.algorithms.parts.intervals import Intervals
from otafl.algorithms.parts.projection import Projection, reconstruct
from otafl.errors import ConfigError
from otafl.radio.digital import quantised, rates, slots
from otafl.simulation.build import Simulation
from tests.conftest import TINY_GAMMA, TINY_PARAMS, make_config, simulate

NOISE_FREE = {"radio.noise_dbm_hz": float("-inf")}


def make(algorithm: str, keys: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config(algorithm, {"cell.devices": 6, "experiment.rounds": 20, **(keys or {})}))


def gradients(sim: Simulation, params: Tensor, t: int = 0) -> Tensor:
    """Every device's update from a model, [S, M, P]."""
    return sim.round_at(t).train(params).dense()


# --- COTAF ---


def test_cotaf_is_truncated_inversion_with_the_largest_of_all_norms() -> None:
    """x^{t+1} = x^t + η (mean_A Δ_i + B/(γ|A|) z), B over all devices, with the very noise of the air."""
    sim = make("cotaf")
    state = sim.init()
    seen = set()
    for t in range(12):
        updates = gradients(sim, state.params, t)
        h = torch.stack([torch.from_numpy(world.coeff[t]) for world in sim.worlds])
        full = h.abs() * math.sqrt(sim.problem.num_params * sim.problem.symbol_energy_j)
        active = full >= sim.algorithm.gamma
        bound = updates.norm(dim=-1).amax(-1)
        noise = sim.air.noise(sim.seeds, "noise", t, sim.problem.num_params) * sim.problem.noise_var_j**0.5
        count = active.sum(-1)
        total = torch.where(active[..., None], updates, 0.0).sum(1) + (bound / sim.algorithm.gamma)[:, None] * noise
        expected = torch.where(
            (count > 0)[:, None],
            state.params + sim.config.training.lr_at(t) * total / count.clamp(min=1)[:, None],
            state.params,
        )
        seen |= set(count.tolist())
        step = sim.step(state, t)
        assert torch.allclose(step.state.params, expected, rtol=1e-9, atol=1e-10)
        assert torch.allclose(step.info.norm_bound, bound, rtol=1e-12)
        state = step.state
    assert len(seen) > 2


def test_cotaf_equals_ota_fedavg_where_the_loudest_device_is_active() -> None:
    """With everybody active B over all is B over A, and COTAF is FedOAG's uplink without memory."""
    keys = {"algorithm.gamma": TINY_GAMMA * 1e-3, **NOISE_FREE}
    one, other = make("cotaf", keys), make("ota-fedavg", keys)
    a, b = one.init(), other.init()
    for t in range(4):
        a, b = one.step(a, t).state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-12)


# --- GBMA ---


def test_gbma_is_parallel_to_opc_with_much_noise() -> None:
    """Both then send at full amplitude; OPC's factor differs by Σ|h|/Σ E|h|."""
    loud = {"radio.noise_dbm_hz": -60.0, "algorithm.norm_limit": 2.0}
    gbma = make("gbma", loud)
    opc = make("opc", {**loud, "algorithm.norms": "clip", "algorithm.renormalise": True})
    opc_step = opc.step(opc.init(), 0)
    h = torch.stack([torch.from_numpy(world.coeff[0]) for world in gbma.worlds]).abs()
    updates = gradients(gbma, gbma.problem.initial)
    clipped = updates * (2.0 / updates.norm(dim=-1).clamp(min=2.0))[..., None]
    quiet = make("gbma", {**NOISE_FREE, "algorithm.norm_limit": 2.0})
    moved = (quiet.step(quiet.init(), 0).state.params - quiet.problem.initial) / quiet.config.training.lr_at(0)
    mean_size = torch.stack([torch.from_numpy(world.mean_gain[0]) for world in gbma.worlds]).mul(math.pi / 4).sqrt()
    expected = (h[..., None] * clipped).sum(1) / mean_size.sum(-1, keepdim=True)
    assert torch.allclose(moved, expected, rtol=1e-9, atol=1e-12)
    weights = opc_step.info.weights * updates.norm(dim=-1).clamp(min=2.0) / 2.0  # of the clipped updates
    parallel = weights / weights.sum(-1, keepdim=True)
    assert torch.allclose(parallel, h / h.sum(-1, keepdim=True), rtol=1e-6)
    assert torch.allclose(gbma.step(gbma.init(), 0).energy_ratio, torch.ones(2, dtype=torch.float64), rtol=1e-9)


# --- OBDA, FSK-MV ---


def sign(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)


def test_obda_without_noise_is_a_majority_vote() -> None:
    sim = make("obda", NOISE_FREE)
    step = sim.step(sim.init(), 0)
    votes = torch.where(step.info.active[..., None], sign(gradients(sim, sim.problem.initial)), 0.0).sum(1)
    moved = step.state.params - sim.problem.initial
    size = sim.config.training.lr_at(0) * sim.algorithm.server_step
    clear = votes != 0
    assert clear.double().mean() > 0.5
    assert torch.equal(sign(moved)[clear], sign(votes)[clear])
    assert torch.allclose(moved.abs(), torch.full_like(moved, size), rtol=1e-9)


def test_obda_hears_a_net_vote_wrongly_as_often_as_the_q_function_says() -> None:
    """One device alone: P(wrong) = Q(γ/(√d σ_z)), over coordinates and rounds, within 5 standard errors."""
    gamma = 3.0 * TINY_GAMMA
    keys = {"cell.devices": 1, "algorithm.gamma": gamma, "experiment.rounds": 400, "experiment.seeds": [0]}
    keys["cell.radius_m"] = 100.0
    wanted = gamma / math.sqrt(TINY_PARAMS) / 0.8  # σ_z at which k = 1 vote is 0.8 standard deviations
    sim = make("obda", {**keys, "radio.noise_dbm_hz": 10 * math.log10(wanted**2 * 1e3)})
    start, wrong, total = sim.init(), 0.0, 0
    for t in range(400):
        step = sim.step(start, t)
        if step.info.active.all():
            mine = sign(gradients(sim, sim.problem.initial, t)[:, 0])
            wrong += float((sign(step.state.params - sim.problem.initial) != mine).double().sum())
            total += mine.numel()
    assert total > 5000
    expected = float(norm.sf(0.8))
    assert abs(wrong / total - expected) < 5 * math.sqrt(expected * (1 - expected) / total)


def test_obda_keeps_what_a_sign_loses() -> None:
    """What is kept: v − (‖v‖₁/d) sign(v) for who voted, all of v for the others: nothing is lost."""
    sim = make("obda", {"algorithm.error_feedback": True})
    state, left = sim.init(), torch.zeros(2, 6, TINY_PARAMS, dtype=torch.float64)
    for t in range(6):
        v = gradients(sim, state.params, t) + left
        step = sim.step(state, t)
        kept = torch.where(step.info.active[..., None], v - v.abs().mean(-1, keepdim=True) * sign(v), v)
        assert torch.allclose(step.state.unsent.values, kept, rtol=0, atol=1e-10)
        state, left = step.state, kept


@pytest.mark.parametrize("algorithm", ["obda", "fsk-mv"])
def test_one_device_without_noise_is_sign_sgd(algorithm: str) -> None:
    keys = {"cell.devices": 1, **NOISE_FREE} | ({"algorithm.gamma": 1e-25} if algorithm == "obda" else {})
    sim = make(algorithm, keys)
    moved = sim.step(sim.init(), 0).state.params - sim.problem.initial
    expected = sign(gradients(sim, sim.problem.initial)[:, 0]) * sim.algorithm.server_step
    assert torch.allclose(moved, sim.config.training.lr_at(0) * expected, rtol=1e-9)


@pytest.mark.parametrize("antennas", [1, 3])
def test_fsk_mv_hears_gains_times_votes(antennas: int) -> None:
    """E[e_+ − e_−] = 2 E_s N Σ Λ_i s_i, whatever the noise, within 5 standard errors; energy at the limit."""
    from otafl.algorithms.fsk_mv import FSKMV
    from otafl.core.round import Round

    keys = {"radio.antennas": antennas, "experiment.rounds": 1500, "experiment.seeds": [0], "cell.devices": 3}
    sim = make("fsk-mv", {**keys, "training.local_steps": 1})
    heard: list[Tensor] = []

    class Ear(Round):
        def uplink(self, *arguments: Any, **options: Any) -> Tensor:
            heard.append(super().uplink(*arguments, **options))
            return heard[-1]

    # the same votes in every round: the updates of round 0
    batches = sim.sampler.at(0)
    votes = sign(gradients(sim, sim.problem.initial))
    for t in range(1500):
        made: Any = sim.round_at(t, batches=batches)
        made.__class__, made.lr = Ear, sim.config.training.lr_at(0)
        FSKMV().step(sim.init(), made)
    energy = torch.stack(heard)[:, 0].reshape(1500, TINY_PARAMS, 2)
    difference = energy[..., 0] - energy[..., 1]
    gain = torch.from_numpy(sim.worlds[0].antenna_gain[0])
    expected = 2 * sim.problem.symbol_energy_j * antennas * (gain[:, None] * votes[0]).sum(0)
    error = difference.std(0) / math.sqrt(1500)
    assert ((difference.mean(0) - expected).abs() < 5 * error).all()
    assert float(sim.step(sim.init(), 0).energy_ratio.max()) == pytest.approx(1.0, rel=1e-5)


# --- antennas ---


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
    rng = np.random.default_rng(0)
    gain = np.array([1.0, 3.0, 0.5, 2.0])
    off = []
    for antennas in (64, 1024):
        h = (rng.standard_normal((400, 4, antennas)) + 1j * rng.standard_normal((400, 4, antennas))) / np.sqrt(2)
        h = h * np.sqrt(gain)[:, None]
        s = h.sum(1, keepdims=True)
        weights = (s.conj() * h).sum(-1).real / (np.abs(s) ** 2).sum(-1)
        off.append(np.abs(weights - gain / gain.sum()).mean())
    assert off[1] < 0.02
    assert off[0] / off[1] == pytest.approx(4.0, rel=0.15)


def test_beamforming_with_one_antenna_is_vanilla() -> None:
    one, other = make("beamforming"), make("vanilla")
    for t in range(4):
        step, same = one.step(one.init(), t), other.step(other.init(), t)
        assert torch.allclose(step.info.noise_std, same.info.noise_std, rtol=1e-9)
        assert torch.allclose(step.energy_ratio, same.energy_ratio, rtol=1e-9)
    free, ideal = make("beamforming", {**NOISE_FREE, "radio.antennas": 3}), make("fedavg")
    assert torch.allclose(free.step(free.init(), 0).state.params, ideal.step(ideal.init(), 0).state.params, atol=1e-10)


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


# --- FedAU, FedVARP ---


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


def test_fedau_over_the_air_without_noise_is_fedau() -> None:
    one, other = make("ota-fedau", NOISE_FREE), make("fedau")
    a, b = one.init(), other.init()
    for t in range(10):
        a, b = one.step(a, t).state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-10)


def test_fedvarp_is_its_definition() -> None:
    sim = make("fedvarp")
    state, server = sim.init(), sim.problem.initial.clone()
    y = torch.zeros(2, 6, TINY_PARAMS, dtype=torch.float64)
    for t in range(15):
        updates = gradients(sim, server, t)
        state, info, *_ = sim.step(state, t)
        active = info.active[..., None]
        count = info.active.sum(-1, keepdim=True).clamp(min=1)
        mean = torch.where(active, updates - y, 0.0).sum(1) / count + y.mean(1)
        server = server + sim.config.training.lr_at(t) * mean
        y = torch.where(active, updates, y)
        assert torch.allclose(state.params, server, rtol=0, atol=1e-10)


# --- digital ---


def test_the_quantiser_is_unbiased_and_bounded() -> None:
    rng = np.random.default_rng(4)
    v = torch.from_numpy(rng.standard_normal(50)) * torch.linspace(0, 3, 50)
    for bits in (1, 2, 4):
        drawn = torch.from_numpy(rng.random((20_000, 50)))
        found = quantised(v.expand(20_000, -1), bits, drawn)
        step = 2 * float(v.abs().max()) / (2**bits - 1)
        assert len(torch.unique((found / step * 1e6).round())) <= 2**bits
        assert ((found - v).abs() <= step * (1 + 1e-9)).all()
        error = found.std(0) / math.sqrt(20_000)
        assert ((found.mean(0) - v).abs() < 5 * error + 1e-12).all()
        assert (found.var(0) <= step**2 / 4 * 1.02 + 1e-12).all()
    assert torch.equal(quantised(torch.zeros(3), 4, torch.rand(3)), torch.zeros(3))


def test_slots_and_energies_by_hand() -> None:
    """Two devices: rate B log2(1 + |h|² E_s/(2σ²)); the better one first, the other only if it fits."""
    h = torch.tensor([[2.0, 1.0]], dtype=torch.complex128)
    rate = rates(h, 2.0, 0.5, 100.0)
    assert rate.tolist()[0] == pytest.approx([100 * math.log2(1 + 8), 100 * math.log2(1 + 2)])
    bits, who = torch.full((1, 2), 1000.0, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    first, second = 1000 / (100 * math.log2(9)), 1000 / (100 * math.log2(3))
    for deadline, through in ((first - 0.01, [0, 0]), (first + 0.01, [1, 0]), (first + second + 0.01, [1, 1])):
        delivered, seconds = slots(bits, rate, who, deadline)
        assert delivered.tolist() == [list(map(bool, through))]
        assert seconds.tolist()[0] == pytest.approx([first * through[0], second * through[1]])
    assert slots(bits, rate, torch.tensor([[False, True]]), 100.0)[0].tolist() == [[False, True]]
    assert slots(bits, torch.zeros_like(rate), who, 1e9)[0].tolist() == [[False, False]]


def test_digital_with_many_bits_and_time_is_error_free_averaging() -> None:
    keys = {"algorithm.bits": 24, "algorithm.deadline_s": 8.0, "radio.tx_power_dbm": 60.0, "cell.radius_m": 100.0}
    one, other = make("digital", keys), make("fedavg")
    a, b = one.init(), make("fedavg", {"cell.radius_m": 100.0}).init()
    for t in range(4):
        step = one.step(a, t)
        assert step.info.active.all()
        a, b = step.state, other.step(b, t).state
    assert torch.allclose(a.params, b.params, rtol=0, atol=1e-6)


def test_digital_time_and_energy_reach_the_ledger() -> None:
    """uplink_s is the sum of slots and energy_j is P times it, P = E_s B; who does not fit spends nothing."""
    import otafl

    keys = {"experiment.rounds": 3, "algorithm.bits": 4, "radio.tx_power_dbm": 20.0}
    sim = make("digital", keys)
    result = otafl.run(sim.config, device="cpu")
    power = sim.config.radio.symbol_energy_j * sim.config.radio.bandwidth_hz
    seconds = np.zeros(2)
    for t in range(3):
        for s, world in enumerate(sim.worlds):
            snr = np.abs(world.coeff[t]) ** 2 * sim.problem.symbol_energy_j / (2 * sim.problem.noise_var_j)
            slot = np.sort((4 * TINY_PARAMS + 32) / (1e6 * np.log2(1 + snr)))
            seconds[s] += slot[np.cumsum(slot) <= 8.0].sum()
    assert result.metrics["uplink_s"][:, -1] == pytest.approx(seconds, rel=1e-7)  # log1p here, log2(1 + x) above
    assert result.metrics["energy_j"][:, -1] == pytest.approx(power * seconds, rel=1e-7)
    assert (result.metrics["channel_uses"] == 0).all()


def test_a_deadline_beyond_the_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="a round lasts 8 s"):
        make_config("digital", {"algorithm.deadline_s": 9.0})
    make_config("digital", {"algorithm.deadline_s": 9.0, "fading.round_s": 10.0})


# --- the hybrid ---


def test_bits_golden() -> None:
    """A = (1, 4, 0.3), τ = (1, 2, 0.5), T = 14."""
    error, time = np.array([1.0, 4.0, 0.3]), np.array([1.0, 2.0, 0.5])
    found = relaxed_bits(error, time, 14.0)
    assert found == pytest.approx([3.78660, 4.24137, 3.46131], abs=2e-5)
    assert (error / (2**found - 1) ** 2).sum() == pytest.approx(0.0215596, abs=2e-7)
    assert (time * found).sum() == pytest.approx(14.0, rel=1e-9)


def test_relaxed_bits_are_the_optimum_of_a_solver() -> None:
    rng = np.random.default_rng(5)
    for _ in range(10):
        error, time = np.exp(rng.normal(0, 1, 4)), np.exp(rng.normal(0, 0.5, 4))
        budget = float(4 * time.sum())
        found = relaxed_bits(error, time, budget)
        solved = minimize(
            lambda r, error=error: float((error / (2**r - 1) ** 2).sum()),
            np.full(4, 4.0),
            bounds=[(1, 30)] * 4,
            constraints={"type": "ineq", "fun": lambda r, time=time, budget=budget: budget - float((time * r).sum())},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert float((error / (2**found - 1) ** 2).sum()) <= solved.fun * (1 + 1e-6)


def test_whole_bits_fit_and_cannot_be_improved_by_one_more() -> None:
    rng = np.random.default_rng(6)
    for _ in range(20):
        error, time = np.exp(rng.normal(0, 1, 5)), np.exp(rng.normal(0, 1, 5))
        budget = float(time.sum() * rng.uniform(1, 6))
        bits = best_bits(error, time, budget)
        assert bits is not None
        assert (bits >= 1).all()
        assert (time * bits).sum() <= budget * (1 + 1e-12)
        assert (time > budget - (time * bits).sum()).all()
    assert best_bits(np.ones(2), np.ones(2), 1.9) is None


def test_the_best_prefix_is_the_best_of_all_subsets_and_never_worse_than_all_or_none() -> None:
    rng = np.random.default_rng(7)
    for _ in range(15):
        strength = np.exp(rng.normal(0, 1.5, 5))
        largest = np.exp(rng.normal(0, 0.7, 5))
        order = np.argsort(strength / largest)
        cell = Cell(size=50, noise=0.02, peak=1.0, bandwidth_hz=50.0, deadline_s=float(rng.uniform(3, 40)))
        # the same rate for all: then who goes digital matters by SM alone, as in the paper's argument
        rate = np.full(5, 100.0)
        _, found = split(strength, largest, rate, cell)
        every = [
            cost(strength, largest, rate, np.array(mask), cell)[1]
            for mask in itertools.product([False, True], repeat=5)
        ]
        prefixes = [cost(strength, largest, rate, np.isin(np.arange(5), order[:k]), cell)[1] for k in range(6)]
        assert found == pytest.approx(min(prefixes), rel=1e-12)
        assert found <= min(every[0], every[-1]) * (1 + 1e-12)
        assert found <= min(every) * 1.3  # whole bits and unequal entries leave the prefix a little behind


def test_hybrid_without_digital_devices_is_vanilla_with_peaks() -> None:
    """K = 0: g = √E_s min |h_i|/‖Δ_i‖_∞, everybody inverts; noise g^{-1} σ_z/m, here by the noise itself."""
    sim = make("hybrid", {"radio.bandwidth_hz": 10.0, "radio.tx_power_dbm": -50.0, "algorithm.deadline_s": 8.0})
    updates = gradients(sim, sim.problem.initial)
    step = sim.step(sim.init(), 0)
    if float(step.info.extra["digital"].sum()):
        pytest.fail("a device went digital")
    h = torch.stack([torch.from_numpy(world.coeff[0]) for world in sim.worlds]).abs()
    gamma = sim.problem.symbol_energy_j**0.5 * (h / updates.abs().amax(-1)).amin(-1)
    noise = sim.air.noise(sim.seeds, "noise", 0, TINY_PARAMS) * sim.problem.noise_var_j**0.5
    mean = updates.mean(1) + noise / (6 * gamma[:, None])
    moved = (step.state.params - sim.problem.initial) / sim.config.training.lr_at(0)
    assert torch.allclose(moved, mean, rtol=1e-8, atol=1e-10)
    assert float(step.energy_ratio.max()) <= 1 + 1e-12


# --- CA-DSGD ---


def test_amp_recovers_sparse_vectors() -> None:
    """Without noise, at q = d/2 and q = 5 k: to 1e-3; the projection keeps lengths in the mean."""
    rng = np.random.default_rng(8)
    size, rows = 2000, 1000
    projection = Projection.of(size, rows, torch.zeros(1, dtype=torch.float64))
    x = np.zeros((3, size))
    for row in x:
        row[rng.permutation(size)[: rows // 5]] = rng.standard_normal(rows // 5)
    sparse = torch.from_numpy(x)
    heard = projection.apply(sparse)
    assert torch.allclose(heard.norm(dim=-1) / sparse.norm(dim=-1), torch.ones(3, dtype=torch.float64), atol=0.1)
    found = reconstruct(projection, heard, 60)
    assert ((found - sparse).norm(dim=-1) / sparse.norm(dim=-1) < 1e-3).all()
    full = Projection.of(size, size, torch.zeros(1, dtype=torch.float64))  # orthonormal: its transpose is its inverse
    assert torch.allclose(full.back(full.apply(sparse)), sparse, atol=1e-10)


def test_ca_dsgd_keeps_what_it_does_not_send() -> None:
    """What is sent and what is kept are all; k entries are sent, by who transmits; energy within the limit."""
    sim = make("ca-dsgd", {"algorithm.sparsity": 0.2, "algorithm.uses": 0.9})
    state, left = sim.init(), torch.zeros(2, 6, TINY_PARAMS, dtype=torch.float64)
    count = math.ceil(0.2 * TINY_PARAMS)
    seen = set()
    for t in range(6):
        v = gradients(sim, state.params, t) + left
        step = sim.step(state, t)
        places = v.abs().topk(count, dim=-1).indices
        sent = torch.zeros_like(v).scatter(-1, places, v.gather(-1, places))
        expected = torch.where(step.info.active[..., None], v - sent, v)
        assert torch.allclose(step.state.unsent.values, expected, rtol=0, atol=1e-10)
        assert float(step.energy_ratio.max()) <= 1 + 1e-9
        seen |= set(step.info.active.sum(-1).tolist())
        state, left = step.state, expected
    assert len(seen) > 1


def test_ca_dsgd_hears_the_weighted_mean_of_what_is_sent() -> None:
    """No noise, everything sent: D̂ = Σ c_i v_i/Σ c_i with c_i ∝ 1/√(‖P v_i‖² + G²), which the last symbol measures."""
    keys = {"algorithm.sparsity": 1.0, "algorithm.uses": 1.0, "algorithm.gamma": 1e-25, "algorithm.steps": 400}
    sim = make("ca-dsgd", {**keys, **NOISE_FREE})
    updates = gradients(sim, sim.problem.initial)
    projection = Projection.of(TINY_PARAMS, TINY_PARAMS - 1, updates)
    amplitude = 1 / torch.sqrt(projection.apply(updates).square().sum(-1) + 100.0)
    mean = (amplitude[..., None] * updates).sum(1) / amplitude.sum(-1, keepdim=True)
    moved = (sim.step(sim.init(), 0).state.params - sim.problem.initial) / sim.config.training.lr_at(0)
    assert torch.allclose(projection.apply(moved), projection.apply(mean), atol=0.15 * float(mean.norm()))


# --- CHARLES ---


def test_charles_with_strong_channels_is_the_mean_update_per_step() -> None:
    keys = {**NOISE_FREE, "algorithm.gamma": TINY_GAMMA * 1e-6, "algorithm.norm_limit": 100.0}
    sim = make("charles", {**keys, "algorithm.least_steps": 3, "algorithm.most_steps": 3, "algorithm.server_lr": 3.0})
    other = make("fedavg")
    one, same = sim.step(sim.init(), 0), other.step(other.init(), 0)
    assert torch.allclose(one.state.params, same.state.params, rtol=0, atol=1e-9)
    assert (one.info.extra["sent_whole"] == 1).all()


def test_charles_gives_weak_channels_more_steps_and_keeps_the_energy_limit() -> None:
    sim = make("charles", {"algorithm.least_steps": 1, "algorithm.most_steps": 3, "experiment.rounds": 20})
    steps = []
    for t in range(20):
        step = sim.step(sim.init(), t)
        assert float(step.energy_ratio.max()) <= 1 + 1e-12
        h = torch.stack([torch.from_numpy(world.coeff[t]) for world in sim.worlds]).abs()
        full = h * math.sqrt(TINY_PARAMS * sim.problem.symbol_energy_j)
        expected = (sim.algorithm.gamma / full).square().ceil().clamp(1, 3)
        assert torch.allclose(step.info.extra["local_steps"], expected.mean(-1))
        steps += expected.flatten().tolist()
    assert len(set(steps)) == 3
