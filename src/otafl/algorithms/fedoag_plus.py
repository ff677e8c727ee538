"""FedOAG-plus: FedOAG with less noise, by reporting another scalar in the handshake.

FedOAG scales all devices by γ/B_t. Most devices then use less energy than they may, and one stale device with a large
innovation sets the noise for all. Here the active device i reports r_i = ‖Δ_i‖/|h_i|. With ρ the median of the reports

    κ = √(d E_s)/max(ρ, θ_min max_i r_i),   θ_i = max(θ_min, min(1, ρ/r_i)),   x̂_i = κ θ_i Δ_i/h_i
    x^{t+1} = η/(κ|A|) (Σ_{i∈A} h_i x̂_i + z) + mean_{i∈A} x^{τ_i+1}
    i ∈ A: x_i ← x^{t+1} + η (1 − θ_i) Δ_i, what was not sent is kept;  anchor ← x^{t+1};   others: x_i ← x̃_i

θ_min = 1 sends everything ("tight scaling"). Noise is never more than FedOAG's at the same state, 1/κ ≤ B/γ.

Knows: its own h at each device; the server learns who is active and the ratios r_i.
Does not know: channel statistics on any side, h at the server. But its reports depend on |h_i|, and the server can
infer much of it from them: see `otafl check fedoag-plus`.
Communicates: d channel uses and one scalar per active device and round; the server broadcasts ρ and κ.
Departures: none: see docs/algorithms/fedoag-plus.md for its derivation.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from otafl.algorithms.parts.gossip import Keeping, State, active_now, anchors_of, first_state, stored
from otafl.algorithms.parts.threshold import Threshold, next_gamma
from otafl.algorithms.parts.truncated import above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import Reports, View
from otafl.radio.knowledge import Knowledge

NOISE_WEIGHT = 0.01  # of an adaptive γ; smaller than FedOAG's, since only a lower bound of the signal is known


def median(reports: Reports) -> Tensor:
    """Middle report, or the mean of the two middle ones, [S]; 0 where no report came."""
    rising = torch.where(reports.who, reports.values, torch.inf).sort(-1).values
    count = reports.count()[:, None]
    middle = torch.cat([(count - 1).clamp(min=0) // 2, count // 2], -1).clamp(max=rising.shape[-1] - 1)
    return torch.where(count[:, 0] > 0, rising.gather(-1, middle).mean(-1), 0.0)


@dataclass(frozen=True)
class FedOAGPlus:
    """FedOAG with less noise: scaled by the reports' median, what exceeds it is kept for later."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    gamma: Threshold = 1e-9
    """γ, as FedOAG's: a device is active if |h_i| ≥ γ/√(d E_s). Or "adaptive"."""
    anchors: Keeping = "kept"
    """How the server keeps the models its devices last received: as they are, or rounded to 16 bits."""
    theta_min: Annotated[float, Ge(0), Le(1)] = 0.5
    """Smallest share of its innovation that an active device sends; 1 sends everything."""

    @property
    def downlink_errors(self) -> bool:
        """As FedOAG's."""
        return self.gamma != "adaptive" and self.anchors == "kept"

    def init(self, problem: Problem) -> State:
        """As FedOAG's."""
        return first_state(problem, self.gamma, self.anchors, NOISE_WEIGHT)

    def active(self, device: View, problem: Problem) -> Tensor | None:
        """As FedOAG's."""
        return None if self.gamma == "adaptive" else above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """FedOAG's round with another handshake."""
        problem, innovation = round.problem, round.train(state.devices)
        gamma, active = active_now(state, round, self.gamma)

        # Handshake: one scalar each way.
        h = torch.where(active, round.device.h, 1.0)
        norms = innovation.norms(active)
        mine = norms / h.abs()
        reports = round.report(mine, active)
        middle, largest = median(reports), reports.max()
        scale = torch.maximum(middle, self.theta_min * largest)
        kappa = torch.where(scale > 0, (problem.num_params * problem.symbol_energy_j) ** 0.5 / scale, 0.0)

        # Devices: send the share θ_i.
        share = torch.where(mine > 0, (middle[:, None] / mine).clamp(self.theta_min, 1.0), 1.0)
        received = round.uplink(innovation, kappa[:, None] * share / h, active)

        # Server: rescale and add the mean anchor; if all innovations are 0, nothing was sent.
        num_active = reports.count().clamp(min=1)
        rescale = torch.where(kappa > 0, 1 / (kappa * num_active), 0.0)
        mean = received * rescale[:, None].to(received.dtype)
        heard = (reports.count() > 0)[:, None]
        params = torch.where(heard, round.lr * mean + anchors_of(state.devices).mean(reports.who), state.params)

        # Postponed broadcast to the active devices, which keep what they have not sent.
        left, kept = 1 - share, stored(params, self.anchors)
        devices = round.broadcast(params, reports.who, state.devices, innovation, unsent=left, stored=kept)

        columns = {"unsent_share": (left * active).sum(-1) / num_active}
        if (
            state.gamma is not None
        ):  # adaptive: the signal that would arrive if all devices were just above the threshold
            columns["gamma"] = state.gamma.clone()
            asked = torch.maximum(middle[:, None], self.theta_min * reports.values)
            sent = (kappa[:, None] * torch.minimum(reports.values, asked)).square().sum(-1)
            at_least = sent * state.gamma**2 / (problem.num_params * problem.symbol_energy_j)
            gamma = next_gamma(state.gamma, reports.count(), at_least, problem, NOISE_WEIGHT)
        info = Info(
            active=reports.who,
            norm_bound=norms.max(-1).values,
            anchors=anchors_of(devices).count(),
            weights=torch.where(active, share / num_active[:, None], 0.0),
            noise_std=rescale * problem.noise_var_j**0.5,
            extra=columns,
        )
        return State(params, devices, gamma if isinstance(gamma, Tensor) else None), info
