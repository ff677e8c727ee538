"""FedAU over the air: FedOAG's uplink, with every vector multiplied by its device's own ω_i.

S. Wang, M. Ji, 2023 (see `otafl.algorithms.fedau`), whose weights live at the devices, so that truncated inversion can
carry them. With u_i = ω_i Δ_i, A and B = max_{i∈A} ‖u_i‖ as in FedOAG

    x̂_i = (γ/h_i) u_i/B,   x^{t+1} = x^t + η B/(γ m) (Σ_{i∈A} h_i x̂_i + z)

Knows: its own h at each device; the server learns who is active and the norms.
Does not know: channel or participation statistics, h at the server.
Communicates: d channel uses and one scalar per active device and round.
Departures: the over-the-air form is ours; see docs/algorithms/ota-fedau.md.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from otafl.algorithms.fedau import State, first_intervals
from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class OTAFedAU:
    """FedAU's weights on FedOAG's uplink: unbiased without memory of models, noisier for devices long away."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    gamma: Gamma = 1e-9
    """γ, the pre-scalar, as in FedOAG."""
    cutoff: Annotated[int, Ge(1)] = 50
    """K: longest interval that is recorded."""

    def init(self, problem: Problem) -> State:
        """Start from x^0, with ω_i = 1."""
        return State(problem.initial, first_intervals(problem))

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Active devices train from x^t and send ω_i Δ_i."""
        active, omega = round.active, state.intervals.mean
        updates = round.train(state.params, active)
        norms = updates.norms(active)
        reports = round.report(norms * omega, active)
        bound = reports.max()
        scale = (torch.where(bound > 0, 1 / bound, 0.0) * self.gamma)[:, None]
        sent = torch.where(active, scale * omega, 0.0)
        heard = round.uplink(updates, sent / torch.where(active, round.device.h, 1.0), active)
        rescale = torch.where(reports.count() > 0, bound / (self.gamma * round.problem.num_devices), 0.0)
        params = state.params + round.lr * heard * rescale[:, None].to(heard.dtype)
        info = Info(
            active=active,
            norm_bound=torch.where(active, norms, 0.0).amax(-1),
            weights=rescale[:, None] * sent,
            noise_std=rescale * round.problem.noise_var_j**0.5,
        )
        return State(params, state.intervals.after(active, self.cutoff)), info
