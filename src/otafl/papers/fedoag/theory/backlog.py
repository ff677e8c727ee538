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

    unsent_share: Array
    """1 − θ: what is not sent of what there is to send."""
    waiting: Array
    """What is left, in rounds of progress."""
    forgotten_share: Array
    """What was forgotten of what there was to send."""
    heard: Array
    """What was sent over what was learnt."""


def queues(sendable: Array, limit: float, aligned: bool, progress: float = 1.0) -> Queues:
    """The queues of devices that can send a_i^t, [T, M], and learn `progress` in every round.

    >>> queues(np.full((100, 1), 2.0), limit=3.0, aligned=True).unsent_share
    array([0.])
    """
    left = np.zeros(sendable.shape[1])
    unsent, waiting, forgotten, sent = (np.zeros_like(sendable) for _ in range(4))
    for t, able in enumerate(sendable):
        whole = left + progress if aligned else np.hypot(left, progress)
        queue = np.minimum(whole, limit)
        sent[t] = np.minimum(queue, able)
        left = queue - sent[t]
        unsent[t], waiting[t], forgotten[t] = left / queue, left / progress, 1 - queue / whole
    return Queues(unsent.mean(0), waiting.mean(0), forgotten.mean(0), sent.mean(0) / progress)


def bound(
    *, smoothness: float, gradient: float, gap: float, step: float, rounds: int, nu: float, limit: float, lost: float
) -> dict[str, float]:
    """Terms of the bound on the mean of E‖∇F(x^t)‖² (docs/algorithms/fedoag-zero.md, Convergence).

    `gradient` is G, `gap` F(x⁰) − F*, `step` η s, `limit` b, and `lost` f, what is forgotten of what is learnt.
    """
    return {
        "A": 2 * gap / (step * rounds),
        "B": (smoothness * step * limit * gradient) ** 2,
        "C": (lost * gradient + smoothness * step * gradient / 2) ** 2,
        "D": smoothness * step * (4 * limit**2 + nu**2) * gradient**2,
    }
