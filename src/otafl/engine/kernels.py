"""The steps of pre-activation-space training as one GPU kernel per step (Triton), for one later layer.

Placeholder.

Knows: pre-activations, Gram matrices, one linear layer behind a ReLU.
Does not know: where they come from.
"""

from torch import Tensor

from otafl.engine.head import Head
from otafl.engine.objective import Objective


def suits(objective: Objective, head: Head, batch: int, z: Tensor) -> bool:
    """Whether the kernel can do these steps."""
    return False


def descend(
    head: Head, gram: Tensor, z: Tensor, targets: Tensor, rest: Tensor, slopes: Tensor, lr: float, tf32: bool
) -> None:
    """The steps."""
    raise NotImplementedError
