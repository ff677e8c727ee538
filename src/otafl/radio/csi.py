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
    """What one side, devices or server, knows of the channel in one round; reading what was not declared raises.

    `h` is the complex channel coefficient, as estimated if the radio is imperfect, `phase` is e^{j arg h}, `mean_gain`
    is Λ = E|h|², linear, and `distance_m` is in metres, all [S, M]; at the server's N antennas, `h_each` is [S, M, N]
    and `sum_h` = Σ_i h_i is [S, N]. Column i of the devices' view is what device i knows: it may not use the others.
    In `plan` and `active` every quantity has all T rounds in front, for instance `h` [T, S, M]. Each read gives a copy.

    Reading raises an InformationError if the method's `knowledge` does not declare the quantity for this side.

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
    """One real number from each of some devices, received at the server without error: what `round.report` returns.

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
