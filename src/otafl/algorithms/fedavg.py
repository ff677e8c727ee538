"""Ideal FedAvg: every device is heard, without fading or noise.

B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, with uniform
weights 1/m, since the paper's objective is the plain mean of the F_i:

    x^{t+1} = x^t + η (1/m) Σ_i Δ_i,   Δ_i = (x̃_i − x^t)/η

Knows: nothing about channels.
Does not know: radio.
Communicates: m error-free uploads a round.
Departures: weights are uniform, not proportional to data.
"""

from dataclasses import dataclass
from typing import ClassVar

from otafl.algorithms.parts.memoryless import State
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class FedAvg:
    """Ideal FedAvg, error-free: the benchmark above all over-the-air methods."""

    knowledge: ClassVar[Knowledge] = Knowledge(fading="none (error-free)")
    ideal_radio: ClassVar[bool] = True

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t and the server averages."""
        updates = round.train(state.params)
        weights = round.everyone.double() / round.problem.taking_part
        mean_update = round.uplink(updates, weights, round.everyone)
        return State(state.params + round.lr * mean_update), Info(active=round.everyone)
