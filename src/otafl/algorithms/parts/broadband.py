"""What BB-interior and BB-alternative share: truncated inversion with one scale among the devices that are scheduled.

The two methods differ only in who is scheduled, I_t. With Λ_min the least mean gain in I_t and a threshold g

    γ = √(d E_s g Λ_min),   x̂_i = χ_i (γ/h_i) u_i,   D̂ = 1/(γ Σ_{I_t} q_i) (Σ h_i x̂_i + z)

    energy:         χ_i = 1{|h_i|² ≥ g Λ_min}: everybody who can afford γ,   q_i = exp(−g Λ_min/Λ_i)
    fading:         χ_i = 1{|h_i|² ≥ g Λ_i}: the same truncation for all,    q_i = e^{−g}
    instantaneous:  no truncation, γ = √(d E_s) min_{I_t} |h_i|: vanilla OTA among the scheduled

Knows: mean gains, who is scheduled, the devices' own channels.
Does not know: how devices are scheduled.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from otafl.algorithms.parts.memoryless import State, move
from otafl.algorithms.parts.truncated import full_amplitude
from otafl.algorithms.parts.uplink import NormLimit, Norms, bound_norms, reach, send
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.errors import ConfigError
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class Broadband(ABC):
    """Keys and steps of both methods; a method adds `scheduled`."""

    knowledge: ClassVar[Knowledge] = Knowledge(
        device=frozenset({"h"}), server=frozenset({"mean_gain", "distance_m"}), fading="Rayleigh"
    )

    interior_radius_m: Annotated[float, Gt(0)] = 900.0
    """Radius R within which devices are scheduled; 0.6 of the paper's cell radius."""
    form: Literal["energy", "fading", "instantaneous"] = "energy"
    """Who among the scheduled transmits."""
    truncation: Annotated[float, Gt(0)] = 0.5
    """Threshold g on the fading power; ½ has the largest effective gain √g e^{−g}."""
    divide_by: Literal["expected", "count"] = "expected"
    """Divide by the expected or by the actual number of transmitting devices, which needs the handshake."""
    distances: Literal["current", "initial"] = "current"
    """Whether the server knows the present positions or those of round 0."""
    norms: Norms = "normalise"
    """How vectors get norm at most 1: by the handshake, or clipped at `norm_limit`."""
    norm_limit: NormLimit = 10.0
    """Norm bound G, if norms are clipped."""

    def __post_init__(self) -> None:
        if self.divide_by == "count" and self.norms == "clip":
            raise ConfigError('algorithm.divide_by = "count" needs the handshake; use norms = "normalise"')
        needs = type(self).knowledge
        if self.form == "fading":
            needs = replace(needs, device=needs.device | {"mean_gain"})
        if self.form == "instantaneous":
            needs = replace(needs, server=needs.server | {"h"})
        object.__setattr__(self, "knowledge", needs)  # of this form, in place of the class's

    @abstractmethod
    def scheduled(self, distance_m: Tensor, draw: Callable[[str], Tensor]) -> Tensor:
        """I_t of every round, bool [T, S, M]."""

    def interior(self, distance_m: Tensor) -> Tensor:
        """The devices within R, bool [T, S, M]; rounding leaves nobody out at the edge."""
        return distance_m <= self.interior_radius_m * (1 + 1e-12)

    def plan(self, server: View, problem: Problem, draw: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Schedule, γ and the factor of every round; γ = 0 where nobody is scheduled."""
        distance_m, gains = server.distance_m, server.mean_gain
        if self.distances == "initial":
            distance_m, gains = distance_m[:1].expand_as(distance_m), gains[:1].expand_as(gains)
        scheduled = self.scheduled(distance_m, draw)
        anybody = scheduled.any(-1)
        if self.form == "instantaneous":
            full = full_amplitude(server.h, problem)
            gamma, prob = torch.where(scheduled, full, torch.inf).amin(-1), torch.ones_like(gains)
        else:
            least = torch.where(scheduled, gains, torch.inf).amin(-1)
            gamma = reach(self.truncation * least, problem)
            ratio = torch.ones_like(gains)
            if self.form == "energy":
                ratio = torch.where(scheduled, least[..., None] / gains, ratio)
            prob = torch.exp(-self.truncation * ratio)
        gamma = torch.where(anybody, gamma, 0.0)
        expected = torch.where(scheduled, prob, 0.0).sum(-1) * problem.taking_part / problem.num_devices
        rescale = torch.where(anybody, 1 / (gamma * expected), 0.0)
        return {"scheduled": scheduled, "gamma": gamma, "rescale": rescale}

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def active(self, device: View, problem: Problem) -> Tensor:
        """Scheduled devices above their threshold."""
        affords = full_amplitude(device.h, problem) >= problem.plan["gamma"][..., None]
        if self.form == "fading":  # implies the former, unless γ is of round 0 and the device has moved away
            affords &= device.h.abs().square() >= self.truncation * device.mean_gain
        return problem.plan["scheduled"] & affords

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """The transmitting devices train from x^t and send."""
        gamma, updates = round.plan["gamma"], round.train(state.params, round.active)
        bounded = bound_norms(round, updates, round.active, self.norms, self.norm_limit)
        received = send(round, updates, bounded, gamma[:, None])
        rescale = round.plan["rescale"]  # 0 in rounds for which nobody is scheduled: they change nothing
        if self.divide_by == "count" and bounded.reports is not None:
            rescale = torch.where(bounded.known, 1 / (gamma * bounded.reports.count()), 0.0)
        return move(round, state.params, received, rescale)
