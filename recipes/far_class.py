"""A data set for recipes/zero.toml: one class is on a few devices alone, which recipes place far away."""

from dataclasses import dataclass, replace

import numpy as np

import otafl
from otafl.world.data import MNIST
from otafl.world.partition import Partition


@otafl.register_dataset("far-class")
@dataclass(frozen=True)
class FarClass:
    """MNIST; all images of one class are on the last five devices, which have no other, the rest as usual."""

    label: int = 8
    owning: int = 5

    def load(self, num_devices: int) -> otafl.Dataset:
        """The same for every seed."""
        images, streams = MNIST().load(num_devices), otafl.Streams(0)
        far, near = (np.flatnonzero((images.train.targets == self.label) == held) for held in (True, False))
        owners = np.zeros(len(images.train), dtype=np.int64)
        parts = Partition().split(images.train.targets[near], num_devices - self.owning, 64, streams)
        for device, part in enumerate([near[part] for part in parts] + np.array_split(far, self.owning)):
            owners[part] = device
        return replace(images, owners=owners)
