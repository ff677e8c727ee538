"""FedAU: weights from the mean of participation intervals, without a radio.

S. Wang, M. Ji, "A Lightweight Method for Tackling Unknown Participation Statistics in Federated Averaging", 2023. A
device that is heard with probability p_i counts 1/p_i-fold, and estimates 1/p_i from its own intervals:

    x^{t+1} = x^t + (η_g η/m) Σ_{i∈A} ω_i Δ_i,   ω_i the mean of device i's intervals (otafl.algorithms.parts.intervals)

Knows: its own h at each device, for who is active.
Does not know: radio, participation statistics.
Communicates: one error-free upload per active device and round.
Departures: none.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from otafl.algorithms.parts.intervals import Intervals
from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    intervals: Intervals


@dataclass(frozen=True)
class FedAU:
    """Active devices count as often as they estimate that they are away; no radio."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}), fading="none (error-free)")
    ideal_radio: ClassVar[bool] = True

    gamma: Gamma = 1e-9
    """γ decides who is active, as in FedOAG."""
    cutoff: Annotated[int, Ge(1)] = 50
    """K: longest interval that is recorded."""
    server_lr: Annotated[float, Gt(0)] = 1.0
    """Server learning rate η_g."""

    def init(self, problem: Problem) -> State:
        """Start from x^0, with ω_i = 1."""
        return State(problem.initial, first_intervals(problem))

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Active devices train from x^t."""
        active = round.active
        updates = round.train(state.params, active)
        weights = torch.where(active, state.intervals.mean, 0.0) * (self.server_lr / round.problem.num_devices)
        params = state.params + round.lr * round.uplink(updates, weights, active)
        return State(params, state.intervals.after(active, self.cutoff)), Info(active=active, weights=weights)


def first_intervals(problem: Problem) -> Intervals:
    """No interval recorded, for every device."""
    num_seeds = problem.initial.shape[0]
    return Intervals.none(torch.zeros(num_seeds, problem.num_devices, dtype=torch.bool, device=problem.initial.device))
