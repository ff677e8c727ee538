"""CHARLES, in a form of ours: weak channels train longer, so that their averaged update is short enough to be inverted.

J. Mao, H. Yang, P. Qiu, J. Liu, A. Yener, "CHARLES: Channel-Quality-Adaptive Over-the-Air Federated Learning over
Wireless Networks", 2022. Every device takes τ_i local steps and sends its update per step, inverting its estimate ĥ_i:

    u_i = Δ_i/τ_i,   x̂_i = (γ/ĥ_i) u_i/G, scaled down to the energy limit
    x^{t+1} = x^t + η η_g s G/(m γ) (Σ h_i x̂_i + z)

The norm of an average of τ stochastic gradients falls as 1/√τ where their noise rules. So a device that would exceed
the limit ρ_i = γ/(√(d E_s) |ĥ_i|) times takes τ_i = τ_min ρ_i² steps, at most the s of `training.local_steps` (the
paper stops by norms during training; here steps follow from the channel beforehand).

Knows: its own h at each device, as it estimates it.
Does not know: channel statistics, h at the server.
Communicates: d channel uses; no side link.
Departures: see docs/algorithms/charles.md.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt

from otafl.algorithms.parts.memoryless import State
from otafl.algorithms.parts.truncated import Gamma, full_amplitude
from otafl.algorithms.parts.uplink import NormLimit
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class CHARLES:
    """Weak channels take more local steps, so that the update per step is shorter and can be inverted."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    gamma: Gamma = 1e-9
    """γ, the pre-scalar: what arrives of a vector of norm G."""
    norm_limit: NormLimit = 1.0
    """G: norm of an update per step that is sent in full at the threshold."""
    least_steps: Annotated[int, Ge(1)] = 2
    """τ_min: local steps of a device whose channel is strong enough; at most training.local_steps."""
    server_lr: Annotated[float, Gt(0)] = 1.0
    """Server learning rate η_g; with 1 and equal steps of all devices, a step is that of FedAvg."""

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t, as long as their channels ask for, and send."""
        problem, who = round.problem, round.everyone
        full, tiny = full_amplitude(round.device.h, problem), torch.finfo(torch.float64).tiny
        most = float(problem.local_steps)
        excess = (self.gamma / full.clamp(min=tiny)).square()  # ρ²
        steps = (self.least_steps * excess).ceil().clamp(min=min(float(self.least_steps), most), max=most)
        updates = round.train(state.params, steps=steps.long())
        norms = updates.norms(who) / steps  # ‖u_i‖
        wanted = self.gamma / self.norm_limit  # of u_i, as it should arrive
        allowed = full / norms.clamp(min=tiny)
        sends = who & (full > 0)
        arrives = torch.where(sends, allowed.clamp(max=wanted), 0.0)
        heard = round.uplink(updates, arrives / steps / torch.where(sends, round.device.h, 1.0), who)
        rescale = torch.full_like(norms[:, 0], self.server_lr * most / (problem.taking_part * wanted))
        params = state.params + round.lr * heard * rescale[:, None].to(heard.dtype)
        count = who.sum(-1).clamp(min=1)
        info = Info(
            active=who,
            weights=rescale[:, None] * arrives / steps,
            noise_std=rescale * problem.noise_var_j**0.5,
            extra={
                "steps_taken": torch.where(who, steps, 0.0).sum(-1) / count,
                "sent_whole": (who & (allowed >= wanted)).sum(-1) / count,
            },
        )
        return State(params), info
