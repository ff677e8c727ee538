"""Local updates as lazy objects: the radio needs their norms and weighted sums, nobody needs them dense.

Knows: end points of local training and the models they are measured against.
Does not know: how training was done, the radio.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**28}  # elements of a difference formed at once


class Updates:
    """(end_i − reference_i)/lr of every device: the unit of a gradient sum.

    The reference of device i of seed s is `pool[s, slot[s, i]]`: one model for all (a shared start), one per
    device, or an anchor buffer. An Updates object is valid until one of its tensors is written.
    """

    def __init__(self, end: Tensor, pool: Tensor, slot: Tensor, lr: float) -> None:
        """End points [S, M, P], reference models [S, K, P] and which one each device has, int [S, M]."""
        self._end, self._pool, self._slot, self._lr = end, pool, slot, lr
        self._versions = (end._version, pool._version, slot._version)

    @property
    def end(self) -> Tensor:
        """Devices' models after local training, [S, M, P]; the caller may take it over."""
        self._check()
        return self._end

    def relative_to(self, pool: Tensor, slot: Tensor) -> "Updates":
        """The same end points measured against other models."""
        self._check()
        return Updates(self._end, pool, slot, self._lr)

    def norms(self, who: Tensor) -> Tensor:
        """Euclidean norms of the devices `who`, accumulated in float64, [S, M]; 0 for the others."""
        self._check()
        norms = torch.zeros(who.shape, dtype=torch.float64, device=who.device)
        for s, rows, difference in self._differences(who):
            norms[s, rows] = torch.linalg.vector_norm(difference, dim=-1, dtype=torch.float64)
        return torch.where(who, norms / self._lr, torch.zeros_like(norms))

    def superpose(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i · update_i over devices with a weight other than 0, [S, P]."""
        self._check()
        total = self._end.new_zeros(self._end.shape[0], self._end.shape[2])
        heard = weights != 0
        scaled = (weights.to(torch.float64) / self._lr).to(self._end.dtype)
        for s, rows, difference in self._differences(heard):
            # masked before the sum: 0 · NaN must not poison the others
            masked = torch.where(heard[s, rows, None], difference, torch.zeros_like(difference))
            total[s] += scaled[s, rows] @ masked
        return total

    def dense(self) -> Tensor:
        """All updates at once, [S, M, P]."""
        self._check()
        rows = torch.arange(len(self._pool), device=self._pool.device)[:, None]
        return (self._end - self._pool[rows, self._slot]) / self._lr

    def _differences(self, who: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(seed index, device indices, end − reference) in chunks that cover the devices `who`.

        On the CPU only these devices are touched; on a GPU all are, since asking which would wait for it.
        """
        num_devices, num_params = self._end.shape[1:]
        chunk = max(1, CHUNK_ELEMENTS[self._end.device.type] // num_params)
        everyone = torch.arange(num_devices, device=self._end.device)
        for s in range(len(self._end)):
            devices = who[s].nonzero().flatten() if self._end.device.type == "cpu" else everyone
            for rows in torch.split(devices, chunk):
                yield s, rows, self._end[s, rows] - self._pool[s, self._slot[s, rows]]

    def _check(self) -> None:
        if (self._end._version, self._pool._version, self._slot._version) != self._versions:
            raise RuntimeError("these updates are no longer valid: a model they are measured from was overwritten")


def shared_reference(params: Tensor, num_devices: int) -> tuple[Tensor, Tensor]:
    """The pool and slots of devices that all start from [S, P]."""
    slot = torch.zeros((len(params), num_devices), dtype=torch.int64, device=params.device)
    return params[:, None, :], slot


def own_references(params: Tensor) -> tuple[Tensor, Tensor]:
    """The pool and slots of devices that each start from their row of [S, M, P]."""
    slot = torch.arange(params.shape[1], device=params.device).expand(params.shape[:2])
    return params, slot
