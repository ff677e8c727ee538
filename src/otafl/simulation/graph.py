"""Takes the algorithm's state and the ledger from round to round; on a GPU by replaying a CUDA graph, where possible.

A round is some hundred small operations around a few large ones, and a GPU finishes them faster than the host can
launch them. So one round is recorded and then replayed; its number, learning rate, batches and noise are in tensors
that the host fills. Whether this works is found out by trying. Each of the first TRIED rounds is done twice: as usual,
and in the form for recording, which is first only run, then recorded, then replayed. If that fails, or its result
differs from the usual round's, all rounds are done as usual.

Knows: simulations, their states and ledgers.
Does not know: what is recorded of a round, files.
"""

import dataclasses
import gc
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from otafl.core.metrics import Ledger
from otafl.core.state import copied, overwrite, tensors_of, unaliased
from otafl.errors import TooLargeError
from otafl.registry import in_a_line
from otafl.simulation.build import Simulation

TRIED = 3  # rounds done twice: kernels are compiled in the first, the second is recorded, the third is replayed
MOST_CHANGE = 0.02  # allowed error of a recorded round, relative to what the round changed
MOST_VALUE = 1e-5  # and, added to it, relative to the value itself
LARGE = 6  # the state's copies and the recorded round's memory, at most, in states
log = logging.getLogger(__name__)


class Rounds:
    """Takes a state and its ledger through the rounds of a simulation."""

    def __init__(self, sim: Simulation, state: Any, ledger: Ledger) -> None:
        self._sim, self._ledger = sim, ledger
        tries = sim.recordable and not _large(state, sim.device)
        self.state = unaliased(state) if tries else state
        self._recorded = _RecordedRounds(sim) if tries else None
        self._tried = 0
        self.how: str | None = "rounds were a CUDA graph" if tries else None
        """How rounds were done, for the log; None if there was no choice."""
        if sim.recordable and not tries:
            self.how = "rounds were done one by one: trying would need a copy of the state, which is large"

    @property
    def replayed(self) -> bool:
        """Whether rounds are by now replayed from a CUDA graph."""
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
        """Do round t both ways; if they differ, keep the usual result and do all later rounds as usual."""
        assert self._recorded is not None
        step, ledger = None, self._ledger.copied()
        with suppress(torch.OutOfMemoryError, TooLargeError):
            # all are trained, as in recorded rounds
            step = self._sim.take(copied(self.state), self._sim.round_at(t, skip_unheard=False))
        if step is None:
            self._give_up("there is no memory for trying")
            self.advance(t)
            return
        ledger.observe(t, step, self._sim.noise_var_j)
        expected = _numbers(step.state, ledger)
        why = "a recorded round led elsewhere"
        try:
            allowed = _allowed(_numbers(self.state, self._ledger), expected)
            self._recorded.advance(t, self.state, self._ledger)
            alike = _alike(_numbers(self.state, self._ledger), expected, allowed)
        except Exception as error:  # whatever it is, the usual rounds do not need this
            alike, why = False, in_a_line(error)
        self._tried += 1
        if alike and self._tried == TRIED and self._sim.device.type == "cuda":
            torch.cuda.empty_cache()  # what rounds done one by one had needed; a graph has its own memory
        if not alike:
            self._give_up(why)
            self.state = step.state
            self._ledger.take(ledger)

    def _give_up(self, why: str) -> None:
        self.how = f"rounds were done one by one: {why}"
        log.info("%s", self.how)
        self._recorded = None


def _large(state: Any, device: torch.device) -> bool:
    """Whether a state takes so much of a GPU's memory that a copy may not fit; then rounds take long anyway."""
    if device.type != "cuda":
        return False
    size = sum(value.numel() * value.element_size() for value in tensors_of(state).values())
    return LARGE * size > torch.cuda.get_device_properties(device).total_memory


class _RecordedRounds:
    """Rounds that do the same operations on the same tensors (state, ledger, inputs) every time."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._t = torch.zeros((), dtype=torch.int64, device=sim.device)
        self._lr = torch.zeros((), dtype=torch.float64, device=sim.device)
        self._batches = torch.empty_like(sim.sampler.at(0))
        self._noise: dict[str, Tensor] = {}
        """Noise that the air adds in a round, by the name of its stream."""
        self._ahead = _Ahead(sim) if sim.device.type == "cuda" else None
        self._air = dataclasses.replace(sim.air, noise=self._drawn)
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def advance(self, t: int, state: Any, ledger: Ledger) -> None:
        """Do round t and overwrite state and ledger: the first call runs it, the second records, the others replay."""
        self._t.fill_(t)
        self._lr.fill_(self._sim.config.training.lr_at(t))
        if self._ahead is None or not self._ahead.fill(t, self._batches, self._noise):
            _draw(self._sim, t, self._batches, self._noise)
        if not self._warm:
            self._round(t, state, ledger)
            self._warm = True
            return
        if self._graph is None:
            self._graph = self._record(state, ledger)
        self._graph.replay()
        if self._ahead is not None and t + 1 < self._sim.config.experiment.rounds:
            self._ahead.draw(t + 1, self._batches, self._noise)

    def _record(self, state: Any, ledger: Ledger) -> "torch.cuda.CUDAGraph":
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        alone = stream == torch.cuda.default_stream()
        own = None if alone else torch.cuda.Stream()  # type: ignore[no-untyped-call]  # and so workspaces of its own
        collects = gc.isenabled()
        gc.disable()  # freeing an older run's graph meanwhile would break the recording
        try:
            with torch.cuda.graph(graph, stream=own):
                self._round(None, state, ledger)
        finally:
            torch.cuda.set_stream(stream)
            if collects:
                gc.enable()
        return graph

    def _round(self, t: int | None, state: Any, ledger: Ledger) -> None:
        """Do one round; the new state overwrites the old one."""
        self._now = t
        step = self._sim.take(state, self._sim.recorded_round(self._t, self._lr, self._batches, self._air))
        ledger.observe(self._t, step, self._sim.noise_var_j)
        overwrite(state, step.state)

    def _drawn(self, seeds: Sequence[int], name: str, t: Any, size: int) -> Tensor:
        """The noise that `advance` has drawn; the first round finds out which streams are needed."""
        if name not in self._noise:
            assert self._now is not None
            self._noise[name] = self._sim.air.noise(seeds, name, self._now, size).clone()
        return self._noise[name]


def _draw(sim: Simulation, t: int, batches: Tensor, noise: dict[str, Tensor]) -> None:
    """Fill mini-batches and noise, by the name of its stream, with those of round t."""
    batches.copy_(sim.sampler.at(t))
    for name, value in noise.items():
        value.copy_(sim.air.noise(sim.seeds, name, t, value.shape[-1]))


class _Ahead:
    """Draws mini-batches and noise of the next round on a stream of its own, while the GPU does the present one."""

    def __init__(self, sim: Simulation) -> None:
        self._sim, self._round = sim, -1
        self._stream = torch.cuda.Stream(sim.device)  # type: ignore[no-untyped-call]
        self._drawn, self._taken = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._batches: Tensor | None = None
        self._noise: dict[str, Tensor] = {}

    def draw(self, t: int, batches: Tensor, noise: dict[str, Tensor]) -> None:
        """Begin to draw what round t needs, as much as there is of each."""
        if self._batches is None:
            self._taken.record()
        self._round = t
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._taken)
            if self._batches is None:
                self._batches = torch.empty_like(batches)
                self._noise = {name: torch.empty_like(value) for name, value in noise.items()}
            _draw(self._sim, t, self._batches, self._noise)
            self._drawn.record()

    def fill(self, t: int, batches: Tensor, noise: dict[str, Tensor]) -> bool:
        """Copy what was drawn for round t; False if nothing was."""
        if self._batches is None or self._round != t:
            return False
        torch.cuda.current_stream().wait_event(self._drawn)
        batches.copy_(self._batches)
        for name, value in self._noise.items():
            noise[name].copy_(value)
        self._taken.record()
        return True


def _numbers(state: Any, ledger: Ledger) -> dict[str, Tensor]:
    """All tensors of a state and its ledger."""
    return tensors_of(state) | {f"ledger {name}": value for name, value in ledger.tensors().items()}


def _allowed(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Allowed error of each real or complex tensor of a recorded round, per seed; integers must be exact."""
    allowed = {}
    for name, value in after.items():
        if _real(value):
            then = before.get(name, value)  # the first round adds the method's own columns
            changed = _length(value - then) if then.shape == value.shape else torch.zeros((), device=value.device)
            allowed[name] = torch.nan_to_num(MOST_CHANGE * changed) + MOST_VALUE * _length(value)
    return allowed


def _alike(found: dict[str, Tensor], expected: dict[str, Tensor], allowed: dict[str, Tensor]) -> bool:
    """Whether all tensors are as expected, up to the allowed errors; where neither is finite, they count as alike."""
    if {name: value.shape for name, value in found.items()} != {name: value.shape for name, value in expected.items()}:
        return False
    alike = []
    for name, value in expected.items():
        if _real(value):
            lost = ~_length(value).isfinite() & ~_length(found[name]).isfinite()
            alike.append(((_length(found[name] - value) <= allowed[name]) | lost).all())
        else:
            alike.append((found[name] == value).all())
    return bool(torch.stack(alike).all())  # waits for the GPU once


def _real(values: Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


def _length(values: Tensor) -> Tensor:
    """Norm of every seed's values, [S]."""
    parts = torch.view_as_real(values) if values.is_complex() else values
    norm: Tensor = torch.linalg.vector_norm(parts.reshape(len(parts), -1), dim=-1, dtype=torch.float64)
    return norm
