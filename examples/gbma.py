"""GBMA: devices correct their phases and nothing else (Sery and Cohen, 2020); see docs/first-method.md."""

import math
from dataclasses import dataclass

import otafl


@otafl.register_algorithm("my-gbma")
@dataclass(frozen=True)
class GBMA:
    """Phases are corrected, amplitudes are not: unbiased where mean gains are equal."""

    knowledge = otafl.Knowledge(device={"phase"}, server={"mean_gain"}, fading="Rayleigh")
    norm_limit: float = 10.0
    """G, at which updates are clipped."""

    def init(self, problem):
        return otafl.State(problem.initial)

    def step(self, state, round):
        problem, who = round.problem, round.everyone
        updates = round.train(state.params)  # Δ_i
        full = math.sqrt(problem.num_params * problem.symbol_energy_j)  # √(d E_s)
        scale = full / updates.norms(who).clamp(min=self.norm_limit)  # r min(1, G/‖Δ_i‖)
        heard = round.uplink(updates, scale * round.device.phase.conj(), who)  # y
        mean_size = (math.pi / 4 * round.server.mean_gain).sqrt().mean(-1, keepdim=True)  # μ
        factor = self.norm_limit / (problem.taking_part * full * mean_size)  # 1/(m r μ)
        return otafl.State(state.params + round.lr * heard * factor.to(heard.dtype)), otafl.Info(active=who)
