"""SCA: pre-scalers designed from channel statistics, trading bias against noise.

F. M. A. Abrar and N. Michelusi, "Non-convex over-the-air heterogeneous federated learning: a bias-variance trade-off"
(arXiv 2510.26722) and its predecessors (2403.19849, 2503.06078), named after the successive convex approximation
that finds the pre-scalers (`otafl.algorithms.design.sca` has the bound and the solvers):

    χ_i = 1{|h_i| ≥ γ_i/√(d E_s)},   x̂_i = χ_i (γ_i/h_i) u_i,   D̂ = (1/α) (Σ h_i x̂_i + z),   α = Σ E[γ_i χ_i]

Knows: Λ_i at the server, of round 0 unless refreshed; its own h, and the γ_i it was sent, at each device.
Does not know: h at the server, statistics at the devices.
Communicates: d channel uses and, when normalising, one scalar per active device and round; γ_i at every design.
Departures: see docs/algorithms/sca.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from otafl.algorithms.design import sca
from otafl.algorithms.parts.memoryless import State, move
from otafl.algorithms.parts.truncated import full_amplitude
from otafl.algorithms.parts.uplink import NormLimit, Norms, bound_norms, reach, send
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class SCA:
    """Pre-scalers designed once from channel statistics, trading bias against noise."""

    knowledge: ClassVar[Knowledge] = Knowledge(
        device=frozenset({"h"}), server=frozenset({"mean_gain"}), fading="Rayleigh"
    )

    omega: Annotated[float, Gt(0)] = 1e-2
    """Weight ω = L η_eff of the variance in the bound; the weight of the bias is m κ²."""
    kappa: Annotated[float, Ge(0)] = 1.0
    """Heterogeneity κ of the devices' gradients, in units of the norm bound."""
    gradient_variance: Annotated[float, Ge(0)] = 0.0
    """Variance σ_i² of a device's vector in units of the squared norm bound, the same for all devices."""
    design: Literal["optimised", "min-noise", "zero-bias"] = "optimised"
    """Minimise the bound, or use one of the two closed-form designs: least noise, no bias."""
    solver: Literal["exact", "successive"] = "exact"
    """Nested root finding, or successive convex approximation; they find the same optimum."""
    refresh: Literal["never", "every", "oracle"] = "never"
    """Design once from the gains of round 0, again every `refresh_rounds`, or in every round."""
    refresh_rounds: Annotated[int, Ge(1)] = 50
    """Rounds between designs with refresh = "every"."""
    norms: Norms = "normalise"
    """How vectors get norm at most 1: by the handshake, or clipped at `norm_limit`."""
    norm_limit: NormLimit = 10.0
    """Norm bound G, if norms are clipped."""

    def plan(self, server: View, problem: Problem, draw: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """γ_i and 1/α of every round."""
        s = reach(server.mean_gain, problem).numpy()
        period = {"never": len(s), "every": self.refresh_rounds, "oracle": 1}[self.refresh]
        designed, use = np.unique(s[::period].reshape(-1, s.shape[2]), axis=0, return_inverse=True)
        gamma = self.prescalers(designed, problem)
        rescale = problem.num_devices / problem.taking_part / sca.amplitudes(gamma, designed).sum(-1)
        rounds = torch.as_tensor(use.reshape(-1, s.shape[1])).repeat_interleave(period, 0)[: len(s)]
        return {"gamma": torch.as_tensor(gamma)[rounds], "rescale": torch.as_tensor(rescale)[rounds]}

    def prescalers(self, reaches: sca.Array, problem: Problem) -> sca.Array:
        """γ_i for reaches S_i [..., M]."""
        if self.design == "min-noise":
            return sca.min_noise(reaches)
        if self.design == "zero-bias":
            return sca.zero_bias(reaches)
        bound = (
            problem.num_params * problem.noise_var_j,
            problem.num_devices * self.kappa**2,
            self.omega,
            self.gradient_variance,
        )
        if self.solver == "exact":
            return sca.exact(reaches, *bound)
        return np.stack([sca.successive(row, *bound) for row in reaches])

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def active(self, device: View, problem: Problem) -> Tensor:
        """The devices that can reach their γ_i."""
        return full_amplitude(device.h, problem) >= problem.plan["gamma"]

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Active devices train from x^t and send."""
        updates = round.train(state.params, round.active)
        bounded = bound_norms(round, updates, round.active, self.norms, self.norm_limit)
        received = send(round, updates, bounded, round.plan["gamma"])
        return move(round, state.params, received, round.plan["rescale"])
