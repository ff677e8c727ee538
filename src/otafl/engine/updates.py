"""Local updates as lazy objects: a perfect radio needs only their norms and weighted sums, not dense vectors.

Knows: end points of local training and the models they are measured against.
Does not know: how training was done, the radio.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from otafl.engine.rows import Rows, all_rows, can_look, rows_of
from otafl.errors import PluginError
from otafl.gpu import masked
from otafl.radio.vectors import Vectors

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**28}  # elements of a difference formed at once


@dataclass(frozen=True)
class Late:
    """Local training that is done when something is asked of its updates, for rows from a shared start."""

    ends: Callable[[], Tensor]
    """Trains, and gives the end points [N, P] of all rows."""
    total: Callable[[Sequence[int], Sequence[float]], Tensor]
    """Trains the rows at some places, and gives the weighted sum of end − start, [S, P]; keeps no end points."""


class Updates:
    """The update Δ_i = (end_i − reference_i)/η_t of every device: what `round.train` returns.

    It has the unit of a gradient; after plain SGD from the reference it is minus the sum of the steps' gradients. The
    reference of device i of seed s is `pool[s, slot[s, i]]`: one model for all (a shared start), one per device, or an
    anchor. Updates are lazy, so they are valid until one of their tensors is written; then they raise a RuntimeError.
    The radio accepts only the library's own classes, and measures itself what is sent.

    >>> start, slot = torch.zeros(1, 1, 2), torch.zeros(1, 2, dtype=torch.int64)
    >>> updates = Updates(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), start, slot, lr=0.5)
    >>> both, first = torch.tensor([[True, True]]), torch.tensor([[True, False]])
    >>> updates.norms(both), updates.superpose(torch.tensor([[0.5, 0.5]]), both)
    (tensor([[10.,  2.]], dtype=torch.float64), tensor([[3., 5.]]))
    >>> updates.encode(torch.sign, 2, first).values
    tensor([[[1., 1.],
             [0., 0.]]])
    """

    def __init__(self, end: Tensor, pool: Tensor, slot: Tensor, lr: float | Tensor) -> None:
        """Measure end points [S, M, P] from reference models.

        Args:
            end: models after local training, [S, M, P].
            pool: reference models, [S, K, P].
            slot: row of `pool` that is each device's reference, int [S, M].
            lr: learning rate η_t, a float or a scalar tensor.
        """
        if not all(type(value) in (float, Tensor) for value in (lr, end, pool, slot)):
            raise TypeError("updates are made of plain tensors and a plain learning rate")
        self._end, self._pool, self._slot, self._lr = end, pool, slot, lr
        self._versions = self._current_versions()
        self._known_norms: tuple[Tensor, int, Tensor] | None = None

    @property
    def end(self) -> Tensor:
        """Devices' models after local training, [S, M, P]; the caller may overwrite them."""
        self._check()
        return self._end

    @property
    def reference(self) -> tuple[Tensor, Tensor]:
        """Models [S, K, P] that the end points are measured against, and the index of each device's, int [S, M]."""
        return self._pool, self._slot

    def norms(self, who: Tensor) -> Tensor:
        """Euclidean norms ‖Δ_i‖, in the unit of a gradient.

        Args:
            who: devices whose norms are needed, bool [S, M].

        Returns:
            Norms in float64, [S, M]; 0 for the others.
        """
        self._check()
        known = self._known_norms
        if known is None or known[0] is not who or known[1] != who._version:
            known = self._known_norms = (who, who._version, self._masked_norms(who) / self._lr)
        return known[2].clone()

    def superpose(self, weights: Tensor, who: Tensor) -> Tensor:
        """Weighted sum Σ_i weights_i Δ_i over the devices `who`, [S, P].

        Sums that a method takes itself do not pass the air; the server learns only from `round.uplink`.

        Args:
            weights: real weights, [S, M]; ignored outside `who`.
            who: devices in the sum, bool [S, M].
        """
        self._check()
        return self._masked_sum((weights.to(torch.float64) / self._lr).to(self._pool.dtype), who)

    def measured_norms(self, who: Tensor) -> Tensor:
        """Like `norms`, but always computed from the current tensors; the radio uses these."""
        self._check()
        return self._masked_norms(who) / self._lr

    @property
    def size(self) -> int:
        """Number of parameters P, which is also the number of channel uses."""
        return self._pool.shape[2]

    @property
    def is_complex(self) -> bool:
        """Updates are real."""
        return False

    def encode(self, f: Callable[..., Tensor], size: int, who: Tensor, *own: Tensor) -> Vectors:
        """Apply a function to the update of each device: signs, sparse vectors, sketches.

        Args:
            f: function from updates [n, P] of n devices, and the rows [n, ...] of `own`, to [n, size]. It gets some
                devices at a time, so it must treat all rows alike and independently. It may overwrite what it gets.
            size: length Q of the result for each device.
            who: devices whose updates are encoded, bool [S, M].
            *own: tensors [S, M, ...], for instance what devices remember.

        Returns:
            Vectors [S, M, size], 0 for the other devices.

        Raises:
            PluginError: the function returned another shape.
        """
        self._check()
        recorded = who.is_cuda and torch.cuda.is_current_stream_capturing()  # then the host cannot read the mask
        rows, found = all_rows(who) if recorded else rows_of(who), None
        for start, stop, difference in self._differences(rows):
            index = rows.index[start:stop]
            coded = f(difference.div_(self._lr), *(values.flatten(0, 1)[index] for values in own))
            if type(coded) is not Tensor or coded.shape != (stop - start, size):
                got = tuple(coded.shape) if isinstance(coded, Tensor) else type(coded).__name__
                raise PluginError(f"encode(): the function must give [n, {size}], got {got} for n = {stop - start}")
            if stop - start == who.numel():  # all at once
                found = coded
                break
            if found is None:
                found = coded.new_zeros(who.numel(), size)
            found[index] = coded
        if found is None:  # nobody is in the mask: real zeros
            found = self._pool.new_zeros(who.numel(), size)
        values = found.view(*who.shape, size)
        return Vectors(torch.where(who[..., None], values, 0.0) if recorded else values)

    def dense(self) -> Tensor:
        """All updates written out, [S, M, P]; this needs as much memory as all devices' models."""
        seeds = torch.arange(len(self._pool), device=self._pool.device)[:, None]
        return (self.end - self._pool[seeds, self._slot]) / self._lr

    def move(self, models: Tensor) -> None:
        """Add end − reference = η Δ_i to other models of the devices, in place.

        Args:
            models: the models to be moved, [S, M, P].
        """
        self._check()
        flat = models.flatten(0, 1)
        every = all_rows(self._slot)
        for start, stop, difference in self._differences(every):
            flat[start:stop] += difference

    def _masked_norms(self, who: Tensor) -> Tensor:
        """‖end − reference‖ of the devices `who`, float64 [S, M]; 0 for the others."""
        if self._by_kernels:
            return masked.squares(self._end, self._pool, self._slot.contiguous(), who).sqrt_()
        norms, rows = torch.zeros(who.numel(), dtype=torch.float64, device=who.device), self._rows_of(who)
        for start, stop, difference in self._differences(rows):
            norms[rows.index[start:stop]] = torch.linalg.vector_norm(difference, dim=-1, dtype=torch.float64)
        return torch.where(who, norms.view(who.shape), 0.0)

    def _masked_sum(self, weights: Tensor, who: Tensor) -> Tensor:
        """Σ_i weights_i (end_i − reference_i) over the devices `who`, [S, P]; weights [S, M]."""
        if self._by_kernels:
            return masked.weighted_sum(self._end, self._pool, self._slot.contiguous(), weights, who)
        rows = self._rows_of(who)
        picked = torch.where(who, weights, 0.0).flatten()[rows.index]
        total = self._pool.new_zeros(self._pool.shape[0], self._pool.shape[2])
        for start, stop, difference in self._differences(rows):
            if not can_look(who):  # rows outside `who` must not count even if they hold NaN
                difference.masked_fill_(~who.flatten()[rows.index[start:stop], None], 0.0)
            for s, first, last in rows.per_seed(start, stop):  # not by atomic additions, whose order varies
                total[s].addmv_(difference[first - start : last - start].t(), picked[first:last])
        return total

    @property
    def _by_kernels(self) -> bool:
        """Whether the kernels for a mask of devices know how the end points are kept."""
        return masked.possible(self._end)

    def _rows_of(self, who: Tensor) -> Rows:
        """The rows of the devices `who`, and perhaps of others where the host does not read masks."""
        return rows_of(who)

    def _differences(self, rows: Rows) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, end − reference) for chunks of some rows; `start` and `stop` are positions in `rows`."""
        end, pool = self._end.flatten(0, 1), self._pool.flatten(0, 1)
        seeds = rows.index // rows.num_devices
        reference = seeds * self._pool.shape[1] + self._slot.flatten()[rows.index]
        chunk = max(1, CHUNK_ELEMENTS[end.device.type] // end.shape[1])
        if chunk == 1:  # a single row is large: avoid copies
            difference = end.new_empty(1, end.shape[1])
            for start, (row, other) in enumerate(zip(rows.index.tolist(), reference.tolist(), strict=True)):
                torch.sub(end[row], pool[other], out=difference[0])
                yield start, start + 1, difference
            return
        for start in range(0, len(rows), chunk):
            stop = min(start + chunk, len(rows))
            difference = end[rows.index[start:stop]]
            yield start, stop, difference.sub_(pool[reference[start:stop]])

    def _current_versions(self) -> tuple[int, ...]:
        return self._end._version, self._pool._version, self._slot._version

    def _check(self) -> None:
        if self._current_versions() != self._versions:
            raise RuntimeError(
                "these updates are no longer valid: a model they are measured from was overwritten; take norms and "
                "sums before round.broadcast()"
            )


class RowUpdates(Updates):
    """Updates of devices that started from one model, with the models of those alone that trained.

    Devices may train as late as when something is asked: a single sum then needs no memory for their models.
    """

    def __init__(self, start: Tensor, num_devices: int, rows: Rows, ends: "Tensor | Late", lr: float | Tensor) -> None:
        """Start [S, P], the rows that trained and their end points [N, P], or what gives them."""
        self._rows, self._late = rows, None if isinstance(ends, Tensor) else ends
        self._known, self._summed = ends if isinstance(ends, Tensor) else None, False
        self._position = torch.full((len(start) * num_devices,), -1, device=start.device)
        self._position[rows.index] = torch.arange(len(rows), device=start.device)
        super().__init__(start, *shared_reference(start, num_devices), lr)

    @property
    def end(self) -> Tensor:
        """Devices' models after local training, [S, M, P], written out when asked for."""
        self._check()
        models = self._end[:, None, :].repeat(1, self._slot.shape[1], 1)
        models.flatten(0, 1)[self._rows.index] = self._ends
        return models

    @property
    def _ends(self) -> Tensor:
        """End points of the rows that trained, [N, P]; they train now, if they have not."""
        if self._known is None:
            assert self._late is not None
            self._known = self._late.ends()
            self._versions = self._current_versions()
        return self._known

    def _masked_sum(self, weights: Tensor, who: Tensor) -> Tensor:
        """Σ_i weights_i (end_i − start) over the devices `who`, [S, P]; the first time without keeping end points."""
        if self._known is not None or self._summed or self._late is None:
            return super()._masked_sum(weights, who)
        self._summed = True  # who asks again gets end points that are kept
        asked, each = who.flatten()[self._rows.index], torch.where(who, weights, 0.0).flatten()[self._rows.index]
        return self._late.total(asked.nonzero().flatten().tolist(), each[asked].tolist())

    @property
    def _by_kernels(self) -> bool:
        """They do not: there are end points of the rows alone."""
        return False

    def _rows_of(self, who: Tensor) -> Rows:
        """The rows of the devices `who`; on a GPU those of all that trained."""
        return rows_of(who) if can_look(who) else self._rows

    def _differences(self, rows: Rows) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, end − start) for chunks of some rows; `start` and `stop` are positions in `rows`."""
        chunk = max(1, CHUNK_ELEMENTS[self._ends.device.type] // self._ends.shape[1])
        for start in range(0, len(rows), chunk):
            index = rows.index[start : start + chunk]
            place = self._position[index]
            if not len(self._ends):  # nobody trained
                yield start, start + len(index), self._end.new_zeros(len(index), self._end.shape[1])
                continue
            difference = self._ends[place] if rows is self._rows else self._ends[place.clamp(min=0)]
            difference.sub_(self._end[index // rows.num_devices])
            if rows is not self._rows:
                difference.masked_fill_((place < 0)[:, None], 0.0)
            yield start, start + len(index), difference

    def _current_versions(self) -> tuple[int, ...]:
        return self._end._version, 0 if self._known is None else self._known._version, self._slot._version


def shared_reference(params: Tensor, num_devices: int) -> tuple[Tensor, Tensor]:
    """The pool and slots of devices that all start from [S, P]."""
    slot = torch.zeros((len(params), num_devices), dtype=torch.int64, device=params.device)
    return params[:, None, :], slot


def own_references(params: Tensor) -> tuple[Tensor, Tensor]:
    """The pool and slots of devices that each start from their row of [S, M, P]."""
    slot = torch.arange(params.shape[1], device=params.device).expand(params.shape[:2])
    return params, slot
