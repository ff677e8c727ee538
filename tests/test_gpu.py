"""What must hold on a CUDA device; run there with `pytest -m gpu`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import otafl
from otafl.random import Streams
from tests.conftest import make_config, simulate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
ALGORITHMS = ["fedavg", "fedoag", "ota-fedavg"]


def host_noise(device: str) -> Any:
    """The same noise for both kinds of device."""

    def draw(seeds: Sequence[int], name: str, t: int, size: int) -> Tensor:
        rows = [Streams(seed).at(f"test {name}", t).standard_normal(size) for seed in seeds]
        return torch.from_numpy(np.stack(rows)).to(device)

    return draw


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("engine", ["batched", "reference"])
def test_cpu_and_gpu_agree_with_the_same_noise(algorithm: str, engine: str) -> None:
    config = make_config(algorithm, {"cell.devices": 8, "experiment.rounds": 10, "training.engine": engine})
    one, other = (otafl.run(config, device=d, noise=host_noise(d)) for d in ("cpu", "cuda"))
    assert torch.allclose(one.params, other.params.cpu(), rtol=1e-8, atol=1e-9)
    for name in one.metrics:
        assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-7, abs=1e-9, nan_ok=True), name


def test_same_world_on_both() -> None:
    config = make_config("fedoag", {"cell.devices": 8})
    one, other = simulate(config, "cpu"), simulate(config, "cuda")
    assert torch.equal(one.problem.initial, other.problem.initial.cpu())
    for t in range(3):
        assert torch.equal(one.round_at(t).device.h, other.round_at(t).device.h.cpu())
        assert torch.equal(one.sampler.at(t), other.sampler.at(t))


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


@pytest.mark.parametrize("pruning", ["references", "paper"])
def test_anchors_on_the_gpu(pruning: str) -> None:
    config = make_config("fedoag", {"cell.devices": 6, "experiment.rounds": 25, "algorithm.pruning": pruning})
    one, other = (otafl.run(config, device=d, noise=host_noise(d)) for d in ("cpu", "cuda"))
    assert np.array_equal(one.metrics["anchors"], other.metrics["anchors"], equal_nan=True)
