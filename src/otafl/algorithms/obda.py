"""OBDA: one-bit digital aggregation over the air: signs are sent, the majority wins.

G. Zhu, Y. Du, D. Gündüz, K. Huang, "One-Bit Over-the-Air Aggregation for Communication-Efficient Federated Edge
Learning", 2021. Above FedOAG's threshold devices send the signs s_i of their updates, and the server takes a sign:

    s_i = sign(Δ_i),   x̂_i = (γ/h_i) s_i/√d,   v = sign(Σ_{i∈A} (γ/√d) s_i + z),   x^{t+1} = x^t + η η_s v

A sign has no length: no norm is reported, and a net majority of k votes is heard wrongly with probability
Q(γ k/(√d σ_z)). With error feedback a device sends the sign of v_i = Δ_i + e_i and keeps e_i = v_i − η_s s_i:
what it has learnt, less the step that the server takes if it follows its vote.

Knows: its own h at each device.
Does not know: norms, channel statistics, h at the server.
Communicates: d channel uses; no side link.
Departures: see docs/algorithms/obda.md.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge
from otafl.radio.vectors import Vectors


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    unsent: Vectors | None
    """What each device has not sent, e_i; None without error feedback."""


def sign(values: Tensor) -> Tensor:
    """+1 or −1, and +1 for 0; NaN stays, so that a seed that diverges is seen."""
    return torch.where(values.isnan(), values, torch.where(values < 0, -1.0, 1.0).to(values.dtype))


@dataclass(frozen=True)
class OBDA:
    """Signs by truncated inversion, and a majority vote: one bit a coordinate, no norms."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    gamma: Gamma = 1e-9
    """γ: devices with |h_i| ≥ γ/√(d E_s) vote, as in FedOAG."""
    server_step: Annotated[float, Gt(0)] = 0.01
    """η_s: every coordinate of the model moves by η_t η_s in a round."""
    error_feedback: bool = False
    """Devices keep what a step of η_s in the direction of their sign leaves over, and add it to their next update."""

    def init(self, problem: Problem) -> State:
        """Start from x^0, with nothing kept."""
        return State(problem.initial, problem.vectors() if self.error_feedback else None)

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Active devices train from x^t and vote; the server moves every coordinate by the same length."""
        size, who, unsent = round.problem.num_params, round.active, state.unsent
        if unsent is None:
            signs = round.train(state.params, who).encode(sign, size, who)
        else:
            updates = round.train(state.params)
            signs = updates.encode(lambda update, left: sign(update + left), size, who, unsent.values)
            total = updates.dense() + unsent.values
            kept = torch.where(who[..., None], total - self.server_step * signs.values, total)
            unsent = Vectors(kept)
        scale = torch.where(who, self.gamma / math.sqrt(size) / torch.where(who, round.device.h, 1.0), 0.0)
        vote = sign(round.uplink(signs, scale, who)).to(state.params.dtype)
        return State(state.params + round.lr * self.server_step * vote, unsent), Info(active=who)
