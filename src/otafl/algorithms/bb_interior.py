"""BB-interior: broadband analog aggregation that schedules the devices near the server.

G. Zhu, Y. Wang, K. Huang, "Broadband Analog Aggregation for Low-Latency Federated Edge Learning", 2019. The server
schedules I_t = {i : D_i ≤ R}; the scheduled devices invert their channels, truncated, with a common pre-scaler. The
equations are in `otafl.algorithms.parts.broadband`.

Knows: where devices are and Λ_i at the server, its own h (fading: and Λ_i) at each device; instantaneous: all h_i.
Does not know: h at the server, except in the instantaneous form.
Communicates: d channel uses and, when normalising or counting, one scalar per transmitting device and round.
Departures: see docs/algorithms/bb-interior.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from otafl.algorithms.parts.broadband import Broadband


@dataclass(frozen=True)
class BBInterior(Broadband):
    """Truncated inversion with a common scale among the devices near the server."""

    def scheduled(self, distance_m: Tensor, draw: Callable[[str], Tensor]) -> Tensor:
        """I_t = {i : D_i ≤ R}, bool [T, S, M]."""
        return self.interior(distance_m)
