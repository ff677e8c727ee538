"""Local training, s steps of SGD on every device: a readable reference engine and a fast engine for any model.

All engines must agree to 1e-9 in float64. The fastest one, for models that begin with a linear layer, is in
`otafl.engine.fast.preactivation`.

Knows: the objective, batches, learning rates.
Does not know: channels, methods, what becomes of the updates.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from otafl.engine.dropout import fold
from otafl.engine.fast.one_core import FactoredLinear
from otafl.engine.objective import Objective
from otafl.engine.rows import Rows, aligned
from otafl.engine.rule import PLAIN, LocalRule
from otafl.engine.updates import Late, RowUpdates, Updates, own_references, shared_reference


class NotRecordable(Exception):
    """Raised if a round cannot be recorded as a CUDA graph, because it depends on something only the host knows."""


# Values that the layers with weights give in one step, from which it pays to train devices one by one on threads, and
# from which channels lie last in memory. Calibrated on two cores with 18 convolutional networks: below the first, all
# devices in one batch are as fast or faster, and both are faster than a plain loop.
THREADS_FROM = 50_000
CHANNELS_LAST_FROM = 1_000_000
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
    dropout: Tensor | None = None
    """Keys of the devices' dropout masks in this round, int [S, M]; None if the model has no dropout."""

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

    def models(self) -> Tensor:
        """A fresh copy of every device's start model, [S, M, P]."""
        shape = (*self.batches.shape[:2], self.start.shape[-1])
        return aligned(shape, self.start).copy_(self.start if self.start.dim() == 3 else self.start[:, None, :])


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
                key = None if work.dropout is None else fold(work.dropout[s, i], k)
                flat = flat.detach().requires_grad_(True)
                with torch.enable_grad():
                    params = work.objective.unflatten(flat)
                    loss = work.objective.loss(params, features[batch], targets[batch], key)
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


Step = Callable[[Tensor, Tensor, Tensor | None], None]
"""One plain SGD step of some rows, in place: from features [R, B, ...], targets [R, B] and keys for dropout [R]."""
Steps = Callable[[LocalWork, dict[str, Tensor]], Step]
"""Makes the steps of some rows from their parameters by name, each [R, ...]."""


def batched(work: LocalWork, params: dict[str, Tensor]) -> Step:
    """Steps of many rows at once with `torch.func`, for any model."""
    gradient = vmap(grad(work.objective.loss))

    def step(features: Tensor, targets: Tensor, keys: Tensor | None) -> None:
        more = () if keys is None else (keys,)
        for name, slope in gradient(params, features, targets, *more).items():
            params[name].sub_(slope * work.lr)

    return step


def one_by_one(work: LocalWork, params: dict[str, Tensor]) -> Step:
    """Steps of a single row by plain automatic differentiation, as in a hand-written loop."""
    last = work.objective.num_values * work.batches.shape[3] >= CHANNELS_LAST_FROM
    module, drops = work.objective.own_module(channels_last=last)
    parameters = [module.get_parameter(name) for name in params]
    for parameter, value in zip(parameters, params.values(), strict=True):
        parameter.data = value[0]  # shared memory, so that a step on it is a step on the row
    lr, left = float(work.lr), work.steps
    large = [part for part in module.modules() if isinstance(part, FactoredLinear)] if work.plain else []
    for layer in large:
        layer.begin(work.steps * work.batches.shape[3], lr)

    def step(features: Tensor, targets: Tensor, keys: Tensor | None) -> None:
        if keys is not None:
            for number, name in enumerate(drops):
                module.get_buffer(name).copy_(fold(keys[0], number))
        with torch.enable_grad():
            loss = work.objective.output_loss(module(features[0]), targets[0])
        slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, slope in zip(parameters, slopes, strict=True):
            if slope is not None:  # None for a parameter that the loss does not use
                parameter.data.sub_(slope, alpha=lr)
        nonlocal left
        left -= 1
        if left == 0:
            for layer in large:
                layer.finish()
            for parameter in parameters:
                parameter.data = work.start.new_empty(0)  # the module must not keep the memory of a round's models

    return step


class ChunkEngine:
    """Trains devices in chunks of rows, one chunk after the other or several at a time, one thread for each."""

    donates = True

    def __init__(self, steps: Steps = batched, chunk: int = 0, threads: int = 1) -> None:
        """`steps` carries out the local steps of at most `chunk` rows (0: by the size of the model)."""
        self._steps, self._chunk, self._threads = steps, chunk, threads

    def train(self, work: LocalWork) -> Updates:
        """Every device's update."""
        index, num_devices = work.rows.index, work.batches.shape[1]
        if work.start.dim() == 2:  # models are made for devices that train, and for no others
            late = self._chunk == 1 and work.start.device.type == "cpu"
            ends = Late(lambda: self._ends(work), partial(self._total, work)) if late else self._ends(work)
            return RowUpdates(work.start, num_devices, work.rows, ends, work.lr)
        end = work.start if work.overwrites else work.models()
        models = end.flatten(0, 1)

        def train(part: slice) -> None:
            rows = index[part]
            flat = models[rows]
            self._train_rows(work, rows, flat)
            models[rows] = flat

        self._in_parts(work, train)
        return work.updates(end)

    def _ends(self, work: LocalWork) -> Tensor:
        """End points [N, P] of the rows, from a shared start."""
        index = work.rows.index
        ends = work.start[index // work.batches.shape[1]]
        self._in_parts(work, lambda part: self._train_rows(work, index[part], ends[part]))
        return ends

    def _total(self, work: LocalWork, places: Sequence[int], weights: Sequence[float]) -> Tensor:
        """Σ weight (end − start) over the rows at some places, [S, P]; every thread keeps one model and one sum."""
        seeds = (work.rows.index // work.batches.shape[1]).tolist()

        def share(first: int) -> Tensor:
            total, model = torch.zeros_like(work.start), torch.empty_like(work.start[:1])
            for k in range(first, len(places), self._threads):  # a fixed share, so that the order of sums is fixed
                place = places[k]
                start = work.start[seeds[place]]
                model.copy_(start[None])
                self._train_rows(work, work.rows.index[place : place + 1], model)
                total[seeds[place]].add_(model[0].sub_(start), alpha=weights[k])
            return total

        if self._threads == 1:
            return share(0)
        first, *others = _pool(self._threads).map(share, range(self._threads))
        for other in others:
            first += other
        return first

    def _in_parts(self, work: LocalWork, train: Callable[[slice], None]) -> None:
        """Call a function for every chunk of the rows."""
        chunk = self._chunk or max(1, CHUNK_ELEMENTS[work.start.device.type] // work.objective.num_params)
        parts = [slice(start, start + chunk) for start in range(0, len(work.rows), chunk)]
        if self._threads > 1:
            list(_pool(self._threads).map(train, parts))
        else:
            for part in parts:
                train(part)

    def _train_rows(self, work: LocalWork, rows: Tensor, flat: Tensor) -> None:
        """Train some rows' models [R, P] in place."""
        (features, targets), batches = work.objective.train, work.batches.flatten(0, 1)
        start = None if work.plain and not work.rule.clips and work.mask is None else flat.clone()
        mine = None if work.correction is None else work.correction.flatten(0, 1)[rows]
        ruled = None if work.plain else Ruled(work, flat, rows, mine)
        step = self._steps(work, work.objective.unflatten(flat))  # on views: a step on them is a step on `flat`
        keys = None if work.dropout is None else work.dropout.flatten()[rows]
        for k in range(work.steps):
            batch = batches[rows, k % work.batches.shape[2]]
            with work.objective.products():
                step(features[batch], targets[batch], None if keys is None else fold(keys, k))
            if ruled is not None:
                ruled.follow(k)
        if work.rule.clips:
            assert start is not None
            norms = torch.linalg.vector_norm(flat - start, dim=1, dtype=torch.float64) / work.lr
            flat.copy_(torch.lerp(start, flat, work.rule.factors(norms).to(flat.dtype)[:, None]))
        if work.mask is not None:
            assert start is not None
            flat.copy_(torch.where(work.mask.flatten()[rows][:, None], flat, start))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that each compute on one core."""
    started, before = threading.Barrier(threads + 1), torch.get_num_threads()

    def start() -> None:
        torch.set_num_threads(1)  # of this thread, but also what a thread takes over when it first computes
        torch.get_num_threads()  # which is now
        started.wait()

    pool = ThreadPoolExecutor(threads, initializer=start)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(before)
    return pool


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
