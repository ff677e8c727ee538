"""OTA-FedAvg: FedOAG's truncated uplink without its memory.

Not a published method: it is FedOAG without the postponed broadcast, so the difference between the two is what
the gossip is worth. All devices receive x^t at the start of the round, and

    x^{t+1} = x^t + η B/(γ|A|) (Σ_{i∈A} h_i x̂_i + z),   Δ_i = (x̃_i − x^t)/η

with A, B and x̂_i as in FedOAG. With unequal channels it converges to the optimum of the p-weighted objective
(the paper's Remark 1), not to that of F.

Knows: its own h at each device; the server learns who is active and the norms from the handshake.
Does not know: channel statistics on any side, h at the server.
Communicates: d channel uses and one scalar per active device and round.
Departures: none.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from otafl.algorithms.parts.memoryless import State
from otafl.algorithms.parts.truncated import Gamma, above_threshold, heard_mean
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class OTAFedAvg:
    """FedOAG's uplink without memory: the average over whoever is active, biased by unequal channels."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    gamma: Gamma = 1e-9
    """γ, the pre-scalar, as in FedOAG."""

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Active devices train from x^t. Silent devices do not, since their work would be lost."""
        updates = round.train(state.params, round.active)
        heard = heard_mean(round, updates, self.gamma, round.active)
        params = torch.where(heard.who.any(-1, keepdim=True), state.params + round.lr * heard.mean, state.params)
        info = Info(active=heard.who, norm_bound=heard.norm_bound, weights=heard.weights, noise_std=heard.noise_std)
        return State(params), info
