"""Vanilla OTA: every device inverts its channel, and the weakest channel limits all.

K. Yang, T. Jiang, Y. Shi, Z. Ding, "Federated Learning via Over-the-Air Computation", 2020, with one antenna:

    weakest:  γ = √(d E_s) min_i |h_i|,           x̂_i = (γ/h_i) Δ_i/B,   D̂ = B/(m γ) (Σ h_i x̂_i + z)
    tight:    γ = √(d E_s) min_i |h_i|/‖Δ_i‖,     x̂_i = (γ/h_i) Δ_i,     D̂ = 1/(m γ) (Σ h_i x̂_i + z)

D̂ is always the mean of the Δ_i plus noise. Under Rayleigh fading the variance of that noise is infinite.

Knows: all h_i at the server, its own h at each device.
Does not know: channel statistics.
Communicates: d channel uses and, when normalising, one scalar per device and round; the server broadcasts γ.
Departures: see docs/algorithms/vanilla.md.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from otafl.algorithms.parts.memoryless import State, move
from otafl.algorithms.parts.truncated import full_amplitude
from otafl.algorithms.parts.uplink import NormLimit, Norms, bound_norms, send
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.errors import ConfigError
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class Vanilla:
    """Everybody inverts its channel, limited by the weakest: unbiased and noisy."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}), server=frozenset({"h"}))

    rule: Literal["weakest", "tight"] = "weakest"
    """Scale by the weakest channel and the largest norm, or by the worst ratio of the two ("tight": less noise)."""
    norms: Norms = "normalise"
    """How vectors get norm at most 1: by the handshake, or clipped at `norm_limit`."""
    norm_limit: NormLimit = 10.0
    """Norm bound G, if norms are clipped."""

    def __post_init__(self) -> None:
        if self.rule == "tight" and self.norms == "clip":
            raise ConfigError('algorithm.rule = "tight" needs the norms of this round; use norms = "normalise"')

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t and send."""
        updates = round.train(state.params)
        bounded = bound_norms(round, updates, round.everyone, self.norms, self.norm_limit)
        strongest = full_amplitude(round.server.h, round.problem)
        if self.rule == "tight" and bounded.reports is not None:
            share = bounded.reports.values * bounded.shrink  # ‖u_i‖ = ‖Δ_i‖/B: shorter vectors can be sent louder
            strongest = torch.where(share > 0, strongest / share, torch.inf)
        gamma = torch.where(round.everyone, strongest, torch.inf).min(-1).values
        gamma = torch.where(gamma.isfinite(), gamma, 1.0)  # all vectors are 0
        received = send(round, updates, bounded, gamma[:, None])
        return move(round, state.params, received, 1 / (round.problem.taking_part * gamma))
