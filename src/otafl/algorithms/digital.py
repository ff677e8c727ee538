"""A digital uplink: what a user would build instead of an analog one.

Devices quantise their updates with r bits a coordinate, unbiased, and send them one after another at the capacity of
their channels, the best channels first, until the round's deadline (otafl.radio.digital):

    rate_i = B log2(1 + |h_i|² E_s/(2 σ_z²)),   slot_i = (d r + 32)/rate_i
    x^{t+1} = x^t + η mean_{delivered} Q_r(Δ_i)

Knows: |h_i| of every device at the server, for rates and slots.
Does not know: channel statistics, and no h at the devices.
Communicates: d r + 32 bits from every device that fits; no analog channel use.
Departures: see docs/algorithms/digital.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from otafl.algorithms.parts.memoryless import State
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.engine.updates import Updates
from otafl.errors import ConfigError
from otafl.radio.digital import SCALE_BITS, quantised
from otafl.radio.knowledge import Knowledge
from otafl.radio.vectors import Vectors
from otafl.world.process import round_length_s

Deadline = Annotated[float, Gt(0)]


def check_deadline(deadline_s: float, sections: Mapping[str, Any]) -> None:
    """Refuse a deadline after the end of a round: the channel of the slots would be that of another round."""
    lasting = round_length_s(sections["mobility"].spec, sections["fading"].spec)
    if lasting is not None and deadline_s > lasting:
        raise ConfigError(
            f"algorithm.deadline_s = {deadline_s:g}: a round lasts {lasting:g} s (round_s of [mobility] or [fading]), "
            "and its channel with it; give a shorter deadline or longer rounds"
        )


def rounded(round: Round, updates: Updates, bits: Tensor | int, who: Tensor) -> Vectors:  # noqa: A002
    """Updates of the devices `who`, quantised without bias to 2^bits values; 0 for the others."""
    num_seeds, num_devices = who.shape
    size = round.problem.num_params
    uniform = round.uniform("rounding", num_devices * size).view(num_seeds, num_devices, size)
    if isinstance(bits, int):
        return updates.encode(lambda update, drawn: quantised(update, bits, drawn), size, who, uniform)
    return updates.encode(quantised, size, who, bits, uniform)


@dataclass(frozen=True)
class Digital:
    """Quantised updates, one device after another at the capacity of its channel, until a deadline."""

    knowledge: ClassVar[Knowledge] = Knowledge(server=frozenset({"h"}))

    bits: Annotated[int, Ge(1), Le(24)] = 8
    """r: bits for a coordinate."""
    deadline_s: Deadline = 8.0
    """Seconds in which all slots of a round must end; at most the length of a round; paper's rounds: 8 s."""

    def check_world(self, sections: Mapping[str, Any]) -> None:
        """The deadline is within the round."""
        check_deadline(self.deadline_s, sections)

    def init(self, problem: Problem) -> State:
        """Start from x^0."""
        return State(problem.initial)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t; those that fit are averaged."""
        updates, everyone = round.train(state.params), round.everyone
        length = torch.full(everyone.shape, round.problem.num_params * self.bits + SCALE_BITS, device=everyone.device)
        delivered = round.digital(rounded(round, updates, self.bits, everyone), length, everyone, self.deadline_s)
        count = delivered.who.sum(-1, keepdim=True)
        weights = delivered.who / count.clamp(min=1).double()
        mean = delivered.sum(weights)
        params = torch.where(count > 0, state.params + round.lr * mean, state.params)
        return State(params), Info(active=delivered.who, weights=weights)
