"""Static rounds overwrite their state; continuing finds the memory that this machine wants."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otafl.algorithms.anchors import FREE, Anchors
from otafl.fold import _restore
from otafl.rounds import _overwrite, _unaliased
from tests.conftest import make_config, simulate


@dataclass(frozen=True)
class Inner:
    latest: Tensor


@dataclass(frozen=True)
class State:
    params: Tensor
    previous: Tensor
    history: Tensor
    inner: Inner


def test_a_state_with_shared_memory_is_overwritten_as_if_it_were_new() -> None:
    """Params ← params + 1, previous ← params, latest ← a view of the old history, over three rounds."""
    x = torch.zeros(2, 3)
    state = _unaliased(State(x, x, torch.zeros(2, 4, 3), Inner(x)), set())
    pointers = [t.data_ptr() for t in (state.params, state.previous, state.history, state.inner.latest)]
    assert len(set(pointers)) == 4
    for r in range(1, 4):
        history = torch.roll(state.history, 1, dims=1)
        history[:, 0] = state.params
        new = State(state.params + 1, state.params, history, Inner(state.history[:, -1]))
        expected = [t.clone() for t in (new.params, new.previous, new.history, new.inner.latest)]
        _overwrite(state, new)
        found = [state.params, state.previous, state.history, state.inner.latest]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert [t.data_ptr() for t in found] == pointers
        assert float(state.params[0, 0]) == r
        assert float(state.previous[0, 0]) == r - 1


def test_restoring_a_template_with_shared_memory() -> None:
    x = torch.zeros(2, 3)
    template = State(x, x, torch.zeros(2, 1, 3).expand(2, 4, 3), Inner(x))
    saved = {
        "state.params": torch.full((2, 3), 1.0),
        "state.previous": torch.full((2, 3), 2.0),
        "state.history": torch.full((2, 4, 3), 3.0),
        "state.inner.latest": torch.full((2, 3), 4.0),
    }
    state = _restore(template, saved, torch.device("cpu"))
    values = [float(t.mean()) for t in (state.params, state.previous, state.history, state.inner.latest)]
    assert values == [1.0, 2.0, 3.0, 4.0]


def test_anchors_saved_with_few_rows_get_those_that_this_machine_wants() -> None:
    """A CPU's buffer grows as it must; a GPU's has all its rows from the start."""
    params = torch.arange(6.0).view(2, 3)
    small = Anchors(
        params[:, None].clone(), torch.zeros((2, 1), dtype=torch.int64), torch.zeros((2, 4), dtype=torch.int64)
    )
    large = Anchors(torch.ones(2, 5, 3), torch.full((2, 5), FREE), torch.zeros((2, 4), dtype=torch.int64))
    grown = large.continued(small)
    assert grown.pool.shape == (2, 5, 3)
    assert grown.index.tolist() == [[0] + [FREE] * 4] * 2
    assert torch.equal(grown.pool[:, 0], params)
    assert small.continued(large).pool.shape == (2, 5, 3)


def test_device_models_keep_their_layout_when_continued() -> None:
    sim = simulate(make_config("fedoag"))
    template: Any = sim.init()
    strides = template.local_params.stride()
    assert strides[1] % 32 == 0
    saved = {
        "state.params": template.params.clone(),
        "state.local_params": torch.ones_like(template.local_params).contiguous(),
        **{f"state.anchors.{n}": getattr(template.anchors, n).clone() for n in ("pool", "index", "slot")},
    }
    state = _restore(template, saved, torch.device("cpu"))
    assert state.local_params.stride() == strides
    assert (state.local_params == 1).all()
