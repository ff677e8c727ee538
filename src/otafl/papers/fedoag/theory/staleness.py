"""How long ago a device was last heard, t − τ_i(t), for activation probabilities that may change from round to round.

A device that was never heard counts from τ = −1. With X_t = t − τ(t): X_0 = 1, and X_{t+1} = 1 if it is heard in round
t, else 1 + X_t, so that the moments follow a recursion; with constant p they tend to 1/p and (2 − p)/p². The paper's
Lemma 7 bounds them by 1/c and 2/c² with c = min p.

Knows: activation probabilities.
Does not know: channels, methods.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def moments(prob: Array) -> tuple[Array, Array]:
    """E[t − τ(t)] and E[(t − τ(t))²] for t = 0 … T, each [T + 1, ...], from p^t [T, ...]."""
    first = np.ones((len(prob) + 1, *prob.shape[1:]))
    second = np.ones_like(first)
    for r, p in enumerate(prob):
        first[r + 1] = 1 + (1 - p) * first[r]
        second[r + 1] = 1 + (1 - p) * (2 * first[r] + second[r])
    return first, second


def never_heard(prob: Array) -> Array:
    """P(never heard in these rounds), [...], from p^t [T, ...]."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(np.log1p(-prob).sum(0)))
