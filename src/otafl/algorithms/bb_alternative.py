"""BB-alternative: broadband analog aggregation that alternates between the interior and the whole cell.

G. Zhu, Y. Wang, K. Huang, "Broadband Analog Aggregation for Low-Latency Federated Edge Learning", 2019; as BB-interior,
but in each round I_t is the interior or all devices: at random, as the FedOAG paper says, or in turn.

Knows: as BB-interior.
Does not know: as BB-interior.
Communicates: as BB-interior.
Departures: see docs/algorithms/bb-alternative.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from otafl.algorithms.parts.broadband import Broadband


@dataclass(frozen=True)
class BBAlternative(Broadband):
    """BB-interior in some rounds, everybody scheduled in the others."""

    alternation: Literal["random", "strict"] = "random"
    """Each round interior or everybody with probability ½, or interior in even rounds."""

    def scheduled(self, distance_m: Tensor, draw: Callable[[str], Tensor]) -> Tensor:
        """The interior, or everybody, bool [T, S, M]."""
        if self.alternation == "random":
            interior_only = draw("schedule") < 0.5
        else:
            interior_only = (torch.arange(len(distance_m)) % 2 == 0)[:, None].expand(distance_m.shape[:2])
        return self.interior(distance_m) | ~interior_only[..., None]
