"""The paper's claims beside what was measured, each with a verdict.

Knows: the paper's claims, results.
Does not know: how results came about.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from otafl.report.markdown import markdown
from otafl.report.statistics import LEVEL, Estimate, estimate, holm, last_accuracy, p_value, paired_difference
from otafl.runs.result import Result

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told with these seeds"
RIVALS = (
    ("SCA", "81 % stationary, below 80 % moving"),
    ("BB, whole cell", "BB-interior and BB-alternative are lower"),
    ("vanilla", "lower, fluctuating"),
)
PAPER_GAMMA = 1e-9
Results = Mapping[tuple[str, str], Result]
"""(regime, label) to its result."""


class Question(NamedTuple):
    """Whether a mean is above a bound."""

    value: Estimate
    bound: float


class Claim(NamedTuple):
    """A claim: the paper's words and number, ours, the questions behind it, and how their answers make a verdict."""

    text: str
    paper: str
    ours: str
    questions: list[Question]
    decide: Callable[[list[str]], str]


def claims(results: Results, gammas: Mapping[float, Result], peak: float) -> list[tuple[str, str, str, str]]:
    """Rows of claim, the paper's number, ours and verdict, from the runs of figures 2 and 3.

    `peak` is the γ that was chosen beforehand, on the validation set and other seeds. All questions are one family:
    Holm's correction makes the chance of any false answer in the whole table at most 5 %.
    """
    asked = _claims(results)
    if peak in gammas:
        asked += _over_gamma(gammas, peak)
    adjusted = iter(holm([p_value(*question) for claim in asked for question in claim.questions]))
    return [
        (claim.text, claim.paper, claim.ours, claim.decide([answer(q, next(adjusted)) for q in claim.questions]))
        for claim in asked
    ]


def answer(question: Question, p: float) -> str:
    """The answer to a question, given its adjusted p-value: yes, no, or not known."""
    if not p < LEVEL:  # NaN, too
        return OPEN
    return HOLDS if question.value.mean > question.bound else FAILS


def _claims(results: Results) -> list[Claim]:
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
    ends = [Question(value, bound) for value in levels.values() for bound in (81.0, 85.0)]
    asked = [Claim("FedOAG reaches about 83 % in all regimes", "83 %", numbers, ends, _about)]

    changes = [gap((regime, "FedOAG"), ("stationary", "FedOAG")) for regime in moving]
    ends = [Question(change, bound) for change in changes for bound in (-1.0, 1.0)]
    text = f"change {_list(changes)} points; at most 1 is asked"
    asked.append(Claim("FedOAG does not suffer from motion", "same level", text, ends, _between))
    for rival, said in RIVALS:
        leads = {regime: gap((regime, "FedOAG"), (regime, rival)) for regime in regimes}
        ours = ", ".join(f"{level[r, rival]} % {r} (FedOAG {_list([lead])})" for r, lead in leads.items())
        parts = [Question(lead, 0.0) for lead in leads.values()]
        asked.append(Claim(f"FedOAG is better than {rival}", said, ours, parts, together))
    losses = [gap(("stationary", "SCA"), (regime, "SCA")) for regime in moving]
    parts = [Question(loss, 1.0) for loss in losses]
    text = f"{_list(losses)} points lost"
    asked.append(Claim("SCA loses a point or more when devices move", "1 to 2 points", text, parts, together))
    rivals = [(regime, label) for regime, label in results if label != "FedAvg" and (regime, "FedAvg") in results]
    parts = [Question(gap((regime, "FedAvg"), (regime, label)), 0.0) for regime, label in rivals]
    tops = ", ".join(f"{level[regime, 'FedAvg']} % {regime}" for regime in regimes)
    asked.append(Claim("Ideal FedAvg is on top", "top", tops, parts, together))
    return asked


def _over_gamma(gammas: Mapping[float, Result], peak: float) -> list[Claim]:
    """The claims on figure 3: both ends are below the γ that was chosen beforehand, and so is the paper's."""
    means = {gamma: estimate(last_accuracy(result)).mean for gamma, result in sorted(gammas.items())}
    failed = {gamma: len(result.diverged) for gamma, result in gammas.items()}
    shape = ", ".join(
        f"{mean:.1f} at {gamma:g}" + (f" ({failed[gamma]} seeds failed)" if failed[gamma] else "")
        for gamma, mean in means.items()
    )
    order = list(means)
    ends = [Question(paired_difference(gammas[peak], gammas[end]), 0.0) for end in (order[0], order[-1]) if end != peak]
    asked = [Claim("Accuracy over γ is an inverted U", "inverted U", shape, ends, together)]
    if peak != PAPER_GAMMA and PAPER_GAMMA in gammas:
        lead = paired_difference(gammas[peak], gammas[PAPER_GAMMA])
        ours = f"{peak:g}, chosen on the validation set with other seeds, is {_list([lead])} points above 1e-9"
        asked.append(Claim("Its peak is at γ = 1e-9", "1e-9", ours, [Question(lead, 0.0)], _refuted))
    return asked


def _about(answers: list[str]) -> str:
    """Between two bounds; "exceeded" where all are above both."""
    return "exceeded" if set(answers) == {HOLDS} else _between(answers)


def _between(answers: list[str]) -> str:
    """Pairs of answers: above the lower bound and not above the upper one."""
    return together([_inside(low, high) for low, high in zip(answers[::2], answers[1::2], strict=True)])


def _inside(low: str, high: str) -> str:
    return HOLDS if (low, high) == (HOLDS, FAILS) else FAILS if low == FAILS or high == HOLDS else OPEN


def _refuted(answers: list[str]) -> str:
    """The paper's value is not the best where the one chosen beforehand is better; else nothing is said."""
    return FAILS if answers == [HOLDS] else OPEN


def together(answers: list[str]) -> str:
    """One verdict for a claim of several parts, all of which it needs."""
    if FAILS in answers:
        return "in part" if HOLDS in answers else FAILS
    return OPEN if OPEN in answers else HOLDS


def as_markdown(rows: list[tuple[str, str, str, str]], note: str) -> str:
    """The table of claims."""
    header = ("claim", "paper", "ours: mean ± std over seeds, paired differences with 95 % intervals", "verdict")
    return f"{markdown(header, rows)}\n\n{note}\n"


def _list(gaps: list[Estimate]) -> str:
    return ", ".join(f"{gap.mean:+.2f} ± {gap.half_width:.2f}" for gap in gaps)
