"""The contract is wide enough: seven kinds of methods, their limits, and what the check says of them and of cheats."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import otafl
from otafl.errors import PluginError
from otafl.simulation.build import Simulation
from tests.algorithms.small_methods import SMALL, State, TopK
from tests.conftest import TINY_GAMMA, TINY_PARAMS, make_config, simulate

NOISE_FREE = {"radio.noise_dbm_hz": float("-inf")}


def make(name: str, keys: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config(name, {**SMALL.get(name, {}), **(keys or {})}))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_check_finds_nothing(name: str) -> None:
    findings = list(otafl.check(name, SMALL[name]))
    assert len(findings) >= 12
    assert [finding for finding in findings if finding.verdict == "FAIL"] == []


def test_gbma_has_its_mean_weights() -> None:
    """Without noise D̂ = Σ |h_i| Δ_i/(m μ), μ the mean of √(π Λ_i)/2; nobody is clipped at a large limit."""
    sim = make("test-gbma", {**NOISE_FREE, "algorithm.norm_limit": 1e6})
    state, round_ = sim.init(), sim.round_at(2)
    updates = round_.train(state.params).dense()
    moved = sim.step(state, 2).state.params - state.params
    world = [torch.from_numpy(values) for values in (sim.worlds[0].coeff[2], sim.worlds[0].mean_gain[2])]
    weights = world[0].abs() / (4 * (math.pi / 4 * world[1]).sqrt().mean())
    expected = sim.config.training.lr_at(2) * (weights[:, None] * updates[0]).sum(0)
    assert torch.allclose(moved[0], expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["test-signs", "test-energy"])
def test_one_device_without_noise_is_sign_descent(name: str) -> None:
    gamma = {"algorithm.gamma": 1e-13} if name == "test-signs" else {}
    sim = make(name, {**NOISE_FREE, "cell.devices": 1, **gamma})
    state, round_ = sim.init(), sim.round_at(1)
    update = round_.train(state.params).dense()[:, 0]
    moved = sim.step(state, 1).state.params - state.params
    assert torch.allclose(moved, torch.where(update < 0, -0.01, 0.01).to(moved.dtype), atol=1e-15)


def test_signs_without_noise_are_a_majority_vote() -> None:
    sim = make("test-signs", {**NOISE_FREE, "cell.devices": 5, "algorithm.gamma": 1e-13})
    state, round_ = sim.init(), sim.round_at(0)
    votes = torch.where(round_.train(state.params).dense() < 0, -1.0, 1.0).sum(1)
    moved = sim.step(state, 0).state.params - state.params
    assert torch.equal(moved > 0, votes > 0)


def test_energy_detection_weighs_by_gain() -> None:
    """E[e₊ − e₋] = 2 E_s N Σ Λ_i s_i; channels averaged over 4,000 rounds of one state, 5 standard errors."""
    keys = {**NOISE_FREE, "experiment.rounds": 4000, "experiment.seeds": [0], "cell.devices": 3}
    keys["training.lr_schedule"] = "constant"  # so that the updates are the same in all of them
    sim, differences = make("test-energy", keys), []
    heard: list[Tensor] = []
    state, updates = sim.init(), None
    for t in range(4000):
        round_ = sim.round_at(t, batches=sim.sampler.at(0))
        inner = round_._air.uplink

        def listen(*arguments: Any, inner: Any = inner) -> Any:
            result = inner(*arguments)
            heard.append(result[0])
            return result

        object.__setattr__(round_, "_air", type("Ear", (), {"uplink": staticmethod(listen)})())
        if updates is None:
            updates = sim.round_at(t, batches=sim.sampler.at(0)).train(state.params).dense()[0]
        sim.algorithm.step(state, round_)
        energy = heard.pop().view(TINY_PARAMS, 2)
        differences.append(energy[:, 0] - energy[:, 1])
    measured = torch.stack(differences)
    signs = torch.where(updates < 0, -1.0, 1.0)
    gains = torch.from_numpy(sim.worlds[0].antenna_gain[0])
    expected = 2 * sim.problem.symbol_energy_j * 2 * (gains[:, None] * signs).sum(0)
    error = measured.std(0) / math.sqrt(4000)
    assert ((measured.mean(0) - expected).abs() < 5 * error).all()


def test_top_k_of_everything_is_ota_fedavg_and_remembers_nothing() -> None:
    """Where everybody is heard; a silent device keeps all it has."""
    gamma = {"algorithm.gamma": 1e-13, **NOISE_FREE}
    one, other = make("test-top-k", {**gamma, "algorithm.share": 1.0}), make("ota-fedavg", gamma)
    state, plain = one.init(), other.init()
    for t in range(5):
        state, plain = one.step(state, t).state, other.step(plain, t).state
    assert torch.allclose(state.params, plain.params, rtol=1e-9)
    assert float(state.unsent.values.abs().max()) < 1e-12
    silent = make("test-top-k", {"algorithm.gamma": 1.0})
    state = silent.step(silent.init(), 0).state
    assert torch.allclose(state.unsent.values, silent.round_at(0).train(silent.init().params).dense())


def test_what_devices_remember_is_in_checkpoints(tmp_path: Any) -> None:
    """Interrupted and continued, a run with memory at its devices ends with the same bytes."""
    config = make_config("test-top-k", {"algorithm.gamma": TINY_GAMMA, "experiment.checkpoint_s": 1e-9})
    otafl.run(config, out=tmp_path / "whole", device="cpu")

    def stop(done: int, row: Any) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        otafl.run(config, out=tmp_path / "parts", device="cpu", observer=stop)
    otafl.run(config, out=tmp_path / "parts", device="cpu")
    for name in ("metrics.csv", "model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_a_sketch_has_half_the_uses_and_half_the_energy() -> None:
    sim = make("test-sketch", {"algorithm.gamma": 1e-13})
    step = sim.step(sim.init(), 0)
    (sent,) = step.spent.transmissions
    assert sent.channel_uses == TINY_PARAMS // 2
    assert sent.limit_j == pytest.approx(TINY_PARAMS // 2 * sim.problem.symbol_energy_j)
    assert torch.allclose(step.energy_ratio, (sent.energy_j / sent.limit_j).max(-1).values)


def test_two_antennas_weights_sum_to_one() -> None:
    """w_i = Re Σ_n s̄_n h_{i,n}/Σ_n |s_n|²: with the same update everywhere the mean is recovered in every round."""
    sim = make("test-antennas", {**NOISE_FREE, "radio.antennas": 3})
    h = torch.from_numpy(sim.worlds[0].each)
    total = h.sum(1)
    weights = (total.conj()[:, None] * h).sum(-1).real / total.abs().square().sum(-1)[:, None]
    assert torch.allclose(weights.sum(1), torch.ones(5, dtype=torch.float64))
    state, round_ = sim.init(), sim.round_at(3)
    updates = round_.train(state.params).dense()[0]
    moved = sim.step(state, 3).state.params[0] - state.params[0]
    expected = 0.3 * sim.config.training.lr_at(3) * (weights[3][:, None] * updates).sum(0)
    assert torch.allclose(moved, expected, rtol=1e-9)


def test_scaffold_begins_as_fedavg_and_its_controls_agree() -> None:
    """The mean of the c_i is c in every round, as SCAFFOLD says of full participation."""
    sim, plain = make("test-scaffold"), make("fedavg")
    state, other = sim.init(), plain.init()
    for t in range(4):
        state, other = sim.step(state, t).state, plain.step(other, t).state
        assert torch.allclose(state.control, state.own.values.mean(1), atol=1e-12)
        assert torch.allclose(state.params, other.params) == (t == 0)
    alone, fedavg = make("test-scaffold", {"cell.devices": 1}), make("fedavg", {"cell.devices": 1})
    state, other = alone.init(), fedavg.init()
    for t in range(4):
        state, other = alone.step(state, t).state, fedavg.step(other, t).state
    assert torch.allclose(state.params, other.params, rtol=1e-9)  # c = c_i: nothing to correct


@otafl.register_algorithm("test-relay")
@dataclass(frozen=True)
class Relay:
    """Device 0 sends everybody's mean, which it cannot have."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(device=frozenset({"h"}))

    def init(self, problem: otafl.Problem) -> State:
        return State(problem.initial)

    def step(self, state: State, round: otafl.Round) -> tuple[State, otafl.Info]:  # noqa: A002
        updates = round.train(state.params).dense()
        values = torch.zeros_like(updates)
        values[:, 0] = torch.nn.functional.normalize(updates.mean(1), dim=-1)
        who = torch.zeros_like(round.everyone)
        who[:, 0] = True
        power = (round.problem.num_params * round.problem.symbol_energy_j) ** 0.5
        scale = torch.where(who, power * round.device.h.conj() / round.device.h.abs(), 0.0)
        heard = round.uplink(otafl.Vectors(values), scale, who)
        step = torch.nn.functional.normalize(heard, dim=-1)
        return State(state.params + 0.1 * step), otafl.Info(active=who)


def test_a_device_that_sends_what_others_have_is_found() -> None:
    failed = {finding.name for finding in otafl.check("test-relay") if finding.verdict == "FAIL"}
    assert "isolation" in failed


def test_vectors_that_are_no_vectors_are_refused() -> None:
    class Quiet(otafl.Vectors):
        def measured_norms(self, who: Tensor) -> Tensor:
            return torch.zeros_like(who, dtype=torch.float64)

    sim = make("test-signs")
    round_, shape = sim.round_at(0), (2, 4)
    values = torch.ones(2, 4, 7, dtype=torch.float64)
    scale, who = torch.ones(shape, dtype=torch.complex128), torch.ones(shape, dtype=torch.bool)
    with pytest.raises(PluginError, match="not a Quiet"):
        round_.uplink(Quiet(values), scale, who)
    with pytest.raises(PluginError, match=r"vectors of shape \[2, 4, 'Q'\], got \[1, 4, 7\]"):
        round_.uplink(otafl.Vectors(values[:1]), scale, who)
    with pytest.raises(PluginError, match="reception is one of real, complex, antennas, energy"):
        round_.uplink(otafl.Vectors(values), scale, who, "loud")  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="complex vectors needs a reception"):
        round_.uplink(otafl.Vectors(values.to(torch.complex128)), scale, who)
    with pytest.raises(PluginError, match=rf"must give \[n, 3\], got \(8, {TINY_PARAMS}\)"):
        round_.train(sim.init().params).encode(lambda update: update, 3, who)


def test_declared_knowledge_of_antennas() -> None:
    @dataclass(frozen=True)
    class Nosy(TopK):
        knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(device=frozenset({"sum_h"}))

    config = make_config("test-top-k")
    nosy = dataclasses.replace(config.algorithm, spec=Nosy())
    with pytest.raises(PluginError, match="a device cannot know sum_h; the server can"):
        simulate(dataclasses.replace(config, algorithm=nosy))
    for wrong in ("sum_h", {"everything"}):  # a word is a set of letters, and h is one
        with pytest.raises(PluginError, match="give a set of what there is to know: distance_m, h, h_each"):
            otafl.Knowledge(server=wrong)  # type: ignore[arg-type]
    with pytest.raises(otafl.OtaflError, match="errors of h_each and sum_h"):
        make("test-antennas", {"imperfect.pilot_snr_db": 10.0})
    sim = make("test-antennas", {"radio.antennas": 3})
    assert torch.equal(sim.round_at(1).server.sum_h[0], torch.from_numpy(sim.worlds[0].each[1].sum(0)))
    turned = make("test-gbma").round_at(1).device.phase[0]
    assert torch.allclose(turned, torch.exp(1j * torch.from_numpy(make("test-gbma").worlds[0].coeff[1]).angle()))


def test_an_error_in_a_method_names_its_line(tmp_path: Any) -> None:
    source = """
import otafl, torch
from dataclasses import dataclass

@otafl.register_algorithm("test-{name}")
@dataclass(frozen=True)
class Wrong:
    knowledge = otafl.Knowledge()
    gamma = 1e-9  # no key: it has no type

    def init(self, problem):
        return otafl.State(problem.initial)

    def step(self, state, round):
        return otafl.State(state.params + torch.ones(7)), otafl.Info(active=round.everyone)
"""
    from otafl.registry import load_plugin

    path = tmp_path / "wrong.py"
    path.write_text(source.replace("{name}", "wrong"))
    load_plugin(str(path))
    sim = simulate(otafl.load_config("quick", {"algorithm.name": "test-wrong", "data.name": "digits"}))
    with pytest.raises(PluginError, match=r"step of round 0 failed: RuntimeError: .* \(wrong\.py, line 15\)"):
        sim.step(sim.init(), 0)
