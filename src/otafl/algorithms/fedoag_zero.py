"""FedOAG-zero: no threshold; the server chooses the noise, devices send what their energy allows and keep the rest.

A successor of FedOAG of this library's own (derivation and numbers: docs/algorithms/fedoag-zero.md). All m devices
train from the server's model x^t and transmit in every round. With p_i the progress of device i in this round and
e_i what it has kept, both in the unit of a gradient sum:

    B = max_i ‖p_i‖,   κ = √d σ_z/(ν m B)                    broadcast by the server
    Δ_i = e_i + p_i, shortened to b B where it is longer
    θ_i = min(1, √(d E_s)|h_i|/(κ ‖Δ_i‖)),   x̂_i = κ θ_i Δ_i/h_i,   e_i ← (1 − θ_i) Δ_i
    x^{t+1} = x^t + η/(κ m) (Σ_i h_i x̂_i + z)

so that the noise in x^{t+1} has norm ν η B (root mean square) in every world. A device keeps the product η e_i, so e_i
grows by η_t/η_{t+1} from round to round. Reports depend on x^t and the device's data only.

Knows: its own h at each device; the server its own receiver noise, and the norms ‖p_i‖ from the handshake.
Does not know: h at the server, who is near or far, channel statistics on any side.
Communicates: d channel uses and one scalar per device and round; the server broadcasts κ, B and x^{t+1} to everybody.
Departures: none, since it has no paper. If there is hardly any noise, κ is bounded from below.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from otafl.algorithms.parts.truncated import full_amplitude
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.engine.devices import Devices
from otafl.radio.knowledge import Knowledge

SMALLEST_GAIN = 1e-12  # with no noise, a device with this |h| could still send everything


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    devices: Devices
    """The models x^t + η e_i: the server's model plus what device i has kept."""


@dataclass(frozen=True)
class FedOAGZero:
    """No threshold: the server chooses the noise, devices send what they can and keep the rest."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    nu: Annotated[float, Gt(0), Le(1e12)] = 2.5
    """Noise level ν: the norm of the noise in a round's step over the largest progress."""
    backlog: Annotated[float, Ge(1), Le(1e12)] = 3.0
    """Backlog limit b: the longest vector a device may have to send over the largest progress; the rest is dropped."""

    def init(self, problem: Problem) -> State:
        """Nobody has anything to send."""
        return State(problem.initial, problem.devices())

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """One round."""
        problem, who = round.problem, round.everyone
        progress = round.train(state.params)

        # Handshake: norms of this round's progress to the server, B and κ to the devices.
        fresh = progress.norms(who)
        largest = round.report(fresh, who).max()
        noise = math.sqrt(problem.num_params * problem.noise_var_j) / (self.nu * problem.taking_part)
        least = SMALLEST_GAIN * math.sqrt(problem.num_params * problem.symbol_energy_j)
        sends = (largest > 0)[:, None] & who  # without any progress nobody sends
        kappa = torch.where(largest > 0, max(noise, least) / largest, 0.0)[:, None]

        # Devices: what they kept and what is new, at most b B of it, and of that as much as the energy allows.
        h = round.device.h
        innovation = round.carry(state.devices, progress, state.params)
        norms = innovation.norms(who)
        short = torch.where(sends & (norms > 0), self.backlog * largest[:, None] / norms, 1.0).clamp(max=1.0)
        affordable = full_amplitude(h, problem) / (kappa * short * norms)
        share = torch.where(sends, torch.where(norms > 0, affordable.clamp(max=1.0), 1.0), 0.0)
        received = round.uplink(innovation, kappa * short * share / torch.where(who & (h != 0), h, 1.0), who)

        # Server: rescale and add to x^t; everybody hears the new model, and keeps what was not sent.
        rescale = torch.where(largest > 0, 1 / (kappa[:, 0] * problem.taking_part), 0.0)
        params = state.params + round.lr * received * rescale[:, None].to(received.dtype)
        left = short * (1 - share)
        devices = round.broadcast(params, torch.ones_like(who), state.devices, innovation, unsent=left)
        columns = {
            "unsent_share": 1 - share,
            "forgotten_share": 1 - short,
            "waiting": torch.where(fresh > 0, left * norms / fresh, 0.0),
            "progress_share": torch.where(sends, fresh / largest[:, None], 0.0),
        }
        info = Info(
            active=who,
            norm_bound=(short * norms).max(-1).values,
            weights=short * share / problem.taking_part,
            noise_std=rescale * problem.noise_var_j**0.5,
            extra={name: torch.where(who, c, 0.0).sum(-1) / problem.taking_part for name, c in columns.items()}
            | {"largest_progress": largest},
        )
        return State(params, devices), info
