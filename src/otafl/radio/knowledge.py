"""Which channel knowledge a method declares, on which side; apart, so that listing it needs no tensors.

Knows: the columns of the paper's Table 1.
Does not know: channels, methods.
"""

from dataclasses import dataclass
from typing import Literal

Quantity = Literal["h", "mean_gain", "distance_m"]
QUANTITIES: frozenset[Quantity] = frozenset({"h", "mean_gain", "distance_m"})


@dataclass(frozen=True)
class Knowledge:
    """Who needs which channel knowledge: the columns of the paper's Table 1."""

    device: frozenset[Quantity] = frozenset()
    server: frozenset[Quantity] = frozenset()
    fading: str = "arbitrary"
    """Fading the method's design assumes."""
