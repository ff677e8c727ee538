"""Dropout whose masks are addressed: the right probability, independent addresses, the same on every engine."""

import math

import pytest
import torch
from torch import nn

import otafl
from otafl.engine.dropout import Dropout, fold, kept, keys, with_addressed_dropout
from otafl.errors import PluginError
from tests.conftest import make_config, simulate


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept(p: float) -> None:
    """Binomial: 5 standard errors, for many keys and within one."""
    bases = keys(torch.tensor([3, 4]), 50, 7).flatten()
    masks = torch.stack([kept(key, (40, 100), p) for key in bases]).double()
    error = math.sqrt(p * (1 - p) / masks.numel())
    assert abs(float(masks.mean()) - (1 - p)) < 5 * error
    each = (masks.mean((1, 2)) - (1 - p)) / math.sqrt(p * (1 - p) / 4000)
    assert float(each.abs().max()) < 5
    assert float(each.std()) == pytest.approx(1, abs=0.3)


def test_masks_of_different_addresses_are_independent() -> None:
    """Any two of them, by seed, device, round, step, layer, and neighbouring values within one: |r| < 5/√n."""
    addresses = []
    for seed in (0, 1):
        for t in (0, 1):
            for key in keys(torch.tensor([seed]), 2, t)[0]:
                addresses += [fold(fold(key, step), layer) for step in (0, 1) for layer in (0, 1)]
    signs = torch.stack([kept(key, (10_000,), 0.5) for key in addresses]).double() * 2 - 1
    correlation = signs @ signs.T / 10_000
    assert float((correlation - torch.eye(len(signs))).abs().max()) < 5 / 100
    for lag in (1, 2, 64):
        assert float((signs[:, lag:] * signs[:, :-lag]).mean(1).abs().max()) < 5 / 100


def test_values_are_scaled_and_evaluation_drops_nothing() -> None:
    layer, ones = Dropout(0.25), torch.ones(8, 50)
    out = layer(ones)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(layer.eval()(ones), ones)
    channels = Dropout(0.5, whole_channels=True)(torch.ones(4, 6, 3, 3))
    assert torch.equal(channels, channels[..., :1, :1].expand(4, 6, 3, 3))


def test_pytorchs_layers_are_replaced_everywhere() -> None:
    shared = nn.Dropout(0.5)
    module = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(nn.Dropout2d(0.3), shared))
    found = [part for part in with_addressed_dropout(module).modules() if isinstance(part, Dropout)]
    assert [part.whole_channels for part in found] == [False, True, False]


def test_rounds_steps_and_devices_have_masks_of_their_own() -> None:
    """The same batch in every step and device: what is learnt differs only by masks."""
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 3))
    sim = simulate(make_config("fedavg", {"training.local_steps": 1, "cell.devices": 4}), model=net)
    batches = torch.zeros_like(sim.sampler.at(0))
    ends = [sim.round_at(t, batches=batches).train(sim.problem.initial).end for t in (0, 1)]
    changes = torch.cat([end.flatten(0, 1) for end in ends])
    assert len({tuple(row.tolist()) for row in changes[:, -123:-3]}) == 16  # two seeds, four devices, two rounds
    again = sim.round_at(0, batches=batches).train(sim.problem.initial).end
    assert torch.equal(again, ends[0])


def test_a_layer_used_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.last(self.drop(self.drop(self.inner(x))))
            return scores

    with pytest.raises(PluginError, match="uses a dropout layer twice"):
        otafl.run(make_config("fedavg"), model=Twice())
