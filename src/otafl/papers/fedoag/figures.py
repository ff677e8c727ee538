"""Figures of the paper: the cell, the partition, accuracy over γ, and the methods beside each other.

Knows: results, positions, counts.
Does not know: how results came about.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from otafl.report.figures import drawing, save, write_csv
from otafl.report.statistics import error_bar, error_bar_text, estimate, last_accuracy
from otafl.runs.result import Result


def accuracy_over_gamma(gammas: Sequence[float], results: Sequence[Result], path: Path, title: str) -> Path:
    """Last accuracy over γ with 95 % intervals, and below it the mean number of active devices."""
    accuracy = [estimate(last_accuracy(result)) for result in results]
    active = [float(result.summary["num_active"]) for result in results]
    place = np.arange(len(gammas))
    with drawing(height=5.0, lines=2, heights=(2, 1)) as (figure, (axes, bars)):
        means, widths = [value.mean for value in accuracy], [error_bar(value) for value in accuracy]
        axes.errorbar(place, means, yerr=widths, fmt="o-", color="#0072B2", capsize=3, linewidth=1.6)
        for x, mean, width in zip(place, means, widths, strict=True):
            above = {"textcoords": "offset points", "xytext": (0, 5), "ha": "center", "fontsize": 8}
            axes.annotate(f"{mean:.1f}", (x, mean + width), **above)
        axes.set_ylim(0, 108)
        axes.set_ylabel(f"test accuracy (%)\n{error_bar_text(accuracy[0].num_seeds)}")
        bars.bar(place, active, width=0.6, color="#56B4E9")
        for x, count in zip(place, active, strict=True):
            bars.annotate(
                f"{count:.1f}", (x, count), textcoords="offset points", xytext=(0, 2), ha="center", fontsize=8
            )
        bars.set_ylabel("active devices\nper round")
        bars.set_ylim(0, 1.2 * max(active))
        bars.set_xticks(place, [_gamma_text(gamma) for gamma in gammas])
        bars.set_xlabel("γ")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_title(title, fontsize=10, loc="left")
        rows = [
            (f"{gamma:g}", f"{value.mean:.4f}", f"{value.std:.4f}", f"{value.half_width:.4f}", f"{count:.4f}")
            for gamma, value, count in zip(gammas, accuracy, active, strict=True)
        ]
        write_csv(path, ("gamma", "test_accuracy_mean", "test_accuracy_std", "half_width_95", "active_devices"), rows)
        return save(figure, path)


def accuracies(groups: Mapping[str, Mapping[str, Result]], path: Path, title: str) -> Path:
    """A row per run with its last accuracy, every seed as a dot, mean and 95 % interval; one colour per group."""
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    with drawing(height=0.9 + 0.32 * len(labels)) as (figure, axes):
        rows = []
        for index, (group, results) in enumerate(groups.items()):
            shift = (index - (len(groups) - 1) / 2) * 0.28
            for label, result in results.items():
                y = labels.index(label) + shift
                values = last_accuracy(result)
                value = estimate(values)
                axes.plot(values, np.full(len(values), y), "o", color=colours[index], alpha=0.35, markersize=4)
                shown = group if label == next(iter(results)) else None
                axes.errorbar(
                    value.mean,
                    y,
                    xerr=error_bar(value),
                    fmt="D",
                    color=colours[index],
                    capsize=3,
                    markersize=4,
                    label=shown,
                )
                rows.append((group, label, f"{value.mean:.4f}", f"{value.std:.4f}", f"{value.half_width:.4f}"))
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        seeds = max(len(result.config.experiment.seeds) for group in groups.values() for result in group.values())
        axes.set_xlabel(f"test accuracy (%)\nevery seed, mean, {error_bar_text(seeds)}")
        means = [float(row[2]) for row in rows]
        axes.set_xlim(max(0, min(means) - 8), 100)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        if len(groups) > 1:
            figure.legend(frameon=False, loc="outside lower center", ncols=len(groups))
        axes.set_title(title, fontsize=10, loc="left")
        write_csv(path, ("group", "run", "test_accuracy_mean", "test_accuracy_std", "half_width_95"), rows)
        return save(figure, path)


def cell_map(
    radius_m: float,
    positions_m: NDArray[np.float64],
    territory_m: float,
    probability: NDArray[np.float64],
    path: Path,
    title: str,
) -> Path:
    """The cell at the end of some rounds: paths [T, M, 2], territories, and each device's uplink probability now."""
    with drawing(6.0, 5.2) as (figure, axes):
        from matplotlib.patches import Circle

        axes.add_patch(Circle((0, 0), radius_m, fill=False, color="#999999", linewidth=1))
        for start in positions_m[0]:
            axes.add_patch(Circle(tuple(start), territory_m, fill=False, color="#bbbbbb", linewidth=0.6))
        for walk in np.moveaxis(positions_m, 0, 1):
            axes.plot(walk[:, 0], walk[:, 1], color="#777777", linewidth=0.6)
        now = positions_m[-1]
        dots = axes.scatter(
            now[:, 0],
            now[:, 1],
            c=probability,
            cmap="viridis",
            vmin=0,
            vmax=1,
            s=42,
            edgecolors="black",
            linewidths=0.5,
        )
        axes.plot(0, 0, marker="^", color="black", markersize=10)
        axes.annotate("server", (0, 0), textcoords="offset points", xytext=(8, 4))
        figure.colorbar(dots, ax=axes, label="uplink probability now", shrink=0.8)
        axes.set_aspect("equal")
        axes.set_xlabel("metres")
        axes.set_ylabel("metres")
        axes.set_title(title, fontsize=10, loc="left")
        rows = [
            (i, f"{x:.2f}", f"{y:.2f}", f"{p:.6g}") for i, ((x, y), p) in enumerate(zip(now, probability, strict=True))
        ]
        write_csv(path, ("device", "x_m", "y_m", "uplink_probability"), rows)
        return save(figure, path)


def class_bubbles(counts: NDArray[np.int64], path: Path, title: str) -> Path:
    """Images of each class [M, C] at each device, as areas."""
    with drawing(6.4, 3.6) as (figure, axes):
        devices, classes = np.nonzero(counts)
        sizes = counts[devices, classes]
        axes.scatter(devices, classes, s=260 * sizes / counts.max(), color="#0072B2", alpha=0.75, linewidths=0)
        axes.set_xticks(range(len(counts)), [str(i + 1) for i in range(len(counts))])
        axes.set_yticks(range(counts.shape[1]))
        axes.set_xlabel(f"device; the largest dot is {counts.max()} images")
        axes.set_ylabel("class")
        axes.grid(color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(title, fontsize=10, loc="left")
        rows = [(i, c, int(counts[i, c])) for i in range(len(counts)) for c in range(counts.shape[1])]
        write_csv(path, ("device", "class", "images"), rows)
        return save(figure, path)


def _gamma_text(gamma: float) -> str:
    mantissa, _, exponent = f"{gamma:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
