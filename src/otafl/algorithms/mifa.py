"""MIFA: memory-augmented FedAvg, without a radio.

X. Gu, K. Huang, J. Zhang, L. Huang, "Fast Federated Learning in the Presence of Arbitrary Device Unavailability",
2021. The latest update of every device stands in for it while it is away:

    i ∈ A: M_i ← x̃_i − x^t;   x^{t+1} = x^t + (η_g/m) Σ_i M_i

Devices keep their M_i and upload its change; the server keeps the sum. The result is the same.

Knows: its own h at each device, for who is active.
Does not know: radio.
Communicates: one error-free upload per active device and round.
Departures: M_i = 0 until a device is first active; the paper assumes that all are in round 0.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.engine.updates import Updates, own_references
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge
from otafl.radio.vectors import Vectors


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    memory: Vectors
    """Memory M_i of every device."""
    total: Tensor
    """Sum Σ M_i, which the server keeps, [S, P]."""


@dataclass(frozen=True)
class MIFA:
    """The latest update of every device stands in for it while it is away; no radio."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}), fading="none (error-free)")
    ideal_radio: ClassVar[bool] = True

    gamma: Gamma = 1e-9
    """γ decides who is active, as in FedOAG."""
    server_lr: Annotated[float, Gt(0)] = 1.0
    """Server learning rate η_g."""

    def init(self, problem: Problem) -> State:
        """Start from x^0, with M_i = 0."""
        return State(problem.initial, problem.vectors(), torch.zeros_like(problem.initial))

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Active devices train from x^t and upload how their memory changes."""
        active = round.active
        latest = round.train(state.params, active).end - state.params[:, None]
        change = Updates(latest, *own_references(state.memory.values), lr=1.0)
        total = state.total + round.uplink(change, active.double(), active)
        params = state.params + self.server_lr / round.problem.num_devices * total
        memory = Vectors(torch.where(active[..., None], latest, state.memory.values))
        return State(params, memory, total), Info(active=active)
