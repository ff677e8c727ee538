"""Local training: s steps of SGD on every device, by a readable reference and by a batched engine.

The two must agree: float64 to 1e-9.

Knows: the objective, batches, learning rates.
Does not know: channels, methods, what becomes of the end points.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from otafl.engine.objective import Objective

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # parameters of the device models trained at once


@dataclass(frozen=True)
class LocalWork:
    """What the devices have to do in one round."""

    objective: Objective
    pool: Tensor
    """Start models, [S, K, P]."""
    slot: Tensor
    """Which of them each device starts from, int [S, M]."""
    who: Tensor
    """Devices that train, bool [S, M]."""
    batches: Tensor
    """Image indices, [S, M, steps, batch]; one step's worth if a round has one batch."""
    steps: int
    lr: float


class Engine(Protocol):
    """A way to do local work."""

    donates: bool
    """Whether a method may overwrite the large tensors of the state it was given."""

    def train(self, work: LocalWork) -> Tensor:
        """End points [S, M, P]; a device that does not train ends where it started."""
        ...


class ReferenceEngine:
    """A loop over devices with plain autograd, to be read: the oracle of every other engine."""

    donates = False

    def train(self, work: LocalWork) -> Tensor:
        """End points [S, M, P]."""
        end = _starts(work)
        features, targets = work.objective.train
        for s, i in work.who.nonzero().tolist():
            flat = end[s, i].clone()
            for k in range(work.steps):
                batch = work.batches[s, i, k % work.batches.shape[2]]
                flat.requires_grad_(True)
                loss = work.objective.loss(work.objective.unflatten(flat), features[batch], targets[batch])
                (gradient,) = torch.autograd.grad(loss, flat)
                flat = flat.detach() - work.lr * gradient
            end[s, i] = flat
        return end


class BatchedEngine:
    """All devices and all seeds at once with `torch.func`, for any model."""

    donates = True

    def train(self, work: LocalWork) -> Tensor:
        """End points [S, M, P]."""
        end = _starts(work)
        features, targets = work.objective.train
        gradient = vmap(grad(work.objective.loss))
        models, every_batch = end.flatten(0, 1), work.batches.flatten(0, 1)
        chunk = max(1, CHUNK_ELEMENTS[end.device.type] // work.objective.num_params)
        for rows in torch.split(work.who.flatten().nonzero().flatten(), chunk):
            flat = models[rows]
            params = work.objective.unflatten(flat)  # views: a step on them is a step on `flat`
            for k in range(work.steps):
                batch = every_batch[rows, k % work.batches.shape[2]]
                for name, slope in gradient(params, features[batch], targets[batch]).items():
                    params[name].sub_(slope, alpha=work.lr)
            models[rows] = flat
        return end


def _starts(work: LocalWork) -> Tensor:
    """A fresh copy of every device's start model, [S, M, P]."""
    seeds = torch.arange(len(work.pool), device=work.pool.device)[:, None]
    return work.pool[seeds, work.slot]


ENGINES: dict[str, type[ReferenceEngine] | type[BatchedEngine]] = {
    "reference": ReferenceEngine,
    "batched": BatchedEngine,
}
