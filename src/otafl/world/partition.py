"""Which device holds which training image.

Knows: class labels, random streams.
Does not know: features, models, where devices are.
"""

import logging
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from otafl.errors import ConfigError
from otafl.random import Streams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partition:
    """How training images are shared out; every image goes to exactly one device."""

    partition: Literal["dirichlet", "iid", "shards"] = "dirichlet"
    """Dirichlet label skew (paper), iid, or shards of label-sorted images."""
    dirichlet_alpha: Annotated[float, Gt(0)] = 0.1
    """α of the Dirichlet partition; smaller is more unequal; paper: 0.1."""
    shards_per_device: Annotated[int, Ge(1), Le(10**4)] = 2
    """Shards each device receives with partition = "shards"."""

    def split(
        self, targets: NDArray[np.int64], num_devices: int, batch_size: int, streams: Streams
    ) -> list[NDArray[np.int64]]:
        """Image indices of every device.

        Every device gets at least one image, and a full batch where there are enough images; the repair moves
        images from the richest to the poorest device, deterministically.
        """
        if len(targets) < num_devices:
            raise ConfigError(
                f"cell.devices = {num_devices}: the data set has only {len(targets)} training images, "
                "and every device needs at least one"
            )
        rng = streams.at("partition")
        if self.partition == "dirichlet":
            parts = self._dirichlet(targets, num_devices, rng)
        elif self.partition == "iid":
            parts = np.array_split(rng.permutation(len(targets)), num_devices)
        else:
            shards = np.array_split(np.argsort(targets, kind="stable"), num_devices * self.shards_per_device)
            owner = rng.permutation(len(shards)) % num_devices
            parts = [
                np.concatenate([shard for shard, o in zip(shards, owner, strict=True) if o == i])
                for i in range(num_devices)
            ]
        return _repair(parts, minimum=min(batch_size, len(targets) // num_devices), seed=streams.seed)

    def _dirichlet(
        self, targets: NDArray[np.int64], num_devices: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Each device draws a class distribution; each class's images are shared out in proportion."""
        classes = np.unique(targets)
        preference = rng.dirichlet(np.full(len(classes), self.dirichlet_alpha), size=num_devices)  # [M, C]
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(num_devices)]
        for column, label in enumerate(classes):
            images = rng.permutation(np.flatnonzero(targets == label))
            share = preference[:, column]
            if not np.isfinite(share.sum()) or share.sum() <= 0:  # a tiny α can underflow a whole column
                share = np.ones(num_devices)
            cuts = np.round(np.cumsum(share)[:-1] / share.sum() * len(images)).astype(np.int64)
            for part, piece in zip(parts, np.split(images, cuts), strict=True):
                part.append(piece)
        return [np.concatenate(part) for part in parts]


def _repair(parts: list[NDArray[np.int64]], minimum: int, seed: int) -> list[NDArray[np.int64]]:
    """Move images from the richest to the poorest device until each has `minimum`."""
    parts = [np.asarray(part, dtype=np.int64) for part in parts]
    moved = 0
    while True:
        sizes = np.array([len(part) for part in parts])
        poorest, richest = int(sizes.argmin()), int(sizes.argmax())
        missing = minimum - int(sizes[poorest])
        if missing <= 0:
            break
        take = min(missing, max(1, (int(sizes[richest]) - minimum) // 2))
        parts[poorest] = np.concatenate([parts[poorest], parts[richest][-take:]])
        parts[richest] = parts[richest][:-take]
        moved += take
    if moved:
        log.info("partition of seed %d: %d images moved so that every device has %d", seed, moved, minimum)
    return parts
