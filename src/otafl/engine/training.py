"""Local training: s steps of SGD on every device, by a readable reference and by a batched engine.

Both take start models [S, M, P] as (pool, slot), train the devices `who` and return all end points; a device
that does not train ends where it started. They must agree: float64 to 1e-9.

Knows: the objective, batches, learning rates.
Does not know: channels, methods, what becomes of the end points.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from otafl.engine.objective import Objective

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # parameters of the device models trained at once


class Engine(Protocol):
    """A way to run local training."""

    donates: bool
    """Whether a method may overwrite the large tensors of the state it was given."""

    def train(
        self,
        objective: Objective,
        pool: Tensor,
        slot: Tensor,
        who: Tensor,
        batches: Tensor,
        steps: int,
        lr: float,
    ) -> Tensor:
        """End points [S, M, P] after `steps` steps; `batches` is [S, M, steps or 1, batch]."""
        ...


class ReferenceEngine:
    """A loop over devices with plain autograd, to be read: the oracle of every other engine."""

    donates = False

    def train(
        self,
        objective: Objective,
        pool: Tensor,
        slot: Tensor,
        who: Tensor,
        batches: Tensor,
        steps: int,
        lr: float,
    ) -> Tensor:
        """End points [S, M, P]."""
        end = _starts(pool, slot)
        features, targets = objective.train
        for s, i in who.nonzero().tolist():
            flat = end[s, i].clone()
            for k in range(steps):
                batch = batches[s, i, k % batches.shape[2]]
                flat.requires_grad_(True)
                loss = objective.loss(objective.unflatten(flat), features[batch], targets[batch])
                (gradient,) = torch.autograd.grad(loss, flat)
                flat = flat.detach() - lr * gradient
            end[s, i] = flat
        return end


class BatchedEngine:
    """All devices and all seeds at once with `torch.func`, for any model."""

    donates = True

    def train(
        self,
        objective: Objective,
        pool: Tensor,
        slot: Tensor,
        who: Tensor,
        batches: Tensor,
        steps: int,
        lr: float,
    ) -> Tensor:
        """End points [S, M, P]."""
        end = _starts(pool, slot)
        features, targets = objective.train
        gradient = vmap(grad(objective.loss))
        rows = who.flatten().nonzero().flatten()
        models = end.flatten(0, 1)
        every_batch = batches.flatten(0, 1)
        chunk = max(1, CHUNK_ELEMENTS[end.device.type] // objective.num_params)
        for part in torch.split(rows, chunk):
            flat = models[part]
            params = objective.unflatten(flat)  # views: a step on them is a step on `flat`
            for k in range(steps):
                batch = every_batch[part, k % batches.shape[2]]
                for name, slope in gradient(params, features[batch], targets[batch]).items():
                    params[name].sub_(slope, alpha=lr)
            models[part] = flat
        return end


def _starts(pool: Tensor, slot: Tensor) -> Tensor:
    """A fresh copy of every device's start model, [S, M, P]."""
    seeds = torch.arange(len(pool), device=pool.device)[:, None]
    return pool[seeds, slot]


ENGINES: dict[str, type[ReferenceEngine] | type[BatchedEngine]] = {
    "reference": ReferenceEngine,
    "batched": BatchedEngine,
}
