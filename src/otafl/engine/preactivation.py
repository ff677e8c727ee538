"""Local training in pre-activation space: the same SGD, reading and writing the large first layer once a round.

Stack a device's mini-batches of the round as X [r, n], with Z = X W₁ᵀ + b₁ at its start and K = X Xᵀ + 1. If G_j
is η times the loss gradient at the pre-activations of batch j, SGD on W₁ and b₁ changes the pre-activations of
batch k by −Σ_{j<k} K[k, j] G_j. So the s steps run on small matrices, and at the end

    W₁ −= Gᵀ X,   b₁ −= Gᵀ 1,   ‖(ΔW₁, Δb₁)‖² = ⟨K G, G⟩

With one batch per round X is that batch, K acts on it in every step, and G is the sum over the steps. Devices
that start from one shared model need no weights of their own: their updates stay factored as (G, X).

On a CPU every thread trains whole devices by itself, whose matrices then stay in its cache. On a GPU all devices
of a chunk are one batch, and the steps are a kernel of their own where that fits (`otafl.engine.kernels`).

Knows: models with a linear first layer, batches, learning rates.
Does not know: channels, methods.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import one_hot

from otafl.engine import kernels
from otafl.engine.head import Head
from otafl.engine.objective import Objective
from otafl.engine.rows import Rows, rows_of
from otafl.engine.training import LocalWork
from otafl.engine.updates import Updates, shared_reference

CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}  # inputs and activations of the devices trained at once
MOST_EXTRA_WORK = 4.0  # operations of this path over those of plain SGD, beyond which it is not worth while


def suits(objective: Objective, num_images: int) -> bool:
    """Whether this path is faster than plain SGD for `num_images` images per device and round."""
    head = objective.head
    if head is None:
        return False
    plain = 4 * num_images * head.inputs * head.outputs
    return num_images**2 * (2 * head.inputs + head.outputs) <= (MOST_EXTRA_WORK - 1) * plain


class PreactivationEngine:
    """All devices and all seeds, for models whose first layer is linear in the input."""

    donates = True

    def __init__(self) -> None:
        self._lent: Callable[[], object] = lambda: None  # the newest factored updates, while somebody has them
        self._buffer: Tensor | None = None

    def train(self, work: LocalWork) -> Updates:
        """Every device's update."""
        with work.objective.products():
            return self._from_shared(work) if work.start.dim() == 2 else self._from_own(work)

    def _from_own(self, work: LocalWork) -> Updates:
        """Each device from its own model, in place where that is allowed."""
        models = work.start if work.overwrites else work.models()
        head, flat, rows = _head(work.objective), models.flatten(0, 1), work.rows

        def train(start: int, stop: int) -> None:
            index = rows.index[start:stop]
            chunk = flat[start:stop] if rows.complete else flat[index]
            weight, bias, rest = head.split(chunk)
            inputs, targets = _examples(work, index)
            z = torch.bmm(inputs, weight.transpose(1, 2))
            if bias is not None:
                z += bias
            slopes = torch.empty_like(z)
            _descend(work, inputs, z, targets, rest, slopes)
            weight.baddbmm_(slopes.transpose(1, 2), inputs, alpha=-1)
            if bias is not None:
                bias -= slopes.sum(1, keepdim=True)
            if not rows.complete:
                flat[index] = chunk

        _for_all(work, train)
        return work.updates(models)

    def _from_shared(self, work: LocalWork) -> Updates:
        """All devices from one model; no weights of their own."""
        head, rows = _head(work.objective), work.rows
        weight, bias, rest = head.split(work.start)
        slopes = self._slopes((len(rows), work.batches.shape[2:].numel(), head.outputs), work.start)
        rests = rest[rows.index // rows.num_devices]

        def train(start: int, stop: int) -> None:
            inputs, targets = _examples(work, rows.index[start:stop])
            z = torch.empty_like(slopes[start:stop])
            for s, first, last in rows.per_seed(start, stop):
                part = slice(first - start, last - start)
                torch.mm(inputs[part].flatten(0, 1), weight[s].t(), out=z[part].flatten(0, 1))
                if bias is not None:
                    z[part] += bias[s]
            _descend(work, inputs, z, targets, rests[start:stop], slopes[start:stop])

        _for_all(work, train)
        updates = FactoredUpdates(work, slopes, rests)
        self._lent = weakref.ref(updates)
        return updates

    def _slopes(self, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """A buffer for G: the last one, unless it is too small or somebody still has updates made of it."""
        size = shape[0] * shape[1] * shape[2]
        buffer = self._buffer
        if buffer is None or len(buffer) < size or buffer.dtype != like.dtype or self._lent() is not None:
            buffer = self._buffer = like.new_empty(size)
        return buffer[:size].view(shape)


class FactoredUpdates(Updates):
    """Updates of devices that started from one model, kept as (G, X) and the later layers' end points."""

    def __init__(self, work: LocalWork, slopes: Tensor, rests: Tensor) -> None:
        """G [N, r, H] and later layers [N, P_rest] of the rows that trained."""
        self._work, self._slopes, self._rests = work, slopes, rests
        self._head = _head(work.objective)
        self._position = torch.full((work.batches.shape[:2].numel(),), -1, device=slopes.device)
        self._position[work.rows.index] = torch.arange(len(work.rows), device=slopes.device)
        super().__init__(work.start, *shared_reference(work.start, work.batches.shape[1]), work.lr)

    @property
    def end(self) -> Tensor:
        """Devices' models after local training, [S, M, P], made now."""
        self._check()
        models = self._work.models()
        flat, rows = models.flatten(0, 1), self._work.rows
        with self._work.objective.products():
            for start, stop in _chunks(self._work, len(rows)):
                index = rows.index[start:stop]
                chunk = flat[index]
                weight, bias, rest = self._head.split(chunk)
                slopes = self._slopes[start:stop]
                weight.baddbmm_(slopes.transpose(1, 2), _examples(self._work, index)[0], alpha=-1)
                if bias is not None:
                    bias -= slopes.sum(1, keepdim=True)
                rest.copy_(self._rests[start:stop])
                flat[index] = chunk
        return models

    def _trained(self, rows: Rows) -> Rows:
        """Those of some rows that trained."""
        if rows is self._work.rows or self._work.rows.complete:
            return rows
        mask = torch.zeros_like(self._position, dtype=torch.bool)
        mask[rows.index] = True
        return rows_of((mask & (self._position >= 0)).view(-1, rows.num_devices))

    def _factors(self, rows: Rows, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs X [R, r, n], G [R, r, H] and the change of the later layers [R, P_rest] of some trained rows."""
        index = rows.index[start:stop]
        mine = slice(start, stop) if rows is self._work.rows else self._position[index]
        rest_start = self._head.split(self._work.start)[2][index // rows.num_devices]
        return _examples(self._work, index)[0], self._slopes[mine], self._rests[mine] - rest_start

    def _row_norms(self, rows: Rows) -> Tensor:
        """‖end − start‖ of some rows, float64 [N]; in full precision whatever training used."""
        if len(trained := self._trained(rows)) < len(rows):
            norms = torch.zeros(len(self._position), dtype=torch.float64, device=self._slopes.device)
            if len(trained):
                norms[trained.index] = self._row_norms(trained)
            return norms[rows.index]
        squares = torch.empty(len(rows), dtype=torch.float64, device=self._slopes.device)

        def measure(start: int, stop: int) -> None:
            inputs, slopes, rest = self._factors(rows, start, stop)
            gram = torch.bmm(inputs, inputs.transpose(1, 2))
            if self._head.bias:
                gram += 1
            first = torch.bmm(gram, slopes).mul_(slopes).sum((1, 2), dtype=torch.float64)
            squares[start:stop] = first + torch.linalg.vector_norm(rest, dim=1, dtype=torch.float64).square()

        _for_all(self._work, measure, rows)
        return squares.clamp_(min=0).sqrt_()

    def _add_rows(self, total: Tensor, weights: Tensor, rows: Rows) -> None:
        """Add Σ_i weights_i (end_i − start) over some rows to [S, P]; weights [S·M]."""
        rows = self._trained(rows)
        weight, bias, rest = self._head.split(total)
        scales = weights[rows.index]
        with self._work.objective.products():
            for start, stop in _chunks(self._work, len(rows)):
                inputs, slopes, change = self._factors(rows, start, stop)
                inputs *= scales[start:stop, None, None]
                for s, first, last in rows.per_seed(start, stop):
                    part = slice(first - start, last - start)
                    weight[s].addmm_(slopes[part].flatten(0, 1).t(), inputs[part].flatten(0, 1), alpha=-1)
                    if bias is not None:
                        bias[s, 0].addmv_(slopes[part].sum(1).t(), scales[first:last], alpha=-1)
                    rest[s].addmv_(change[part].t(), scales[first:last])

    def _current_versions(self) -> tuple[int, ...]:
        return self._pool._version, self._slopes._version, self._rests._version


def _head(objective: Objective) -> Head:
    assert objective.head is not None
    return objective.head


def _examples(work: LocalWork, index: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [R, r, n] and labels [R, r] of some rows' batches."""
    features, targets = work.objective.train
    images = work.batches.flatten(0, 1)[index].flatten()
    inputs = features.index_select(0, images).view(len(index), -1, features.shape[1])
    return inputs, targets.index_select(0, images).view(len(index), -1)


def _descend(work: LocalWork, inputs: Tensor, z: Tensor, targets: Tensor, rest: Tensor, slopes: Tensor) -> None:
    """The s steps: from pre-activations [R, r, H] to G [R, r, H]; the later layers [R, P_rest] learn in place."""
    head, per_round = _head(work.objective), work.batches.shape[2] == 1 and work.steps > 1
    batch = work.batches.shape[3]
    gram = _gram(inputs, batch, per_round, head.bias)
    if not per_round and kernels.suits(work.objective, head, batch, z):
        kernels.descend(head, gram, z, targets, rest, slopes, work.lr, tf32=work.objective.tf32)
        return
    step = _chain_step(work, head) if _by_hand(work.objective) else _any_step(work, head)
    if per_round:
        slopes.zero_()
        for k in range(work.steps):
            slope = step(z, targets, rest)
            slopes += slope
            if k + 1 < work.steps:
                z.baddbmm_(gram, slope, alpha=-1)
        return
    for k in range(work.steps):
        now, before = slice(k * batch, (k + 1) * batch), slice(0, k * batch)
        if k:
            z[:, now].baddbmm_(gram[:, now, before], slopes[:, before], alpha=-1)
        slopes[:, now] = step(z[:, now], targets[:, now], rest)


def _gram(inputs: Tensor, batch: int, per_round: bool, bias: bool) -> Tensor:
    """K = X Xᵀ (+ 1 with a bias), [R, r, r]; with several batches only below the blocks of its diagonal."""
    if per_round or inputs.device.type != "cpu":
        gram = torch.bmm(inputs, inputs.transpose(1, 2))
        return gram.add_(1) if bias else gram
    num_images = inputs.shape[1]
    gram = inputs.new_empty(len(inputs), num_images, num_images)
    for start in range(0, num_images, 2 * batch):
        stop = start + 2 * batch
        block = torch.bmm(inputs[:, start:stop], inputs[:, : stop - batch].transpose(1, 2))
        gram[:, start:stop, : stop - batch] = block.add_(1) if bias else block
    return gram


Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From pre-activations [R, b, H], labels [R, b] and later layers [R, P_rest], which learn, to η ∂loss/∂z."""


def _by_hand(objective: Objective) -> bool:
    return _head(objective).layers is not None and objective.classifies


def _chain_step(work: LocalWork, head: Head) -> Step:
    """One step of SGD where ReLU and linear layers follow, by hand."""
    assert head.layers is not None
    layers = head.layers

    def step(z: Tensor, targets: Tensor, rest: Tensor) -> Tensor:
        weights = [layer.split(rest) for layer in layers]
        inputs: list[Tensor] = []
        output = z
        for weight, bias in weights:
            inputs.append(output.relu())
            output = torch.baddbmm(bias, inputs[-1], weight.transpose(1, 2))
        slope: Tensor = output.softmax(-1)
        slope -= one_hot(targets, slope.shape[-1])
        slope *= work.lr / targets.shape[1]
        for (weight, bias), active in zip(reversed(weights), reversed(inputs), strict=True):
            earlier = torch.bmm(slope, weight)
            weight.baddbmm_(slope.transpose(1, 2), active, alpha=-1)
            bias -= slope.sum(1, keepdim=True)
            slope = torch.ops.aten.threshold_backward(earlier, active, 0)  # zero where the unit was off
        return slope

    return step


def _any_step(work: LocalWork, head: Head) -> Step:
    """One step of SGD for any later layers, by automatic differentiation."""
    objective = work.objective

    def loss(params: dict[str, Tensor], z: Tensor, targets: Tensor) -> Tensor:
        return objective.output_loss(head.rest(params, z), targets)

    gradient = vmap(grad(loss, argnums=(0, 1)))

    def step(z: Tensor, targets: Tensor, rest: Tensor) -> Tensor:
        params = objective.unflatten(rest)
        by_params, by_z = gradient(params, z, targets)
        for name, slope in by_params.items():
            params[name].sub_(slope, alpha=work.lr)
        return torch.mul(by_z, work.lr)

    return step


def _chunks(work: LocalWork, count: int) -> Sequence[tuple[int, int]]:
    """Positions of `count` rows in pieces that fit: one device at a time where CPU threads share them out."""
    num_images, head = work.batches.shape[2:].numel(), _head(work.objective)
    row_bytes = work.start.element_size() * num_images * (head.inputs + 2 * head.outputs + num_images)
    chunk = max(1, CHUNK_BYTES[work.start.device.type] // row_bytes)
    if work.start.device.type == "cpu" and _by_hand(work.objective):
        chunk = 1
    return [(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _for_all(work: LocalWork, task: Callable[[int, int], None], rows: Rows | None = None) -> None:
    """Run a task on pieces of the rows that train (or of others), shared out over CPU threads where that pays."""
    chunks = _chunks(work, len(work.rows if rows is None else rows))
    threads = torch.get_num_threads()
    if work.start.device.type != "cpu" or not _by_hand(work.objective) or threads == 1 or len(chunks) < threads:
        for start, stop in chunks:
            task(start, stop)
        return
    for _ in _workers(os.getpid(), threads).map(lambda piece: task(*piece), chunks):
        pass


@lru_cache(maxsize=1)
def _workers(pid: int, count: int) -> ThreadPoolExecutor:
    """Threads that each compute with one thread; other threads keep the number they had."""
    started = threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, "otafl", initializer=start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(count)  # what later threads take as their number
    return pool
