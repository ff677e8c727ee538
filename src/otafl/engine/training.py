"""Local training, s steps of SGD on every device: a readable reference engine and a fast engine for any model.

All engines must agree to 1e-9 in float64. The fastest one, for models that begin with a linear layer, is in
`otafl.engine.fast.preactivation`.

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
from otafl.engine.rule import PLAIN, LocalRule
from otafl.engine.updates import Updates, own_references, shared_reference


class NotRecordable(Exception):
    """Raised if a round cannot be recorded as a CUDA graph, because it depends on something only the host knows."""


CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # parameters of the device models trained at once


@dataclass(frozen=True)
class LocalWork:
    """What the devices have to do in one round."""

    objective: Objective
    start: Tensor
    """Start model: one for all devices, [S, P], or one per device, [S, M, P]."""
    rows: Rows
    """Devices that train."""
    batches: Tensor
    """Image indices, [S, M, steps, batch]; one step's worth if a round has one batch."""
    steps: int
    lr: float | Tensor
    """Learning rate η; a scalar tensor if rounds are recorded as a CUDA graph."""
    mask: Tensor | None = None
    """Devices that really train if `rows` is padded (in a CUDA graph), bool [S, M]; None if all rows train."""
    reference: tuple[Tensor, Tensor] | None = None
    """Models that the end points are measured against, as pool and slots of `Updates`; None for the start."""
    rule: LocalRule = PLAIN
    """Rule of a local step."""
    correction: Tensor | None = None
    """Correction c_i, added to every gradient of device i, [S, M, P]."""
    counts: Tensor | None = None
    """Number of steps of each device, int [S, M], at most `steps`; None if every device makes all of them."""
    who: Tensor | None = None
    """The mask that the rows were made from."""

    @property
    def plain(self) -> bool:
        """Whether every device makes all steps of plain SGD."""
        return self.rule.plain and self.correction is None and self.counts is None

    @property
    def overwrites(self) -> bool:
        """Whether an engine may overwrite `start`: nobody needs it later, and its models lie in order in memory."""
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
        """Raise NotRecordable if there is a mask; for code that must know exactly which rows train."""
        if self.mask is not None:
            raise NotRecordable("this engine needs to know which devices train")

    def models(self) -> Tensor:
        """A fresh copy of every device's start model, [S, M, P]."""
        if self.start.dim() == 3:
            return self.start.clone()
        return self.start[:, None, :].repeat(1, self.batches.shape[1], 1)


class Engine(Protocol):
    """A way to do local work."""

    donates: bool
    """Whether large tensors of a method's state may be overwritten."""

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
            start = end[s, i].clone()
            flat, velocity = start, torch.zeros_like(start)
            for k in range(work.steps if work.counts is None else int(work.counts[s, i])):
                batch = work.batches[s, i, k % work.batches.shape[2]]
                flat = flat.detach().requires_grad_(True)
                loss = work.objective.loss(work.objective.unflatten(flat), features[batch], targets[batch])
                (gradient,) = torch.autograd.grad(loss, flat)
                flat = flat.detach()
                if not work.plain:
                    pull = work.rule.weight_decay * flat + work.rule.proximal * (flat - start)
                    correction = 0.0 if work.correction is None else work.correction[s, i]
                    gradient = velocity = work.rule.momentum * velocity + gradient + pull + correction
                flat = flat - work.lr * gradient
            if work.rule.clips:
                norm = torch.linalg.vector_norm(flat - start, dtype=torch.float64) / work.lr
                flat = start + work.rule.factors(norm).to(flat.dtype) * (flat - start)
            end[s, i] = flat
        return work.updates(end)


class BatchedEngine:
    """Trains all devices of all seeds at once with `torch.func`, for any model."""

    donates = True

    def train(self, work: LocalWork) -> Updates:
        """Every device's update."""
        end = work.start if work.overwrites else work.models()
        features, targets = work.objective.train
        gradient = vmap(grad(work.objective.loss))
        models, every_batch = end.flatten(0, 1), work.batches.flatten(0, 1)
        chunk = max(1, CHUNK_ELEMENTS[end.device.type] // work.objective.num_params)
        for rows in torch.split(work.rows.index, chunk):
            if not len(rows):  # nobody trains in this round
                continue
            flat = models[rows]
            start = None if work.plain and not work.rule.clips and work.mask is None else flat.clone()
            mine = None if work.correction is None else work.correction.flatten(0, 1)[rows]
            ruled = None if work.plain else Ruled(work, flat, rows, mine)
            params = work.objective.unflatten(flat)  # views: a step on them is a step on `flat`
            for k in range(work.steps):
                batch = every_batch[rows, k % work.batches.shape[2]]
                with work.objective.products():
                    slopes = gradient(params, features[batch], targets[batch])
                for name, slope in slopes.items():
                    params[name].sub_(slope * work.lr)
                if ruled is not None:
                    ruled.follow(k)
            if work.rule.clips:
                assert start is not None
                norms = torch.linalg.vector_norm(flat - start, dim=1, dtype=torch.float64) / work.lr
                flat = torch.lerp(start, flat, work.rule.factors(norms).to(flat.dtype)[:, None])
            if work.mask is not None:
                assert start is not None
                flat = torch.where(work.mask.flatten()[rows][:, None], flat, start)
            models[rows] = flat
        return work.updates(end)


class Ruled:
    """Turns plain SGD steps, made in place on some rows' parameters [R, P], into steps of a rule."""

    def __init__(self, work: LocalWork, flat: Tensor, rows: Tensor, correction: Tensor | None) -> None:
        """Take some or all parameters of the rows' models, and the same columns of their corrections, each [R, P]."""
        rule = work.rule
        self._flat, self._start, self._before = flat, flat.clone(), flat.clone()
        self._velocity = torch.zeros_like(flat)  # −η v
        self._momentum, self._pull = rule.momentum, work.lr * (rule.weight_decay + rule.proximal)
        self._constant = work.lr * rule.weight_decay * self._start
        if correction is not None:
            self._constant = self._constant + work.lr * correction
        self._counts = None if work.counts is None else work.counts.flatten()[rows][:, None]

    def follow(self, k: int) -> None:
        """Turn plain step k, which has just been made, into a step of the rule."""
        plain = self._flat - self._before
        pull = self._pull * (self._before - self._start) + self._constant
        self._velocity = self._momentum * self._velocity + plain - pull
        moved = self._velocity if self._counts is None else torch.where(k < self._counts, self._velocity, 0.0)
        self._before += moved
        self._flat.copy_(self._before)
