"""What every contender shares: the workload's files, and how times and the final model are handed back.

A contender is started as `python SCRIPT.py FOLDER ROUNDS NAME`; FOLDER has the workload as NumPy files. It does the
rounds of ideal FedAvg and reports seconds per round, without evaluation, and its final model as FOLDER/NAME.*.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

DEVICES, STEPS, BATCH, INPUTS, HIDDEN, CLASSES = 30, 10, 32, 784, 1024, 10


class Workload:
    """The files of a workload."""

    def __init__(self) -> None:
        self.folder, self.rounds, self.name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        self.features = np.load(self.folder / "features.npy", mmap_mode="r")
        self.targets = np.load(self.folder / "targets.npy")
        self.batches = np.load(self.folder / "batches.npy")
        """[rounds, devices, steps (or 1), batch]"""
        self.lr = np.load(self.folder / "lr.npy")
        """η of every round."""
        self.start = np.load(self.folder / "start.npy")
        self.marks: list[float] = []

    def layers(self, flat: np.ndarray) -> list[np.ndarray]:
        """Weights and biases in the order of PyTorch."""
        shapes = [(HIDDEN, INPUTS), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,)]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]

    def mark(self) -> None:
        """A round begins, or the last one has ended."""
        self.marks.append(time.perf_counter())

    def report(self, layers: list[np.ndarray], **extra: float) -> None:
        """Write the final model and the times."""
        np.save(self.folder / f"{self.name}.npy", np.concatenate([np.asarray(layer).ravel() for layer in layers]))
        seconds = np.diff(self.marks).tolist()
        (self.folder / f"{self.name}.json").write_text(json.dumps({"seconds": seconds, **extra}))
