"""What every registered method must keep: shapes, purity, randomness, knowledge, energy, one world for all."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import otafl
from otafl import registry
from otafl.conformance import CHECKS, world_of
from otafl.engine.updates import Updates
from otafl.errors import InformationError
from otafl.radio.knowledge import QUANTITIES
from otafl.simulation.build import Simulation
from tests.conftest import has_gamma, make_config, simulate

ALGORITHMS = sorted(registry.BUILTIN["algorithms"])
NO_RADIO = {name for name in ALGORITHMS if getattr(registry.lookup("algorithms", name), "ideal_radio", False)}
CLIPS = ("algorithm.norms", "clip")
# What does not apply to whom, a method or a form of it, and why; everything else applies to everyone.
SIGNS = {name: "signs have no length: its own tests" for name in ("obda", "fsk-mv")}
EXEMPT: dict[str, dict[Any, str]] = {
    "C1 energy": dict.fromkeys(NO_RADIO, "spends none")
    | {
        "digital": "power times slots: its own tests",
        "hybrid": "a limit for every entry, which is stricter: its own tests",
    },
    "C2 linearity, C3 noise": dict.fromkeys(NO_RADIO, "no weights and no noise without a radio: its own tests")
    | SIGNS
    | dict.fromkeys(("gbma", "blind", "beamforming"), "weights are channels that no party knows: its own tests")
    | {
        "charles": "devices take different numbers of steps: its own tests",
        "ca-dsgd": "what is heard is reconstructed: its own tests",
    }
    | dict.fromkeys(("digital", "hybrid"), "rounds to a grid: its own tests")
    | dict.fromkeys(("fedoag", "fedoag-plus"), "adds anchors: identities F1, F4 and their like in their own tests")
    | {"fedoag-zero": "sends what devices kept, too: its own tests"},
    "C4 phases": {"blind": "weights follow from phases", "fsk-mv": "phases are random anyway, and noise adds to them"},
    "C5 zero-noise limit": dict.fromkeys(NO_RADIO, "no weights without a radio: its own tests")
    | SIGNS
    | dict.fromkeys(("digital", "hybrid", "ca-dsgd", "charles"), "its own tests")
    | {"beamforming": "exactly the mean in every round: its own tests", "ota-fedau": "unbiased through its intervals"}
    | dict.fromkeys(("fedoag", "fedoag-plus", "fedoag-zero"), "unbiased through memory: F7 and the bias oracle")
    | dict.fromkeys(("ota-fedavg", "opc", "lcpc", "cotaf", "gbma", "blind"), "biased by design: the bias oracle")
    | {
        CLIPS: "averages clipped updates",
        ("algorithm.design", "default"): "trades bias for noise",
        ("algorithm.design", "min-noise"): "trades bias for noise",
        ("algorithm.regime", "biased"): "by its name",
        ("algorithm.form", "energy"): "q_i differ, one factor for all",
    },
    "C6 scale": dict.fromkeys(NO_RADIO, "no normalisation")
    | SIGNS
    | {
        "gbma": "clips at a fixed bound",
        "charles": "scales to a fixed bound",
        "ca-dsgd": "its last symbol is a fixed length",
        CLIPS: "a fixed bound is not a ratio",
        ("algorithm.anchors", "float16"): "the rounding error of x^0 is not scaled",
    },
    "C8 empty round": dict.fromkeys(("fedavg", "vanilla", "opc", "air-feel", "fedoag-zero"), "everybody transmits")
    | dict.fromkeys(("gbma", "charles", "hybrid", "fsk-mv", "blind", "beamforming"), "everybody transmits")
    | {"obda": "the server cannot know, and takes the sign of the noise: its own tests"}
    | dict.fromkeys((("algorithm.form", "instantaneous"), ("algorithm.form", "clip")), "everybody transmits"),
}
CLIPPING = [
    name
    for name in ALGORITHMS
    if any(field.name == "norms" for field in dataclasses.fields(registry.lookup("algorithms", name)))
]
FORMS = [(name, {}) for name in ALGORITHMS] + [
    *((name, {"algorithm.norms": "clip", "algorithm.norm_limit": 2.0}) for name in CLIPPING),
    ("vanilla", {"algorithm.rule": "tight"}),
    ("sca", {"algorithm.design": "min-noise"}),
    ("sca", {"algorithm.design": "zero-bias", "algorithm.refresh": "oracle"}),
    *((name, {"algorithm.form": "fading"}) for name in ("bb-interior", "bb-alternative")),
    *((name, {"algorithm.form": "instantaneous"}) for name in ("bb-interior", "bb-alternative")),
    ("bb-interior", {"algorithm.divide_by": "count", "algorithm.distances": "initial"}),
    ("bb-interior", {"algorithm.form": "fading", "algorithm.distances": "initial"}),
    ("air-feel", {"algorithm.regime": "biased", "algorithm.renormalise": True}),
    ("fedawe", {"algorithm.step_limit": 0.5}),
    ("opc", {"algorithm.renormalise": True}),
    ("lcpc", {"algorithm.renormalise": False}),
    ("lcpc", {"algorithm.form": "truncate"}),
    ("lcpc", {"algorithm.form": "truncate", "algorithm.renormalise": False}),
    ("air-feel", {"algorithm.regime": "biased"}),
    ("sca", {"algorithm.solver": "successive"}),
    ("sca", {"algorithm.refresh": "every", "algorithm.refresh_rounds": 3}),
    ("bb-alternative", {"algorithm.alternation": "strict"}),
    ("fedoag-plus", {"algorithm.theta_min": 1.0}),
    ("fedoag-zero", {"algorithm.nu": 0.05}),
    *((name, {"algorithm.gamma": "adaptive"}) for name in ("fedoag", "fedoag-plus")),
    *((name, {"algorithm.anchors": "float16"}) for name in ("fedoag", "fedoag-plus")),
]  # fmt: skip


NOTED = {
    ("fedoag-plus", "reports", "note"): "its reports tell of channels, as its page says",
    ("ca-dsgd", "noise", "note"): "its signals have another length than the model",
    ("fsk-mv", "noise", "note"): "its signals have another length than the model",
}
"""What `otafl check` cannot settle, and why."""


def forms(check: str) -> Any:
    """Every form of every method to which a check applies."""
    exempt = EXEMPT[check]
    chosen = [(name, keys) for name, keys in FORMS if not exempt.keys() & {name, *keys.items(), *defaults(name, keys)}]
    return pytest.mark.parametrize(
        ("algorithm", "keys"), chosen, ids=[" ".join([name, *map(str, keys.values())]) for name, keys in chosen]
    )


def defaults(name: str, keys: dict[str, Any]) -> set[tuple[str, str]]:
    """The form that a method has where no key names one."""
    first = {"sca": ("design", "default"), "lcpc": ("form", "clip")}
    first |= dict.fromkeys(("bb-interior", "bb-alternative"), ("form", "energy"))
    if name not in first or f"algorithm.{first[name][0]}" in keys:
        return set()
    key, form = first[name]
    return {(f"algorithm.{key}", form)}


def reference(algorithm: str, overrides: dict[str, Any] | None = None) -> Simulation:
    return simulate(make_config(algorithm, {"training.engine": "reference", "cell.devices": 6, **(overrides or {})}))


def advance(sim: Simulation, num_rounds: int) -> Any:
    state = sim.init()
    for t in range(num_rounds):
        state = sim.step(state, t)[0]
    return state


@pytest.mark.parametrize("name", ["server", "noise", "future", "purity", "silence"])
@pytest.mark.parametrize(("algorithm", "keys"), FORMS)
def test_contracts(algorithm: str, keys: dict[str, Any], name: str) -> None:
    """What `otafl check` demands of anybody's method; the other checks, below, of every method in its first form."""
    verdict, text = CHECKS[name](world_of(algorithm, keys))
    assert verdict == "ok" or (algorithm, name, verdict) in NOTED, text


@pytest.mark.parametrize("name", sorted(CHECKS.keys() - {"server", "noise", "future", "purity", "silence"}))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_other_contracts(algorithm: str, name: str) -> None:
    votes = {"algorithm.server_step": 0.1}
    learns = {"fedoag-zero": {"algorithm.nu": 0.3}, "obda": votes}  # with so small a model
    learns["fsk-mv"] = votes | {"data.partition": "iid"}  # its nearest device decides
    verdict, text = CHECKS[name](world_of(algorithm, learns.get(algorithm, {})))
    assert verdict == "ok" or (algorithm, name, verdict) in NOTED, text


@pytest.mark.parametrize(("algorithm", "keys"), FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shapes_and_dtype_are_kept(algorithm: str, keys: dict[str, Any], dtype: str) -> None:
    sim = reference(algorithm, {"training.precision": dtype, **keys})
    state, info, _, ratio, _ = sim.step(sim.init(), 0)
    assert state.params.shape == (2, sim.objective.num_params)
    assert state.params.dtype == getattr(torch, dtype)
    assert info.active.shape == (2, 6)
    assert ratio.shape == (2,)
    assert dataclasses.is_dataclass(state)


@dataclasses.dataclass(frozen=True)
class DeepFade:
    """Everybody far below what statistics promise."""

    def coefficients(self, positions_m: Any, streams: Any) -> Any:
        return np.full(positions_m.shape[:2], 1e-9 + 0j)

    def exceed_prob(self, power: Any) -> Any:
        return (np.asarray(power) <= 1e-18).astype(float)


@pytest.fixture
def deep_fade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered["fading"], "deep", DeepFade)


@pytest.mark.usefixtures("deep_fade")
@forms("C8 empty round")
def test_c8_a_round_with_nobody_active_keeps_the_model(algorithm: str, keys: dict[str, Any]) -> None:
    """Where the server can know. With clipped norms and a fixed factor it cannot, and applies the noise alone."""
    sim = reference(algorithm, {"fading.name": "deep", **keys})
    state, info, spent, *_ = sim.step(sim.init(), 0)
    assert not info.active.any()
    assert (spent.energy_j == 0).all()
    if keys.get("algorithm.norms") == "clip":
        noise = (state.params - sim.problem.initial) / sim.config.training.lr_at(0)
        scheduled = sim.round_at(0).plan.get("scheduled", torch.ones_like(info.active)).any(-1)
        assert torch.equal((noise != 0).any(-1), scheduled)
        assert torch.allclose(noise.std(-1), info.noise_std, rtol=5 / np.sqrt(2 * noise.shape[-1]))
        return
    assert torch.equal(state.params, sim.problem.initial)


@forms("C1 energy")
def test_c1_energy_never_exceeds_the_limit(algorithm: str, keys: dict[str, Any]) -> None:
    """Over many rounds; and the limit is nearly used: a check that never bites would not show."""
    config = make_config(algorithm, {"cell.devices": 10, "experiment.rounds": 60, **keys})
    largest = np.nanmax(otafl.run(config).metrics["energy_ratio_max"])
    assert 0.5 < largest <= 1 + 1e-12
    moving = {"mobility.name": "bounded-waypoint", "mobility.speed_mps": [5.0, 20.0], "mobility.territory_m": 400.0}
    assert np.nanmax(otafl.run(config.replace(moving)).metrics["energy_ratio_max"]) <= 1 + 1e-12


@pytest.mark.parametrize(
    ("algorithm", "keys"), [form for form in FORMS if hasattr(registry.lookup("algorithms", form[0]), "plan")]
)
def test_plans_do_not_look_ahead(algorithm: str, keys: dict[str, Any]) -> None:
    """What the server decides for a round depends on no later round: the plan of fewer rounds is its beginning."""
    moving = {"mobility.name": "bounded-waypoint", "mobility.speed_mps": [5.0, 20.0], "mobility.territory_m": 400.0}
    plans = [reference(algorithm, {**keys, **moving, "experiment.rounds": rounds}).problem.plan for rounds in (7, 20)]
    assert plans[0].keys() == plans[1].keys()
    assert plans[0]
    for name, values in plans[0].items():
        assert torch.equal(values, plans[1][name][:7]), name


@forms("C2 linearity, C3 noise")
def test_c2_and_c3_update_is_the_weighted_sum_plus_the_noise_it_reports(algorithm: str, keys: dict[str, Any]) -> None:
    """(x^{t+1} − x^t)/η = Σ w_i Δ_i + noise_std · z/σ_z, with the weights and the standard deviation of Info."""
    sim = reference(algorithm, {"experiment.rounds": 6, **keys})
    assert sim.noise_var_j > 0
    state, anybody = sim.init(), False
    for t in range(6):
        lr = sim.config.training.lr_at(t)
        updates = sim.round_at(t).train(state.params).dense()
        after, info, *_ = sim.step(state, t)
        unit = sim.air.noise(sim.seeds, "noise", t, sim.objective.num_params)  # type: ignore[union-attr]
        expected = (info.weights[..., None] * updates).sum(1) + info.noise_std[:, None] * unit
        assert torch.allclose((after.params - state.params) / lr, expected, rtol=1e-9, atol=1e-9)
        assert (info.weights[~info.active] == 0).all()
        assert (info.weights >= 0).all()
        anybody |= bool((info.weights > 0).any() and (info.noise_std > 0).any())
        state = after
    assert anybody


@forms("C5 zero-noise limit")
def test_c5_without_noise_the_full_average_is_recovered_in_the_mean(algorithm: str, keys: dict[str, Any]) -> None:
    """Mean weights over rounds and seeds are equal for all devices; exactly, where everybody always transmits."""
    rounds, seeds = 150, list(range(8))
    whole_cell = {"algorithm.interior_radius_m": 1e6} if algorithm.startswith("bb-") else {}
    world = {"experiment.rounds": rounds, "experiment.seeds": seeds, "radio.noise_dbm_hz": -np.inf, "cell.devices": 5}
    quick = {"training.engine": "batched", "training.local_steps": 1}
    sim = reference(algorithm, {**world, **quick, **whole_cell, **keys})
    state, weights = sim.init(), []
    for t in range(rounds):
        state, info, *_ = sim.step(state, t)
        weights.append(info.weights)
    mean = torch.stack(weights).mean(0).numpy()  # [S, M]
    error = mean.std(0, ddof=1) / np.sqrt(len(seeds))
    assert (np.abs(mean.mean(0) - 1 / 5) < 5 * error + 1e-9).all()
    assert (error < 0.02).all()


@forms("C4 phases")
def test_c4_phases_of_the_channels_do_not_matter(algorithm: str, keys: dict[str, Any]) -> None:
    one, other = reference(algorithm, keys), reference(algorithm, keys)
    turn = torch.rand(other._channel["h"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    turn = torch.exp(2j * torch.pi * turn)
    for name in other._channel.keys() & {"h", "phase", "h_each"}:
        shape = (*turn.shape, *[1] * (other._channel[name].dim() - turn.dim()))
        other._channel[name] = other._channel[name] * turn.view(shape)
    other._coeff = other._channel["h"]  # believed and true
    state, turned = advance(one, 4), advance(other, 4)
    assert torch.allclose(state.params, turned.params, rtol=1e-9, atol=1e-9)


class Louder:
    """A Round in which every update is `factor` times as long."""

    def __init__(self, sim: Simulation, t: int, factor: float) -> None:
        self._round, self._factor = sim.round_at(t), factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)

    def train(self, start: Any, who: Tensor | None = None, reference: Tensor | None = None) -> Updates:
        updates = self._round.train(start, who, reference)
        pool, slot = updates.reference
        start = pool[torch.arange(len(pool))[:, None], slot]  # a device's own start is its anchor in the first round
        return Updates(start + self._factor * (updates.end - start), pool, slot, self._round.lr)


@forms("C6 scale")
def test_c6_scale_of_the_updates_does_not_matter(algorithm: str, keys: dict[str, Any]) -> None:
    """All updates times c multiply the recovered update by c, noise included, where norms are normalised."""
    sim = reference(algorithm, keys)
    start = sim.init()
    plain = sim.algorithm.step(start, Louder(sim, 0, 1.0))[0].params - start.params
    louder = sim.algorithm.step(start, Louder(sim, 0, 1000.0))[0].params - start.params
    assert torch.allclose(louder, 1000.0 * plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("side", ["device", "server"])
@pytest.mark.parametrize("quantity", sorted(QUANTITIES))
def test_undeclared_reads_raise(algorithm: str, side: str, quantity: Any) -> None:
    sim = reference(algorithm)
    view = getattr(sim.round_at(0), side)
    if quantity in getattr(sim.algorithm.knowledge, side):
        assert getattr(view, quantity).shape == {"h_each": (2, 6, 1), "sum_h": (2, 1)}.get(quantity, (2, 6))
        return
    with pytest.raises(InformationError, match=f"reads {quantity} at the {side}"):
        getattr(view, quantity)


def test_declarations_are_those_of_table_1() -> None:
    """FedOAG: devices know their own h, nobody anything else; ideal FedAvg needs nothing."""
    fedoag = registry.lookup("algorithms", "fedoag").knowledge
    assert (fedoag.device, fedoag.server, fedoag.fading) == ({"h"}, set(), "arbitrary")
    assert registry.lookup("algorithms", "fedavg").knowledge.device == set()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_seed_alone_equals_the_seed_in_a_batch_in_single_precision(algorithm: str) -> None:
    overrides = {"training.precision": "float32", "cell.devices": 6}
    batch = otafl.run(make_config(algorithm, {**overrides, "experiment.seeds": [0, 1, 2, 3, 4]}))
    alone = otafl.run(make_config(algorithm, {**overrides, "experiment.seeds": [3]}))
    scale = float(alone.params.abs().max())
    assert float((batch.params[3] - alone.params[0]).abs().max()) < 1e-4 * max(1.0, scale)


def test_all_methods_meet_the_same_world() -> None:
    """C7: channels, batches, start model and unit noise are functions of the seed, not of the method."""
    sims = [simulate(make_config(name)) for name in ALGORITHMS]
    for sim in sims[1:]:
        assert torch.equal(sim.problem.initial, sims[0].problem.initial)
        assert torch.equal(sim.sampler.at(3), sims[0].sampler.at(3))
        for one, other in zip(sim.worlds, sims[0].worlds, strict=True):
            assert one is other  # shared within a process, not only equal
        assert all(
            np.array_equal(a, b)
            for mine, yours in zip(sim.shares, sims[0].shares, strict=True)
            for a, b in zip(mine, yours, strict=True)
        )
    noisy = [sim for sim in sims if sim.config.algorithm.name not in NO_RADIO]
    draws = [sim.air.noise(sim.seeds, "noise", 2, 50) for sim in noisy]  # type: ignore[union-attr]
    assert all(torch.equal(draw, draws[0]) for draw in draws)


def test_every_module_is_registered_and_has_a_page() -> None:
    folder = Path(registry.__file__).parent / "algorithms"
    shared = {"__init__", "base", "gossip", "threshold", "truncated", "uplink", "memoryless"}
    modules = {path.stem for path in folder.glob("*.py")} - shared
    registered = {place.split(":")[0].rsplit(".", 1)[1] for place in registry.BUILTIN["algorithms"].values()}
    assert modules == registered
    docs = Path(__file__).parents[2] / "docs" / "algorithms"
    for name in ALGORITHMS:
        page = (docs / f"{name}.md").read_text(encoding="utf-8")
        for heading in ("Assumes", "Protocol", "Hyper-parameters", "Departures", "Known behaviour", "Results"):
            assert f"\n## {heading}" in page, f"docs/algorithms/{name}.md lacks {heading}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_device_that_diverged_stops_its_own_seed_and_no_other(algorithm: str) -> None:
    """A device of seed 0 learns NaN and is heard: that seed's model is no number; the other is what it would be."""
    keys = {"algorithm.gamma": 1e-25} if has_gamma(algorithm) else {}
    keys |= {"radio.tx_power_dbm": 60.0} if algorithm in ("digital", "hybrid") else {}
    sim = simulate(make_config(algorithm, {"cell.devices": 6, **keys}))
    features = sim.objective.train.features.clone()
    features[0] = torch.nan
    sim.objective.train = sim.objective.train._replace(features=features)
    batches = sim.sampler.at(0).clamp(min=1)
    whole = sim.take(sim.init(), sim.round_at(0, batches=batches))
    batches[0, whole.info.active[0].nonzero()[0]] = 0
    broken = sim.take(sim.init(), sim.round_at(0, batches=batches))
    assert not broken.state.params[0].isfinite().all()
    assert torch.equal(broken.state.params[1], whole.state.params[1])
    assert broken.state.params[1].isfinite().all()
