"""Receive beamforming: the server points its antennas so that the weakest device is heard best.

K. Yang, T. Jiang, Y. Shi, Z. Ding, "Federated Learning via Over-the-Air Computation", 2020: vanilla OTA with N
antennas. For a receive vector f with ‖f‖ = 1

    g = √(d E_s) min_i |f^H h_i|/B,   x̂_i = g (f^H h_i)*/|f^H h_i|² Δ_i,   D̂ = Re(f^H y)/(m g)

D̂ is always the mean of the Δ_i plus noise of standard deviation σ_z/(m g). The best f maximises min_i |f^H h_i|, which
is not convex: ascents of a soft minimum start from every antenna, from the sum of the channels and from the strongest
direction, for all rounds at once, and the best point of all that were visited is taken. With one antenna it is vanilla.

Knows: all h_i at every antenna of the server; the server tells each device its factor.
Does not know: channel statistics.
Communicates: d channel uses and one scalar per device and round; the server answers a complex number to each device.
Departures: see docs/algorithms/beamforming.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from otafl.algorithms.parts.memoryless import State
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge

TOGETHER = 64  # rounds whose vectors are found at a time, for the memory that it takes
SHARPNESS = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # of the soft minimum, in turn


def receive_vectors(h: Tensor, who: Tensor, steps: int) -> Tensor:
    """Receive vectors f with a large min over `who` of |f^H h_i|; h [..., M, N] to [..., N], of norm 1."""
    h = torch.where(who[..., None], h, 0.0)
    each = torch.where(who, torch.linalg.vector_norm(h, dim=-1), torch.inf)
    h = h / each.amin(-1)[..., None, None].clamp(min=torch.finfo(torch.float64).tiny)  # the weakest device has norm 1
    num_antennas = h.shape[-1]
    alone = torch.eye(num_antennas, dtype=h.dtype, device=h.device).expand(*h.shape[:-2], -1, -1)
    directions = h / torch.linalg.vector_norm(h, dim=-1, keepdim=True).clamp(min=1e-300)
    strongest = torch.linalg.eigh(directions.mT @ directions.conj()).eigenvectors[..., -1]
    f = torch.cat([alone, h.sum(-2)[..., None, :], strongest[..., None, :]], -2)  # starts [..., N + 2, N]
    f = f / torch.linalg.vector_norm(f, dim=-1, keepdim=True).clamp(min=1e-300)
    best, value = f, _power(f, h, who).amin(-1)
    for sharpness in SHARPNESS:
        for _ in range(steps):
            seen = torch.einsum("...kn,...mn->...km", f.conj(), h)  # f^H h_i
            power = _power(f, h, who)
            low = power.amin(-1, keepdim=True).clamp(min=1e-300)
            weight = torch.softmax(-sharpness * (power / low).log(), -1) / power.clamp(min=1e-300)  # 0 for inf
            step = torch.einsum("...km,...km,...mn->...kn", weight.to(h.dtype), seen.conj(), h)
            f = f + 0.7 * step / torch.linalg.vector_norm(step, dim=-1, keepdim=True).clamp(min=1e-300) / sharpness**0.7
            f = f / torch.linalg.vector_norm(f, dim=-1, keepdim=True)
            found = _power(f, h, who).amin(-1)
            better = found > value
            best, value = torch.where(better[..., None], f, best), torch.where(better, found, value)
        f = best
    place = value.argmax(-1)[..., None, None].expand(*value.shape[:-1], 1, num_antennas)
    chosen: Tensor = best.gather(-2, place).squeeze(-2)
    return chosen


def _power(f: Tensor, h: Tensor, who: Tensor) -> Tensor:
    """|f^H h_i|² of every receive vector and device [..., K, M]; infinite outside `who`."""
    power = torch.einsum("...kn,...mn->...km", f.conj(), h).abs().square()
    return torch.where(who[..., None, :], power, torch.inf)


@dataclass(frozen=True)
class Beamforming:
    """Vanilla with antennas that are pointed so that the weakest device is heard best."""

    knowledge: ClassVar[Knowledge] = Knowledge(server=frozenset({"h_each"}))

    steps: Annotated[int, Ge(1)] = 30
    """Steps of the ascent for each of six sharpnesses of the soft minimum."""

    def plan(self, server: View, problem: Problem, draw: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Receive vectors of all rounds as real and imaginary part, [T, S, N, 2]; with cohorts none: see `step`."""
        if problem.cohort:
            return {}
        parts = [
            receive_vectors(h, torch.ones(h.shape[:-1], dtype=torch.bool), self.steps)
            for h in torch.split(server.h_each, TOGETHER)
        ]
        return {"receive": torch.view_as_real(torch.cat(parts))}

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t and send."""
        problem, who = round.problem, round.everyone
        updates = round.train(state.params)
        bound = round.report(updates.norms(who), who).max()
        if problem.cohort:
            f = receive_vectors(round.server.h_each, who, self.steps)
        else:
            f = torch.view_as_complex(round.plan["receive"])
        seen = torch.einsum("sn,smn->sm", f.conj(), round.server.h_each)
        least = torch.where(who, seen.abs(), torch.inf).amin(-1)
        g = math.sqrt(problem.num_params * problem.symbol_energy_j) * least / torch.where(bound > 0, bound, 1.0)
        scale = torch.where(who, g[:, None] * seen.conj() / seen.abs().square().clamp(min=1e-300), 0.0)
        heard = round.uplink(updates, scale, who, "antennas")
        mean = torch.einsum("sn,snq->sq", f.conj().to(heard.dtype), heard).real
        rescale = torch.where(bound > 0, 1 / (problem.taking_part * g), 0.0)
        params = state.params + round.lr * mean * rescale[:, None].to(mean.dtype)
        noise = rescale * problem.noise_var_j**0.5
        return State(params), Info(active=who, norm_bound=bound, noise_std=noise)
