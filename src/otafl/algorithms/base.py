"""The contract between a method and the world: Problem, Round, Info.

An algorithm is a frozen dataclass of hyper-parameters with

    knowledge: ClassVar[Knowledge]     what it reads of the channel, on which side
    init(problem) -> State             a dataclass of tensors with a field `params` [S, P], the server model
    step(state, round) -> (State, Info)

State is what the next round needs, Info is diagnostics. A method touches the world only through the
instruments of its Round: devices compute from `round.device` and what was broadcast; what the server uses must
come from `round.server`, `round.report` or `round.uplink`. Shapes have the seeds S in front: a method is
written for the trailing axes, active sets are masks, "nobody is active" is a `where` per seed.

`step` owns the state it is given and may overwrite its large tensors where `round.donates` is true.

Knows: updates, the air, views.
Does not know: configuration, files, which method is running.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from otafl.engine.batches import BatchSampler
from otafl.engine.objective import Objective
from otafl.engine.training import Engine, LocalWork
from otafl.engine.updates import Updates, own_references, shared_reference
from otafl.errors import PluginError
from otafl.radio.air import Air, IdealAir, Received, check_uplink
from otafl.radio.csi import Knowledge, Reports, View, collect_reports
from otafl.random import Streams


@dataclass(frozen=True)
class Problem:
    """What a method is given once, before round 0."""

    num_devices: int
    num_params: int
    symbol_energy_j: float
    noise_var_j: float
    initial: Tensor
    """x^0, [S, P]."""
    server: View
    """What the server declared to know, at round 0."""


@dataclass(frozen=True)
class Info:
    """Diagnostics of one round."""

    active: Tensor
    """Devices that took part, bool [S, M]."""
    norm_bound: Tensor | None = None
    """B_t, [S]."""
    anchors: Tensor | None = None
    """Models the server holds for its devices, [S]."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of the method's own, each [S]."""


class Algorithm(Protocol):
    """A method."""

    knowledge: ClassVar[Knowledge]
    ideal_radio: ClassVar[bool]
    """Whether its uplink is the error-free one."""

    def init(self, problem: Problem) -> Any:
        """The state before round 0."""
        ...

    def step(self, state: Any, round: "Round") -> tuple[Any, Info]:  # noqa: A002 - the field's own word
        """One round."""
        ...


class Round:
    """The keyhole through which a method sees one round."""

    def __init__(
        self,
        *,
        owner: str,
        problem: Problem,
        t: int,
        lr: float,
        seeds: tuple[int, ...],
        device: View,
        server: View,
        coeff: Tensor,
        engine: Engine,
        objective: Objective,
        sampler: BatchSampler,
        local_steps: int,
        air: Air | IdealAir,
    ) -> None:
        self.problem, self.t, self.lr, self.seeds = problem, t, lr, seeds
        self.device, self.server = device, server
        self.donates = engine.donates
        self.received: list[Received] = []
        self.scalars = torch.zeros(len(seeds), dtype=torch.int64, device=coeff.device)
        self._owner, self._coeff, self._air = owner, coeff, air
        self._engine, self._objective, self._sampler = engine, objective, sampler
        self._local_steps = local_steps

    def train(self, start: Tensor, who: Tensor | None = None) -> Updates:
        """Local training from a shared model [S, P] or from each device's own [S, M, P].

        Devices outside `who` do not train: their update is 0. Unit: (end − start)/lr.
        """
        shape = tuple(self._coeff.shape)
        if start.dim() == 2:
            pool, slot = shared_reference(start, shape[1])
        else:
            pool, slot = own_references(start)
        if (*pool.shape[:1], slot.shape[1], pool.shape[2]) != (*shape, self._objective.num_params):
            raise PluginError(
                f"algorithm {self._owner}: train() needs models of shape [S, P] or [S, M, P], got {tuple(start.shape)}"
            )
        who = torch.ones(shape, dtype=torch.bool, device=start.device) if who is None else who
        batches = self._sampler.at(self.t).to(start.device)
        work = LocalWork(self._objective, pool, slot, who, batches, self._local_steps, self.lr)
        return Updates(self._engine.train(work), pool, slot, self.lr)

    def report(self, values: Tensor, who: Tensor) -> Reports:
        """Devices `who` tell the server one scalar each, error-free; counted in the ledger."""
        reports = collect_reports(values, who, self._owner)
        self.scalars = self.scalars + reports.count()
        return reports

    def uplink(self, signal: Updates, tx_scale: Tensor, who: Tensor) -> Received:
        """Devices `who` send tx_scale_i (complex [S, M]) times their vector, all at once."""
        if not isinstance(signal, Updates):
            raise PluginError(
                f"algorithm {self._owner}: uplink() sends what train() returned, not a {type(signal).__name__}"
            )
        check_uplink(self._owner, tx_scale, who, (self._coeff.shape[0], self._coeff.shape[1]))
        received = self._air.uplink(signal, tx_scale, who, self._coeff, self.t, len(self.received))
        self.received.append(received)
        return received

    def draw(self, name: str) -> list[np.random.Generator]:
        """The method's own random streams of this round, one generator per seed."""
        return [Streams(seed).at(f"algorithm/{name}", self.t) for seed in self.seeds]


class Step(NamedTuple):
    """One round done."""

    state: Any
    info: Info
    round: Round
    energy_ratio: Tensor
    """Largest energy of a device over the limit, [S]."""
    finite: Tensor
    """Whether the server model is finite, bool [S]."""
