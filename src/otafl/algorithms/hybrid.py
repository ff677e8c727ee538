"""Analog-digital hybrid: devices that would limit the analog uplink send bits instead.

M. F. U. Abrar, N. Michelusi, "Analog-digital Scheduling for Federated Learning: A Communication-Efficient Approach",
2023. The server knows |h_i| and the largest entries ‖Δ_i‖_∞, and SM_i = |h_i|/‖Δ_i‖_∞. For each K the K devices of
least SM go digital and the others invert their channels analogously, with a peak limit |x̂|² ≤ E_s for every entry:

    analog:   γ = √E_s min_analog SM_i, error d σ_z²/γ² (in units of Δ), time d/B
    digital:  r_i bits an entry, error ≤ d ‖Δ_i‖_∞²/(2^{r_i} − 1)², time (d r_i + 32)/rate_i

K and the r_i make the sum of the errors small within the deadline (otafl.algorithms.design.bits).

    D̂ = (1/n) (Σ_digital Q(Δ_i) + Σ_analog Δ_i + z/γ)

n is m, unless a device's channel is worse than the server believes and its bits come too late.

Knows: all h_i at the server, its own h at each device.
Does not know: channel statistics.
Communicates: d channel uses, bits, and one scalar per device and round; the server answers γ, r_i and who does what.
Departures: see docs/algorithms/hybrid.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from otafl.algorithms.design.bits import Cell, split
from otafl.algorithms.digital import Deadline, check_deadline, rounded
from otafl.algorithms.parts.memoryless import State
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.errors import ConfigError
from otafl.radio.digital import SCALE_BITS, rates
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class Hybrid:
    """Devices that would limit the analog uplink send bits instead: the split of least error, in every round."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}), server=frozenset({"h"}))

    deadline_s: Deadline = 8.0
    """Seconds that analog upload and digital slots of a round may take together; paper's rounds: 8 s."""

    def check_world(self, sections: Mapping[str, Any]) -> None:
        """The deadline is within the round."""
        check_deadline(self.deadline_s, sections)

    def init(self, problem: Problem) -> State:
        """Start from x^0; one analog upload must fit before the deadline."""
        upload_s = problem.num_params / problem.bandwidth_hz
        if upload_s > self.deadline_s:
            raise ConfigError(
                f"algorithm.deadline_s = {self.deadline_s:g}: an analog upload of {problem.num_params:,} parameters "
                f"takes {upload_s:.3g} s; give more time or bandwidth"
            )
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t; the server splits them."""
        problem, who = round.problem, round.everyone
        updates = round.train(state.params)
        peaks = updates.encode(lambda update: update.abs().amax(-1, keepdim=True), 1, who).values[..., 0]
        largest = round.report(peaks.double(), who).values
        bits = self._bits(round, largest)
        analog, digital = who & (bits == 0), who & (bits > 0)
        h = round.server.h.abs()
        ratio = torch.where(analog & (largest > 0), h / torch.where(largest > 0, largest, 1.0), torch.inf)
        gamma = math.sqrt(problem.symbol_energy_j) * ratio.amin(-1)
        gamma = torch.where(gamma.isfinite(), gamma, 0.0)  # nobody is analog, or all of them have nothing to send
        factor = torch.where(gamma > 0, 1 / gamma, 0.0)
        heard = analog & (h > 0)
        scale = torch.where(heard, gamma[:, None] / torch.where(heard, round.device.h, 1.0), 0.0)
        total = round.uplink(updates, scale, analog) * factor[:, None].to(state.params.dtype)
        sent = round.digital(
            rounded(round, updates, bits.clamp(min=1), digital),
            problem.num_params * bits + SCALE_BITS,
            digital,
            self.deadline_s * (1 + 1e-9) - analog.any(-1) * problem.num_params / problem.bandwidth_hz,
        )
        count = (analog | sent.who).sum(-1, keepdim=True).clamp(min=1)
        mean = (total + sent.sum(sent.who.double())) / count
        info = Info(active=analog | sent.who, extra={"digital": sent.who.sum(-1).double()})
        return State(state.params + round.lr * mean), info

    def _bits(self, round: Round, largest: Tensor) -> Tensor:  # noqa: A002
        """Bits of every device by the server's split, [S, M]; 0 for analog ones and for those that do not take part."""
        problem, h = round.problem, round.server.h
        rate = rates(h, problem.symbol_energy_j, problem.noise_var_j, problem.bandwidth_hz)
        cell = Cell(
            problem.num_params, problem.noise_var_j, problem.symbol_energy_j, problem.bandwidth_hz, self.deadline_s
        )
        return split(h.abs(), largest, rate, round.everyone, cell)[0]
