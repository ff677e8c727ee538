"""The channel knowledge that a method declares for each side; a module of its own, so that it loads without PyTorch.

Knows: the columns of the paper's Table 1.
Does not know: channels, methods.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from otafl.errors import PluginError

Quantity = Literal["h", "h_each", "sum_h", "phase", "mean_gain", "distance_m"]
QUANTITIES: frozenset[Quantity] = frozenset({"h", "h_each", "sum_h", "phase", "mean_gain", "distance_m"})
OWN: frozenset[Quantity] = frozenset({"h", "phase", "mean_gain", "distance_m"})
"""Quantities that a device can know, each for itself; the others belong to the server's antennas."""


@dataclass(frozen=True)
class Knowledge:
    """The channel knowledge that devices and server need: the columns of the paper's Table 1, in finer steps.

    A method declares it as `knowledge`; its views then give these quantities, and raise on all others.

    h           complex coefficient of every device, after combining where the server has several antennas
    h_each      the same at every antenna (server only)
    sum_h       the sum over all devices at every antenna, as one common pilot reveals it (server only)
    phase       e^{j arg h}, for devices that can compensate their phase but not their amplitude
    mean_gain   Λ = E|h|²
    distance_m  distance from the server

    >>> Knowledge(device={"h"}).server
    frozenset()
    """

    device: Set[Quantity] = frozenset()
    """What each device knows of its own channel: `h`, `phase`, `mean_gain`, `distance_m`."""
    server: Set[Quantity] = frozenset()
    """What the server knows, any of the above."""
    fading: str = "arbitrary"
    """Fading that the method's design assumes; only shown in tables."""

    def __post_init__(self) -> None:
        for side in ("device", "server"):  # any set will do
            known = getattr(self, side)
            if isinstance(known, str) or not set(known) <= QUANTITIES:
                there = ", ".join(sorted(QUANTITIES))
                raise PluginError(f"Knowledge({side}={known!r}): give a set of what there is to know: {there}")
            object.__setattr__(self, side, frozenset(known))
