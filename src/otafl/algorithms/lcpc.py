"""LCPC: low-complexity power control, one constant for all devices and rounds from channel statistics.

The FedOAG paper's Table 1 names it beside OPC. Its exact form is not public, so there are two candidates:

    truncate:  truncated inversion with a common γ,        a_i = γ where |h_i| ≥ γ/√(d E_s)
    clip:      inversion up to full power, a constant a,   a_i = min(1/a, √(d E_s) |h_i|)

Both minimise the expected error of the mean (`design.constant`); D̂ = (a/m) (Σ a_i u_i + z), or, renormalised, with
the sum of the expected amplitudes in place of m/a, so that the expected weights sum to 1.

Knows: Λ_i of round 0 at the server, its own h at each device.
Does not know: h at the server, statistics at the devices.
Communicates: d channel uses and, when normalising, one scalar per transmitting device and round; γ or a once.
Departures: see docs/algorithms/lcpc.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from otafl.algorithms.design import constant
from otafl.algorithms.parts.memoryless import State, move
from otafl.algorithms.parts.truncated import full_amplitude
from otafl.algorithms.parts.uplink import NormLimit, Norms, bound_norms, reach, send
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class LCPC:
    """One constant from channel statistics for all devices and rounds."""

    knowledge: ClassVar[Knowledge] = Knowledge(
        device=frozenset({"h"}), server=frozenset({"mean_gain"}), fading="Rayleigh"
    )

    form: Literal["clip", "truncate"] = "clip"
    """Inversion up to full power, or truncated inversion with a common threshold."""
    renormalise: bool = True
    """Make the expected weights sum to 1; with much noise the optimum shrinks the mean."""
    norms: Norms = "normalise"
    """How vectors get norm at most 1: by the handshake, or clipped at `norm_limit`."""
    norm_limit: NormLimit = 10.0
    """Norm bound G, if norms are clipped."""

    def plan(self, server: View, problem: Problem, draw: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The constants, from the gains of round 0: `most`, the largest amplitude, and the server's factor."""
        gains = server.mean_gain
        s = reach(gains[0], problem).numpy()
        noise, m = problem.num_params * problem.noise_var_j, problem.num_devices
        if self.form == "truncate":
            most, a = constant.truncation(s, noise)
            expected = most * np.exp(-((most[:, None] / s) ** 2)).sum(-1)
        else:
            a = constant.clipping(s, noise)
            most, expected = 1 / a, constant.clipped_moments(a, s)[0].sum(-1) / a
        rescale = (1 / expected if self.renormalise else a / m) * m / problem.taking_part
        constants = {"most": torch.as_tensor(most), "rescale": torch.as_tensor(rescale)}
        return {name: value.expand(len(gains), -1) for name, value in constants.items()}

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def active(self, device: View, problem: Problem) -> Tensor:
        """The devices that can reach γ; in the clipped form all of them."""
        full = full_amplitude(device.h, problem)
        return full >= problem.plan["most"][..., None] if self.form == "truncate" else torch.ones_like(full).bool()

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """The transmitting devices train from x^t and send."""
        full = full_amplitude(round.device.h, round.problem)
        amplitude = torch.minimum(round.plan["most"][:, None], full)
        updates = round.train(state.params, round.active)
        bounded = bound_norms(round, updates, round.active, self.norms, self.norm_limit)
        received = send(round, updates, bounded, amplitude)
        return move(round, state.params, received, round.plan["rescale"])
