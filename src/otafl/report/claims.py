"""What the paper claims, what was measured, and whether the claim holds.

Knows: the paper's claims, results.
Does not know: how results came about.
"""

from collections.abc import Mapping

import numpy as np

from otafl.report.statistics import Estimate, estimate, last_accuracy, paired_difference
from otafl.result import Result

RIVALS = (
    ("SCA", "81 % stationary, below 80 % moving"),
    ("BB-interior", "lower"),
    ("BB-alternative", "lower"),
    ("vanilla", "lower, fluctuating"),
)
Results = Mapping[tuple[str, str], Result]
"""(regime, label) to its result."""


def claims(results: Results, gammas: Mapping[float, Result]) -> list[tuple[str, str, str, str]]:
    """(claim, the paper's number, ours, verdict), from the runs of figures 2 and 3."""
    rows: list[tuple[str, str, str, str]] = []
    regimes = list(dict.fromkeys(regime for regime, label in results if label == "FedOAG"))
    level = {key: estimate(last_accuracy(result)) for key, result in results.items()}

    fedoag = {regime: level[regime, "FedOAG"] for regime in regimes}
    paper = level.get(("stationary", "FedOAG, γ = 1e-9"))
    at_paper = f"; {_text(paper)} at the paper's γ = 1e-9 (stationary)" if paper else ""
    numbers = ", ".join(f"{_text(value)} {regime}" for regime, value in fedoag.items())
    above = all(value.mean - np.nan_to_num(value.half_width) > 83 for value in fedoag.values())
    rows.append(
        ("FedOAG reaches about 83 % in all regimes", "83 %", numbers + at_paper, "exceeded" if above else "in part")
    )
    gaps = [
        paired_difference_of(results, (r, "FedOAG"), ("stationary", "FedOAG")) for r in regimes if r != "stationary"
    ]
    flat = all(abs(gap.mean) <= max(1.0, gap.half_width) for gap in gaps)
    change = ", ".join(f"{gap.mean:+.2f} ± {gap.half_width:.2f}" for gap in gaps)
    rows.append(("FedOAG does not suffer from motion", "same level", f"change {change} points", _yes(flat)))
    for rival, said in RIVALS:
        gaps_by = {r: paired_difference_of(results, (r, "FedOAG"), (r, rival)) for r in regimes}
        ours = ", ".join(
            f"{_text(level[r, rival])} {r} (FedOAG {gap.mean:+.2f} ± {gap.half_width:.2f})"
            for r, gap in gaps_by.items()
        )
        wins = [gap.mean > np.nan_to_num(gap.half_width) for gap in gaps_by.values()]
        holds = "holds" if all(wins) else "in part" if any(wins) else "does not hold"
        rows.append((f"FedOAG is better than {rival}", said, ours, holds))
    loss = [level["stationary", "SCA"].mean - level[r, "SCA"].mean for r in regimes if r != "stationary"]
    lost = ", ".join(f"{value:+.2f} points lost" for value in loss)
    rows.append(("SCA loses when devices move", "1 to 2 points", lost, _yes(all(value > 0.5 for value in loss))))
    ideal = all(level[r, "FedAvg"].mean >= max(v.mean for (q, _), v in level.items() if q == r) for r in regimes)
    tops = ", ".join(f"{_text(level[r, 'FedAvg'])} {r}" for r in regimes)
    rows.append(("Ideal FedAvg is on top", "top", tops, _yes(ideal)))
    if gammas:
        curve = {gamma: estimate(last_accuracy(result)) for gamma, result in gammas.items()}
        best = max(curve, key=lambda gamma: curve[gamma].mean)
        inside = min(curve) < best < max(curve)
        shape = ", ".join(f"{value.mean:.1f} at {gamma:g}" for gamma, value in curve.items())
        rows.append(("Accuracy over γ is an inverted U", "inverted U", shape, _yes(inside)))
        rows.append(("Its peak is at γ = 1e-9", "1e-9", f"{best:g}", _yes(best == 1e-9)))
    return rows


def paired_difference_of(results: Results, one: tuple[str, str], other: tuple[str, str]) -> Estimate:
    """Difference of last accuracies by seed of two runs."""
    return paired_difference(results[one], results[other])


def as_markdown(rows: list[tuple[str, str, str, str]], note: str) -> str:
    """The table of claims."""
    lines = [
        "| claim | paper | ours: mean ± std over seeds, paired differences with 95 % intervals | verdict |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", note, ""])


def _text(value: Estimate) -> str:
    return f"{value} %"


def _yes(holds: bool) -> str:
    return "holds" if holds else "does not hold"
