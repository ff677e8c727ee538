"""Blind reception: devices know nothing, and many server antennas make up for it.

M. M. Amiri, T. M. Duman, D. Gündüz, S. R. Kulkarni, H. V. Poor, "Blind Federated Edge Learning", 2021. Devices send
their updates as they are; the server knows only the sums s_n = Σ_i h_{i,n} that one common pilot reveals:

    x̂_i = √(d E_s) Δ_i/B,   D̂ = B/√(d E_s) Re(Σ_n s_n* y_n)/Σ_n |s_n|²

The weights w_i = Re Σ_n s_n* h_{i,n}/Σ_n |s_n|² sum to one in every round. With zero-mean fading and N antennas they go
to Λ_i/Σ_j Λ_j, with deviations that fall as 1/√N: near devices count more.

Knows: Σ_i h_i at every antenna of the server.
Does not know: any single channel, on either side.
Communicates: d channel uses and, when normalising, one scalar per device and round.
Departures: see docs/algorithms/blind.md.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from otafl.algorithms.parts.memoryless import State
from otafl.algorithms.parts.uplink import NormLimit, Norms, bound_norms
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class Blind:
    """No channel knowledge at devices; the server combines its antennas with the sum of all channels."""

    knowledge: ClassVar[Knowledge] = Knowledge(server=frozenset({"sum_h"}), fading="zero mean")

    norms: Norms = "normalise"
    """How vectors get norm at most 1: by the handshake, or clipped at `norm_limit`."""
    norm_limit: NormLimit = 10.0
    """Norm bound G, if norms are clipped."""

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t and send at the same amplitude, phases as they are."""
        problem, updates = round.problem, round.train(state.params)
        bounded = bound_norms(round, updates, round.everyone, self.norms, self.norm_limit)
        full = math.sqrt(problem.num_params * problem.symbol_energy_j)
        sent = torch.where(bounded.who, full * bounded.shrink, 0.0)
        heard = round.uplink(updates, sent, bounded.who, "antennas")
        pilot = round.server.sum_h
        strength = pilot.abs().square().sum(-1)
        combined = torch.einsum("sn,snq->sq", pilot.conj().to(heard.dtype), heard).real
        rescale = torch.where(bounded.known, bounded.limit / (full * strength), 0.0)
        params = state.params + round.lr * combined * rescale[:, None].to(combined.dtype)
        noise = rescale * strength.sqrt() * problem.noise_var_j**0.5
        return State(params), Info(active=bounded.who, norm_bound=bounded.limit, noise_std=noise)
