"""FedAWE: adaptive weighting by echoes, without a radio.

M. Xiang, S. Ioannidis, E. Yeh, C. Joe-Wong, L. Su, "Efficient Federated Learning against Heterogeneous and
Non-stationary Client Unavailability", 2024. Only active devices train, from their own, possibly stale, models, and
their work is multiplied by the rounds they were away: with k_i = t − τ_i, τ_i the last active round (−1 at the start),

    x^{t+1} = mean_{i∈A} (x_i + η_g k_i (x̃_i − x_i));   i ∈ A: x_i ← x^{t+1};   others unchanged

Knows: its own h at each device, for who is active.
Does not know: radio.
Communicates: one error-free upload per active device and round.
Departures: the averaged step is not clipped unless asked for (`step_limit`).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.engine.devices import Devices
from otafl.engine.updates import Updates, shared_reference
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    devices: Devices
    """The devices' models x_i^t."""
    last_active: Tensor
    """τ_i, int [S, M]."""


@dataclass(frozen=True)
class FedAWE:
    """Active devices count their work as often as they were away; no radio."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}), fading="none (error-free)")
    ideal_radio: ClassVar[bool] = True

    gamma: Gamma = 1e-9
    """γ decides who is active, as in FedOAG."""
    server_lr: Annotated[float, Gt(0)] = 1.0
    """Server learning rate η_g."""
    step_limit: Annotated[float, Gt(0)] | None = None
    """Longest step of the server; 0.5 in the authors' code, none here by default."""

    def init(self, problem: Problem) -> State:
        """Every device starts from x^0."""
        devices = problem.devices()
        return State(problem.initial, devices, torch.full_like(devices.models[..., 0], -1, dtype=torch.int64))

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """One round; uploads are measured against x^t and added to it again, which changes nothing."""
        active, start = round.active, state.devices.models
        trained = round.train(state.devices, active)
        echo = self.server_lr * (round.t - state.last_active).to(start.dtype)
        uploaded = torch.lerp(start, trained.end, echo[..., None])
        uploads = Updates(uploaded, *shared_reference(state.params, round.problem.num_devices), round.lr)
        count = active.sum(-1, keepdim=True)
        mean = round.uplink(uploads, active / count.clamp(min=1).double(), active)
        move = round.lr * mean
        if self.step_limit is not None:
            length = torch.linalg.vector_norm(move, dim=-1, keepdim=True)
            move = move * (self.step_limit / length.clamp(min=self.step_limit))
        params = torch.where(count > 0, state.params + move, state.params)
        devices = round.broadcast(params, active, state.devices, trained)
        return State(params, devices, torch.where(active, round.t, state.last_active)), Info(active=active)
