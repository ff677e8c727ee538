"""What the analysis says about a configuration: who is heard, how fast devices mix, staleness, the bound's terms.

Knows: simulations, results, the parts of the analysis.
Does not know: how it is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from otafl.algorithms.fedoag_zero import FedOAGZero
from otafl.errors import ConfigError
from otafl.papers.fedoag.theory import backlog, bounds, estimates, mixing, staleness
from otafl.runs.result import Result
from otafl.simulation.build import Simulation

MOST_ROUNDS = 25  # in which the gossip matrix of a moving cell is looked at
SYMBOLS = {
    "smoothness": "L",
    "gradient_var": "σ²",
    "dissimilarity": "ζ²",
    "gradient_bound": "G²",
    "initial_gap": "F(x⁰) − F*",
}
TERMS = {"A": "initialisation", "B": "consensus", "C": "gradient noise and heterogeneity", "D": "receiver noise"}
CONDITIONS = {"norm_bound": "Lemma 5", "descent": "Lemma 4", "consensus": "Lemma 6", "theorem": "Theorem 1"}
WAITS = {
    "unsent_share": "of what there is to send is not sent, if progress is across what waits … along it",
    "waiting": "rounds of progress that wait",
    "forgotten_share": "of what there is to send is forgotten",
}
ZERO_TERMS = {
    "A": "initialisation",
    "B": "what waits",
    "C": "what is forgotten, and local drift",
    "D": "noise, of gradients and of the receiver",
}
MEASURED = {
    "staleness_mean": "mean staleness of the run (its first seed)",
    "consensus": "mean of the consensus distance; experiment.record has it recorded",
    "mean_grad_norm_sq": "mean of ‖∇F(x̄)‖²; experiment.record has it recorded",
}


Tell = Callable[[str], None]
"""Says on a terminal what is being done."""


@dataclass
class Account:
    """Rows of (quantity, value, what it is), warnings, and what a figure needs."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    staleness: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Expected staleness after each round, mean over devices."""
    bounds: dict[str, float] = field(default_factory=dict)
    """Column of a run to what the analysis says of its mean at η_0."""
    applies: dict[str, bool] = field(default_factory=dict)
    """Column to whether its statement allows η_0, where it has a condition."""
    predicted: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Column of a run to what its mean should be in two cases, the smaller first."""

    @property
    def words(self) -> str:
        """The main thing in a sentence."""
        value = {symbol: shown for symbol, shown, _ in self.rows}
        text = {symbol: meaning for symbol, _, meaning in self.rows}
        if "E|A|" in value:
            return (
                f"{value['E|A|']} of the {text['E|A|'].split('of ')[1].split(',')[0]} devices are heard in a round on "
                f"average; {value['never heard']} are not heard once."
            )
        return f"Devices get {value['heard']} of what they learn to the server, the worst {text['heard'].split()[-1]}."

    def add(self, symbol: str, value: float | str, text: str) -> None:
        """One more row."""
        self.rows.append((symbol, value if isinstance(value, str) else f"{value:.3g}", text))


def account(sim: Simulation, result: Result | None = None, tell: Tell | None = None) -> Account:
    """The analysis of a simulation's first seed, and beside it what a run of the same configuration measured.

    Constants are estimated at x⁰ and, where there is a run, at its last model.
    """
    if isinstance(sim.algorithm, FedOAGZero):
        return _of_zero(sim, sim.algorithm, result, tell)
    prob = sim.uplink_probability()
    if getattr(sim.algorithm, "gamma", None) == "adaptive":
        raise ConfigError('algorithm.gamma = "adaptive": the analysis is for one γ; give the one to look at')
    if prob is None:
        raise ConfigError(
            f"algorithm.name = {sim.config.algorithm.name!r}: the analysis is FedOAG's; "
            "choose a method with algorithm.gamma, or fedoag-zero"
        )
    found = _constants(sim, result, tell)
    report = Account()
    gap = _who_is_heard(report, prob)
    if getattr(sim.config.fading.spec, "pooled", False):
        report.warnings.append("uplink probabilities here are of one law for all devices: that of all draws together")
    if getattr(sim.config.fading.spec, "memory", "independent") != "independent":
        report.warnings.append(
            "fading has a memory: the analysis takes activations of different rounds as independent, "
            "so mixing and staleness here are too good"
        )
    training = sim.config.training
    if training.lr_schedule != "constant" or (training.batches != "per_round" and training.local_steps > 1):
        report.warnings.append(
            "the statements are for one mini-batch per round and a constant step size (training.batches = "
            '"per_round", training.lr_schedule = "constant"): here their numbers are for orientation'
        )
    if not sim.config.imperfect.none:
        report.warnings.append(
            "the radio is imperfect: the analysis, and the probabilities here, are those of devices that know their "
            "channels and a server that hears the sum as it was sent"
        )
    for name, symbol in SYMBOLS.items():
        report.add(symbol, found[name].value, found[name].how)
    k = bounds.Constants(
        num_devices=prob.shape[1],
        local_steps=sim.config.training.local_steps,
        num_params=sim.problem.num_params,
        lr=sim.config.training.lr,
        noise_var=sim.noise_var_j,
        gamma=sim.algorithm.gamma,
        least_prob=float(prob.min()),
        gap=gap,
        **{name: measured.value for name, measured in found.items()},
    )
    try:
        _bounds(report, k, len(prob))
        grad_sq = _measured(result, "mean_grad_norm_sq")
        if grad_sq is not None:
            report.bounds["consensus"] = bounds.consensus_error(k, grad_sq)
            report.add("consensus", report.bounds["consensus"], "Lemma 6 at η_0 and the run's mean ‖∇F(x̄)‖²")
    except ZeroDivisionError:  # c or 1 − ρ is 0 to machine precision
        report.add("sum", "∞", "bound on the mean of E‖∇F(x̄)‖²: a device is never heard, and nothing is said of it")
    except OverflowError:
        report.add("sum", "∞", "bound on the mean of E‖∇F(x̄)‖²: beyond the largest number")
    if result is not None:
        for column, text in MEASURED.items():
            value = _measured(result, column)
            report.add("measured", "–" if value is None else value, text)
    return report


def _constants(sim: Simulation, result: Result | None, tell: Tell | None) -> dict[str, estimates.Measured]:
    """Constants of the problem, at x⁰ and at the last model of a run."""
    if result is not None and not len(result.params):
        raise ConfigError("the run's models were deleted, and the constants need them; leave the run out")
    if tell is not None:
        tell("measuring the constants of the bound on this model and its data; a minute for the paper's")
    points = [sim.problem.initial[0]]
    if result is not None:
        points.append(result.params[0].to(sim.dtype))
        if not bool(points[1].isfinite().all()):
            raise ConfigError(
                f"seed {sim.seeds[0]} of the run diverged: its last model tells nothing; leave the run out"
            )
    return estimates.constants(sim, points)


def _of_zero(sim: Simulation, method: FedOAGZero, result: Result | None, tell: Tell | None) -> Account:
    """FedOAG-zero: what devices can send, what waits, and the bound of docs/algorithms/fedoag-zero.md."""
    report, config, problem = Account(), sim.config, sim.problem
    if not config.imperfect.none:
        report.warnings.append("the radio is imperfect: what is said here is for one that is not")
    training = config.training
    if training.lr_schedule != "constant" or training.warmup or training.clip < np.inf:
        report.warnings.append(
            "the bound is for a constant step size and progress that is not clipped (training.lr_schedule, warmup, "
            "clip): here its numbers are for orientation; the queues are for what the run does"
        )
    if not problem.noise_var_j > 0:
        raise ConfigError("radio.noise_dbm_hz: without noise everybody sends everything, and nothing is to be said")
    if config.radio.antennas > 1:
        raise ConfigError("radio.antennas: FedOAG-zero's queues are predicted for one antenna; set it to 1")
    if config.cell.cohort:
        raise ConfigError(
            "cell.cohort: FedOAG-zero's queues are predicted for devices that always take part; set it to 0"
        )
    each = method.nu * problem.num_devices * np.sqrt(problem.symbol_energy_j / problem.noise_var_j)
    sendable = each * np.abs(sim.worlds[0].coeff)
    mean_able = sendable.mean(0)
    learnt = _measured(result, "progress_share")
    report.add(
        "a", float(np.median(sendable)), "median of what a device can send in a round, over the largest progress B"
    )
    report.add("", float(mean_able.min()), "the weakest device's mean")
    report.add("a ≥ 1", float((mean_able >= 1).sum()), f"devices of {problem.num_devices} that can send B in the mean")
    how = "assumed, since there is no run" if learnt is None else "of the run"
    report.add("q", 1.0 if learnt is None else learnt, f"a device's progress over B, {how}")
    found = {
        aligned: backlog.queues(sendable, method.backlog, aligned, 1.0 if learnt is None else learnt)
        for aligned in (False, True)
    }
    for column, text in WAITS.items():
        across, along = (float(getattr(found[aligned], column).mean()) for aligned in (False, True))
        report.predicted[column] = (min(across, along), max(across, along))
        measured = _measured(result, column)
        beside = "" if measured is None else f"; measured {measured:.3g}"
        report.add(column.removesuffix("_share"), f"{across:.2g} … {along:.2g}", f"{text}{beside}")
    heard = found[True].heard
    report.add(
        "heard", float(heard.mean()), f"of what devices learn, if it points one way; the worst {heard.min():.2g}"
    )
    report.add("ν", method.nu, "noise in a step over η B, root mean square")
    constants = _constants(sim, result, tell)
    for name, symbol in SYMBOLS.items():
        report.add(symbol, constants[name].value, constants[name].how)
    terms = backlog.bound(
        smoothness=constants["smoothness"].value,
        gradient=constants["gradient_bound"].value ** 0.5,
        gap=constants["initial_gap"].value,
        step=training.lr * training.local_steps,
        rounds=config.experiment.rounds,
        nu=method.nu,
        limit=method.backlog,
        lost=1 - float(heard.mean()),
    )
    for letter, text in ZERO_TERMS.items():
        report.add(f"({letter})", terms[letter], f"of the bound, {text}, at η_0")
    report.bounds["grad_norm_sq"] = sum(terms.values())
    report.add("sum", report.bounds["grad_norm_sq"], "bound on the mean of E‖∇F(x)‖²")
    return report


def _measured(result: Result | None, column: str) -> float | None:
    """The mean of a column over the rounds of a run's first seed, where it has it."""
    if result is None or column not in result.metrics or np.isnan(result.metrics[column][0]).all():
        return None
    return float(np.nanmean(result.metrics[column][0]))


def _who_is_heard(report: Account, prob: NDArray[np.float64]) -> float:
    """Probabilities, mixing and staleness; returns 1 − ρ."""
    rounds, m = prob.shape
    moves = bool((prob != prob[0]).any())
    looked = np.unique(np.linspace(0, rounds - 1, MOST_ROUNDS).astype(int)) if moves else np.array([0])
    gap, least = min(mixing.spectral_gap(prob[r]) for r in looked), float(prob.min())
    first, second = staleness.moments(prob)
    report.staleness = first[1:].mean(1)
    if least > 0:
        report.bounds["staleness_mean"] = 1 / least
    never = staleness.never_heard(prob)
    report.add("c", least, "least uplink probability p_i^t of any device and round")
    report.add("E|A|", float(prob.sum(1).mean()), f"expected active devices of {m}, mean over rounds")
    report.add("never heard", float(never.sum()), f"expected devices that are not heard once in {rounds} rounds")
    where = f"worst of {len(looked)} rounds" if moves else "one round: nobody moves"
    lemma = f"Lemma 2 says ≥ {bounds.ergodicity(m, least):.2g}"
    report.add("1 − ρ", gap, f"spectral gap of the gossip matrix, {where}; {lemma}")
    limit = f"{1 / least:.3g}" if least > 0 else "∞"
    report.add("staleness", float(first[:-1].mean()), f"mean of E[t − τ_i]; Lemma 7 says ≤ 1/c = {limit}")
    report.add("", float(np.sqrt(second[-1].max())), "largest root mean square staleness of a device at the end")
    silent = int((never > 0.5).sum())
    if silent:
        report.warnings.append(
            f"Assumption 1 holds only with c = {least:.1g}: {silent} of {m} devices will probably "
            f"not be heard once in {rounds} rounds, so unbiasedness says nothing about them; a smaller γ hears more"
        )
    return gap


def _bounds(report: Account, k: bounds.Constants, rounds: int) -> None:
    """Step sizes that the statements allow, and Theorem 1 term by term."""
    most = {what: bounds.largest_lr(k, what) for what in CONDITIONS}
    terms, allowed = bounds.theorem(k, rounds), bounds.theorem(replace(k, lr=most["theorem"]), rounds)
    needed, kappa = bounds.rounds_needed(k), k.kappa  # nothing is added before everything is known
    report.add("κ", kappa, "of Lemma 3, at η = η_0")
    for what, text in CONDITIONS.items():
        report.add(f"η ≤ {most[what]:.2g}", "yes" if k.lr <= most[what] else "no", f"{text} allows η_0 = {k.lr:g}")
    for letter, text in TERMS.items():
        largest = f"at the largest η allowed {allowed[letter]:.3g}"
        report.add(f"({letter})", terms[letter], f"of Theorem 1, {text}, at η_0; {largest}")
    largest = f"at the largest η {sum(allowed.values()):.3g}"
    report.bounds["mean_grad_norm_sq"] = sum(terms.values())
    report.applies = {"mean_grad_norm_sq": k.lr <= most["theorem"], "consensus": k.lr <= most["consensus"]}
    report.add("sum", sum(terms.values()), f"bound on the mean of E‖∇F(x̄)‖²; {largest}")
    absorbed = bounds.absorbed(replace(k, lr=most["theorem"]))
    report.add(
        "72 → 73", absorbed, "what the printed Theorem 1 takes to be at most 1, to drop a part of (D); here it is kept"
    )
    report.add("T ≥", needed, "rounds that Corollary 1 needs, mended")
    if k.lr > most["theorem"]:
        report.warnings.append(
            f"η_0 = {k.lr:g} is {k.lr / most['theorem']:.1g} times what Theorem 1 allows: "
            "its bound does not apply to this run"
        )
