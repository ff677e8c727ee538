"""An adaptive γ: the server adjusts the threshold from what it hears anyway, and broadcasts it.

A low γ lets noise in, a high one keeps devices silent. The server can measure both in every round, for any fading:

    waiting = (m − |A| + ½)/(|A| + ½)         silent rounds of a device per round in which it is heard
    noise   = weight √d σ_z²/‖signal‖²        how much the noise energy fluctuates, over the energy of the signal

The signal's energy follows from the reports, if innovations of different devices are orthogonal. γ moves by SPEED times
the log-ratio of noise and waiting, and is halved if nobody was heard. The weights: docs/open-problems.md.

Knows: how many devices there are, how many are heard, what they report, the server's own receiver noise.
Does not know: any h_i, channel statistics, what is learnt.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from otafl.algorithms.parts.truncated import SMALLEST_GAMMA, Gamma
from otafl.core.contract import Problem

Threshold = Gamma | Literal["adaptive"]
SPEED = 0.05  # of log γ per round and log-ratio
MOST = 3.0  # the log-ratio is clipped here


def first_gamma(problem: Problem, weight: float) -> Tensor:
    """The first γ: one device alone, heard with it, has noise = 1; float64 [S]."""
    start = max(_noise(problem, weight) ** 0.5, SMALLEST_GAMMA)
    return torch.full(problem.initial.shape[:1], start, dtype=torch.float64, device=problem.initial.device)


def next_gamma(gamma: Tensor, num_active: Tensor, signal_energy: Tensor, problem: Problem, weight: float) -> Tensor:
    """γ of the next round, from |A| and ‖signal‖² of this one, all [S]."""
    noise = _noise(problem, weight) / signal_energy
    heard = num_active.to(torch.float64)
    waiting = (problem.num_devices - heard + 0.5) / (heard + 0.5)
    ratio = (noise / waiting).log().nan_to_num(nan=0.0).clamp(-MOST, MOST)
    moved = gamma * (SPEED * ratio).exp()
    return torch.where(num_active > 0, moved, gamma / 2).clamp(min=SMALLEST_GAMMA)


def _noise(problem: Problem, weight: float) -> float:
    return weight * math.sqrt(problem.num_params) * problem.noise_var_j
