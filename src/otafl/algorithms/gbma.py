"""GBMA: devices correct their phases and nothing else.

T. Sery, K. Cohen, "On Analog Gradient Descent Learning over Multiple Access Fading Channels", 2020. With updates
clipped at G, u_i = Δ_i min(1, G/‖Δ_i‖), and r = √(d E_s)/G

    x̂_i = r e^{−j arg h_i} u_i,   x^{t+1} = x^t + η/(m r μ) (Σ |h_i| r u_i + z),   μ = (1/m) Σ_i E|h_i|

Amplitudes are constant, so a device's weight is its own |h_i|: E w_i = E|h_i|/(m μ), equal only where gains are. Where
‖Δ_i‖ ≥ G it sends at full energy, and is then parallel to OPC with much noise. E|h_i| = √(π Λ_i)/2 is Rayleigh's, for
one antenna.

Knows: the phase of its own h at each device, mean gains at the server.
Does not know: any amplitude |h_i|.
Communicates: d channel uses; no side link.
Departures: see docs/algorithms/gbma.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from otafl.algorithms.parts.memoryless import State
from otafl.algorithms.parts.uplink import NormLimit
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.errors import ConfigError
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class GBMA:
    """Phases are corrected, amplitudes are not: everybody sends, and is heard as loud as its channel is."""

    knowledge: ClassVar[Knowledge] = Knowledge(
        device=frozenset({"phase"}), server=frozenset({"mean_gain"}), fading="Rayleigh"
    )

    norm_limit: NormLimit = 10.0
    """Norm bound G, at which updates are clipped."""

    def check_world(self, sections: Mapping[str, Any]) -> None:
        """One antenna: with several, what arrives of a device is no Rayleigh variable."""
        if sections["radio"].antennas > 1:
            raise ConfigError('algorithm.name = "gbma": is for one antenna, radio.antennas = 1; with more take "opc"')

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t and send."""
        problem, who = round.problem, round.everyone
        updates = round.train(state.params)
        full = math.sqrt(problem.num_params * problem.symbol_energy_j)
        scale = full / updates.norms(who).clamp(min=self.norm_limit)  # r ‖u_i‖/‖Δ_i‖
        heard = round.uplink(updates, scale * round.device.phase.conj(), who)
        mean_size = (math.pi / 4 * round.server.mean_gain).sqrt().mean(-1)  # μ
        rescale = self.norm_limit / (problem.taking_part * full * mean_size)  # 1/(m r μ)
        params = state.params + round.lr * heard * rescale[:, None].to(heard.dtype)
        limit = 0 * mean_size + self.norm_limit
        noise = rescale * problem.noise_var_j**0.5
        return State(params), Info(active=who, norm_bound=limit, noise_std=noise)
