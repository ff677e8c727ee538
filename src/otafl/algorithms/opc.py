"""OPC: optimised power control, which minimises the error of every round's mean.

X. Cao, G. Zhu, J. Xu, K. Huang, "Optimized Power Control for Over-the-Air Computation in Fading Channels", 2020: its
optimum for known channels, in each round. With c_i = √(d E_s) |h_i| and b_i = min(1, a c_i)

    x̂_i = b_i/(a h_i) u_i,   D̂ = (a/m) (Σ h_i x̂_i + z) = (1/m) Σ b_i u_i + (a/m) z

a minimises Σ (1 − a c_i)₊² + ν a², ν = d σ_z². With c rising, a = max_k Σ_{j≤k} c_j/(ν + Σ_{j≤k} c_j²): strong devices
invert their channel, weak ones send at full energy.

Knows: all h_i at the server, its own h at each device.
Does not know: channel statistics.
Communicates: d channel uses and, when normalising, one scalar per device and round; the server broadcasts a.
Departures: see docs/algorithms/opc.md.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from otafl.algorithms.parts.memoryless import State, move
from otafl.algorithms.parts.truncated import full_amplitude
from otafl.algorithms.parts.uplink import NormLimit, Norms, bound_norms, send
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.knowledge import Knowledge


def best_scale(full: Tensor, noise: float) -> Tensor:
    """The a that minimises Σ (1 − a c_i)₊² + ν a², [S], for amplitudes c_i at full energy [S, M]."""
    rising = full.sort(-1).values
    return (rising.cumsum(-1) / (noise + rising.square().cumsum(-1))).max(-1).values


@dataclass(frozen=True)
class OPC:
    """Least error of every round's mean: strong devices invert, weak ones send at full energy."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}), server=frozenset({"h"}))

    renormalise: bool = False
    """Divide by Σ b_i instead of m, so that the weights sum to 1; with much noise the optimum shrinks the mean."""
    norms: Norms = "normalise"
    """How vectors get norm at most 1: by the handshake, or clipped at `norm_limit`."""
    norm_limit: NormLimit = 10.0
    """Norm bound G, if norms are clipped."""

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t and send."""
        problem, updates = round.problem, round.train(state.params)
        bounded = bound_norms(round, updates, round.everyone, self.norms, self.norm_limit)
        full = torch.where(round.everyone, full_amplitude(round.server.h, problem), 0.0)
        a = best_scale(full, problem.num_params * problem.noise_var_j)
        mine = torch.minimum(1 / a[:, None], full_amplitude(round.device.h, problem))  # b_i/a
        received = send(round, updates, bounded, mine)
        total = torch.minimum(1 / a[:, None], full).sum(-1)
        return move(round, state.params, received, 1 / total if self.renormalise else a / problem.taking_part)
