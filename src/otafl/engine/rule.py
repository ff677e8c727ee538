"""The rule of a local step: SGD, optionally with momentum, weight decay, a proximal term and clipped progress.

With w_0 the model that a device's local work starts from and c_i a correction that a method gives it, step k is

    v_k = μ v_{k−1} + ∇ℓ(w_k) + λ w_k + ρ (w_k − w_0) + c_i,   v_{−1} = 0,   w_{k+1} = w_k − η v_k

and after the last one, with the round's own progress p = (w_s − w_0)/η,

    w_s ← w_0 + η p min(1, C/‖p‖)

`clip` C limits what a device learns in one round, whatever it sends, so it means the same for every method. A method's
`norm_limit` limits what a device sends. In a method without memory, a `norm_limit` of C or more has no effect.

Unrolled, the displacement is linear in the gradients: with δ = λ + ρ and u = λ w_0 + c_i

    w_k − w_0 = −η Σ_{j<k} a_kj ∇ℓ(w_j) − η b_k u
    p_kj = μ p_{k−1,j} − δ η a_kj,  p_kk = 1,    q_k = μ q_{k−1} − δ η b_k + 1
    a_{k+1,j} = a_kj + p_kj,                     b_{k+1} = b_k + q_k

which is the form that training in pre-activation space uses (`otafl.engine.fast.preactivation`).

Knows: the coefficients of a local step.
Does not know: models, engines.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalRule:
    """Coefficients of a local step; the defaults give plain SGD."""

    momentum: float = 0.0
    """Momentum coefficient μ."""
    weight_decay: float = 0.0
    """Weight decay λ."""
    proximal: float = 0.0
    """Strength ρ of the pull back to w_0."""
    clip: float = math.inf
    """Limit C on the norm of a round's progress; infinite for none."""

    @property
    def plain(self) -> bool:
        """Whether every step is a plain SGD step; progress may still be clipped."""
        return self.momentum == self.weight_decay == self.proximal == 0

    @property
    def clips(self) -> bool:
        """Whether progress is limited."""
        return self.clip < math.inf

    def factors(self, norms: Tensor) -> Tensor:
        """Clipping factors min(1, C/‖p‖) for given norms ‖p‖ of progress."""
        return torch.where(norms > self.clip, self.clip / norms, 1.0)

    def unrolled(self, steps: int, lr: float) -> tuple[Tensor, Tensor]:
        """The coefficients a [steps + 1, steps] and b [steps + 1], float64."""
        a, b = torch.zeros(steps + 1, steps, dtype=torch.float64), torch.zeros(steps + 1, dtype=torch.float64)
        p, q = torch.zeros(steps, dtype=torch.float64), 0.0
        pull = (self.weight_decay + self.proximal) * lr
        for k in range(steps):
            p = self.momentum * p - pull * a[k]
            p[k] = 1.0
            q = self.momentum * q - pull * float(b[k]) + 1
            a[k + 1], b[k + 1] = a[k] + p, b[k] + q
        return a, b


PLAIN = LocalRule()
