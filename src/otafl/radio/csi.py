"""Views of the channel that give only what a method declared, and reports that are counted.

Knows: declared knowledge, the round's channel.
Does not know: models, methods.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from otafl.errors import InformationError
from otafl.radio.knowledge import QUANTITIES, Quantity


class View:
    """One side's view of the channel in one round; reading what was not declared raises.

    Shapes: `h`, `phase`, `mean_gain` and `distance_m` are [S, M], `h_each` is [S, M, N], `sum_h` [S, N].

    >>> view = View("mine", "device", frozenset({"h"}), {"h": torch.ones(1, 2)})
    >>> view.h.shape
    torch.Size([1, 2])
    """

    def __init__(self, owner: str, side: str, allowed: frozenset[Quantity], values: Mapping[Quantity, Tensor]) -> None:
        self._owner, self._side, self._allowed, self._values = owner, side, allowed, values

    def __getattr__(self, quantity: str) -> Tensor:
        if quantity not in QUANTITIES:
            raise InformationError(
                f"algorithm {self._owner}: the {self._side} view has no {quantity!r}; "
                f"it can have {', '.join(sorted(QUANTITIES))}"
            )
        if quantity not in self._allowed:
            raise InformationError(
                f"algorithm {self._owner}: reads {quantity} at the {self._side} but does not declare it; "
                f"add it to knowledge.{self._side}"
            )
        return self._values[quantity].clone()  # a copy: a method may overwrite what it reads


@dataclass(frozen=True)
class Reports:
    """One scalar from each of some devices, received at the server without error.

    >>> reports = Reports(torch.tensor([[0.0, 3.0, 2.0]]), torch.tensor([[False, True, True]]))
    >>> reports.max(), reports.count()
    (tensor([3.]), tensor([2]))
    """

    values: Tensor
    """Reported values, [S, M]; 0 where no report came."""
    who: Tensor
    """Devices that reported, bool [S, M]."""

    def count(self) -> Tensor:
        """Number of reports, [S]."""
        return self.who.sum(-1)

    def max(self) -> Tensor:
        """Largest reported value, [S]; 0 where no report came."""
        largest = torch.where(self.who, self.values, -torch.inf).max(dim=-1).values
        return torch.where(self.who.any(-1), largest, 0.0)
