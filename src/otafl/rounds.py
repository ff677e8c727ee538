"""From round to round: the algorithm's state and the ledger, on a GPU as one CUDA graph where that is possible.

A round is some hundred small operations around a few large ones, and a GPU finishes them faster than the host can
ask for them. Where a simulation's rounds are static (see `Simulation.static`), they are recorded once and then
replayed, with the round's number, learning rate, batches and noise in tensors that the host fills.

Knows: simulations, their states and ledgers.
Does not know: what is recorded of a round, files.
"""

import dataclasses
import gc
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from otafl.metrics import Ledger
from otafl.radio.air import Air
from otafl.simulation import Simulation

WARM_UP = 2  # static rounds before they are recorded: kernels are compiled, memory is found
log = logging.getLogger(__name__)


class Rounds:
    """Takes a state and its ledger through the rounds of a simulation."""

    def __init__(self, sim: Simulation, state: Any, ledger: Ledger) -> None:
        self._sim, self._ledger = sim, ledger
        self.state = _unaliased(state, set()) if sim.static else state
        self._static = _StaticRounds(sim, self.state, ledger) if sim.static else None

    def advance(self, t: int) -> None:
        """Do round t."""
        if self._static is not None:
            self._static.advance(t)
            return
        step = self._sim.step(self.state, t)
        self.state = step.state
        self._ledger.observe(t, step, self._sim.noise_var_j)


class _StaticRounds:
    """Rounds that do the same with the same tensors every time: state, ledger, inputs."""

    def __init__(self, sim: Simulation, state: Any, ledger: Ledger) -> None:
        self._sim, self._state, self._ledger = sim, state, ledger
        self._t = torch.zeros((), dtype=torch.int64, device=sim.device)
        self._lr = torch.zeros((), dtype=torch.float64, device=sim.device)
        self._batches = torch.empty_like(sim.sampler.at(0))
        self._noise: list[Tensor] = []  # of each use of the uplink in a round
        self._air = sim.air
        if isinstance(sim.air, Air):
            self._air = dataclasses.replace(sim.air, noise=self._static_noise)
        self._names: list[str] = []
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recordable = True

    def advance(self, t: int) -> None:
        """Do round t."""
        self._t.fill_(t)
        self._lr.fill_(self._sim.config.training.lr_at(t))
        self._batches.copy_(self._sim.sampler.at(t))
        if isinstance(self._sim.air, Air):
            for name, noise in zip(self._names, self._noise, strict=True):
                noise.copy_(self._sim.air.noise(self._sim.seeds, name, t, noise.shape[-1]))
        if self._done >= WARM_UP and self._graph is None and self._recordable:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._round(t)
        self._done += 1

    def _record(self) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        collects = gc.isenabled()
        gc.disable()  # freeing an older run's graph in the middle would spoil this one
        try:
            with torch.cuda.graph(graph):
                self._round(None)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)
            self._recordable = False
            log.warning("rounds are not a CUDA graph: %s", error)
            return
        finally:
            if collects:
                gc.enable()
        self._graph = graph

    def _round(self, t: int | None) -> None:
        """One round; the new state takes the place of the old."""
        self._now = t
        step = self._sim.take(self._state, self._sim.static_round(self._t, self._lr, self._batches, self._air))
        self._ledger.observe(self._t, step, self._sim.noise_var_j)
        _overwrite(self._state, step.state)

    def _static_noise(self, seeds: Sequence[int], name: str, t: Any, size: int) -> Tensor:
        """The noise that `advance` has drawn; the first round shows what is needed."""
        if name not in self._names:
            assert isinstance(self._sim.air, Air)
            assert self._now is not None
            self._names.append(name)
            self._noise.append(self._sim.air.noise(seeds, name, self._now, size).clone())
        return self._noise[self._names.index(name)]


def _unaliased(state: Any, seen: set[int]) -> Any:
    """A state whose tensors share no memory, so that each can be overwritten."""
    values = {}
    for f in dataclasses.fields(state):
        value = getattr(state, f.name)
        if not isinstance(value, Tensor):
            values[f.name] = _unaliased(value, seen)
            continue
        place = value.untyped_storage().data_ptr()
        values[f.name] = value.clone() if place in seen or 0 in value.stride() else value
        seen.add(place)
    return dataclasses.replace(state, **values)


def _overwrite(old: Any, new: Any) -> None:
    """Copy the tensors of a state into those of another of the same form."""
    pairs = _pairs(old, new)
    memory = {kept.untyped_storage().data_ptr() for kept, _ in pairs}
    moved = [
        (kept, value.clone() if value.untyped_storage().data_ptr() in memory else value)
        for kept, value in pairs
        if (kept.data_ptr(), kept.stride()) != (value.data_ptr(), value.stride())
    ]
    for kept, value in moved:
        kept.copy_(value)


def _pairs(old: Any, new: Any) -> list[tuple[Tensor, Tensor]]:
    """Tensors of two states, field by field."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for f in dataclasses.fields(old):
        one, other = getattr(old, f.name), getattr(new, f.name)
        pairs += [(one, other)] if isinstance(one, Tensor) else _pairs(one, other)
    return pairs
