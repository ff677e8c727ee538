"""FedOAG's uplink, lines 10–18 of its Algorithm 1: truncated channel inversion, and the handshake that bounds norms.

    A = {i : |h_i| ≥ γ/√(d E_s)},   B = max_{i∈A} ‖Δ_i‖,   x̂_i = (γ/h_i) Δ_i/B
    mean_{i∈A} Δ_i ≈ B/(γ|A|) (Σ_{i∈A} h_i x̂_i + z)

‖x̂_i‖ ≤ γ/|h_i| ≤ √(d E_s): the energy limit holds surely. The server learns who is active, and the norms.

Knows: the uplink, norms, the devices' own channels.
Does not know: what the vectors are, what the server does with their mean.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from otafl.core.contract import Problem
from otafl.core.round import Round
from otafl.engine.updates import Updates
from otafl.radio.csi import View

SMALLEST_GAMMA = 1e-25
Gamma = Annotated[float, Ge(SMALLEST_GAMMA), Le(1e6)]
"""The pre-scalar; outside this range a received signal would underflow or overflow in float32."""


@dataclass(frozen=True)
class Heard:
    """The mean of the active devices' vectors, as the server recovers it."""

    mean: Tensor
    """The mean with noise, [S, P]; meaningless if nobody was active."""
    who: Tensor
    """Devices that reported, bool [S, M]."""
    norm_bound: Tensor
    """B, [S]."""
    weights: Tensor
    """1/|A| for the active devices, [S, M]."""
    noise_std: Tensor
    """Standard deviation of the noise in `mean`, per coordinate, [S]."""
    signal_energy: Tensor
    """Σ_i ‖γ Δ_i/B‖², the energy that arrived if different devices' vectors are orthogonal, [S]."""


def full_amplitude(h: Tensor, problem: Problem) -> Tensor:
    """√(d E_s) |h_i| in √J: the norm with which a vector of d values, sent at full energy, arrives.

    Args:
        h: channels [..., M], real or complex.
        problem: the constants of the run.

    Returns:
        Real amplitudes of the shape of h.

    >>> import otafl
    >>> sim = otafl.Simulation(otafl.load_config("quick", {"data.name": "digits", "experiment.seeds": [0]}))
    >>> reach = full_amplitude(sim.round_at(0).device.h, sim.problem)
    >>> list(reach.shape), bool((reach >= 1e-10).sum() > (reach >= 1e-9).sum())
    ([1, 30], True)
    """
    return h.abs() * math.sqrt(problem.num_params * problem.symbol_energy_j)


def above_threshold(device: View, problem: Problem, gamma: float | Tensor) -> Tensor:
    """Line 10 of FedOAG: the active set A, devices with |h_i| ≥ γ/√(d E_s).

    Args:
        device: what devices know of the channel, with `h`.
        problem: the constants of the run.
        gamma: γ in √J, a number or [S, 1].

    Returns:
        A mask of the shape of `device.h`: [T, S, M] in a method's `active`, [S, M] within a round.

    >>> import otafl
    >>> sim = otafl.Simulation(otafl.load_config("quick", {"data.name": "digits", "experiment.seeds": [0]}))
    >>> above_threshold(sim.round_at(0).device, sim.problem, gamma=1e-25).all().item()
    True
    """
    return full_amplitude(device.h, problem) >= gamma


def heard_mean(round: Round, vectors: Updates, gamma: float | Tensor, who: Tensor) -> Heard:  # noqa: A002
    """Lines 12–18 of FedOAG: B = max ‖Δ_i‖, x̂_i = (γ/h_i) Δ_i/B, mean = B/(γ|A|) (Σ_{i∈A} h_i x̂_i + z).

    Args:
        round: the instruments of this round.
        vectors: what `round.train` returned.
        gamma: γ in √J, a number or [S].
        who: the active set A, bool [S, M].

    Returns:
        The mean that the server hears [S, P], who was heard, B, weights and the noise's standard deviation.

    >>> import otafl
    >>> sim = otafl.Simulation(otafl.load_config("quick", {"data.name": "digits", "algorithm.name": "fedoag"}))
    >>> now = sim.round_at(0)
    >>> heard = heard_mean(now, now.train(sim.problem.initial), 1e-10, now.active)
    >>> heard.mean.shape == sim.problem.initial.shape
    True

    Reference:
        M. Xiang et al., "Over-the-Air Federated Learning in Heterogeneous Mobile Wireless Networks", 2026, Algorithm 1.
    """
    reports = round.report(vectors.norms(who), who)
    bound, count = reports.max(), reports.count()
    scale = (torch.where(bound > 0, 1 / bound, 0.0) * gamma)[:, None]  # if all norms are 0, nothing is sent
    sent = torch.where(who, scale, 0.0)
    received = round.uplink(vectors, sent / torch.where(who, round.device.h, 1.0), who)  # Σ γ Δ_i/B + z
    rescale = bound / gamma / count.clamp(min=1)
    return Heard(
        mean=received * rescale[:, None].to(received.dtype),
        who=reports.who,
        norm_bound=bound,
        weights=rescale[:, None] * sent,
        noise_std=rescale * round.problem.noise_var_j**0.5,
        signal_energy=(scale * reports.values).square().sum(-1),
    )
