"""Random streams with addresses, from which all randomness of a run is derived.

A stream is a pure function of its address (seed, name, t). So every method meets the same world, a new draw in one
place changes nothing elsewhere, and no generator state has to be saved.

Knows: seeds, names and rounds.
Does not know: what is drawn.
"""

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Streams:
    """All random streams of one seed: a stream depends on (seed, name, t) alone.

    Two calls with the same address give the same numbers, whatever was drawn before; use another name for other ones.

    >>> bool(Streams(0).at("fading", 3).random() == Streams(0).at("fading", 3).random())
    True
    """

    seed: int
    """Seed of the run, 0 or more."""

    def _sequence(self, name: str, t: int) -> np.random.SeedSequence:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        words = (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))
        return np.random.SeedSequence((self.seed, *words, t))

    def at(self, name: str, t: int = 0) -> np.random.Generator:
        """A NumPy generator at the beginning of the stream (seed, name, t).

        Args:
            name: what is drawn, any string, for instance "fading".
            t: round, or another whole number from 0.
        """
        return np.random.Generator(np.random.PCG64(self._sequence(name, t)))

    def anonymous(self, name: str, t: int = 0) -> np.random.Generator:
        """The same stream as `at`, from a generator that does not reveal its address."""
        source, nameless = np.random.PCG64(self._sequence(name, t)), np.random.PCG64(0)
        nameless.state = source.state
        return np.random.Generator(nameless)

    def key(self, name: str, t: int = 0) -> int:
        """A whole number of 63 bits for the address (seed, name, t), to seed a generator on a compute device with."""
        low, high = self._sequence(name, t).generate_state(2, np.uint32)
        return (int(high) << 32 | int(low)) & (2**63 - 1)
