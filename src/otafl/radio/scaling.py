"""Transmit scalings that methods share.

Knows: channel coefficients and thresholds.
Does not know: energies, models, methods.
"""

import math

import torch
from torch import Tensor


def inversion_threshold(gamma: float, num_params: int, symbol_energy_j: float) -> float:
    """Smallest |h| at which γ/h times a vector of norm 1 keeps the energy limit: γ/√(d E_s)."""
    return gamma / math.sqrt(num_params * symbol_energy_j)


def truncated_inversion(gamma: float, coeff: Tensor, active: Tensor, norm_bound: Tensor) -> Tensor:
    """γ/(h_i B) for active devices, complex [S, M]; 0 for the others and where B = 0."""
    sends = active & (norm_bound > 0)[:, None]
    divisor = torch.where(sends, coeff * norm_bound[:, None], torch.ones_like(coeff))
    return torch.where(sends, gamma / divisor, torch.zeros_like(divisor))
