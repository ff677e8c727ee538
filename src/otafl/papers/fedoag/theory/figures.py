"""Figures of the analysis: a run beside its bounds, γ as the bound sees it, rates, which optimum a method goes to.

Knows: curves and bounds.
Does not know: how they came about.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otafl.papers.fedoag.theory.account import Account
from otafl.report.figures import drawing, save, write_csv
from otafl.report.statistics import Estimate, error_bar, error_bar_text
from otafl.runs.result import Result

Array = NDArray[np.float64]
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
GRID = {"color": "#dddddd", "linewidth": 0.6}


def beside_bounds(found: Account, result: Result, path: Path) -> Path:
    """Measured staleness, consensus distance and ‖∇F(x̄)‖² over rounds, and what the analysis says of each."""
    panels: tuple[tuple[str, str, str | None, Array | None, str], ...] = (
        ("staleness_mean", "mean staleness (rounds)", "expected", found.staleness, "Lemma 7: 1/c"),
        ("consensus", "consensus distance", None, None, "Lemma 6"),
        ("mean_grad_norm_sq", "‖∇F(x̄)‖²", "mean so far", None, "Theorem 1"),
    )
    if found.predicted:  # FedOAG-zero's
        panels = (
            ("unsent_share", "share not sent", None, None, ""),
            ("waiting", "rounds of progress that wait", None, None, ""),
            ("forgotten_share", "share forgotten", None, None, ""),
        )
    rows = []
    with drawing(10.5, 3.8, columns=3) as (figure, axes):
        for ax, (column, label, curve, known, bound) in zip(axes, panels, strict=True):
            ax.set_title(label, fontsize=10, loc="left")
            ax.set_xlabel("round")
            ax.grid(axis="y", **GRID)
            if not found.predicted:
                ax.set_yscale("log")
            values = result.metrics.get(column)
            if values is None or np.isnan(values).all():
                ax.text(0.5, 0.5, "not recorded: see\nexperiment.record", ha="center", transform=ax.transAxes)
                ax.set_yticks([])
                continue
            at, mean = result.rounds[1:], values[0, 1:]  # of the seed that the account is of
            ax.plot(at, mean, color=BLUE, linewidth=1.6, label=f"measured, seed {result.config.experiment.seeds[0]}")
            if known is not None:
                ax.plot(np.arange(1, len(known) + 1), known, "--", color=ORANGE, linewidth=1.4, label=curve)
            elif curve is not None:
                ax.plot(at, np.cumsum(mean) / np.arange(1, len(mean) + 1), "--", color=BLUE, label=curve)
            limit = found.bounds.get(column, np.inf)
            if column in found.predicted:
                low, high = found.predicted[column]
                ax.axhspan(low, high, color=ORANGE, alpha=0.25, label=f"predicted mean, {low:.2g} to {high:.2g}")
                ax.set_ylim(0, None)
            elif not found.applies.get(column, True):
                ax.plot([], [], " ", label=f"{bound} does not allow this η_0")
            elif np.isfinite(limit):
                ax.axhline(limit, color="black", linewidth=1.2, label=f"{bound} = {limit:.2g}")
            else:
                ax.plot([], [], color="black", label=f"{bound} = ∞")
            ax.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))
            low, high = found.predicted.get(column, (np.nan, limit))
            rows += [
                (column, int(r), *(f"{v:.6g}" for v in (value, low, high))) for r, value in zip(at, mean, strict=True)
            ]
        write_csv(path, ("quantity", "round", "measured", "at_least", "at_most"), rows)
        return save(figure, path)


def gamma_tradeoff(
    gammas: Sequence[float],
    accuracy: Sequence[Estimate],
    fine: Array,
    terms: Mapping[str, Array],
    path: Path,
    title: str,
) -> Path:
    """Measured accuracy over γ, and below it the factors with which γ enters the bound, over a finer grid."""
    lines = dict(zip(terms, ((ORANGE, "-"), (ORANGE, ":"), (GREEN, "--")), strict=True))
    with drawing(6.4, 5.4, lines=2) as (figure, (top, bottom)):
        means, widths = [value.mean for value in accuracy], [error_bar(value) for value in accuracy]
        top.errorbar(gammas, means, yerr=widths, fmt="o-", color=BLUE, capsize=3, linewidth=1.6)
        top.set_ylabel(f"test accuracy (%)\n{error_bar_text(accuracy[0].num_seeds)}")
        top.set_ylim(0, 102)
        top.set_title(title, fontsize=10, loc="left")
        rows = []
        for name, values in terms.items():
            best = fine[int(np.nanargmin(values))]
            relative = values / np.nanmin(values)
            bottom.plot(fine, relative, lines[name][1], color=lines[name][0], label=f"{name}: least at γ = {best:.1e}")
            rows += [(name, f"{gamma:.6g}", f"{value:.6g}") for gamma, value in zip(fine, relative, strict=True)]
        bottom.set_ylabel("term of Theorem 1\nover its least value")
        bottom.set_yscale("log")
        bottom.set_ylim(0.7, 1e6)
        figure.legend(loc="outside lower center", frameon=False, fontsize=9)
        for ax in (top, bottom):
            ax.set_xscale("log")
            ax.grid(axis="y", **GRID)
        bottom.set_xlabel("γ")
        write_csv(path, ("term", "gamma", "relative"), rows)
        return save(figure, path)


def distances(
    rounds: Array,
    curves: Mapping[str, Mapping[str, Any]],
    titles: tuple[str, str],
    label: str,
    path: Path,
    limits: tuple[float, float],
) -> Path:
    """Two panels of distances over rounds: server models, and means of the devices' models dotted.

    A curve has "style" (a colour), "server" and "mean" (or None): one array per panel.
    """
    rows = []
    with drawing(9.6, 3.8, columns=2) as (figure, panels):
        for number, (ax, title) in enumerate(zip(panels, titles, strict=True)):
            for name, curve in curves.items():
                ax.plot(rounds, curve["server"][number], color=curve["style"], linewidth=1.6, label=name)
                if curve["mean"] is not None:
                    ax.plot(rounds, curve["mean"][number], ":", color=curve["style"], linewidth=1.2)
            ax.set_yscale("log")
            ax.set_ylim(*limits)
            ax.set_xlabel("round")
            ax.set_title(title, fontsize=10, loc="left")
            ax.grid(axis="y", **GRID)
        panels[0].set_ylabel(label)
        handles = panels[1].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(curves), frameon=False, fontsize=9)
        for name, curve in curves.items():
            for model in ("server", "mean"):
                if curve[model] is not None:
                    rows += [
                        (name, model, int(t), f"{first:.6g}", f"{second:.6g}")
                        for t, first, second in zip(rounds, *curve[model], strict=True)
                    ]
        write_csv(path, ("method", "model", "round", "to_true", "to_weighted"), rows)
        return save(figure, path)


def rate(rounds: Array, values: Array, slope: Estimate, path: Path, title: str) -> Path:
    """Values [S, N] over numbers of rounds [N] on log-log axes, with a line of the fitted slope and one of −1/2."""
    with drawing(5.4, 4.0) as (figure, axes):
        mean = values.mean(0)
        axes.plot(rounds, values.T, "o", color=BLUE, markersize=3, alpha=0.35)
        axes.plot(rounds, mean, "o-", color=BLUE, linewidth=1.6, label=f"measured, mean of {len(values)} seeds")
        middle = np.exp(np.log(rounds).mean()), np.exp(np.log(mean).mean())
        fit = middle[1] * (rounds / middle[0]) ** slope.mean
        axes.plot(rounds, fit, "--", color=ORANGE, label=f"slope {slope.mean:.3f} ± {slope.half_width:.3f} (95 %)")
        axes.plot(rounds, 1.6 * mean[0] * (rounds / rounds[0]) ** -0.5, color=GREY, linewidth=1, label="slope −1/2")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("rounds T, η = √m/(L√(sT))")
        axes.set_ylabel("mean of ‖∇F(x̄)‖² over T rounds")
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(**GRID)
        axes.legend(frameon=False, fontsize=9)
        rows = [(int(t), s, f"{values[s, i]:.6g}") for i, t in enumerate(rounds) for s in range(len(values))]
        write_csv(path, ("rounds", "seed", "mean_grad_norm_sq"), rows)
        return save(figure, path)
