"""FedOAG-plus: FedOAG with less noise, by another scalar in the handshake.

FedOAG scales everybody by γ/B_t: the energy limit is met with slack unless the weakest active device also has the
largest innovation, and one stale device with a huge innovation sets the noise for all. Here active device i reports
r_i = ‖Δ_i‖/|h_i|, and with ρ the median of the reports

    κ = √(d E_s)/max(ρ, θ_min max_i r_i),   θ_i = max(θ_min, min(1, ρ/r_i)),   x̂_i = κ θ_i Δ_i/h_i
    x^{t+1} = η/(κ|A|) (Σ_{i∈A} h_i x̂_i + z) + mean_{i∈A} x^{τ_i+1}
    i ∈ A: x_i ← x^{t+1} + η (1 − θ_i) Δ_i, what was not sent is kept;  anchor ← x^{t+1};   others: x_i ← x̃_i

θ_min = 1 sends everything ("tight scaling"). Noise is never more than FedOAG's at the same state, 1/κ ≤ B/γ.

Knows: its own h at each device; the server learns who is active and the ratios r_i.
Does not know: channel statistics on any side, h at the server. Its reports depend on |h_i| and tell the server much of
it, as `otafl check fedoag-plus` says.
Communicates: d channel uses and one scalar per active device and round; the server broadcasts ρ and κ.
Departures: none: see docs/algorithms/fedoag-plus.md for its derivation.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from otafl.algorithms.base import Info, Round
from otafl.algorithms.gossip import Gossip, State
from otafl.engine.rows import blend_rows
from otafl.radio.csi import Reports
from otafl.radio.knowledge import Knowledge


def median(reports: Reports) -> Tensor:
    """Middle report, or the mean of the two middle ones, [S]; 0 where no report came."""
    rising = torch.where(reports.who, reports.values, torch.inf).sort(-1).values
    count = reports.count()[:, None]
    middle = torch.cat([(count - 1).clamp(min=0) // 2, count // 2], -1).clamp(max=rising.shape[-1] - 1)
    return torch.where(count[:, 0] > 0, rising.gather(-1, middle).mean(-1), 0.0)


@dataclass(frozen=True)
class FedOAGPlus(Gossip):
    """FedOAG with less noise: scaled by the reports' median, what exceeds it is kept for later."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))
    noise_weight: ClassVar[float] = 0.01  # against a signal of which only a lower bound is known

    theta_min: Annotated[float, Ge(0), Le(1)] = 0.5
    """Least share of its innovation that an active device sends; 1 sends everything, 0 would never drain."""

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """FedOAG's round with another handshake."""
        anchors, problem = state.anchors, round.problem
        gamma, active = self.listen(state, round)
        innovation = round.train(state.local_params, reference=(anchors.pool, anchors.slot))

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
        params = torch.where(heard, round.lr * mean + anchors.mean(reports.who), state.params)

        # Postponed broadcast to the active devices, which keep what they have not sent.
        left = 1 - share
        local = blend_rows(innovation.end, reports.who, params, left, (anchors.pool, anchors.slot), round.donates)

        def at_least() -> Tensor:
            """Received energy of devices that are just above the threshold."""
            asked = torch.maximum(middle[:, None], self.theta_min * reports.values)
            sent = (kappa[:, None] * torch.minimum(reports.values, asked)).square().sum(-1)
            return sent * gamma**2 / (problem.num_params * problem.symbol_energy_j)

        state, columns = self.follow(state, round, reports.who, params, local, at_least)
        info = Info(
            active=reports.who,
            norm_bound=norms.max(-1).values,
            anchors=state.anchors.count(),
            weights=torch.where(active, share / num_active[:, None], 0.0),
            noise_std=rescale * problem.noise_var_j**0.5,
            extra={"unsent_share": (left * active).sum(-1) / num_active, **columns},
        )
        return state, info
