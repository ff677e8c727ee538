"""Air-FEEL: power control against the convergence bound, biased or unbiased.

X. Cao, G. Zhu, J. Xu, Z. Wang, S. Cui, "Optimized Power Control Design for Over-the-Air Federated Edge Learning",
2021, its FedAvg version, with an energy limit for each round. All devices transmit:

    x̂_i = r_i(|h_i|) e^{−j arg h_i} u_i,   D̂ = (a/m) (Σ h_i x̂_i + z),   b_i = a |h_i| r_i = min(c_i, a √(d E_s) |h_i|)

    biased:    c_i = 1, a minimises Σ E(b_i − 1)² + ν a²
    unbiased:  c_i with E b_i = 1, a minimises Σ (E b_i² − 1) + ν a² where that is possible (`design.unbiased`)

Knows: Λ_i of round 0 at the server, its own h at each device.
Does not know: h at the server, statistics at the devices.
Communicates: d channel uses and, when normalising, one scalar per device and round; (a, c_i) once.
Departures: see docs/algorithms/air-feel.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from otafl.algorithms.design import constant, unbiased
from otafl.algorithms.parts.memoryless import State, move
from otafl.algorithms.parts.truncated import full_amplitude
from otafl.algorithms.parts.uplink import NormLimit, Norms, bound_norms, reach, send
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class AirFEEL:
    """Everybody sends, inverting up to a factor designed from channel statistics; unbiased in the mean, or biased."""

    knowledge: ClassVar[Knowledge] = Knowledge(
        device=frozenset({"h"}), server=frozenset({"mean_gain"}), fading="block, known law"
    )

    regime: Literal["unbiased", "biased"] = "unbiased"
    """All expected weights 1/m ("unbiased"), or the least mean squared error ("biased")."""
    renormalise: bool = False
    """Make the expected weights of "biased" sum to 1; with much noise the optimum would shrink the mean."""
    norms: Norms = "normalise"
    """How vectors get norm at most 1: by the handshake, or clipped at `norm_limit`."""
    norm_limit: NormLimit = 10.0
    """Norm bound G, if norms are clipped."""

    def plan(self, server: View, problem: Problem, draw: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """From the gains of round 0: each device's largest amplitude c_i/a and the server's factor a/m."""
        gains = server.mean_gain
        s = reach(gains[0], problem).numpy()
        noise = problem.num_params * problem.noise_var_j
        if self.regime == "unbiased":
            a = unbiased.scale(s, noise)
            factor = unbiased.factors(a, s)
        else:
            a = constant.clipping(s, noise)
            factor = np.ones_like(s)
        total: Any = problem.num_devices  # Σ E b_i, where the design is unbiased
        if self.renormalise and self.regime == "biased":
            total = constant.clipped_moments(a, s)[0].sum(-1)
        total = total * problem.taking_part / problem.num_devices
        most, rescale = torch.as_tensor(factor / a[:, None]), torch.as_tensor(a / total)
        return {"most": most.expand(len(gains), -1, -1), "rescale": rescale.expand(len(gains), -1)}

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t and send."""
        updates = round.train(state.params)
        bounded = bound_norms(round, updates, round.everyone, self.norms, self.norm_limit)
        amplitude = torch.minimum(round.plan["most"], full_amplitude(round.device.h, round.problem))
        received = send(round, updates, bounded, amplitude)
        return move(round, state.params, received, round.plan["rescale"])
