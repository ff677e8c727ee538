"""The paper's lemmas, Theorem 1 and Corollary 1, term by term, as printed and mended.

`mended=True` (the default) gives what can be proved, `mended=False` what is printed (docs/theory.md has the arguments):

- Lemma 6 loses the 3ζ² of Proposition 1. Without noise, on quadratics started at the optimum of F, its right side is 0
  and its left side is not. Adding 108 ρ η² s² ζ²/(1 − √ρ)² mends it, and Theorem 1 inherits 6 L² times that.
- Theorem 1 drops Lemma 6's receiver noise, 576 ρ m η² s² L² d σ_z² (σ² + G²)/(c γ (1 − √ρ))², which its step size
  makes small only where 576 ρ m ≤ 632 (κ + 1) √(β² + 1) (1 − √ρ). Here it is part of D.
- Lemma 4's proof weighs a gradient against η s, which has units; with the weight 1/12 the drift of local steps needs no
  term of its own, so 1 in place of 1 + κ² L².
- Corollary 1's condition on T gives Theorem 1's step size only for m ≤ s; needed is
  T ≥ 632² s m³ (κ + 1)² (β² + 1)/(1 − √ρ)².

Knows: the constants of the analysis.
Does not know: where they come from.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from otafl.papers.fedoag.theory.mixing import spectral_gap


@dataclass(frozen=True)
class Constants:
    """What the bounds are made of."""

    num_devices: int
    """m."""
    local_steps: int
    """s."""
    num_params: int
    """d."""
    lr: float
    """η."""
    smoothness: float
    """L."""
    gradient_var: float
    """σ², variance of a stochastic gradient."""
    dissimilarity: float
    """ζ², with (1/m) Σ ‖∇F_i − ∇F‖² ≤ β² ‖∇F‖² + ζ²."""
    dissimilarity_slope: float
    """β²."""
    gradient_bound: float
    """G_max² of the true gradients."""
    initial_gap: float
    """F(x⁰) − F*."""
    noise_var: float
    """σ_z²."""
    gamma: float
    """γ."""
    least_prob: float
    """c = min p_i^t."""
    gap: float
    """1 − ρ."""

    @property
    def rho(self) -> float:
        """ρ."""
        return 1 - self.gap

    @property
    def root_gap(self) -> float:
        """1 − √ρ, with relative accuracy where ρ is nearly 1."""
        return self.gap / (1 + math.sqrt(max(0.0, self.rho)))

    @property
    def kappa(self) -> float:
        """κ of Lemma 3: 2 ((1 + ηL)^s − 1 − sηL)/(s (s − 1) (ηL)²); 0 for one step, where nothing drifts."""
        s, x = self.local_steps, self.lr * self.smoothness
        if s < 2:
            return 0.0
        if x * s < 1e-3:  # the leading terms, which the difference would lose
            return 1 + (s - 2) * x / 3
        return 2 * (math.expm1(s * math.log1p(x)) - s * x) / (s * (s - 1) * x**2)


def ergodicity(num_devices: int, least_prob: float) -> float:
    """Lemma 2: a lower bound on 1 − ρ, c⁴ [1 − (1 − c)^m]²/8."""
    heard = -math.expm1(num_devices * math.log1p(-least_prob)) if least_prob < 1 else 1.0
    return least_prob**4 * heard**2 / 8


def norm_bound(k: Constants) -> float:
    """Lemma 5: (1/T) Σ E B_t² ≤ 12 m s² (σ² + G²)/c², for η ≤ 1/(s L (κ + 1))."""
    return 12 * k.num_devices * k.local_steps**2 * (k.gradient_var + k.gradient_bound) / k.least_prob**2


def descent(k: Constants, grad_sq: float, bound_sq: float, consensus: float, mended: bool = True) -> float:
    """Lemma 4: E F(x̄^{t+1}) − F(x̄^t), given ‖∇F(x̄)‖², E B_t² and (1/m) Σ ‖x_i − x̄‖²."""
    eta, s, smooth, m = k.lr, k.local_steps, k.smoothness, k.num_devices
    noise = eta**2 * smooth * k.num_params * k.noise_var * bound_sq / (k.gamma**2 * m**2)
    spread = 6 * eta**2 * s**2 * smooth * (k.dissimilarity + k.gradient_var) * (1.0 if mended else _printed_drift(k))
    return -eta * s / 3 * grad_sq + noise + spread + eta * s * smooth**2 * consensus


def consensus_error(k: Constants, grad_sq: float, mended: bool = True) -> float:
    """Lemma 6: mean of E‖x_i − x̄‖² over devices and rounds, given the mean of E‖∇F(x̄)‖²."""
    factor = k.rho * k.lr**2 * k.local_steps**2 / k.root_gap**2
    signal = 108 * (k.dissimilarity_slope + 1) * grad_sq + 36 * k.gradient_var
    if mended:
        signal += 108 * k.dissimilarity
    noise = 96 * k.num_devices * k.num_params * k.noise_var * (k.gradient_var + k.gradient_bound)
    return factor * (signal + noise / (k.least_prob * k.gamma) ** 2)


def largest_lr(k: Constants, what: str) -> float:
    """The largest η that satisfies the condition of "descent", "norm_bound", "consensus" or "theorem".

    The conditions have κ, which rises with η; η here is where they are just met, whatever `k.lr` is.
    """
    root = math.sqrt(k.dissimilarity_slope + 1)
    factor = {
        "descent": 1 / (108 * (k.dissimilarity_slope + 1)),
        "norm_bound": 1.0,
        "consensus": k.root_gap / (632 * root),
        "theorem": k.root_gap / (632 * root * k.num_devices),
    }[what] / (k.local_steps * k.smoothness)
    low, high = 0.0, factor  # κ ≥ 0
    for _ in range(200):
        middle = (low + high) / 2
        met = middle * (replace(k, lr=middle).kappa + 1) <= factor
        low, high = (middle, high) if met else (low, middle)
    return low


def theorem(k: Constants, num_rounds: int, mended: bool = True) -> dict[str, float]:
    """Theorem 1's terms on the mean of E‖∇F(x̄^t)‖²: A initialisation, B consensus, C gradients, D receiver noise.

    D is the noise in x̄ itself, 72 …/m, and that in the devices' models around it, 576 …; printed is 73 …/m.
    """
    x, m = k.lr * k.local_steps * k.smoothness, k.num_devices
    spread = k.rho / k.root_gap**2
    signal = 36 * k.gradient_var + (108 * k.dissimilarity if mended else 0.0)
    noise = k.num_params * k.noise_var * (k.gradient_var + k.gradient_bound) / (k.least_prob * k.gamma) ** 2
    return {
        "A": 6 * k.initial_gap / (k.lr * k.local_steps * num_rounds),
        "B": 6 * x**2 * spread * signal,
        "C": 36 * x * (k.gradient_var + k.dissimilarity) * (1.0 if mended else _printed_drift(k)),
        "D": noise * (72 * x / m + 576 * m * x**2 * spread if mended else 73 * x / m),
    }


def absorbed(k: Constants) -> float:
    """What Theorem 1's last step takes to be at most 1: 576 ρ m/(632 (κ + 1) √(β² + 1) (1 − √ρ))."""
    root = math.sqrt(k.dissimilarity_slope + 1)
    return 576 * k.rho * k.num_devices / (632 * (k.kappa + 1) * root * k.root_gap)


def gamma_factors(prob: NDArray[np.float64], gamma: float) -> tuple[float, float, float]:
    """How γ enters Theorem 1: D in x̄, 1/(cγ)²; D around x̄, ρ/((1 − √ρ) cγ)²; B, ρ/(1 − √ρ)².

    Infinite where a device is never heard.
    """
    gap, least = spectral_gap(prob), float(prob.min())
    noise = 1 / (least * gamma) ** 2 if least * gamma > 1e-150 else math.inf
    rho = max(0.0, 1 - gap)
    spread = rho * ((1 + math.sqrt(rho)) / gap) ** 2 if gap > 0 else math.inf
    return noise, noise * spread if spread else 0.0, spread


def corollary_lr(num_devices: int, local_steps: int, smoothness: float, num_rounds: int) -> float:
    """Corollary 1's step size, η = √m/(L √(s T))."""
    return math.sqrt(num_devices) / (smoothness * math.sqrt(local_steps * num_rounds))


def rounds_needed(k: Constants, mended: bool = True) -> float:
    """Corollary 1's least T, at which its step size satisfies Theorem 1's condition (as printed only for m ≤ s)."""
    s, m = k.local_steps, k.num_devices
    kappa = replace(k, lr=largest_lr(k, "theorem")).kappa
    common = 632**2 * (kappa + 1) ** 2 * (k.dissimilarity_slope + 1) / k.root_gap**2
    return common * (s * m**3 if mended else (s * m) ** 2)


def _printed_drift(k: Constants) -> float:
    """1 + κ² L²."""
    return 1 + (k.kappa * k.smoothness) ** 2
