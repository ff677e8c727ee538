"""FSK-MV: a majority vote by two tones and energy detection; nobody knows any channel.

A. Şahin, B. Everette, S. S. M. Hoque, "Distributed Learning over a Wireless Network with FSK-Based Majority Vote",
2021. Every coordinate has two channel uses, a tone for + and one for −. A device puts √(2 E_s) e^{jθ} on the tone of
its sign, with a random phase θ for every device and coordinate, and nothing on the other:

    e_± = Σ_n |y_n^±|²,   v = sign(e_+ − e_−),   x^{t+1} = x^t + η η_s v

E[e_+ − e_−] = 2 E_s N Σ_i Λ_i s_i for N antennas: the noise cancels in the mean, and near devices outvote far ones.

Knows: nothing.
Does not know: any channel, phase, gain or norm, on either side.
Communicates: 2 d channel uses; no side link.
Departures: see docs/algorithms/fsk-mv.md.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from otafl.algorithms.obda import sign
from otafl.algorithms.parts.memoryless import State
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.knowledge import Knowledge


def tones(update: Tensor, tone: Tensor) -> Tensor:
    """√2 e^{jθ} on the tone of a coordinate's sign, 0 on the other; [n, P] to [n, 2 P]."""
    tone, against = tone.where(~update.isnan(), torch.nan), update < 0
    both = tone.new_empty(*update.shape, 2)
    both[..., 0], both[..., 1] = tone.where(~against, 0.0), tone.where(against, 0.0)
    return both.flatten(1)


@dataclass(frozen=True)
class FSKMV:
    """A vote by two tones and energy detection: no channel knowledge anywhere, twice the channel uses."""

    knowledge: ClassVar[Knowledge] = Knowledge()

    server_step: Annotated[float, Gt(0)] = 0.01
    """η_s: every coordinate of the model moves by η_t η_s in a round."""

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t and vote at full energy."""
        size, who = round.problem.num_params, round.everyone
        updates = round.train(state.params)
        angle = round.uniform("phases", who.shape[1] * size).mul_(2 * math.pi).view(*who.shape, size)
        tone = torch.polar(angle.new_full((), math.sqrt(2)), angle)
        signal = updates.encode(tones, 2 * size, who, tone)
        # a hair below √E_s, since √2 e^{jθ} in float32 may be a rounding above √2
        scale = who.double() * (math.sqrt(round.problem.symbol_energy_j) * (1 - 1e-6))
        energy = round.uplink(signal, scale, who, "energy").reshape(-1, size, 2)
        vote = sign(energy[..., 0] - energy[..., 1]).to(state.params.dtype)
        return State(state.params + round.lr * self.server_step * vote), Info(active=who)
