"""COTAF: model differences, scaled by the largest of all devices, over truncated inversion.

T. Sery, N. Shlezinger, K. Cohen, Y. C. Eldar, "Over-the-Air Federated Learning from Heterogeneous Data", 2021. With
h_min the threshold on |h_i|, B = max ‖Δ_i‖ over all devices and γ = h_min √(d E_s)

    A = {i : |h_i| ≥ h_min},   x̂_i = (γ/h_i) Δ_i/B,   x^{t+1} = x^t + η B/(γ|A|) (Σ_{i∈A} h_i x̂_i + z)

As training converges the Δ_i become short, B falls, and with it the noise in x^{t+1}.

Knows: its own h at each device; the server learns every norm, and how many devices transmit.
Does not know: channel statistics, h at the server.
Communicates: d channel uses, one scalar per device and round, and one more per active device, by which |A| is known.
Departures: see docs/algorithms/cotaf.md.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from otafl.algorithms.parts.memoryless import State
from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class COTAF:
    """Truncated inversion, scaled by the largest update of all devices: noise falls as training converges."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    gamma: Gamma = 1e-9
    """γ = h_min √(d E_s): devices with |h_i| ≥ h_min transmit; the same knob as FedOAG's."""

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Everybody trains from x^t and reports a norm; strong channels transmit."""
        updates, everyone = round.train(state.params), round.everyone
        norms = updates.norms(everyone)
        bound = round.report(norms, everyone).max()
        active = everyone & above_threshold(round.device, round.problem, self.gamma)
        count = round.report(active.double(), active).count()
        scale = (torch.where(bound > 0, 1 / bound, 0.0) * self.gamma)[:, None]  # if all norms are 0, nothing is sent
        sent = torch.where(active, scale, 0.0)
        heard = round.uplink(updates, sent / torch.where(active, round.device.h, 1.0), active)
        rescale = bound / self.gamma / count.clamp(min=1)
        params = torch.where(
            (count > 0)[:, None], state.params + round.lr * heard * rescale[:, None].to(heard.dtype), state.params
        )
        info = Info(
            active=active,
            norm_bound=torch.where(active, norms, 0.0).amax(-1),
            weights=rescale[:, None] * sent,
            noise_std=rescale * round.problem.noise_var_j**0.5,
        )
        return State(params), info
