"""What the paper claims, what was measured, and whether the claim holds.

Knows: the paper's claims, results.
Does not know: how results came about.
"""

from collections.abc import Mapping

import numpy as np

from otafl.report.statistics import Estimate, estimate, last_accuracy, paired_difference
from otafl.result import Result

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told with these seeds"
RIVALS = (
    ("SCA", "81 % stationary, below 80 % moving"),
    ("BB-interior", "lower"),
    ("BB-alternative", "lower"),
    ("vanilla", "lower, fluctuating"),
)
Results = Mapping[tuple[str, str], Result]
"""(regime, label) to its result."""


def claims(results: Results, gammas: Mapping[float, Result]) -> list[tuple[str, str, str, str]]:
    """(claim, the paper's number, ours, verdict), from the runs of figures 2 and 3.

    A verdict is given only where 95 % intervals allow one: "cannot be told" is one of them.
    """
    regimes = list(dict.fromkeys(regime for regime, label in results if label == "FedOAG"))
    moving = [regime for regime in regimes if regime != "stationary"]
    level = {key: estimate(last_accuracy(result)) for key, result in results.items()}

    def gap(one: tuple[str, str], other: tuple[str, str]) -> Estimate:
        return paired_difference(results[one], results[other])

    levels = {regime: level[regime, "FedOAG"] for regime in regimes}
    paper = level.get(("stationary", "FedOAG, γ = 1e-9"))
    numbers = ", ".join(f"{value} % {regime}" for regime, value in levels.items())
    if paper is not None:
        numbers += f"; {paper} % at the paper's γ = 1e-9 (stationary)"
    about = together([within(shifted(value, -83.0), -2.0, 2.0) for value in levels.values()])
    if all(above(shifted(value, -83.0), 2.0) == HOLDS for value in levels.values()):
        about = "exceeded"
    rows = [("FedOAG reaches about 83 % in all regimes", "83 %", numbers, about)]

    changes = [gap((regime, "FedOAG"), ("stationary", "FedOAG")) for regime in moving]
    flat = together([within(change, -1.0, 1.0) for change in changes])
    rows.append(("FedOAG does not suffer from motion", "same level", f"change {_list(changes)} points", flat))
    for rival, said in RIVALS:
        leads = {regime: gap((regime, "FedOAG"), (regime, rival)) for regime in regimes}
        ours = ", ".join(f"{level[r, rival]} % {r} (FedOAG {_list([lead])})" for r, lead in leads.items())
        rows.append((f"FedOAG is better than {rival}", said, ours, together([above(v, 0.0) for v in leads.values()])))
    losses = [gap(("stationary", "SCA"), (regime, "SCA")) for regime in moving]
    lost = together([above(loss, 1.0) for loss in losses])
    rows.append(("SCA loses a point or more when devices move", "1 to 2 points", f"{_list(losses)} points lost", lost))
    rivals = [(regime, label) for regime, label in results if label != "FedAvg" and (regime, "FedAvg") in results]
    top = together([above(gap((regime, "FedAvg"), (regime, label)), 0.0) for regime, label in rivals])
    tops = ", ".join(f"{level[regime, 'FedAvg']} % {regime}" for regime in regimes)
    rows.append(("Ideal FedAvg is on top", "top", tops, top))
    if gammas:
        rows += _over_gamma(gammas)
    return rows


def _over_gamma(gammas: Mapping[float, Result]) -> list[tuple[str, str, str, str]]:
    """The claims on figure 3; a γ at which a seed diverged counts as lower than any other."""
    means = {gamma: estimate(last_accuracy(result)).mean for gamma, result in sorted(gammas.items())}
    order = list(means)
    shape = ", ".join(
        f"{gamma:g} diverged" if gammas[gamma].diverged else f"{m:.1f} at {gamma:g}" for gamma, m in means.items()
    )
    finite = [gamma for gamma in order if not gammas[gamma].diverged]
    if not finite:
        return [("Accuracy over γ is an inverted U", "inverted U", shape, OPEN)]
    best = max(finite, key=lambda gamma: means[gamma])

    def beats(other: float) -> str:
        return HOLDS if gammas[other].diverged else above(paired_difference(gammas[best], gammas[other]), 0.0)

    neighbours = [order[k] for k in (order.index(best) - 1, order.index(best) + 1) if 0 <= k < len(order)]
    if len(neighbours) == 1:  # the best of all is at an end
        inverted = FAILS if beats(neighbours[0]) == HOLDS else OPEN
    else:
        inverted = together([beats(order[0]), beats(order[-1])])
    rival = 1e-9 if best != 1e-9 else max((g for g in finite if g != best), key=lambda g: means[g], default=best)
    lead = paired_difference(gammas[best], gammas[rival])
    told = beats(rival) == HOLDS
    peak = (HOLDS if best == 1e-9 else FAILS) if told else OPEN
    ours = f"{best:g}, {_list([lead])} points above {rival:g}"
    return [
        ("Accuracy over γ is an inverted U", "inverted U", shape, inverted),
        ("Its peak is at γ = 1e-9", "1e-9", ours, peak),
    ]


def above(value: Estimate, bound: float) -> str:
    """Whether a mean is above a bound, as far as its 95 % interval tells."""
    if value.num_seeds < 2 or not np.isfinite(value.half_width):
        return OPEN
    return HOLDS if value.mean - value.half_width > bound else FAILS if value.mean + value.half_width < bound else OPEN


def within(value: Estimate, low: float, high: float) -> str:
    """Whether a mean is between two bounds, as far as its 95 % interval tells."""
    inside = (above(value, low), above(value, high))
    return HOLDS if inside == (HOLDS, FAILS) else FAILS if inside[0] == FAILS or inside[1] == HOLDS else OPEN


def together(verdicts: list[str]) -> str:
    """One verdict for a claim of several parts, all of which it needs."""
    if FAILS in verdicts:
        return "in part" if HOLDS in verdicts else FAILS
    return OPEN if OPEN in verdicts else HOLDS


def shifted(value: Estimate, by: float) -> Estimate:
    """The same with another mean."""
    return value._replace(mean=value.mean + by)


def as_markdown(rows: list[tuple[str, str, str, str]], note: str) -> str:
    """The table of claims."""
    lines = [
        "| claim | paper | ours: mean ± std over seeds, paired differences with 95 % intervals | verdict |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", note, ""])


def _list(gaps: list[Estimate]) -> str:
    return ", ".join(f"{gap.mean:+.2f} ± {gap.half_width:.2f}" for gap in gaps)
