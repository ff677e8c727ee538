"""Local training: s steps of SGD on every device, by a readable reference and by an engine for any model.

All engines must agree: float64 to 1e-9. The fastest, for models that begin with a linear layer, is in
`otafl.engine.preactivation`.

Knows: the objective, batches, learning rates.
Does not know: channels, methods, what becomes of the updates.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from otafl.engine.objective import Objective
from otafl.engine.rows import Rows
from otafl.engine.updates import Updates, own_references, shared_reference


class NotStatic(Exception):
    """A round cannot be a CUDA graph: it does something that depends on what only the host knows."""


CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # parameters of the device models trained at once


@dataclass(frozen=True)
class LocalWork:
    """What the devices have to do in one round."""

    objective: Objective
    start: Tensor
    """A model for all, [S, P], or one per device, [S, M, P]."""
    rows: Rows
    """Devices that train."""
    batches: Tensor
    """Image indices, [S, M, steps, batch]; one step's worth if a round has one batch."""
    steps: int
    lr: float | Tensor
    """η; a scalar tensor where rounds are a CUDA graph."""
    mask: Tensor | None = None
    """Of the rows, only these train, bool [S, M]: where rounds are a CUDA graph, which cannot pick rows."""
    reference: tuple[Tensor, Tensor] | None = None
    """Models that the end points are measured against, where that is not the start: pool and slots of `Updates`."""

    @property
    def overwrites(self) -> bool:
        """Whether an engine may train in place: nobody asks for the start, whose models lie one behind the other."""
        if self.reference is None or self.start.dim() == 2:
            return False
        seed, device, element = self.start.stride()
        apart = element == 1 and device >= self.start.shape[2] and seed == device * self.start.shape[1]
        return apart and self.start.untyped_storage().data_ptr() != self.reference[0].untyped_storage().data_ptr()

    def updates(self, end: Tensor) -> Updates:
        """The end points [S, M, P] as updates."""
        if self.reference is not None:
            return Updates(end, *self.reference, self.lr)
        pool, slot = shared_reference(self.start, end.shape[1]) if self.start.dim() == 2 else own_references(self.start)
        return Updates(end, pool, slot, self.lr)

    def need_rows(self) -> None:
        """Refuse a mask, for those who cannot do with one."""
        if self.mask is not None:
            raise NotStatic("this engine needs to know which devices train")

    def models(self) -> Tensor:
        """A fresh copy of every device's start model, [S, M, P]."""
        if self.start.dim() == 3:
            return self.start.clone()
        return self.start[:, None, :].repeat(1, self.batches.shape[1], 1)


class Engine(Protocol):
    """A way to do local work."""

    donates: bool
    """Whether large tensors of a method's state may be overwritten, by the engine and by the method."""

    def train(self, work: LocalWork) -> Updates:
        """Every device's update; that of a device that does not train is 0."""
        ...


class ReferenceEngine:
    """A loop over devices with plain autograd, to be read: the oracle of every other engine."""

    donates = False

    def train(self, work: LocalWork) -> Updates:
        """Every device's update."""
        end = work.models()
        features, targets = work.objective.train
        for row in work.rows.index.tolist():
            s, i = divmod(row, end.shape[1])
            flat = end[s, i].clone()
            for k in range(work.steps):
                batch = work.batches[s, i, k % work.batches.shape[2]]
                flat.requires_grad_(True)
                loss = work.objective.loss(work.objective.unflatten(flat), features[batch], targets[batch])
                (gradient,) = torch.autograd.grad(loss, flat)
                flat = flat.detach() - work.lr * gradient
            end[s, i] = flat
        return work.updates(end)


class BatchedEngine:
    """All devices and all seeds at once with `torch.func`, for any model."""

    donates = True

    def train(self, work: LocalWork) -> Updates:
        """Every device's update."""
        work.need_rows()
        end = work.start if work.overwrites else work.models()
        features, targets = work.objective.train
        gradient = vmap(grad(work.objective.loss))
        models, every_batch = end.flatten(0, 1), work.batches.flatten(0, 1)
        chunk = max(1, CHUNK_ELEMENTS[end.device.type] // work.objective.num_params)
        for rows in torch.split(work.rows.index, chunk):
            if not len(rows):  # nobody trains in this round
                continue
            flat = models[rows]
            params = work.objective.unflatten(flat)  # views: a step on them is a step on `flat`
            for k in range(work.steps):
                batch = every_batch[rows, k % work.batches.shape[2]]
                with work.objective.products():
                    slopes = gradient(params, features[batch], targets[batch])
                for name, slope in slopes.items():
                    params[name].sub_(slope * work.lr)
            models[rows] = flat
        return work.updates(end)
