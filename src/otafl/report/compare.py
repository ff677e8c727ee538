"""Compares runs: levels with their uncertainty, and paired differences by seed.

Knows: results, statistics.
Does not know: files.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otafl import registry
from otafl.errors import ConfigError, OtaflError
from otafl.report.axes import Budget, averaged, column
from otafl.report.markdown import markdown
from otafl.report.runs import Named, Runs, collect, labels_of, without_axis
from otafl.report.statistics import (
    Comparison,
    Estimate,
    accuracy_in,
    estimate,
    final_accuracy,
    holm,
    last_accuracy,
    mean_accuracy,
    p_value,
    rounds_to_reach,
    verdict,
    welch,
)
from otafl.runs.result import Result

FEWEST = 3  # seeds from which an interval says something


@dataclass(frozen=True)
class Row:
    """A run in a table of comparison. Accuracies are in percent; a failed seed counts with 0."""

    group: str
    """Its value on the axis by which the table is divided; "" if it is not."""
    label: str
    result: Result
    final: Estimate
    """Test accuracy of the last model."""
    last: Estimate
    """Test accuracy, mean over the last recorded rounds; or that of the model at a budget."""
    rows: str
    """The rows that `last` is taken from, in words."""
    whole: float
    """Test accuracy, mean over all rounds."""
    reach: str
    """Median of the rounds after which a seed had reached the level."""
    gap: Comparison | None
    """Paired difference to the baseline; None for the baseline itself, and where pairs make no sense."""

    @property
    def interval(self) -> str:
        """The 95 % interval of `last`, within 0 … 100; from three seeds on."""
        value = self.last
        if value.num_seeds < FEWEST:
            return f"{value.num_seeds} seed{'s' if value.num_seeds > 1 else ''}"
        return f"{max(0.0, value.low):.2f} … {min(100.0, value.high):.2f}"

    @property
    def failed(self) -> str:
        """How many seeds failed, in words."""
        return f"{len(self.result.diverged)} of {len(self.result.config.experiment.seeds)}"


@dataclass(frozen=True)
class Table:
    """What `otafl.compare` returns: prints as text, shows as a table in a notebook."""

    rows: tuple[Row, ...]
    level: float
    """Test accuracy in percent of "rounds to reach"."""
    notes: tuple[str, ...]
    verdicts: tuple[str, ...]
    """A sentence for every run that is compared with a baseline."""
    at: Budget | None = None
    """What may be spent; None to compare the last recorded rounds."""

    HEADER = ("", "last model", "mean ± std", "95 % interval", "of", "all rounds", "reach", "failed")

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.label,
                str(row.final),
                str(row.last),
                row.interval,
                row.rows,
                f"{row.whole:.2f}",
                row.reach,
                row.failed,
            )
            for row in self.rows
        ]

    def __str__(self) -> str:
        rows = [
            ("", "test accuracy (%)", f"at {self.at}" if self.at else "", "", "", "mean over", "rounds to", "failed"),
            (
                "run",
                "last model",
                "mean ± std",
                "95 % interval",
                "of",
                "all rounds",
                f"reach {self.level:g} %",
                "seeds",
            ),
            *self._cells(),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines, body = lines[:2], lines[2:]
        for group in dict.fromkeys(row.group for row in self.rows):
            lines += ["", f"{group}:"] if group else []
            lines += [line for row, line in zip(self.rows, body, strict=True) if row.group == group]
        return "\n".join([*lines, "", *self.notes, *self.verdicts])

    def markdown(self) -> str:
        """The table as Markdown, with the paired differences as a column."""
        header = [
            "run",
            "last model (%)",
            f"at {self.at} (%)" if self.at else "last rounds (%)",
            "95 % interval",
            "minus baseline",
            "p, Holm",
            "failed seeds",
        ]
        cells = []
        for row in self.rows:
            gap, p = "–", "–"
            if row.gap is not None:
                gap = f"{row.gap.gap.mean:+.2f} ± {row.gap.gap.half_width:.2f}"
                p = "< 0.001" if row.gap.p < 0.001 else f"{row.gap.p:.2g}"
            label = f"{row.group}: {row.label}" if row.group else row.label
            cells.append((label, str(row.final), str(row.last), row.interval, gap, p, row.failed))
        return markdown(header, cells)

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        head = line(
            (
                "run",
                "last model",
                f"mean ± std at {self.at}" if self.at else "mean ± std",
                *self.HEADER[3:6],
                f"rounds to {self.level:g} %",
                "failed seeds",
            ),
            "th",
        )
        body = []
        for row, cells in zip(self.rows, self._cells(), strict=True):
            body.append(line((f"{row.group}: {row.label}" if row.group else row.label, *cells[1:]), "td"))
        said = "".join(f"<li>{html.escape(text)}</li>" for text in (*self.verdicts, *self.notes))
        return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table><ul>{said}</ul>"

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row per run."""
        from otafl.runs.result import pandas

        return pandas().DataFrame(
            [
                {
                    "group": row.group,
                    "run": row.label,
                    "last_model": row.final.mean,
                    "mean": row.last.mean,
                    "std": row.last.std,
                    "num_seeds": row.last.num_seeds,
                    "failed": len(row.result.diverged),
                    "all_rounds": row.whole,
                    "minus_baseline": row.gap.gap.mean if row.gap else None,
                    "half_width": row.gap.gap.half_width if row.gap else None,
                    "p_holm": row.gap.p if row.gap else None,
                }
                for row in self.rows
            ]
        )


def compare(
    runs: Runs,
    baseline: str | None = None,
    labels: Sequence[str] | None = None,
    per: str | Sequence[str] | None = None,
    level: float | None = None,
    at: str | None = None,
) -> Table:
    """Compare runs with one of them: levels, paired differences by seed, and what the seeds cannot tell.

    Args:
        runs: run directories, folders of them, sweeps' folders or results; or any of these by label.
        baseline: label of the run that the others are compared with; default: the first.
        labels: a label for each run, in their order; default: what tells them apart.
        per: an axis or key, or several; runs with different values of them are compared apart, each group with its
            own baseline.
        level: test accuracy in percent for "rounds to reach"; default: 95 % of the middle run's, rounded down.
        at: a budget, "column=value", for instance "uplink_s=600" (airtime), "joules=0.1", "time=3600" (of the world,
            `round_s` for each round) or "rounds=300": compare each seed's last recorded model within it.

    Returns:
        A table; p-values are corrected (Holm) for all comparisons in it.

    >>> import otafl
    >>> small = otafl.load_config("quick", {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2})
    >>> runs = {name: otafl.run(small.replace({"algorithm.name": name}), device="cpu") for name in ("opc", "fedavg")}
    >>> [row.label for row in otafl.compare(runs, baseline="fedavg").rows]
    ['opc', 'fedavg']
    """
    found = collect(runs, labels)
    if any("test_accuracy" not in run.result.metrics for run in found):
        raise OtaflError("compare needs runs that record test accuracy; regression problems have none")
    axes = [per] if isinstance(per, str) else list(per or ())
    groups = _grouped(found, axes, labels is None and not isinstance(runs, Mapping))
    budget = None if at is None else Budget.parse(at)
    scores, rows_of, notes = _scores(found, budget)
    last = {place: estimate(values) for place, values in scores.items()}
    if level is None:
        level = float(np.floor(0.95 * np.median([value.mean for value in last.values()])))
    bases = {group: _base(members, baseline, group) for group, members in groups.items()}
    gaps: dict[tuple[str, str], Estimate] = {}
    why: dict[tuple[str, str], str] = {}
    for group, members in groups.items():
        base = bases[group]
        for run in members:
            if run is base:
                continue
            reason = _unpaired(run, base)
            if reason is None:
                gaps[group, run.label] = estimate(scores[id(run.result)] - scores[id(base.result)])
            else:
                apart = welch(scores[id(run.result)], scores[id(base.result)])
                size = f"{apart.mean:+.2f} ± {apart.half_width:.2f} points (unpaired, Welch, 95 %: {reason})"
                told = f"{run.label} minus {base.label}: {size if apart.num_seeds > 1 else f'not compared, {reason}'}"
                why[group, run.label] = told
    adjusted = dict(zip(gaps, holm([p_value(gap) for gap in gaps.values()]), strict=True))
    rows, verdicts = [], []
    for group, members in groups.items():
        for run in members:
            place = group, run.label
            gap = Comparison(gaps[place], adjusted[place], len(gaps)) if place in gaps else None
            rows.append(
                Row(
                    group,
                    run.label,
                    run.result,
                    estimate(final_accuracy(run.result)),
                    last[id(run.result)],
                    rows_of[id(run.result)],
                    float(mean_accuracy(run.result).mean()),
                    _reach(rounds_to_reach(run.result, level)),
                    gap,
                )
            )
            said = verdict(run.label, bases[group].label, gap) if gap is not None else why.get(place)
            if said is not None:
                verdicts.append(f"{group}: {said}" if group else said)
    return Table(tuple(rows), level, (*_notes(found), *notes), tuple(verdicts), budget)


def _scores(
    runs: Sequence[Named], budget: Budget | None
) -> tuple[dict[int, NDArray[np.float64]], dict[int, str], list[str]]:
    """Every seed's test accuracy [S] by run, the rows that it is taken from, and notes on the budget."""
    if budget is None:
        last = {id(run.result): last_accuracy(run.result) for run in runs}
        return last, {id(run.result): run.result.summary["averaged_over"] for run in runs}, []
    scores, told, notes = {}, {}, ["the last recorded model of each seed within the budget; nothing is interpolated"]
    for run in runs:
        result, rows = run.result, budget.rows(run.result, run.label)
        scores[id(result)] = accuracy_in(result, rows)
        first, last = result.rounds[rows.min()], result.rounds[rows.max()]
        told[id(result)] = f"round {first}" if first == last else f"rounds {first} to {last}"
        spent = column(result, budget.column, run.label)[:, -1]
        if (rows == len(result.rounds) - 1).any() and budget.left_over(result, run.label):
            most = f"{np.nanmax(spent):.3g}" if np.nan_to_num(spent).any() else "nothing"
            notes.append(f"{run.label}: had spent {most} at its end, so its last model counts")
    return scores, told, notes


def overview(folder: Path) -> str:
    """The first columns of a sweep's table, without verdicts; "" where runs record no accuracy."""
    try:
        table = compare(folder)
    except OtaflError:
        return ""
    told = {row.rows for row in table.rows}
    rows = [
        ("run", "last model (%)", f"{averaged(told.pop()) if len(told) == 1 else 'last rounds'} (%)", "failed seeds")
    ]
    rows += [(row.label, str(row.final), str(row.last), row.failed) for row in table.rows]
    width = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, width, strict=True)).rstrip() for row in rows) + "\n"


def _grouped(runs: Sequence[Named], per: Sequence[str], own_labels: bool) -> dict[str, list[Named]]:
    """Group to its runs, with labels that are unique there."""
    groups: dict[str, list[Named]] = {}
    for run in runs:
        words = []
        for axis in per:
            value = run.value(axis)
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words.append(value if isinstance(value, str) else f"{axis} = {text}")
        groups.setdefault(", ".join(words), []).append(run)
    if not (own_labels and per):
        return groups
    for group, members in groups.items():
        rest: Sequence[Named] = members
        for axis in per:
            rest = without_axis(rest, axis)
        groups[group] = [run.named(label) for run, label in zip(members, labels_of(rest), strict=True)]
    return groups


def _base(members: Sequence[Named], baseline: str | None, group: str) -> Named:
    """The run with which the others of a group are compared."""
    if baseline is None:
        return members[0]
    for run in members:
        if run.label == baseline:
            return run
    known = [run.label for run in members]
    where = f" of {group}" if group else ""
    raise ConfigError(f"baseline {baseline!r}: no run{where} has that label{registry.nearest(baseline, known)}; "
                      f"there are {', '.join(map(repr, known))}")  # fmt: skip


def _notes(runs: Sequence[Named]) -> list[str]:
    notes = ["std and interval between seeds; a failed seed counts with 0 %"]
    devices = dict.fromkeys(str(run.result.summary["device"]) for run in runs)
    if len(devices) > 1:
        notes.append(f"runs were made on {' and on '.join(devices)}: equal runs would differ in their last digits")
    for note in dict.fromkeys(note for run in runs for note in run.result.notes):
        having = [run.label for run in runs if note in run.result.notes]
        whose = (
            "all" if len(having) == len(runs) > 1 else f"{len(having)} runs" if len(having) > 3 else "; ".join(having)
        )
        notes.append(f"{whose}: {note}")
    return notes


def _reach(rounds: np.ndarray) -> str:
    missing = int(np.isnan(rounds).sum())
    if missing == len(rounds):
        return "never"
    note = f"{missing} of {len(rounds)} never"
    if missing > len(rounds) / 2:
        return note
    return f"{float(np.nanmedian(rounds)):.0f}{f' ({note})' if missing else ''}"


def same_world(one: Result, other: Result) -> str | None:
    """What keeps a seed from being the same geometry, motion, channel and data in two runs; None if nothing does."""
    sections = ("data", "partition", "cell", "mobility", "pathloss", "fading")
    other_ones = [section for section in sections if getattr(one.config, section) != getattr(other.config, section)]
    if other_ones:
        return f"[{'], ['.join(dict.fromkeys(s.replace('partition', 'data') for s in other_ones))}]"
    if one.config.radio.antennas != other.config.radio.antennas:  # powers and noise change no draw
        return "radio.antennas"
    made = [
        {**result.summary.get("sources", {}), "algorithm": None, "model": None, "python": None}
        for result in (one, other)
    ]
    return None if made[0] == made[1] else "plug-ins or data"


def _unpaired(run: Named, base: Named) -> str | None:
    """The reason why two runs cannot be compared seed by seed; None if they can."""
    if run.result.config.experiment.seeds != base.result.config.experiment.seeds:
        return "other seeds"
    differs = same_world(run.result, base.result)
    return None if differs is None else f"not the same world, {differs} differ"
