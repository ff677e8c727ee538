"""Which channel knowledge a method declares, on which side; apart, so that listing it needs no tensors.

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
"""What a device can know: its own; the others are quantities of the server's antennas."""


@dataclass(frozen=True)
class Knowledge:
    """Who needs which channel knowledge: the columns of the paper's Table 1, and what lies between them.

    h           complex coefficient of every device, after combining where the server has several antennas
    h_each      that at every antenna (server only)
    sum_h       the sum over all devices at every antenna, which one common pilot shows (server only)
    phase       e^{j arg h}: a device that can compensate its phase, but not its amplitude
    mean_gain   Λ = E|h|²
    distance_m  where devices are

    >>> Knowledge(device={"h"}).server
    frozenset()
    """

    device: Set[Quantity] = frozenset()
    server: Set[Quantity] = frozenset()
    fading: str = "arbitrary"
    """Fading the method's design assumes."""

    def __post_init__(self) -> None:
        for side in ("device", "server"):  # any set will do
            known = getattr(self, side)
            if isinstance(known, str) or not set(known) <= QUANTITIES:
                there = ", ".join(sorted(QUANTITIES))
                raise PluginError(f"Knowledge({side}={known!r}): give a set of what there is to know: {there}")
            object.__setattr__(self, side, frozenset(known))
