"""Figures and tables of what the paper leaves open.

Knows: results, colours.
Does not know: which runs are needed, how they came about.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from otafl.report.figures import LABELS, SPARE_STYLES, STYLES, drawing, save, write_csv
from otafl.report.markdown import markdown
from otafl.report.statistics import (
    Estimate,
    error_bar,
    error_bar_text,
    estimate,
    last_accuracy,
    paired_difference,
    rounds_to_reach,
)
from otafl.runs.result import Result, first_averaged

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOLERATED = 0.3  # points that an adaptive γ may be below the best fixed one


@dataclass(frozen=True)
class Chosen:
    """One method in one world: γ by itself beside the fixed γ that did best on the validation set."""

    world: str
    method: str
    edge: float
    """γ at which an edge device's mean gain is at the threshold."""
    fixed: Mapping[float, Result]
    adaptive: Result

    @property
    def best(self) -> float:
        """The fixed γ with the best validation accuracy at the end; a seed that failed counts with 0."""
        return max(self.fixed, key=lambda gamma: _validated(self.fixed[gamma]))

    @property
    def gap(self) -> Estimate:
        """Test accuracy of the adaptive γ minus that of the best fixed one, by seed."""
        return paired_difference(self.adaptive, self.fixed[self.best])

    @property
    def found(self) -> float:
        """γ that the adaptive run ended with, mean over its seeds."""
        values = _late(self.adaptive, "gamma")
        return float(values[np.isfinite(values)].mean()) if np.isfinite(values).any() else math.nan


def _late(result: Result, column: str) -> NDArray[np.float64]:
    """Per seed, the mean over the rounds r > T − 50; NaN where it diverged."""
    late = result.rounds > first_averaged(result.config)
    if not late.any():
        return np.full(len(result.config.experiment.seeds), np.nan)
    return np.asarray(result.metrics[column][:, late].mean(1))


def _validated(result: Result) -> float:
    return float(np.nan_to_num(_late(result, "validation_accuracy")).mean())


def adaptive_table(rows: Sequence[Chosen], note: str) -> str:
    """Markdown."""
    header = ("world", "method", "best fixed γ", "its accuracy (%)", "γ found", "accuracy (%)")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        best, edge = row.best, " (edge of the grid)" if row.best in (min(row.fixed), max(row.fixed)) else ""
        fixed, own = _accuracy_text(row.fixed[best]), _accuracy_text(row.adaptive)
        gap = f"{row.gap.mean:+.2f} ± {row.gap.half_width:.2f}" if row.gap.num_seeds > 1 else "–"
        if row.gap.mean < -TOLERATED:
            gap = f"**{gap}**"
        found = f"{row.found:.2g}" if math.isfinite(row.found) else "–"
        lines.append((row.world, row.method, f"{best:.2g}{edge}", fixed, found, own, gap))
    return f"{note}\n\n{markdown((*header, 'difference (points, paired, 95 %)'), lines)}\n"


def adaptive_panels(rows: Sequence[Chosen], path: Path, title: str) -> Path:
    """Accuracy over fixed γ in every world, and where the adaptive γ lands."""
    worlds = list(dict.fromkeys(row.world for row in rows))
    columns = min(3, len(worlds))
    lines = -(-len(worlds) // columns)
    table: list[tuple[str, ...]] = []
    with drawing(3.2 * columns, 2.5 * lines + 0.6, columns, lines) as (figure, panels):
        flat = np.atleast_1d(panels).flatten()
        for axes, world in zip(flat, worlds, strict=False):
            tops, lows = [], []
            for row in (row for row in rows if row.world == world):
                points = _points(row)
                known = [value for value in points.values() if math.isfinite(value.mean)]
                tops += [value.mean + error_bar(value) for value in known]
                lows += [value.mean for value in known]
                _draw_points(axes, row, points)
                table += [
                    (world, row.method, gamma, f"{value.mean:.4f}", f"{value.half_width:.4f}")
                    for gamma, value in points.items()
                ]
            axes.set_xscale("log")
            axes.set_xticks([0.3, 1, 3], ["0.3", "1", "3"])
            axes.tick_params(labelbottom=True)
            axes.minorticks_off()
            if tops:
                axes.set_ylim(max(min(lows), max(lows) - 25) - 1, min(100.0, max(tops)) + 0.5)
            axes.set_title(world, fontsize=9, loc="left")
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        for axes in flat[len(worlds) :]:
            axes.set_visible(False)
        handles, labels = flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        for axes in flat[max(0, len(worlds) - columns) : len(worlds)]:
            axes.set_xlabel("γ/γ at the cell's edge", fontsize=9)
        seeds = rows[0].adaptive.config.experiment.seeds
        figure.supylabel(f"test accuracy (%),\n{error_bar_text(len(seeds))}", fontsize=9)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        write_csv(path, ("world", "method", "gamma", "test_accuracy_mean", "half_width_95"), table)
        return save(figure, path)


def _points(row: Chosen) -> dict[str, Estimate]:
    """Accuracies of the fixed γ and of the adaptive one."""
    points = {f"{gamma:g}": estimate(last_accuracy(row.fixed[gamma])) for gamma in sorted(row.fixed)}
    return points | {"adaptive": estimate(last_accuracy(row.adaptive))}


def _draw_points(axes: "Axes", row: Chosen, points: Mapping[str, Estimate]) -> None:
    colour, _ = STYLES[row.adaptive.config.algorithm.name]
    *fixed, own = points.values()
    common: dict[str, Any] = {"color": colour, "capsize": 2}
    axes.errorbar(
        [gamma / row.edge for gamma in sorted(row.fixed)],
        [value.mean for value in fixed],
        yerr=[error_bar(value) for value in fixed],
        fmt="o-",
        markersize=3,
        linewidth=1.2,
        label=f"{row.method}, γ fixed",
        **common,
    )
    axes.errorbar(
        row.found / row.edge,
        own.mean,
        yerr=error_bar(own),
        fmt="*",
        markersize=11,
        markeredgecolor="black",
        markeredgewidth=0.6,
        label=f"{row.method}, γ adaptive",
        **common,
    )


def anchors_table(found: Mapping[tuple[str, str, str], Result], note: str) -> str:
    """Markdown: rows are (γ, method, what the server keeps)."""
    header = ["world", "method", "server keeps", "models held, mean", "most", "by the paper's rule"]
    header += ["memory, mean (float32 models)", "B_t, mean", "accuracy (%)"]
    lines: list[tuple[str, ...]] = []
    for (gamma, method, keeps), result in found.items():
        share = 0.5 if keeps in ("float16", "bfloat16") else 1.0
        accuracy, lost = _accuracy_text(result), len(result.diverged) == len(result.config.experiment.seeds)
        if lost:
            first = min(result.diverged.values())
            lines.append((gamma, method, keeps, *[""] * 5, f"diverged, first after round {first}"))
            continue
        held = result.metrics["anchors"][:, 1:]
        paper = f"{np.nanmean(result.metrics['anchors_paper']):.1f}" if "anchors_paper" in result.metrics else ""
        bound = float(np.nanmean(result.metrics["norm_bound"][:, 1:]))
        counts = (f"{np.nanmean(held):.1f}", f"{np.nanmax(held):.0f}", paper, f"{share * np.nanmean(held):.1f}")
        lines.append((gamma, method, keeps, *counts, f"{bound:.3g}", accuracy))
    return f"{note}\n\n{markdown(header, lines)}\n"


def _accuracy_text(result: Result) -> str:
    diverged = len(result.diverged)
    if diverged == len(result.config.experiment.seeds):
        return "every seed failed"
    seeds = len(result.config.experiment.seeds)
    level = estimate(last_accuracy(result))
    return f"{level}" + (f" ({diverged} of {seeds} seeds failed and count with 0)" if diverged else "")


def anchors_over_rounds(found: Mapping[str, Mapping[str, Result]], path: Path, title: str) -> Path:
    """Models the server holds over rounds, one panel per γ, one line per way of keeping them."""
    styles = (("#0072B2", "-"), *SPARE_STYLES)
    table = []
    with drawing(3.9 * len(found), 3.6, len(found)) as (figure, panels):
        for axes, (gamma, results) in zip(np.atleast_1d(panels), found.items(), strict=True):
            for (name, result), (colour, line) in zip(results.items(), styles, strict=False):
                share = 0.5 if name == "float16" else 1.0
                held = share * result.metrics["anchors"].mean(0)
                axes.plot(result.rounds, held, line, color=colour, linewidth=1.6, label=name)
                table += [(gamma, name, int(r), f"{h:.3f}") for r, h in zip(result.rounds, held, strict=True)]
            paper = next(iter(results.values()))
            held, name = paper.metrics["anchors_paper"].mean(0), "the paper's rule"
            axes.plot(paper.rounds, held, "--", color="#000000", linewidth=1.6, label=name)
            table += [(gamma, name, int(r), f"{h:.3f}") for r, h in zip(paper.rounds[1:], held[1:], strict=True)]
            axes.set_yscale("log")
            axes.set_ylim(1, 1000)
            axes.set_xlabel("round")
            axes.set_title(gamma, fontsize=9, loc="left")
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        np.atleast_1d(panels)[0].set_ylabel("memory for anchors (models of float32)")
        np.atleast_1d(panels)[0].legend(frameon=False, fontsize=8)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        write_csv(path, ("gamma", "keeps", "round", "models"), table)
        return save(figure, path)


def speedup(
    found: Mapping[str, Mapping[str, Mapping[int, Result]]], level: float, path: Path, title: str
) -> tuple[Path, str]:
    """Rounds, and gradient steps of all devices together, to a target accuracy over m and over s; and a table."""
    names = {"devices": "devices m", "steps": "local steps s"}
    table: list[tuple[Any, ...]] = []
    with drawing(7.6, 6.0, 2, 2) as (figure, panels):
        for column, (axis, methods) in enumerate(found.items()):
            for algorithm, results in methods.items():
                for size in sorted(results):
                    table.append(_speedup_row(axis, algorithm, size, results[size], level))
                for axes, scaled in zip(panels[:, column], (False, True), strict=True):
                    _draw_speedup(axes, algorithm, results, level, scaled)
            sizes = np.array(sorted(next(iter(methods.values()))))
            rounds = {size: _to_reach(result, level) for size, result in next(iter(methods.values())).items()}
            first = min((size for size in rounds if len(rounds[size])), default=None)
            if first is not None:
                line = {"color": "#777777", "linewidth": 1, "label": "rounds ∝ 1/size (linear speed-up)"}
                panels[0, column].plot(sizes, float(rounds[first].mean()) * first / sizes, ":", **line)
            panels[1, column].set_xlabel(names[axis])
            for axes in panels[:, column]:
                axes.set_xscale("log")
                axes.set_yscale("log")
                axes.set_xticks(sizes, [str(size) for size in sizes])
                low, high = axes.get_ylim()
                ticks = [one * 10**k for k in range(8) for one in (1, 2, 5) if low <= one * 10**k <= high]
                axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
                axes.minorticks_off()
                axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        panels[0, 0].set_ylabel(f"rounds to {level:.0f} %")
        panels[1, 0].set_ylabel(f"gradient steps of all devices to {level:.0f} %")
        figure.legend(
            *panels[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
        )
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        header = ("over", "method", "size", "rounds", "half_width_95", "seeds_that_reach_it", "gradient_steps")
        write_csv(path, header, table)
        lines = []
        for over, algorithm, size, rounds, width, seeds, steps in table:
            told = (f"{rounds} ± {width}", seeds, f"{float(steps):,.0f}") if seeds[0] != "0" else ("–", seeds, "–")
            lines.append((over, LABELS[algorithm], str(size), *told))
        columns = ("over", "method", "size", "rounds", "seeds that reach it", "gradient steps")
        return save(figure, path), f"{markdown(columns, lines)}\n"


def _draw_speedup(axes: "Axes", algorithm: str, results: Mapping[int, Result], level: float, scaled: bool) -> None:
    colour, line = STYLES[algorithm]
    reached = {size: _to_reach(result, level) for size, result in sorted(results.items())}
    sizes = [size for size, rounds in reached.items() if len(rounds) == len(results[size].config.experiment.seeds)]
    values = [estimate(reached[size] * (_gradients(results[size]) if scaled else 1)) for size in sizes]
    axes.errorbar(
        sizes,
        [value.mean for value in values],
        yerr=[error_bar(value) for value in values],
        fmt=f"o{line}",
        color=colour,
        markersize=4,
        linewidth=1.5,
        capsize=3,
        label=LABELS[algorithm],
    )


def _to_reach(result: Result, level: float) -> NDArray[np.float64]:
    """Rounds to a level, of the seeds that reach it."""
    rounds = rounds_to_reach(result, level)
    return rounds[np.isfinite(rounds)]


def _gradients(result: Result) -> int:
    """Gradient steps of all devices in a round."""
    return result.config.cell.devices * result.config.training.local_steps


def _speedup_row(axis: str, algorithm: str, size: int, result: Result, level: float) -> tuple[Any, ...]:
    rounds = _to_reach(result, level)
    value = estimate(rounds)
    reached = f"{len(rounds)}/{len(result.config.experiment.seeds)}"
    steps = f"{value.mean * _gradients(result):.0f}"
    return axis, algorithm, size, f"{value.mean:.0f}", f"{value.half_width:.0f}", reached, steps


def excess_loss(panels: Mapping[str, Mapping[str, tuple[Result, float]]], path: Path, title: str) -> Path:
    """F(x^t) − F* over rounds, one panel per kind of gradients; a curve is a result and its F*."""
    from matplotlib.lines import Line2D

    dashes: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")
    table = []
    with drawing(3.9 * len(panels), 4.2, len(panels)) as (figure, drawn):
        for axes, (name, curves) in zip(np.atleast_1d(drawn), panels.items(), strict=True):
            kinds = list(dict.fromkeys(label.split(", ", 1)[1] for label in curves))
            for label, (result, optimum) in curves.items():
                colour, _ = STYLES[result.config.algorithm.name]
                excess = result.metrics["test_loss"].mean(axis=0) - optimum  # ends where a seed fails
                line = dashes[kinds.index(label.split(", ", 1)[1])]
                axes.plot(result.rounds[1:], excess[1:], line, color=colour, linewidth=1.5)
                table += [(name, label, int(r), f"{e:.6g}") for r, e in zip(result.rounds, excess, strict=True)]
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_ylim(1e-4, 30 * axes.get_ylim()[1])
            axes.set_xlabel("round")
            axes.set_title(name, fontsize=9, loc="left")
            lines = [Line2D([], [], color="#555555", linestyle=dash) for dash in dashes]
            axes.legend(lines, kinds, frameon=False, fontsize=8, loc="upper right")
            axes.grid(color="#eeeeee", linewidth=0.6)
        methods = list(dict.fromkeys(r.config.algorithm.name for curves in panels.values() for r, _ in curves.values()))
        lines = [Line2D([], [], color=STYLES[method][0]) for method in methods]
        names = [LABELS[method] for method in methods]
        figure.legend(lines, names, loc="outside lower center", ncols=len(methods), frameon=False)
        np.atleast_1d(drawn)[0].set_ylabel("F(x) − F*, mean over seeds")
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        write_csv(path, ("gradients", "run", "round", "excess_loss"), table)
        return save(figure, path)
