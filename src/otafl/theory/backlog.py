"""What FedOAG-zero's devices have waiting: a queue for each, fed by its progress and drained by its channel.

In units of the largest progress B, device i learns q a round, at most, can send a_i = ν m √E_s |h_i|/σ_z, and
remembers at most b. With n its queue before it sends:

    sent = min(n, a),   left = n − sent,   n' = min(b, |left + progress|)

where progress is in the direction of what is left (then lengths add, and this is the most that can wait) or across it
(then squares add).

Knows: what devices can send.
Does not know: channels, models.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Queues:
    """Means over rounds, each [M]."""

    share: Array
    """θ: what is sent of what there is to send."""
    waiting: Array
    """What is left, in rounds of progress."""
    forgotten: Array
    """What was forgotten of what there was to send."""
    heard: Array
    """What was sent over what was learnt."""


def queues(sendable: Array, limit: float, aligned: bool, progress: float = 1.0) -> Queues:
    """The queues of devices that can send a_i^t, [T, M], and learn `progress` in every round.

    >>> queues(np.full((100, 1), 2.0), limit=3.0, aligned=True).share
    array([1.])
    """
    left = np.zeros(sendable.shape[1])
    share, waiting, forgotten = (np.zeros_like(sendable) for _ in range(3))
    sent = np.zeros_like(sendable)
    for t, able in enumerate(sendable):
        whole = left + progress if aligned else np.hypot(left, progress)
        queue = np.minimum(whole, limit)
        sent[t] = np.minimum(queue, able)
        share[t], forgotten[t] = sent[t] / queue, 1 - queue / whole
        left = queue - sent[t]
        waiting[t] = left / progress
    return Queues(share.mean(0), waiting.mean(0), forgotten.mean(0), sent.mean(0) / progress)
