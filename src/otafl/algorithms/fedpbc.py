"""FedPBC: postponed broadcast without a radio, the digital predecessor of FedOAG.

M. Xiang, S. Ioannidis, E. Yeh, C. Joe-Wong, L. Su, "Towards Bias Correction of FedAvg over Nonuniform and
Time-Varying Communications", 2023. Every device trains from its own model in every round; with the active set A

    x^{t+1} = mean_{i∈A} x̃_i;   i ∈ A: x_i ← x^{t+1} at the end of the round;   others: x_i ← x̃_i

Devices are active as in FedOAG, so that without noise the two give identical iterates.

Knows: its own h at each device, for who is active.
Does not know: radio.
Communicates: one error-free upload per active device and round.
Departures: none.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.engine.devices import Devices
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    devices: Devices
    """The devices' models x_i^t."""


@dataclass(frozen=True)
class FedPBC:
    """FedOAG without a radio: active devices are averaged, and receive the mean at the end of the round."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}), fading="none (error-free)")
    ideal_radio: ClassVar[bool] = True

    gamma: Gamma = 1e-9
    """γ decides who is active, as in FedOAG."""

    def init(self, problem: Problem) -> State:
        """Every device starts from x^0."""
        return State(problem.initial, problem.devices())

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """One round; uploads are measured against x^t and added to it again, which changes nothing."""
        active = round.active
        uploads = round.train(state.devices, reference=state.params)
        count = active.sum(-1, keepdim=True)
        mean = round.uplink(uploads, active / count.clamp(min=1).double(), active)
        params = torch.where(count > 0, state.params + round.lr * mean, state.params)
        return State(params, round.broadcast(params, active, state.devices, uploads)), Info(active=active)
