"""Local training in pre-activation space: the same SGD, reading and writing the large first layer once a round.

Stack a device's mini-batches of the round as X [r, n], with Z = X W₁ᵀ + b₁ at its start and K = X Xᵀ + 1. If G_j
is η times the loss gradient at the pre-activations of batch j, SGD on W₁ and b₁ changes the pre-activations of
batch k by −Σ_{j<k} K[k, j] G_j. So the s steps run on small matrices, and at the end

    W₁ −= Gᵀ X,   b₁ −= Gᵀ 1,   ‖(ΔW₁, Δb₁)‖² = ⟨K G, G⟩ = ⟨K, G Gᵀ⟩

The steps of other rules (`otafl.engine.rule`) are linear in the gradients, too. With their coefficients a and b, batch
k's pre-activations change by −Σ_{j<k} a_kj K[k, j] G_j − η b_k X_k (λ W₁ + c)ᵀ, and at the end

    W₁ −= (a_s G)ᵀ X + η b_s (λ W₁ + c)

so the norm of the progress is known, and can be clipped, before W₁ is written.

With one batch per round X is that batch, K acts on it in every step, and G is the sum over the steps. Devices
that start from one shared model need no weights of their own: their updates stay factored as (G, X). Devices with
models of their own may split the round into a few groups of steps, each done as above: W₁ is then read and written more
often, but the matrices K are smaller.

The devices of a chunk are computed as one batch; their steps are in `otafl.engine.fast.steps`.

Knows: models with a linear first layer, batches, learning rates.
Does not know: channels, methods.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from otafl.engine.fast import kernels
from otafl.engine.fast.steps import by_descend, descend, descend_by_rule, gram_strips, head_of, images_of, scratch
from otafl.engine.objective import Objective
from otafl.engine.rows import Rows, aligned, can_look, rows_of
from otafl.engine.training import LocalWork
from otafl.engine.updates import Updates, shared_reference
from otafl.gpu import masked

CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}  # inputs and activations of the devices trained at once
GROUP_IMAGES = {
    "cpu": 128,
    "cuda": 2**30,
}  # images per group of steps, between two passes over a device's own W₁; K grows as their square
MOST_EXTRA_WORK = 2.5  # largest ratio of operations to those of plain SGD at which this path pays


def suits(objective: Objective, num_images: int) -> bool:
    """Whether this path should be faster than plain SGD for `num_images` images per device and round."""
    head = objective.head
    if head is None:
        return False
    plain = 4 * num_images * head.inputs * head.outputs
    return num_images**2 * (2 * head.inputs + head.outputs) <= (MOST_EXTRA_WORK - 1) * plain


class PreactivationEngine:
    """Trains all devices of all seeds, for models whose first layer is linear in the input."""

    donates = True

    def __init__(self) -> None:
        self._lent: Callable[[], object] = lambda: None  # the newest factored updates, while they are in use
        self._buffer: Tensor | None = None

    def train(self, work: LocalWork) -> Updates:
        """Every device's update."""
        with work.objective.products():
            if work.start.dim() == 3:
                return self._from_own(work)
            if work.rule.weight_decay or work.correction is not None:  # these act on all of W₁: one model per device
                reference = work.reference or shared_reference(work.start, work.batches.shape[1])
                return self._from_own(replace(work, start=work.models(), reference=reference))
            return self._from_shared(work)

    def _from_own(self, work: LocalWork) -> Updates:
        """Train each device from its own model, in place where that is allowed."""
        models = work.start if work.overwrites else work.models()
        head, flat, rows = head_of(work.objective), models.flatten(0, 1), work.rows
        clips = work.rule.clips
        parts = [work] if clips else _groups(work)

        for start, stop in _chunks(work, len(rows)):
            index = rows.index[start:stop]
            chunk = flat[start:stop] if rows.complete else flat[index]
            if not by_descend(work):
                self._by_rule(work, index, chunk)
                if not rows.complete:
                    flat[index] = chunk
                continue
            weight, bias, rest = head.split(chunk)
            before = head.tail(chunk).clone() if clips else None
            for part in parts:
                if work.objective.tf32 and masked.possible(flat):  # TF32 products are faster in another layout
                    inputs, turned = kernels.gather_both(work.objective.train.features, images_of(part, index))
                else:
                    inputs = _inputs(part, index)
                    turned = inputs.transpose(1, 2)
                z, slopes = (scratch(name, (*inputs.shape[:2], head.outputs), inputs) for name in ("z", "slopes"))
                torch.bmm(inputs, weight.transpose(1, 2), out=z)
                squares = descend(part, index, inputs, z, bias, rest, slopes, squares=clips)
                if before is not None and squares is not None:
                    _shorten(work, squares, slopes, before, head.tail(chunk))
                weight.baddbmm_(slopes.transpose(1, 2), turned.transpose(1, 2), alpha=-1)
            if not rows.complete:
                flat[index] = chunk
        return work.updates(models)

    def _by_rule(self, work: LocalWork, index: Tensor, models: Tensor) -> None:
        """Train some rows' models [R, P] in place if steps are not plain SGD."""
        head, rule = head_of(work.objective), work.rule
        inputs = _inputs(work, index)
        weight, bias, rest = head.split(models)
        tail_before = head.tail(models).clone()
        z = torch.bmm(inputs, weight.transpose(1, 2))
        slopes = torch.empty_like(z)
        change: Tensor | None = None  # λ W₁ + c, which changes W₁ in addition to the gradients
        fixed: Tensor | None = None  # X (λ W₁ + c)ᵀ
        own = None if work.correction is None else work.correction.flatten(0, 1)[index]
        if rule.weight_decay or own is not None:
            change = rule.weight_decay * weight
            if own is not None:
                change = change + head.split(own)[0]
            fixed = torch.bmm(inputs, change.transpose(1, 2))
        parts = (None, None) if own is None else head.split(own)[1:]
        pull = fixed
        if fixed is not None and bias is not None:
            pull = fixed + rule.weight_decay * bias + (0.0 if parts[0] is None else parts[0])
        lasts = descend_by_rule(work, index, inputs, z, bias, rest, slopes, pull, parts)
        step = torch.zeros_like(slopes[:, 0, 0]) if change is None else lasts * work.lr
        if rule.clips:
            tail = head.tail(models)
            squares = _first_squares(inputs, slopes) + (tail - tail_before).square().sum(1, dtype=torch.float64)
            if change is not None and fixed is not None:
                squares += 2 * step * (slopes * fixed).sum((1, 2), dtype=torch.float64)
                squares += step.square() * change.square().sum((1, 2), dtype=torch.float64)
            step = step * _shorten(work, squares, slopes, tail_before, tail)[0]
        if change is not None:
            weight.sub_(step[:, None, None] * change)
        weight.baddbmm_(slopes.transpose(1, 2), inputs, alpha=-1)

    def _from_shared(self, work: LocalWork) -> Updates:
        """Train all devices from one shared model; no device gets its own copy of W₁."""
        head, rows = head_of(work.objective), work.rows
        weight = head.split(work.start)[0].contiguous()  # aligned, for fast products
        slopes = self._slopes((len(rows), work.batches.shape[2:].numel(), head.outputs), work.start)
        tails = head.tail(work.start)[rows.index // rows.num_devices]

        squares: list[Tensor | None] = []
        for start, stop in _chunks(work, len(rows)):
            inputs = _inputs(work, rows.index[start:stop])
            z = scratch("z", slopes[start:stop].shape, slopes)
            for seeds_here, part in _equal_parts(rows, start, stop):
                each = len(weight[seeds_here]), -1
                left = inputs[part].view(*each, head.inputs)
                torch.bmm(left, weight[seeds_here].transpose(1, 2), out=z[part].view(*each, head.outputs))
            index, mine = rows.index[start:stop], head.split_tail(tails[start:stop])
            clips, tail = work.rule.clips, tails[start:stop]
            before = tail.clone() if clips else tail
            if by_descend(work):
                found = descend(work, index, inputs, z, *mine, slopes[start:stop], squares=clips)
            else:
                descend_by_rule(work, index, inputs, z, *mine, slopes[start:stop], None, (None, None))
                found = None
            if clips and found is None:
                found = _first_squares(inputs, slopes[start:stop]) + (tail - before).square().sum(
                    1, dtype=torch.float64
                )
            if clips and found is not None:
                found = _shorten(work, found, slopes[start:stop], before, tail)[1]
            squares.append(found)
        known = [part for part in squares if part is not None]
        updates = FactoredUpdates(work, slopes, tails, torch.cat(known) if known else None)
        self._lent = weakref.ref(updates)
        return updates

    def _slopes(self, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """A buffer for G: the previous one, unless it is too small or earlier updates still use it."""
        if like.is_cuda and torch.cuda.is_current_stream_capturing():  # a CUDA graph has its own memory
            return like.new_empty(shape)
        size = shape[0] * shape[1] * shape[2]
        buffer = self._buffer
        if buffer is None or len(buffer) < size or buffer.dtype != like.dtype or self._lent() is not None:
            buffer = self._buffer = like.new_empty(size)
        return buffer[:size].view(shape)


class FactoredUpdates(Updates):
    """Updates of devices that started from one model, kept as (G, X) and the trained parameters after W₁."""

    def __init__(self, work: LocalWork, slopes: Tensor, tails: Tensor, squares: Tensor | None) -> None:
        """G [N, r, H], tails [N, P_tail] and, where known, squared norms [N] of the trained rows."""
        self._work, self._slopes, self._tails, self._squares = work, slopes, tails, squares
        self._head = head_of(work.objective)
        self._start_tail = self._head.tail(work.start).clone()  # a copy: the start may be overwritten
        self._position = torch.full((work.batches.shape[:2].numel(),), -1, device=slopes.device)
        self._position[work.rows.index] = torch.arange(len(work.rows), device=slopes.device)
        super().__init__(work.start, *shared_reference(work.start, work.batches.shape[1]), work.lr)

    @property
    def end(self) -> Tensor:
        """Devices' models after local training, [S, M, P], computed when asked for."""
        models = self._work.models()
        self.move(models)
        return models

    def move(self, models: Tensor) -> None:
        """Add end − start to other models [S, M, P] of the devices, in place."""
        self._check()
        self._add_to(models.flatten(0, 1))

    def _add_to(self, flat: Tensor) -> None:
        """Add end − start to models [S·M, P], in place."""
        rows = self._work.rows
        with self._work.objective.products():
            for start, stop in _chunks(self._work, len(rows)):
                index, slopes, change = self._factors(rows, start, stop)
                chunk = flat[start:stop] if rows.complete else flat[index]
                self._head.split(chunk)[0].baddbmm_(slopes.transpose(1, 2), self._right(index), alpha=-1)
                self._head.tail(chunk).add_(change)
                if not rows.complete:
                    flat[index] = chunk

    def _right(self, index: Tensor) -> Tensor:
        """Inputs X of some rows, [R, r, n], laid out for the right-hand side of a product."""
        features = self._work.objective.train.features
        if self._work.objective.tf32 and masked.possible(features):  # TF32 products are faster in another layout
            return kernels.gather_both(features, images_of(self._work, index))[1].transpose(1, 2)
        return _inputs(self._work, index)

    def _rows(self, who: Tensor) -> Rows:
        """Rows of the devices `who` that trained; on a GPU, where the host does not read masks, all that trained."""
        if who is self._work.who or not can_look(who):
            return self._work.rows
        rows = rows_of(who & (self._position >= 0).view(who.shape))
        return self._work.rows if torch.equal(rows.index, self._work.rows.index) else rows

    def _factors(self, rows: Rows, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row numbers, G [R, r, H] and the change of the parameters after W₁ [R, P_tail], for some trained rows."""
        index = rows.index[start:stop]
        mine = slice(start, stop) if rows is self._work.rows else self._position[index]
        return (
            index,
            self._slopes[mine],
            self._tails[mine] - self._start_tail[index // rows.num_devices],
        )

    def _differences(self, rows: Rows) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, end − start) for chunks of some rows; `start` and `stop` are positions in `rows`."""
        change = aligned((*self._work.batches.shape[:2], self._pool.shape[2]), self._pool).zero_().flatten(0, 1)
        self._add_to(change)  # rarely needed, so computed all at once
        for start, stop in _chunks(self._work, len(rows)):
            yield start, stop, change[start:stop] if rows.complete else change[rows.index[start:stop]]

    def _masked_norms(self, who: Tensor) -> Tensor:
        """‖end − start‖ of the devices `who`, float64 [S, M]; 0 for the others."""
        if self._squares is None:
            self._squares = self._all_squares()
        squares = torch.zeros(who.numel(), dtype=torch.float64, device=who.device)
        squares[self._work.rows.index] = self._squares
        return torch.where(who, squares.clamp_(min=0).sqrt_().view(who.shape), 0.0)

    def _all_squares(self) -> Tensor:
        """Squared norms of the trained rows, float64 [N]; computed once, since nothing else changes these tensors."""
        rows, found = self._work.rows, []
        with self._work.objective.products():
            for start, stop in _chunks(self._work, len(rows)):
                index, slopes, tail = self._factors(rows, start, stop)
                first = _first_squares(_inputs(self._work, index), slopes)
                found.append(first + torch.linalg.vector_norm(tail, dim=1, dtype=torch.float64).square())
        return torch.cat(found) if found else self._slopes.new_zeros(0, dtype=torch.float64)

    def _masked_sum(self, weights: Tensor, who: Tensor) -> Tensor:
        """Σ_i weights_i (end_i − start) over the devices `who`, [S, P]; weights [S, M]."""
        rows = self._rows(who)
        scales = torch.where(who, weights, 0.0).flatten()[rows.index]
        silent = None  # rows outside `who`, which must not count even if they hold NaN
        if who is not self._work.who and not can_look(who):
            silent = ~who.flatten()[rows.index]
        total = torch.zeros_like(self._work.start)
        weight, tail = self._head.split(total)[0], self._head.tail(total)[:, None]
        sums = torch.zeros_like(weight, memory_format=torch.contiguous_format)  # aligned, for fast products
        for start, stop in _chunks(self._work, len(rows)):
            index, slopes, change = self._factors(rows, start, stop)
            if silent is not None:
                slopes = slopes.masked_fill(silent[start:stop, None, None], 0.0)
                change = change.masked_fill(silent[start:stop, None], 0.0)
            for seeds, part in _equal_parts(rows, start, stop):
                count, mine = len(sums[seeds]), scales[start:stop][part]
                left = slopes[part].view(count, -1, self._head.outputs)
                right, factor = _scaled_inputs(self._work, index[part], mine, count)
                with self._work.objective.products():
                    sums[seeds].baddbmm_(left.transpose(1, 2), right, alpha=-factor)
                each = len(mine) // count
                tail[seeds].baddbmm_(mine.view(count, 1, each), change[part].view(count, each, tail.shape[2]))
        weight.copy_(sums)
        return total

    def _current_versions(self) -> tuple[int, ...]:
        return self._pool._version, self._slopes._version, self._tails._version


def _first_squares(inputs: Tensor, slopes: Tensor) -> Tensor:
    """‖Gᵀ X‖² = ⟨K, G Gᵀ⟩ of some rows, float64 [R]."""
    (gram,) = gram_strips(inputs, inputs.shape[1], bias=False)
    return torch.bmm(gram, slopes).mul_(slopes).sum((1, 2), dtype=torch.float64)


def _shorten(work: LocalWork, squares: Tensor, slopes: Tensor, before: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Clip some rows' progress in place, given its squared norms [R]: scale G and move `tail` towards `before`.

    The tails are [R, P_tail]. Returns the clipping factors and the squared norms after clipping, each [R].
    """
    squares = squares.clamp(min=0)
    factors = work.rule.factors(squares.sqrt() / work.lr)
    mine = factors.to(slopes.dtype)
    slopes *= mine[:, None, None]
    tail.copy_(torch.lerp(before, tail, mine[:, None]))
    return mine, squares * factors.square()


def _equal_parts(rows: Rows, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yield (seeds, their positions from `start`) with equally many rows per seed: all seeds at once, or one by one."""
    if rows.even and (start, stop) == (0, len(rows)):
        yield slice(None), slice(None)
        return
    for s, first, last in rows.per_seed(start, stop):
        yield slice(s, s + 1), slice(first - start, last - start)


def _inputs(work: LocalWork, index: Tensor) -> Tensor:
    """Inputs X of some rows, [R, r, n], in memory that the next call may overwrite."""
    features, images = work.objective.train.features, images_of(work, index)
    inputs = scratch("inputs", (images.numel(), features.shape[1]), features)
    torch.index_select(features, 0, images.flatten(), out=inputs)
    return inputs.view(*images.shape, -1)


def _scaled_inputs(work: LocalWork, index: Tensor, scales: Tensor, num_groups: int) -> tuple[Tensor, float]:
    """Inputs of some rows times their weights, stacked by group, [groups, ·, n], and a factor still to be applied."""
    features = work.objective.train.features
    if work.objective.tf32 and masked.possible(features):
        return kernels.gather_turned(features, images_of(work, index), scales, num_groups).transpose(1, 2), 1.0
    inputs = _inputs(work, index)
    if scales.device.type == "cpu" and bool((scales == scales[0]).all()):  # one factor for all: no pass over inputs
        return inputs.view(num_groups, -1, inputs.shape[2]), float(scales[0])
    inputs *= scales[:, None, None]
    return inputs.view(num_groups, -1, inputs.shape[2]), 1.0


def _chunks(work: LocalWork, count: int) -> Sequence[tuple[int, int]]:
    """Split `count` rows into chunks (start, stop) of about CHUNK_BYTES."""
    num_images, head = work.batches.shape[2:].numel(), head_of(work.objective)
    row_bytes = work.start.element_size() * num_images * (head.inputs + 2 * head.outputs + num_images)
    chunk = max(1, CHUNK_BYTES[work.start.device.type] // row_bytes)
    return [(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _groups(work: LocalWork) -> list[LocalWork]:
    """Split the round into groups of a few steps each."""
    steps, batch = work.batches.shape[2:]
    count = min(steps, -(-steps * batch // GROUP_IMAGES[work.start.device.type]))
    if count == 1:
        return [work]
    cuts = [steps * i // count for i in range(count + 1)]
    return [replace(work, batches=work.batches[:, :, i:j], steps=j - i) for i, j in pairwise(cuts)]
