"""FedOAG-zero: no threshold; the server chooses the noise, devices send what their energy allows and keep the rest.

A successor of FedOAG of this library's own (derivation and numbers: docs/algorithms/fedoag-zero.md). All m devices
transmit in every round. With Δ_i = (x̃_i − x^t)/η, everything device i has not sent yet, and n_i = ‖Δ_i‖:

    B = max_i n_i,   κ = √d σ_z/(ν m B)                    broadcast by the server
    θ_i = min(1, √(d E_s)|h_i|/(κ n_i)),   x̂_i = κ θ_i Δ_i/h_i
    x^{t+1} = x^t + η/(κ m) (Σ_i h_i x̂_i + z)
    every i: x_i ← x^{t+1} + η (1 − θ_i) Δ_i

so that the noise in x^{t+1} has norm ν η B in every world, and the sum of the devices' models changes by the noise
alone. A far device sends small shares; what it keeps grows, B grows, κ falls, shares rise: it drains by itself.

Knows: its own h at each device; the server its own receiver noise, and the norms n_i from the handshake.
Does not know: h at the server, who is near or far, channel statistics on any side.
Communicates: d channel uses and one scalar per device and round; the server broadcasts κ and x^{t+1} to everybody.
Departures: none: it has no paper. Where there is no noise, κ is as small as a received signal can be.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from torch import Tensor

from otafl.algorithms.base import Info, Problem, Round
from otafl.algorithms.truncated import full_amplitude
from otafl.engine.devices import Devices
from otafl.radio.knowledge import Knowledge

SMALLEST_GAIN = 1e-12  # |h| of a device that would still send everything where there is no noise


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    devices: Devices
    """With their models x_i; everybody has received x^t."""


@dataclass(frozen=True)
class FedOAGZero:
    """No threshold: the server chooses the noise, devices send what they can and keep the rest."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))
    ideal_radio: ClassVar[bool] = False

    nu: Annotated[float, Gt(0), Le(1e12)] = 1.4
    """ν: norm of the noise in a round's step, in units of the largest innovation; without dimension."""

    def init(self, problem: Problem) -> State:
        """Every device starts from x^0."""
        return State(problem.initial, problem.devices())

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """One round."""
        problem, who = round.problem, round.everyone
        innovation = round.train(state.devices, reference=state.params)

        # Handshake: norms to the server, κ to the devices.
        norms = innovation.norms(who)
        bound = round.report(norms, who).max()
        noise = math.sqrt(problem.num_params * problem.noise_var_j) / (self.nu * problem.taking_part)
        least = SMALLEST_GAIN * math.sqrt(problem.num_params * problem.symbol_energy_j)
        kappa = torch.where(bound > 0, max(noise, least) / bound, 0.0)[:, None]  # if all norms are 0, nothing is sent

        # Devices: as much as the energy allows; 0 for who does not take part in this round.
        affordable = full_amplitude(round.device.h, problem) / (kappa * norms)
        share = torch.where(who, torch.where(norms > 0, affordable.clamp(max=1.0), 1.0), 0.0)
        received = round.uplink(innovation, kappa * share / torch.where(who, round.device.h, 1.0), who)

        # Server: rescale and add to x^t; everybody hears the new model and keeps what was not sent.
        rescale = torch.where(bound > 0, 1 / (kappa[:, 0] * problem.taking_part), 0.0)
        params = state.params + round.lr * received * rescale[:, None].to(received.dtype)
        everybody = torch.ones_like(who)
        devices = round.broadcast(params, everybody, state.devices, innovation, unsent=1 - share)
        info = Info(
            active=who,
            norm_bound=bound,
            weights=share / problem.taking_part,
            noise_std=rescale * problem.noise_var_j**0.5,
            extra={"unsent_share": torch.where(who, 1 - share, 0.0).sum(-1) / problem.taking_part},
        )
        return State(params, devices), info
