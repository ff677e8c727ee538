"""The GPU kernels, run by Triton's interpreter on a CPU: what they compute, without a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
import otafl.engine.fast.kernels as kernels
from otafl.gpu import masked
from tests.conftest import make_config, simulate

draw = torch.Generator().manual_seed(0)
features, images = torch.randn(50, 70, generator=draw), torch.randint(0, 50, (6, 40), generator=draw)
inputs, turned = kernels.gather_both(features, images)
assert torch.equal(inputs, features[images])
assert torch.equal(turned, features[images].transpose(1, 2))
scales = torch.rand(6, generator=draw)
expected = (features[images] * scales[:, None, None]).view(2, -1, 70).transpose(1, 2)
assert torch.allclose(kernels.gather_turned(features, images, scales, 2), expected)

end, pool = torch.randn(2, 5, 9001, generator=draw), torch.randn(2, 3, 9001, generator=draw)
end[0, 1] = torch.nan  # a device outside the mask
slot = torch.randint(0, 3, (2, 5), generator=draw)
who = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 1, 0]], dtype=torch.bool)
weights = torch.rand(2, 5, generator=draw)
difference = torch.where(who[..., None], end - pool[torch.arange(2)[:, None], slot], 0.0)
squares = difference.double().square().sum(-1)
assert torch.allclose(masked.squares(end, pool, slot, who), squares, rtol=1e-6)
assert torch.allclose(masked.squares(end, None, None, who), torch.where(who, end.double().square().sum(-1), 0.0))
cut = torch.randn(3, 50, generator=draw)[:, :37]  # one vector a seed, with room between them
everyone = torch.ones(3, 1, dtype=torch.bool)
assert torch.allclose(masked.squares(cut.unsqueeze(1), None, None, everyone)[:, 0], cut.double().square().sum(1))
total = (weights[..., None] * difference).sum(1)
assert torch.allclose(masked.weighted_sum(end, pool, slot, weights, who), total, atol=1e-4)
chosen = torch.where(who[:, :3], weights[:, :3], 0.0)
mean = masked.weighted_sum(pool, None, None, weights[:, :3], who[:, :3])
assert torch.allclose(mean, (chosen[..., None] * pool).sum(1), atol=1e-4)
models = end.clone()
masked.replace(models, torch.ones(2, 9001), who)
assert (models[who] == 1).all() and torch.equal(models[~who].nan_to_num(), end[~who].nan_to_num())
models, kept = end.clone(), torch.rand(2, 5, generator=draw)
kept[0, 0] = 0
masked.blend(models, torch.ones(2, 9001), who, kept, pool, slot)
assert torch.allclose(models[who], (1 + kept[..., None] * difference)[who])
assert torch.equal(models[~who].nan_to_num(), end[~who].nan_to_num())

from otafl.radio.vectors import Vectors

phases = torch.rand(2, 5, dtype=torch.float64, generator=draw)
for values in (end[..., :901], torch.complex(end[..., :901], pool[:, :1, :901].expand(-1, 5, -1))):
    for by in (weights, torch.polar(weights.double(), phases), weights[..., None] * torch.ones(3)):
        vectors = Vectors(values.clone())
        expected = vectors.superpose(by, who), vectors.norms(who)
        possible, masked.possible = masked.possible, lambda parts: parts.dtype == torch.float32
        found = vectors.superpose(by, who), vectors.norms(who)
        masked.possible = possible
        assert found[0].shape == expected[0].shape and found[0].dtype == expected[0].dtype
        assert torch.allclose(found[0], expected[0], atol=1e-5) and torch.allclose(found[1], expected[1], rtol=1e-6)

from otafl.gpu import dense
from otafl.radio.digital import quantised

normal, drawn = torch.randn(3, 5000, generator=draw), torch.rand(3, 5000, generator=draw)
assert torch.allclose(dense.uniform(normal), torch.special.ndtr(normal), atol=1e-6)
assert dense.uniform(torch.full((9,), 30.0)).max() < 1
normal[1] = 0
for bits in (3, torch.tensor([1, 8, 5])):
    expected, possible = quantised(normal, bits, drawn), dense.possible
    dense.possible = lambda values: True
    found = quantised(normal, bits, drawn)
    dense.possible = possible
    assert torch.allclose(found, expected, atol=1e-5) and (found[1] == 0).all()
edge = torch.sign(torch.randn(20, 3000, generator=draw))
assert dense.quantised(edge, torch.rand(20, 3000), torch.ones(20, 1), torch.full((1,), 2.0**16 - 1)).abs().max() <= 1

keys = {"training.engine": "preactivation", "training.precision": "float32", "training.batch_size": 16}
keys |= {"model.hidden": [150], "data.train_images": 2000, "cell.devices": 3, "experiment.seeds": [0]}
sim = simulate(make_config("fedoag", keys))


def changes():
    round_ = sim.round_at(0)
    shared = round_.train(sim.problem.initial)
    return round_.train(sim.problem.devices().models).end, shared.end, shared.norms(round_.everyone)


plain = changes()
kernels.suits = lambda *arguments: True
kernels.BLOCK = 256  # the interpreter runs programs one by one: none may wait for another
for one, other in zip(plain, changes()):
    assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)

head, labels = sim.objective.head, torch.randint(0, sim.objective.num_classes, (3, 32), generator=draw)
inputs, z = torch.randn(3, 32, 20, generator=draw), torch.randn(3, 32, 150, generator=draw)
gram, tail = inputs @ inputs.transpose(1, 2), torch.randn(3, head.tail(sim.problem.initial).shape[1], generator=draw)


def steps(mask, counts=None):
    bias, rest = head.split_tail(tail.clone())
    slopes = torch.full_like(z, torch.nan)
    scale = torch.tensor(0.01)
    squares = kernels.descend(head, 16, gram, z.clone(), bias, labels, rest, slopes, scale, mask, counts, False, True)
    return slopes, bias, rest, squares


everybody, some = steps(None), steps(torch.tensor([True, False, True]))
for one, other in zip(everybody, some):
    assert torch.equal(one[[0, 2]], other[[0, 2]]) and not torch.equal(one[1], other[1])
fewer = steps(None, torch.tensor([1, 2, 0]))  # of two steps
assert all(torch.equal(one[1], other[1]) for one, other in zip(everybody, fewer))
assert all(torch.equal(one[2], other[1]) for one, other in zip(fewer, some) if one.shape[1:] == z.shape[1:])
assert torch.equal(fewer[0][0, :16], everybody[0][0, :16]) and (fewer[0][0, 16:] == 0).all() and fewer[3][2] == 0
bias, rest = head.split_tail(tail)
assert (some[0][1] == 0).all() and some[3][1] == 0  # G and the norm of the one that does not train
assert torch.equal(some[1][1], bias[1]) and torch.equal(some[2][1], rest[1])
change = (everybody[0].transpose(1, 2) @ inputs).double().square().sum((1, 2))
change += (everybody[1] - bias).double().square().sum((1, 2)) + (everybody[2] - rest).double().square().sum(1)
assert torch.allclose(everybody[3], change, rtol=1e-5)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux")
def test_kernels_compute_their_formulas() -> None:
    """Gathering both ways round; norms, sums and replacements in a mask; the steps of local training."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
