"""FedVARP: the latest updates of all devices as a control for the variance of partial participation, without a radio.

D. Jhunjhunwala, P. Sharma, A. Nagarkatti, G. Joshi, "FedVARP: Tackling the Variance Due to Partial Client
Participation in Federated Learning", 2022. The server keeps the latest update y_i of every device:

    D̂ = (1/|A|) Σ_{i∈A} (Δ_i − y_i) + (1/m) Σ_j y_j,   x^{t+1} = x^t + η_g η D̂,   i ∈ A: y_i ← Δ_i

The model rests in rounds in which nobody is active.

MIFA puts Δ_i in y_i's place and weighs the change by 1/m; FedVARP weighs it by 1/|A|.

Knows: its own h at each device, for who is active.
Does not know: radio.
Communicates: one error-free upload per active device and round.
Departures: see docs/algorithms/fedvarp.md; y_i = 0 until a device is first active, as in the paper.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from otafl.algorithms.mifa import State
from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.engine.updates import Updates, own_references
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge
from otafl.radio.vectors import Vectors


@dataclass(frozen=True)
class FedVARP:
    """The change of active devices' updates on top of everybody's latest; no radio."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}), fading="none (error-free)")
    ideal_radio: ClassVar[bool] = True

    gamma: Gamma = 1e-9
    """γ decides who is active, as in FedOAG."""
    server_lr: Annotated[float, Gt(0)] = 1.0
    """Server learning rate η_g."""

    def init(self, problem: Problem) -> State:
        """Start from x^0, with y_i = 0."""
        return State(problem.initial, problem.vectors(), torch.zeros_like(problem.initial))

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Active devices train from x^t and upload how their update changes."""
        active = round.active
        latest = (round.train(state.params, active).end - state.params[:, None]) / round.lr
        change = round.uplink(Updates(latest, *own_references(state.memory.values), lr=1.0), active.double(), active)
        count = active.sum(-1, keepdim=True).clamp(min=1)
        mean = change / count + state.total / round.problem.num_devices
        memory = Vectors(torch.where(active[..., None], latest, state.memory.values))
        moved = state.params + round.lr * self.server_lr * mean
        params = torch.where(active.any(-1, keepdim=True), moved, state.params)
        return State(params, memory, state.total + change), Info(active=active)
