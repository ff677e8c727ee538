"""What the analysis says about a configuration: who is heard, how fast devices mix, staleness, the bound's terms.

Knows: simulations, the parts of the analysis.
Does not know: how it is shown.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from otafl.errors import ConfigError
from otafl.simulation import Simulation
from otafl.theory import bounds, estimates, mixing, staleness

MOST_ROUNDS = 25  # in which the gossip matrix of a moving cell is looked at


@dataclass(frozen=True)
class Account:
    """Rows of (quantity, value, what it is), and warnings."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    constants: bounds.Constants | None = None
    staleness_mean: float = 0.0
    """Mean over devices and rounds of E[t − τ_i(t)]."""


def uplink_probability(sim: Simulation) -> NDArray[np.float64]:
    """p_i^t of the first seed, [T, M], from threshold, gains and the law of the fading."""
    gamma = getattr(sim.algorithm, "gamma", None)
    if gamma is None:
        raise ConfigError(
            f"algorithm.name = {sim.config.algorithm.name!r}: the analysis is FedOAG's; "
            "choose a method with algorithm.gamma"
        )
    power = gamma**2 / (sim.problem.num_params * sim.problem.symbol_energy_j)
    return np.asarray(sim.config.fading.spec.exceed_prob(power / sim.worlds[0].mean_gain), dtype=np.float64)


def account(sim: Simulation, points: list[Tensor]) -> Account:
    """The analysis of a simulation's first seed; constants are estimated at `points`, of which x⁰ is the first."""
    prob = uplink_probability(sim)
    rounds, m = prob.shape
    looked = (
        np.unique(np.linspace(0, rounds - 1, MOST_ROUNDS).astype(int)) if (prob != prob[0]).any() else np.array([0])
    )
    gap = min(mixing.spectral_gap(prob[r]) for r in looked)
    least = float(prob.min())
    never = staleness.never_heard(prob)
    first, second = staleness.moments(prob)
    training = sim.config.training
    found = estimates.constants(sim, points)
    k = bounds.Constants(
        num_devices=m,
        local_steps=training.local_steps,
        num_params=sim.problem.num_params,
        lr=training.lr,
        noise_var=sim.noise_var_j,
        gamma=sim.algorithm.gamma,
        least_prob=least,
        gap=gap,
        **{name: measured.value for name, measured in found.items()},
    )
    terms = bounds.theorem(k, rounds)
    allowed = bounds.theorem(replace(k, lr=bounds.largest_lr(k, "theorem")), rounds)
    report = Account(constants=k, staleness_mean=float(first[:-1].mean()))
    add = report.rows.append
    add(("c", f"{least:.3g}", "least uplink probability p_i^t of any device and round"))
    add(("E|A|", f"{prob.sum(1).mean():.2f}", f"expected active devices of {m}, mean over rounds"))
    add(("never heard", f"{never.sum():.2f}", f"expected devices that are not heard once in {rounds} rounds"))
    where = "one round: nobody moves" if len(looked) == 1 else f"worst of {len(looked)} rounds"
    add(
        (
            "1 − ρ",
            f"{gap:.3g}",
            f"spectral gap of the gossip matrix, {where}; Lemma 2 says ≥ {bounds.ergodicity(m, least):.2g}",
        )
    )
    add(("staleness", f"{report.staleness_mean:.1f}", f"mean of E[t − τ_i]; Lemma 7 says ≤ 1/c = {1 / least:.3g}"))
    add(("", f"{np.sqrt(second[-1].max()):.3g}", "largest root mean square staleness of a device at the end"))
    for name, symbol in SYMBOLS.items():
        add((symbol, f"{found[name].value:.3g}", found[name].how))
    add(("κ", f"{k.kappa:.3g}", "of Lemma 3, at η = η_0"))
    for what, text in (
        ("norm_bound", "Lemma 5"),
        ("descent", "Lemma 4"),
        ("consensus", "Lemma 6"),
        ("theorem", "Theorem 1"),
    ):
        add(
            (
                f"η ≤ {bounds.largest_lr(k, what):.2g}",
                "yes" if training.lr <= bounds.largest_lr(k, what) else "no",
                f"{text} allows η_0 = {training.lr:g}",
            )
        )
    for letter, text in TERMS.items():
        add(
            (
                f"({letter})",
                f"{terms[letter]:.3g}",
                f"of Theorem 1, {text}, at η_0; at the largest η allowed {allowed[letter]:.3g}",
            )
        )
    add(
        (
            "sum",
            f"{sum(terms.values()):.3g}",
            f"bound on the mean of E‖∇F(x̄)‖²; at the largest η {sum(allowed.values()):.3g}",
        )
    )
    add(("T ≥", f"{bounds.rounds_needed(k):.2g}", "rounds that Corollary 1 needs, mended"))
    _warn(report, k, never, rounds, training.lr)
    return report


SYMBOLS = {
    "smoothness": "L",
    "gradient_var": "σ²",
    "dissimilarity": "ζ²",
    "gradient_bound": "G²",
    "initial_gap": "F(x⁰) − F*",
}
TERMS = {"A": "initialisation", "B": "consensus", "C": "gradient noise and heterogeneity", "D": "receiver noise"}


def _warn(report: Account, k: bounds.Constants, never: NDArray[np.float64], rounds: int, lr: float) -> None:
    silent = int((never > 0.5).sum())
    if silent:
        report.warnings.append(
            f"Assumption 1 holds only with c = {k.least_prob:.1g}: {silent} of {k.num_devices} devices will probably "
            f"not be heard once in {rounds} rounds, so unbiasedness says nothing about them; a smaller γ hears more"
        )
    if lr > bounds.largest_lr(k, "theorem"):
        report.warnings.append(
            f"η_0 = {lr:g} is {lr / bounds.largest_lr(k, 'theorem'):.1g} times what Theorem 1 allows: "
            "its bound does not apply to this run"
        )
