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
from otafl.radio.air import Air, IdealAir, Transmission, check_mask
from otafl.radio.csi import Knowledge, Reports, View
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
        self._owner, self._coeff, self._air = owner, coeff, air
        self._engine, self._objective, self._sampler = engine, objective, sampler
        self._local_steps = local_steps
        self._open = True
        self._transmissions: list[Transmission] = []
        self._energy_j = torch.zeros(coeff.shape, dtype=torch.float64, device=coeff.device)
        self._scalars = torch.zeros(len(seeds), dtype=torch.int64, device=coeff.device)

    def train(self, start: Tensor, who: Tensor | None = None) -> Updates:
        """Local training from a shared model [S, P] or from each device's own [S, M, P].

        Devices outside `who` do not train: their update is 0. Unit: (end − start)/lr.
        """
        shape = self._check("train()")
        if start.dim() == 2:
            pool, slot = shared_reference(start, shape[1])
        else:
            pool, slot = own_references(start)
        if (*pool.shape[:1], slot.shape[1], pool.shape[2]) != (*shape, self._objective.num_params):
            raise PluginError(
                f"algorithm {self._owner}: train() needs models of shape [S, P] or [S, M, P], got {tuple(start.shape)}"
            )
        who = torch.ones(shape, dtype=torch.bool, device=start.device) if who is None else who
        check_mask(self._owner, "train()", who, shape)
        batches = self._sampler.at(self.t).to(start.device)
        work = LocalWork(self._objective, pool, slot, who, batches, self._local_steps, self.lr)
        return Updates(self._engine.train(work), pool, slot, self.lr)

    def report(self, values: Tensor, who: Tensor) -> Reports:
        """Devices `who` tell the server one real number each, error-free; counted in the ledger."""
        shape = self._check("report()")
        check_mask(self._owner, "report()", who, shape)
        if not isinstance(values, Tensor) or values.shape != shape or values.is_complex():
            raise PluginError(f"algorithm {self._owner}: report() needs one real value per device, of shape {shape}")
        self._scalars += who.sum(-1)
        return Reports(torch.where(who, values, torch.zeros_like(values)), who.clone())

    def uplink(self, signal: Updates, tx_scale: Tensor, who: Tensor) -> Tensor:
        """Devices `who` send tx_scale_i (complex [S, M]) times their vector, all at once; what is heard, [S, P]."""
        shape = self._check("uplink()")
        if not isinstance(signal, Updates):
            raise PluginError(
                f"algorithm {self._owner}: uplink() sends what train() returned, not a {type(signal).__name__}"
            )
        if not isinstance(tx_scale, Tensor) or tx_scale.shape != shape:
            got = tuple(tx_scale.shape) if isinstance(tx_scale, Tensor) else type(tx_scale).__name__
            raise PluginError(f"algorithm {self._owner}: uplink() needs tx_scale of shape {shape}, got {got}")
        check_mask(self._owner, "uplink()", who, shape)
        heard, transmission = self._air.uplink(signal, tx_scale, who, self._coeff, self.t, len(self._transmissions))
        self._transmissions.append(transmission)
        self._energy_j += transmission.energy_j
        return heard

    def draw(self, name: str) -> list[np.random.Generator]:
        """The method's own random streams of this round, one generator per seed."""
        return [Streams(seed).at(f"algorithm/{name}", self.t) for seed in self.seeds]

    def close(self) -> "Spent":
        """End the round: its instruments no longer work. Returns what it spent."""
        self._open = False
        return Spent(tuple(self._transmissions), self._energy_j, self._scalars)

    def _check(self, call: str) -> tuple[int, int]:
        """The shape [S, M], if the round is still going on."""
        if not self._open:
            raise PluginError(f"algorithm {self._owner}: {call} of round {self.t} was called after that round")
        return self._coeff.shape[0], self._coeff.shape[1]


class Spent(NamedTuple):
    """What the uplink of a round was, for the ledger."""

    transmissions: tuple[Transmission, ...]
    energy_j: Tensor
    """Energy of every device, float64 [S, M]."""
    scalars: Tensor
    """Reported scalars, int [S]."""


class Step(NamedTuple):
    """One round done."""

    state: Any
    info: Info
    spent: Spent
    energy_ratio: Tensor
    """Largest energy of a device over the limit, [S]."""
    finite: Tensor
    """Whether the server model is finite, bool [S]."""
