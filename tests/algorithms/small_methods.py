"""Small methods that need what the keyhole offers: other vectors, other receptions, memory at the devices.

Each is written as a user would write it, with names of `otafl` alone. They are tests of the contract, not products.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import otafl


@dataclass(frozen=True)
class State:
    params: Tensor


def at_full_energy(problem: otafl.Problem, uses: int) -> float:
    """√(Q E_s), the length of the longest vector on Q channel uses."""
    return math.sqrt(uses * problem.symbol_energy_j)


@otafl.register_algorithm("test-gbma")
@dataclass(frozen=True)
class GBMA:
    """Phases are corrected, amplitudes are not: x̂_i = r e^{−j arg h_i} u_i, D̂ = y/(m r μ), μ = mean E|h_i|."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(
        device=frozenset({"phase"}), server=frozenset({"mean_gain"}), fading="Rayleigh"
    )
    norm_limit: float = 10.0

    def init(self, problem: otafl.Problem) -> State:
        return State(problem.initial)

    def step(self, state: State, round: otafl.Round) -> tuple[State, otafl.Info]:  # noqa: A002
        updates = round.train(state.params)
        shortened = (self.norm_limit / updates.norms(round.everyone).clamp(min=1e-300)).clamp(max=1)
        r = at_full_energy(round.problem, round.problem.num_params) / self.norm_limit
        heard = round.uplink(updates, r * shortened * round.device.phase.conj(), round.everyone)
        mu = (math.pi / 4 * round.server.mean_gain).sqrt().mean(-1)
        mean = heard / (round.problem.taking_part * r * mu)[:, None].to(heard.dtype)
        return State(state.params + round.lr * mean), otafl.Info(active=round.everyone)


@otafl.register_algorithm("test-signs")
@dataclass(frozen=True)
class Signs:
    """One-bit aggregation: devices above a threshold send signs, the server takes the majority."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(device=frozenset({"h"}))
    gamma: float = 1e-9
    server_step: float = 0.01

    def init(self, problem: otafl.Problem) -> State:
        return State(problem.initial)

    def step(self, state: State, round: otafl.Round) -> tuple[State, otafl.Info]:  # noqa: A002
        size, h = round.problem.num_params, round.device.h
        who = round.everyone & (h.abs() >= self.gamma / at_full_energy(round.problem, size))
        signs = round.train(state.params, who).encode(lambda update: torch.where(update < 0, -1.0, 1.0), size, who)
        heard = round.uplink(signs, torch.where(who, self.gamma / math.sqrt(size) / h, 0.0), who)
        vote = torch.where(heard < 0, -1.0, 1.0).to(heard.dtype)
        return State(state.params + self.server_step * vote), otafl.Info(active=who)


@dataclass(frozen=True)
class Remembering:
    params: Tensor
    unsent: otafl.Vectors
    """What each device has not sent, [S, M, P]."""


@otafl.register_algorithm("test-top-k")
@dataclass(frozen=True)
class TopK:
    """The k largest entries of update and memory are sent, the rest is kept for later."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(device=frozenset({"h"}))
    gamma: float = 3e-10
    share: float = 0.25

    def init(self, problem: otafl.Problem) -> Remembering:
        return Remembering(problem.initial, problem.vectors())

    def step(self, state: Remembering, round: otafl.Round) -> tuple[Remembering, otafl.Info]:  # noqa: A002
        size, h = round.problem.num_params, round.device.h
        who = round.everyone & (h.abs() >= self.gamma / at_full_energy(round.problem, size))
        count = max(1, int(self.share * size))

        def largest(update: Tensor, unsent: Tensor) -> Tensor:
            total = update + unsent
            places = total.abs().topk(count).indices
            return torch.zeros_like(total).scatter(1, places, total.gather(1, places))

        updates, unsent = round.train(state.params), state.unsent.values
        sent = updates.encode(largest, size, who, unsent)
        reports = round.report(sent.norms(who), who)
        bound, heard_from = reports.max().clamp(min=1e-300), reports.count().clamp(min=1)
        heard = round.uplink(sent, torch.where(who, self.gamma / (h * bound[:, None]), 0.0), who)
        mean = heard * (bound / (self.gamma * heard_from))[:, None].to(heard.dtype)
        mean = torch.where(reports.who.any(-1)[:, None], mean, 0.0)
        left = otafl.Vectors(unsent + updates.dense() - sent.values)
        return Remembering(state.params + round.lr * mean, left), otafl.Info(active=who)


@otafl.register_algorithm("test-sketch")
@dataclass(frozen=True)
class Sketch:
    """A random projection to half as many channel uses, the same for all devices; the server projects back."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(device=frozenset({"h"}))
    gamma: float = 3e-10

    def init(self, problem: otafl.Problem) -> State:
        return State(problem.initial)

    def step(self, state: State, round: otafl.Round) -> tuple[State, otafl.Info]:  # noqa: A002
        size, h = round.problem.num_params, round.device.h
        uses = size // 2
        drawn = np.stack([rng.choice([-1.0, 1.0], (uses, size)) for rng in round.draw("sketch")])
        matrix = torch.from_numpy(drawn).to(state.params.dtype)
        who = round.everyone & (h.abs() >= self.gamma / at_full_energy(round.problem, uses))
        sketches = otafl.Vectors(torch.einsum("sqp,smp->smq", matrix, round.train(state.params, who).dense()))
        reports = round.report(sketches.norms(who), who)
        bound, count = reports.max().clamp(min=1e-300), reports.count().clamp(min=1)
        heard = round.uplink(sketches, torch.where(who, self.gamma / (h * bound[:, None]), 0.0), who)
        factor = (bound / (self.gamma * count * uses))[:, None].to(heard.dtype)
        mean = torch.einsum("sqp,sq->sp", matrix, heard) * factor
        mean = torch.where(reports.who.any(-1)[:, None], mean, 0.0)
        return State(state.params + round.lr * mean / 3), otafl.Info(active=who)  # a step that P > Q lets be stable


@otafl.register_algorithm("test-antennas")
@dataclass(frozen=True)
class Antennas:
    """Devices know nothing; the server combines its antennas with Σ_i h_i, which one common pilot shows."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(server=frozenset({"sum_h"}))

    def init(self, problem: otafl.Problem) -> State:
        return State(problem.initial)

    def step(self, state: State, round: otafl.Round) -> tuple[State, otafl.Info]:  # noqa: A002
        updates = round.train(state.params)
        bound = round.report(updates.norms(round.everyone), round.everyone).max().clamp(min=1e-300)
        alpha = at_full_energy(round.problem, round.problem.num_params) / bound
        heard = round.uplink(updates, alpha[:, None].expand(round.everyone.shape), round.everyone, "antennas")
        pilot = round.server.sum_h
        combined = torch.einsum("sn,snq->sq", pilot.conj().to(heard.dtype), heard)
        mean = combined.real / (pilot.abs().square().sum(-1) * alpha)[:, None].to(combined.real.dtype)
        return State(state.params + 0.3 * round.lr * mean), otafl.Info(active=round.everyone)


@otafl.register_algorithm("test-energy")
@dataclass(frozen=True)
class EnergyDetection:
    """Two tones for each sign, with random phases; the server compares energies: nobody knows any channel."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge()
    server_step: float = 0.01

    def init(self, problem: otafl.Problem) -> State:
        return State(problem.initial)

    def step(self, state: State, round: otafl.Round) -> tuple[State, otafl.Info]:  # noqa: A002
        size, shape = round.problem.num_params, round.everyone.shape
        drawn = np.stack([rng.random((shape[1], size)) for rng in round.draw("phases")])
        tone = torch.polar(
            torch.full_like(torch.from_numpy(drawn), math.sqrt(2)), 2 * math.pi * torch.from_numpy(drawn)
        )

        def tones(update: Tensor, tone: Tensor) -> Tensor:
            return torch.stack([tone.where(update >= 0, 0.0), tone.where(update < 0, 0.0)], -1).flatten(1)

        signal = round.train(state.params).encode(tones, 2 * size, round.everyone, tone)
        scale = torch.full(shape, math.sqrt(round.problem.symbol_energy_j), dtype=torch.float64)
        energy = round.uplink(signal, scale, round.everyone, "energy").view(len(scale), size, 2)
        vote = torch.where(energy[..., 0] >= energy[..., 1], 1.0, -1.0).to(state.params.dtype)
        return State(state.params + self.server_step * vote), otafl.Info(active=round.everyone)


SMALL: dict[str, dict[str, Any]] = {
    "test-gbma": {},
    "test-signs": {},
    "test-top-k": {},
    "test-sketch": {},
    "test-antennas": {"radio.antennas": 2},
    "test-energy": {"radio.antennas": 2},
}


@dataclass(frozen=True)
class Controlled:
    params: Tensor
    control: Tensor
    """c, [S, P]."""
    own: otafl.Vectors
    """c_i, [S, M, P]."""


@otafl.register_algorithm("test-scaffold")
@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD with everybody heard, error-free: gradients are corrected by c − c_i, c_i ← c_i − c − Δ_i/s."""

    knowledge: ClassVar[otafl.Knowledge] = otafl.Knowledge(fading="none (error-free)")
    ideal_radio: ClassVar[bool] = True
    local_steps: int = 3

    def init(self, problem: otafl.Problem) -> Controlled:
        own = problem.vectors()
        return Controlled(problem.initial, torch.zeros_like(problem.initial), own)

    def step(self, state: Controlled, round: otafl.Round) -> tuple[Controlled, otafl.Info]:  # noqa: A002
        own, control = state.own.values, state.control[:, None]
        updates = round.train(state.params, correction=control - own)
        share = round.everyone.double() / round.problem.taking_part
        mean = round.uplink(updates, share, round.everyone)
        own = own - control - updates.dense() / self.local_steps
        params = state.params + round.lr * mean
        return Controlled(params, -mean / self.local_steps, otafl.Vectors(own)), otafl.Info(active=round.everyone)


SMALL["test-scaffold"] = {}
