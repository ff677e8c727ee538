"""What the memoryless over-the-air methods share: all devices start from x^t, and x^{t+1} = x^t + η D̂.

If nobody is heard, the server keeps x^t. With norms "clip" it cannot know that, and adds the noise to its model.

Knows: what was received.
Does not know: how a method chooses amplitudes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from otafl.algorithms.parts.uplink import Received
from otafl.core.contract import Info
from otafl.core.round import Round


@dataclass(frozen=True)
class State:
    """The state of a method that remembers nothing but the server model; other methods write a dataclass of their own.

    >>> State(params=torch.zeros(2, 5)).params.shape  # [S, P]
    torch.Size([2, 5])
    """

    params: Tensor
    """Server model x^t, [S, P]."""


def move(round: Round, params: Tensor, received: Received, rescale: Tensor) -> tuple[State, Info]:  # noqa: A002
    """x^{t+1} = x^t + η G c (Σ a_i u_i + z), c = `rescale` [S]; x^t if the server knows that nobody transmitted."""
    bounded = received.bounded
    factor = torch.where(bounded.known, bounded.limit * rescale, 0.0)
    update = received.sum * factor[:, None].to(received.sum.dtype)
    return State(params + round.lr * update), Info(
        active=bounded.who,
        norm_bound=bounded.limit,
        weights=factor[:, None] * received.arrived,
        noise_std=factor * round.problem.noise_var_j**0.5,
    )
