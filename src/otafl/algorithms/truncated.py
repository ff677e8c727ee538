"""The truncated uplink with norm handshake that FedOAG and its memoryless ablation share.

Lines of the FedOAG paper's Algorithm 1 are in comments.

Knows: γ, the devices' own channels.
Does not know: what the vectors are, what the server does with their mean.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor

from otafl.algorithms.base import Problem, Round
from otafl.engine.updates import Updates
from otafl.radio.csi import View
from otafl.radio.scaling import inversion_threshold, truncated_inversion

Gamma = Annotated[float, Ge(1e-25), Le(1e6)]
"""The pre-scalar; beyond these bounds a received signal in float32 would under- or overflow."""


@dataclass(frozen=True)
class Heard:
    """What the server has after the uplink."""

    mean: Tensor
    """Noisy mean of the active devices' vectors, [S, P]; meaningless where nobody was active."""
    who: Tensor
    """Devices that reported, bool [S, M]."""
    any: Tensor
    """Whether anybody was active, bool [S, 1]."""
    norm_bound: Tensor
    """B_t, [S]."""


def above_threshold(device: View, problem: Problem, gamma: float) -> Tensor:
    """Line 10: A = {i : |h_i| ≥ γ/√(d E_s)}, a mask, known to the devices."""
    return device.h.abs() >= inversion_threshold(gamma, problem.num_params, problem.symbol_energy_j)


def heard_mean(round: Round, vectors: Updates, gamma: float) -> Heard:  # noqa: A002
    """Lines 12–18: report norms, learn B_t, send (γ/h_i) Δ_i/B_t, rescale by B_t/(γ|A|)."""
    active = round.active
    reports = round.report(vectors.norms(active), active)
    norm_bound = reports.max()  # B_t, computed by the server and sent back
    tx_scale = truncated_inversion(gamma, round.device.h, active, norm_bound)
    received = round.uplink(vectors, tx_scale, active)  # Σ γ Δ_i/B_t + z
    num_active = reports.count()
    rx_scale = norm_bound / (gamma * num_active.clamp(min=1).to(norm_bound.dtype))
    mean = received * rx_scale[:, None].to(received.dtype)
    return Heard(mean, reports.who, (num_active > 0)[:, None], norm_bound)
