"""What must hold on a CUDA device; run there with `pytest -m gpu`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import otafl
from otafl import registry
from otafl.algorithms.fedavg import FedAvg
from otafl.core.metrics import Ledger
from otafl.engine.fast import preactivation
from otafl.random import Streams
from otafl.simulation.graph import Rounds
from otafl.simulation.run import Turn, run_in_turns
from tests.algorithms import small_methods  # noqa: F401 - makes them known
from tests.conftest import make_config, simulate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
ALGORITHMS = sorted(registry.BUILTIN["algorithms"])


def host_noise(device: str) -> Any:
    """The same noise for both kinds of device."""

    def draw(seeds: Sequence[int], name: str, t: int, size: int) -> Tensor:
        rows = [Streams(seed).at(f"test {name}", t).standard_normal(size) for seed in seeds]
        return torch.from_numpy(np.stack(rows)).to(device)

    return draw


def replays(config: otafl.Config) -> bool:
    """Whether rounds of this configuration become a CUDA graph."""
    sim = simulate(config, "cuda")
    rounds = Rounds(sim, sim.init(), Ledger.empty(len(sim.seeds), config.cell.devices, sim.device))
    for t in range(5):
        rounds.advance(t)
    return rounds.replayed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("engine", ["auto", "batched", "reference"])
def test_cpu_and_gpu_agree_with_the_same_noise(algorithm: str, engine: str) -> None:
    config = make_config(algorithm, {"cell.devices": 8, "experiment.rounds": 10, "training.engine": engine})
    one, other = (otafl.run(config, device=d, noise=host_noise(d)) for d in ("cpu", "cuda"))
    assert torch.allclose(one.params, other.params.cpu(), rtol=1e-8, atol=1e-9)
    for name in one.metrics:
        assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-7, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("algorithm", ["fedoag", "fedoag-plus"])
@pytest.mark.parametrize("engine", ["preactivation", "reference"])
@pytest.mark.parametrize(
    "keys",
    [{"algorithm.gamma": "adaptive"}, {"algorithm.anchors": "float16"}],
    ids=lambda keys: str(next(iter(keys.values()))),
)
def test_adaptive_gamma_and_other_anchors_agree_too(algorithm: str, engine: str, keys: dict[str, Any]) -> None:
    """In float64; in float32, where rounds are a CUDA graph, γ stays with the host's."""
    sizes = {"cell.devices": 8, "experiment.rounds": 12, "training.engine": engine}
    config = make_config(algorithm, {**sizes, **keys})
    one, other = (otafl.run(config, device=d, noise=host_noise(d)) for d in ("cpu", "cuda"))
    assert torch.allclose(one.params, other.params.cpu(), rtol=1e-8, atol=1e-9)
    if engine == "preactivation":
        config = make_config(algorithm, {**NETWORK, "experiment.rounds": 12, **keys})
        one, other = (otafl.run(config, device=d, noise=host_noise(d)) for d in ("cpu", "cuda"))
        assert np.array_equal(one.metrics["num_active"], other.metrics["num_active"], equal_nan=True)
        assert other.metrics["norm_bound"][:, 1:] == pytest.approx(one.metrics["norm_bound"][:, 1:], rel=2e-3)


@pytest.mark.parametrize("algorithm", ["fedoag", "fedoag-plus", "vanilla", "sca"])
def test_imperfect_radios_agree_too(algorithm: str) -> None:
    flaws = {"pilot_snr_db": 15.0, "phase_std_rad": 0.2, "bits": 6, "clip_amplitude": 2.0, "block_uses": 20}
    flaws |= {"timing_std": 0.1, "interference_dbm_hz": -190.0, "downlink_std": 0.05}
    keys = {"cell.devices": 8, "experiment.rounds": 10, **{f"imperfect.{key}": value for key, value in flaws.items()}}
    config = make_config(algorithm, keys)
    one, other = (otafl.run(config, device=d, noise=host_noise(d)) for d in ("cpu", "cuda"))
    assert torch.allclose(one.params, other.params.cpu(), rtol=1e-7, atol=1e-8)


def test_same_world_on_both() -> None:
    config = make_config("fedoag", {"cell.devices": 8})
    one, other = simulate(config, "cpu"), simulate(config, "cuda")
    assert torch.equal(one.problem.initial, other.problem.initial.cpu())
    for t in range(3):
        assert torch.equal(one.round_at(t).device.h, other.round_at(t).device.h.cpu())
        assert torch.equal(one.sampler.at(t), other.sampler.at(t).cpu())


def test_noise_on_the_gpu_is_addressed_and_has_unit_variance() -> None:
    sim = simulate(make_config("fedoag"), "cuda")
    draw = sim.air.noise((0, 1), "noise", 4, 200_000)  # type: ignore[union-attr]
    assert torch.equal(draw, sim.air.noise((0, 1), "noise", 4, 200_000))  # type: ignore[union-attr]
    assert ((draw.square().mean(-1) - 1).abs() < 5 * (2 / 200_000) ** 0.5).all()
    assert not torch.equal(draw[0], draw[1])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-4)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_seed_alone_equals_the_seed_in_a_batch(algorithm: str, dtype: str, tolerance: float) -> None:
    overrides = {"training.precision": dtype, "cell.devices": 6}
    batch = otafl.run(make_config(algorithm, {**overrides, "experiment.seeds": [0, 1, 2, 3, 4]}), device="cuda")
    alone = otafl.run(make_config(algorithm, {**overrides, "experiment.seeds": [3]}), device="cuda")
    scale = max(1.0, float(alone.params.abs().max()))
    assert float((batch.params[3] - alone.params[0]).abs().max()) < tolerance * scale


def test_resume_on_the_gpu(tmp_path: Path) -> None:
    config = make_config("fedoag", {"experiment.rounds": 12, "experiment.checkpoint_s": 1e-9})

    def stop(done: int, row: Any) -> None:
        if done == 8:
            raise RuntimeError("stop")

    whole = otafl.run(config, out=tmp_path / "whole", device="cuda")
    with pytest.raises(RuntimeError, match="stop"):
        otafl.run(config, out=tmp_path / "parts", device="cuda", observer=stop)
    parts = otafl.run(config, out=tmp_path / "parts", device="cuda")
    assert torch.allclose(whole.params, parts.params, rtol=1e-9, atol=1e-11)


def test_anchors_on_the_gpu() -> None:
    config = make_config("fedoag", {"cell.devices": 6, "experiment.rounds": 25})
    one, other = (otafl.run(config, device=d, noise=host_noise(d)) for d in ("cpu", "cuda"))
    for column in ("anchors", "anchors_paper"):
        assert np.array_equal(one.metrics[column], other.metrics[column], equal_nan=True)


NETWORK: dict[
    str, Any
] = {  # what the kernels take: batches of 32, one hidden layer (not a multiple of a block), float32
    "training.engine": "preactivation",
    "training.precision": "float32",
    "training.batch_size": 32,
    "model.hidden": [150],
    "data.train_images": 2000,
    "cell.devices": 7,
}


@pytest.mark.parametrize("start", ["shared", "own"])
def test_kernels_do_the_reference_engines_sgd(start: str) -> None:
    """In float32; the median over devices, since a unit at the edge of its ReLU may fall to either side."""
    ends = {}
    for engine, precision in (("reference", "float64"), ("preactivation", "float32"), ("preactivation", "tf32")):
        config = make_config("fedoag", {**NETWORK, "training.engine": engine, "training.precision": precision})
        sim = simulate(config, "cuda")
        models = sim.problem.initial if start == "shared" else sim.problem.devices().models
        end = sim.round_at(1).train(models).end.double()
        ends[engine, precision] = end - sim.problem.initial[:, None].double()
    expected = ends.pop(("reference", "float64"))
    for (_, precision), change in ends.items():
        error = (change - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.median()) < {"float32": 1e-5, "tf32": 2e-2}[precision]


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_more_programs_than_the_gpu_runs_at_once(precision: str) -> None:
    """Sixteen blocks of hidden units for each of 500 rows: nobody waits for ever, reads a score too early, or late."""
    keys = {"model.hidden": [2048], "cell.devices": 100, "experiment.seeds": list(range(5)), "data.train_images": 60000}
    sim = simulate(make_config("fedoag", {**NETWORK, **keys, "training.precision": precision}), "cuda")
    first = sim.round_at(0).train(sim.problem.initial)
    everyone = sim.round_at(0).everyone
    norms, weights = first.norms(everyone), torch.ones(everyone.shape, device="cuda", dtype=torch.float64)
    total = first.superpose(weights, everyone)
    dense = torch.stack([seed.double().norm(dim=-1) for seed in first.dense()])
    assert torch.allclose(norms, dense, rtol=2e-2 if precision == "tf32" else 1e-4)
    for _ in range(3):
        again = sim.round_at(0).train(sim.problem.initial)
        assert torch.equal(again.norms(everyone), norms)
        assert torch.equal(again.superpose(weights, everyone), total)
    own = sim.round_at(0).train(sim.problem.devices().models).end.double() - sim.problem.initial[:, None].double()
    assert torch.allclose(
        own.norm(dim=-1), dense * float(sim.round_at(0).lr), rtol=2e-2 if precision == "tf32" else 1e-4
    )


@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_graph_of_rounds_gives_what_rounds_one_by_one_give(algorithm: str, precision: str) -> None:
    """Rows of padded size and a graph: the same run, in which who is heard, energies and counts are the same."""
    calm = {"radio.noise_dbm_hz": float("-inf"), "training.lr": 0.02}
    config = make_config(algorithm, {**NETWORK, **calm, "training.precision": precision, "experiment.rounds": 12})
    one = otafl.run(config, device="cuda")
    assert replays(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("otafl.simulation.build.Simulation.recordable", False)
        other = otafl.run(config, device="cuda")
    moved = (other.params - simulate(config, "cuda").problem.initial).norm()
    assert (one.params - other.params).norm() < (1e-2 if precision == "tf32" else 1e-4) * moved
    for name in ("num_active", "anchors", "staleness_mean", "channel_uses", "scalar_reports"):
        assert np.array_equal(one.metrics[name], other.metrics[name], equal_nan=True), name
    for name in ("norm_bound", "energy_ratio_max", "energy_j") if algorithm != "fedavg" else ():
        assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-2, nan_ok=True), name


def test_masked_kernels_are_their_formulas() -> None:
    """Norms, weighted sums and replacements of the devices in a mask, next to devices that are not finite."""
    from otafl.engine.rows import replace_rows
    from otafl.engine.updates import Updates

    generator = torch.Generator(device="cuda").manual_seed(0)
    end = torch.randn((2, 5, 9001), device="cuda", generator=generator)
    pool = torch.randn((2, 3, 9001), device="cuda", generator=generator)
    slot = torch.randint(0, 3, (2, 5), device="cuda", generator=generator)
    who = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 1, 0]], device="cuda", dtype=torch.bool)
    weights = torch.rand((2, 5), device="cuda", generator=generator, dtype=torch.float64)
    end[0, 1] = torch.nan
    updates = Updates(end, pool, slot, lr=0.5)
    seeds = torch.arange(2, device="cuda")[:, None]
    difference = torch.where(who[..., None], (end - pool[seeds, slot]).double() / 0.5, 0.0)
    assert torch.allclose(updates.norms(who), difference.norm(dim=-1), rtol=1e-6)
    expected = (weights[..., None] * difference).sum(1)
    assert torch.allclose(updates.superpose(weights, who).double(), expected, rtol=1e-5, atol=1e-4)
    fresh = torch.ones((2, 9001), device="cuda")
    replaced = end.clone()
    replace_rows(replaced, who, fresh)
    assert (replaced[who] == 1).all()
    assert torch.equal(replaced[~who].nan_to_num(), end[~who].nan_to_num())


def test_a_large_cell_of_one_seed_is_trained_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("fedoag", {**NETWORK, "experiment.seeds": [0], "experiment.rounds": 6})
    whole = otafl.run(config, device="cuda")
    monkeypatch.setitem(preactivation.CHUNK_BYTES, "cuda", 2**20)
    parts = otafl.run(config, device="cuda")
    assert torch.allclose(whole.params, parts.params, rtol=0, atol=1e-4)


SMALL: dict[str, Any] = {
    "data.name": "digits",
    "training.engine": "auto",
    "training.precision": "float32",
    "training.batch_size": 8,
}
CONVOLUTIONS: dict[str, Any] = {"model.name": "cnn", "model.channels": [16, 16], "model.dense": [20]}
IMAGES = SMALL | CONVOLUTIONS
NETS: dict[str, dict[str, Any]] = {
    "cnn": {**CONVOLUTIONS, "model.channels": [16, 32], "model.kernel": 5},
    "dropout": {**CONVOLUTIONS, "model.dropout": 0.4},
    "resnet": {"model.name": "resnet"},
}


@pytest.mark.parametrize("start", ["shared", "own"])
@pytest.mark.parametrize("net", NETS)
def test_kernels_for_convolutions_equal_the_reference(net: str, start: str) -> None:
    """To float32's rounding; TF32 and bfloat16 to theirs."""
    ends = {}
    for engine, precision in (("reference", "float64"), ("layers", "float32"), ("layers", "tf32"), ("layers", "bf16")):
        keys = {**SMALL, **NETS[net], "training.engine": engine, "training.precision": precision}
        sim = simulate(make_config("fedavg").replace({**keys, "training.local_steps": 2}), "cuda")
        models = sim.problem.initial if start == "shared" else sim.problem.devices().models
        moved = sim.round_at(0).train(models).end - sim.problem.initial[:, None]
        ends[precision] = moved.double()
    for precision, allowed in (("float32", 1e-5), ("tf32", 1e-2), ("bf16", 1e-1)):
        error = (ends[precision] - ends["float64"]).norm(dim=-1) / ends["float64"].norm(dim=-1)
        assert float(error.median()) < allowed, precision  # in some devices a ReLU at its edge falls to the other side


def test_float32_means_float32_in_convolutions() -> None:
    """CuDNN would use TF32 if it were not told otherwise."""
    ends = []
    for precision in ("float32", "float64"):
        keys = {**IMAGES, "training.engine": "batched", "training.precision": precision}
        sim = simulate(make_config("fedavg").replace(keys), "cuda")
        ends.append((sim.round_at(0).train(sim.problem.initial).end - sim.problem.initial[:, None]).double())
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 1e-5


RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped": ("fedoag", {"training.clip": 0.05}),
    "clipped, shared start": ("fedavg", {"training.clip": 0.05}),
    "a cohort": ("fedavg", {"cell.cohort": 3}),
    "a cohort with anchors": ("fedoag", {"cell.cohort": 3}),
    "adaptive": ("fedoag-plus", {"algorithm.gamma": "adaptive"}),
    "error feedback": ("fedoag-zero", {"training.clip": 0.05}),
    "error feedback, a cohort": ("fedoag-zero", {"cell.cohort": 3}),
    "error feedback, any model": ("fedoag-zero", {"training.engine": "batched"}),
    "any model": ("fedoag", {"training.engine": "batched"}),
    "any model, some devices": ("ota-fedavg", {"training.engine": "batched"}),
    "momentum, any model": ("fedavg", {"training.engine": "batched", "training.momentum": 0.5}),
    **{name: (name, {}) for name in ("test-gbma", "test-signs", "test-top-k", "test-antennas")},
    "convolutions": ("fedavg", IMAGES),
    "convolutions, own models": ("fedoag", {**IMAGES, "radio.noise_dbm_hz": -230.0}),
    "convolutions, dropout, some devices": (
        "ota-fedavg",
        {**IMAGES, "model.dropout": 0.3, "radio.noise_dbm_hz": -230.0},
    ),
    "convolutions, error feedback": ("fedoag-zero", {**IMAGES, "training.clip": 1.0}),
    "corrections, any model": ("test-scaffold", {"training.engine": "batched"}),
    "momentum": ("fedoag", {"training.momentum": 0.5}),
    "momentum, some devices": ("ota-fedavg", {"training.momentum": 0.5}),
    "corrections": ("test-scaffold", {}),
    "two hidden layers": ("fedoag", {"model.hidden": [32, 16]}),
    "two hidden layers, some devices": ("ota-fedavg", {"model.hidden": [32, 16]}),
    "a batch for all steps": ("ota-fedavg", {"training.batches": "per_round"}),
}


@pytest.mark.parametrize("case", RECORDED)
def test_rounds_of_many_kinds_are_recorded_without_being_told(case: str) -> None:
    """And lead where rounds one by one lead, with a user's own methods, too."""
    algorithm, keys = RECORDED[case]
    calm = {"training.lr": 0.02, "experiment.rounds": 12}
    if algorithm.startswith("test-"):
        config = make_config("fedavg", {**NETWORK, **calm, **keys}).replace({"algorithm.name": algorithm})
    else:
        config = make_config(algorithm, {**NETWORK, **calm}).replace(keys)
    assert replays(config)
    one = otafl.run(config, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("otafl.simulation.build.Simulation.recordable", False)
        other = otafl.run(config, device="cuda")
    moved = (other.params - simulate(config, "cuda").problem.initial).norm()
    assert (one.params - other.params).norm() < 1e-3 * moved
    for name in ("num_active", "channel_uses", "scalar_reports"):
        assert np.array_equal(one.metrics[name], other.metrics[name], equal_nan=True), name


def asks(round_: Any) -> None:
    """Wait for the GPU, which a recorded round cannot do."""
    if float(round_.lr) < 0:
        raise AssertionError


@pytest.mark.parametrize("what", [asks, lambda round_: round_.draw("x"), lambda round_: int(round_.t) % 2])
def test_rounds_that_cannot_be_recorded_are_done_one_by_one(what: Any) -> None:
    class Asking(FedAvg):
        """Ideal FedAvg that asks for something in between."""

        def step(self, state: Any, round: Any) -> Any:  # noqa: A002
            what(round)
            return super().step(state, round)

    config = make_config("fedavg", {**NETWORK, "experiment.rounds": 8})
    asking = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, spec=Asking()))
    assert not replays(asking)
    one, other = otafl.run(asking, device="cuda"), otafl.run(config, device="cuda")
    assert torch.allclose(one.params, other.params, rtol=1e-3, atol=1e-5)


def test_runs_in_turns_have_the_bytes_that_they_have_alone(tmp_path: Path) -> None:
    """Each has a stream of its own; precisions, methods and sizes differ, and a light run follows a heavy one.

    The first two share their mini-batches, the second waits for what the first draws, and rows are far apart, so that
    the host does not wait for the GPU meanwhile.
    """
    forms: list[tuple[str, dict[str, Any]]] = [
        ("fedoag", {"model.hidden": [2048], "experiment.eval_every": 40}),
        ("ota-fedavg", {"model.hidden": [16], "experiment.eval_every": 40}),
        ("fedoag", {"training.precision": "float32"}),
        ("fedoag", {"training.precision": "tf32", "training.lr": 0.05}),
        ("fedoag-zero", {"training.precision": "tf32"}),
        ("ota-fedavg", {"model.hidden": [64]}),
        ("sca", {"experiment.rounds": 20}),
    ]
    turns = [
        Turn(make_config(name, {**NETWORK, "experiment.rounds": 40, **keys}), tmp_path / "turns" / str(i))
        for i, (name, keys) in enumerate(forms)
    ]
    run_in_turns(turns, "cuda")
    for i, turn in enumerate(turns):
        otafl.run(turn.config, tmp_path / "alone" / str(i), "cuda")
        for name in ("metrics.csv", "model.safetensors"):
            assert (tmp_path / "alone" / str(i) / name).read_bytes() == (turn.out / name).read_bytes(), (i, name)
