"""What FedOAG and FedOAG-plus share: devices with anchors, and a threshold γ, fixed or adaptive.

Knows: γ, anchors.
Does not know: what is sent, how the server recovers it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from otafl.algorithms.parts.threshold import Threshold, first_gamma
from otafl.algorithms.parts.truncated import above_threshold
from otafl.core.contract import Problem
from otafl.core.round import Round
from otafl.engine.devices import Anchors, Devices

Keeping = Literal["kept", "float16", "bfloat16"]


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    devices: Devices
    """The devices' models x_i^t and anchors x^{τ_i+1}."""
    gamma: Tensor | None = None
    """γ_t if it is adaptive, float64 [S]; else None."""


def stored(params: Tensor, keeping: Keeping) -> Tensor:
    """The model as the server stores it. Devices use the rounded model as their anchor, so rounding is not lost."""
    return params if keeping == "kept" else params.to(getattr(torch, keeping)).to(params.dtype)


def first_state(problem: Problem, gamma: Threshold, keeping: Keeping, noise_weight: float) -> State:
    """Every device starts from x^0 and has it as its anchor."""
    devices = problem.devices(anchor=stored(problem.initial, keeping))
    return State(problem.initial, devices, first_gamma(problem, noise_weight) if gamma == "adaptive" else None)


def active_now(state: State, round: Round, gamma: Threshold) -> tuple[float | Tensor, Tensor]:  # noqa: A002
    """The γ of this round, and the mask of active devices."""
    if gamma != "adaptive":
        return gamma, round.active
    assert state.gamma is not None
    return state.gamma, round.everyone & above_threshold(round.device, round.problem, state.gamma[:, None])


def anchors_of(devices: Devices) -> Anchors:
    """The anchors that these methods' devices have."""
    assert devices.anchors is not None
    return devices.anchors
