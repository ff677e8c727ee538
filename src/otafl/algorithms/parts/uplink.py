"""The analog uplink that the memoryless over-the-air methods share.

Device i sends (a_i/h_i) u_i, so that a_i u_i arrives, with an amplitude a_i ≤ √(d E_s) |h_i| and a vector of norm at
most 1, so the energy limit always holds. A method chooses the amplitudes, and the factor by which the server recovers
an average. There are two ways to make norms at most 1:

- "normalise": u_i = Δ_i/B, B = max ‖Δ_i‖ over the devices that transmit, by the handshake of FedOAG's Algorithm 1
  (lines 12–15): each reports its norm, the server answers B. The server also learns who transmits.
- "clip": u_i = Δ_i min(1/G, 1/‖Δ_i‖) with a fixed bound G and no side link.

Knows: the uplink, norms, the devices' own channels.
Does not know: what the vectors are, what the server does with their sum.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from otafl.core.contract import Problem
from otafl.core.round import Round
from otafl.engine.updates import Updates
from otafl.radio.csi import Reports

Norms = Literal["normalise", "clip"]
NormLimit = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class Bounded:
    """Vectors of norm at most 1, and what the server learns of them."""

    who: Tensor
    """Devices that transmit, bool [S, M]."""
    shrink: Tensor
    """‖u_i‖/‖Δ_i‖, [S, M] or [S, 1]."""
    limit: Tensor
    """B or G, [S]."""
    known: Tensor
    """True if the server knows that somebody sent; always true if norms are clipped, bool [S]."""
    reports: Reports | None
    """The norms ‖Δ_i‖ if they are reported, else None."""


@dataclass(frozen=True)
class Received:
    """What the server has after the uplink."""

    sum: Tensor
    """Σ a_i u_i + z, [S, P]."""
    bounded: Bounded
    arrived: Tensor
    """a_i ‖u_i‖/‖Δ_i‖, [S, M]; for the diagnostics."""


def reach(mean_gain: Tensor, problem: Problem) -> Tensor:
    """S_i = √(d Λ_i E_s)."""
    return (mean_gain * (problem.num_params * problem.symbol_energy_j)).sqrt()


def bound_norms(round: Round, updates: Updates, who: Tensor, norms: Norms, norm_limit: float) -> Bounded:  # noqa: A002
    """Make the norms of the devices `who` at most 1, by the handshake or by clipping."""
    mine = updates.norms(who)
    if norms == "clip":
        limit = torch.full_like(mine[:, 0], norm_limit)
        return Bounded(who, 1 / mine.clamp(min=norm_limit), limit, torch.ones_like(limit, dtype=torch.bool), None)
    reports = round.report(mine, who)
    largest = reports.max()
    shrink = torch.where(largest > 0, 1 / largest, 0.0)[:, None]  # if all norms are 0, nothing is sent
    return Bounded(who, shrink, largest, reports.count() > 0, reports)


def send(round: Round, updates: Updates, bounded: Bounded, amplitude: Tensor) -> Received:  # noqa: A002
    """Devices send with amplitudes a_i [S, M] or [S, 1]."""
    h = torch.where(bounded.who, round.device.h, 1.0)
    arrived = torch.where(bounded.who, amplitude * bounded.shrink, 0.0)
    return Received(round.uplink(updates, arrived / h, bounded.who), bounded, arrived)
