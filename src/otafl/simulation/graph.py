"""From round to round: the algorithm's state and the ledger, on a GPU as one CUDA graph where that is possible.

A round is some hundred small operations around a few large ones, and a GPU finishes them faster than the host can ask
for them. So rounds are recorded once and then replayed, with the round's number, learning rate, batches and noise in
tensors that the host fills. Whether that can be done is found out by trying: in its first rounds a simulation does each
round twice, as usual and so that it can be recorded, then recorded, then replayed. If that cannot be done, or leads to
anything else than the usual round, rounds stay as usual.

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

from otafl.core.metrics import Ledger
from otafl.core.state import copied, overwrite, tensors_of, unaliased
from otafl.radio.air import Air
from otafl.registry import in_a_line
from otafl.simulation.build import Simulation

TRIED = 3  # rounds done twice: kernels are compiled in the first, the second is recorded, the third is replayed
MOST_CHANGE = 0.02  # by which a recorded round may miss the usual one, over what the round changed
MOST_VALUE = 1e-5  # and over what is there
log = logging.getLogger(__name__)


class Rounds:
    """Takes a state and its ledger through the rounds of a simulation."""

    def __init__(self, sim: Simulation, state: Any, ledger: Ledger) -> None:
        self._sim, self._ledger = sim, ledger
        self.state = unaliased(state) if sim.recordable else state
        self._recorded = _RecordedRounds(sim) if sim.recordable else None
        self._tried = 0
        self.how: str | None = "rounds were a CUDA graph" if sim.recordable else None
        """How rounds were done, where that could be chosen."""

    @property
    def replayed(self) -> bool:
        """Whether rounds are a CUDA graph by now."""
        return self._recorded is not None and self._tried >= TRIED

    def advance(self, t: int) -> None:
        """Do round t."""
        if self._recorded is None:
            step = self._sim.step(self.state, t)
            self._ledger.observe(t, step, self._sim.noise_var_j)
            self.state = step.state
        elif self._tried >= TRIED:
            self._recorded.advance(t, self.state, self._ledger)
        else:
            self._try(t)

    def _try(self, t: int) -> None:
        """Round t both ways: if they differ, what the usual way gave, from now on."""
        assert self._recorded is not None
        try:
            mine, ledger = copied(self.state), self._ledger.copied()
        except torch.OutOfMemoryError:
            self._give_up("there is no memory for trying")
            self.advance(t)
            return
        step = self._sim.take(mine, self._sim.round_at(t, skip_unheard=False))  # all are trained, as in recorded rounds
        ledger.observe(t, step, self._sim.noise_var_j)
        expected = _numbers(step.state, ledger)
        why = "a recorded round led elsewhere"
        try:
            allowed = _allowed(_numbers(self.state, self._ledger), expected)
            self._recorded.advance(t, self.state, self._ledger)
            alike = _alike(_numbers(self.state, self._ledger), expected, allowed)
        except Exception as error:  # whatever it is: rounds as usual either have it, too, or do without
            alike, why = False, in_a_line(error)
        self._tried += 1
        if not alike:
            self._give_up(why)
            self.state = step.state
            self._ledger.take(ledger)

    def _give_up(self, why: str) -> None:
        self.how = f"rounds were done one by one: {why}"
        log.info("%s", self.how)
        self._recorded = None


class _RecordedRounds:
    """Rounds that do the same with the same tensors every time: state, ledger, inputs."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._t = torch.zeros((), dtype=torch.int64, device=sim.device)
        self._lr = torch.zeros((), dtype=torch.float64, device=sim.device)
        self._batches = torch.empty_like(sim.sampler.at(0))
        self._noise: dict[str, Tensor] = {}
        """What the air adds in a round, by name."""
        self._air = sim.air
        if isinstance(sim.air, Air):
            self._air = dataclasses.replace(sim.air, noise=self._drawn)
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def advance(self, t: int, state: Any, ledger: Ledger) -> None:
        """Do round t in place of state and ledger: the first as it will be recorded, then recorded, then replayed."""
        self._t.fill_(t)
        self._lr.fill_(self._sim.config.training.lr_at(t))
        self._batches.copy_(self._sim.sampler.at(t))
        if isinstance(self._sim.air, Air):
            for name, noise in self._noise.items():
                noise.copy_(self._sim.air.noise(self._sim.seeds, name, t, noise.shape[-1]))
        if not self._warm:
            self._round(t, state, ledger)
            self._warm = True
            return
        if self._graph is None:
            self._graph = self._record(state, ledger)
        self._graph.replay()

    def _record(self, state: Any, ledger: Ledger) -> "torch.cuda.CUDAGraph":
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        collects = gc.isenabled()
        gc.disable()  # freeing an older run's graph in the middle would spoil this one
        try:
            with torch.cuda.graph(graph):
                self._round(None, state, ledger)
        finally:
            torch.cuda.set_stream(stream)
            if collects:
                gc.enable()
        return graph

    def _round(self, t: int | None, state: Any, ledger: Ledger) -> None:
        """One round; the new state takes the place of the old."""
        self._now = t
        step = self._sim.take(state, self._sim.recorded_round(self._t, self._lr, self._batches, self._air))
        ledger.observe(self._t, step, self._sim.noise_var_j)
        overwrite(state, step.state)

    def _drawn(self, seeds: Sequence[int], name: str, t: Any, size: int) -> Tensor:
        """The noise that `advance` has drawn; the first round shows what is needed."""
        if name not in self._noise:
            assert isinstance(self._sim.air, Air)
            assert self._now is not None
            self._noise[name] = self._sim.air.noise(seeds, name, self._now, size).clone()
        return self._noise[name]


def _numbers(state: Any, ledger: Ledger) -> dict[str, Tensor]:
    """All tensors of a state and its ledger."""
    return tensors_of(state) | {f"ledger {name}": value for name, value in ledger.tensors().items()}


def _allowed(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """By how much a recorded round may miss each real tensor, for each seed; whole numbers it may not miss."""
    allowed = {}
    for name, value in after.items():
        if _real(value):
            then = before.get(name, value)  # a column of the method's own, which the first round makes
            changed = _length(value - then) if then.shape == value.shape else torch.zeros((), device=value.device)
            allowed[name] = torch.nan_to_num(MOST_CHANGE * changed) + MOST_VALUE * _length(value)
    return allowed


def _alike(found: dict[str, Tensor], expected: dict[str, Tensor], allowed: dict[str, Tensor]) -> bool:
    """Whether all tensors are the expected ones but for rounding; what is not finite need not be finite alike."""
    if {name: value.shape for name, value in found.items()} != {name: value.shape for name, value in expected.items()}:
        return False
    alike = []
    for name, value in expected.items():
        if _real(value):
            lost = ~_length(value).isfinite() & ~_length(found[name]).isfinite()
            alike.append(((_length(found[name] - value) <= allowed[name]) | lost).all())
        else:
            alike.append((found[name] == value).all())
    return bool(torch.stack(alike).all())  # asked once


def _real(values: Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


def _length(values: Tensor) -> Tensor:
    """Norm of every seed's values, [S]."""
    parts = torch.view_as_real(values) if values.is_complex() else values
    norm: Tensor = torch.linalg.vector_norm(parts.reshape(len(parts), -1), dim=-1, dtype=torch.float64)
    return norm
