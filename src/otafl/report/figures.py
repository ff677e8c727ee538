"""Figures of results; matplotlib is imported here only.

Knows: results, colours.
Does not know: how results came about.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from otafl.errors import OtaflError
from otafl.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart with any colour vision; line styles repeat the distinction in print.
STYLES: dict[str, tuple[str, str]] = {
    "fedavg": ("#000000", "--"),
    "fedoag": ("#0072B2", "-"),
    "ota-fedavg": ("#D55E00", "-."),
}
SPARE_STYLES = (("#009E73", "-"), ("#CC79A7", "-"), ("#E69F00", "-"), ("#56B4E9", "-"), ("#F0E442", "-"))
LABELS = {"fedavg": "ideal FedAvg", "fedoag": "FedOAG", "ota-fedavg": "OTA-FedAvg (no memory)"}


def accuracy_over_rounds(results: Mapping[str, Result], path: Path, title: str) -> Path:
    """Mean test accuracy over rounds with a band of one standard deviation between seeds, as a PNG."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise OtaflError("figures need matplotlib: pip install 'otafl[plot]'") from error
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
        spare = iter(SPARE_STYLES)
        ends: list[tuple[float, str, str]] = []
        lowest = 100.0
        for name, result in results.items():
            colour, line = STYLES.get(name) or next(spare, ("#999999", ":"))
            accuracy = 100 * result.metrics["test_accuracy"]
            mean = np.nanmean(accuracy, axis=0)
            settled = result.rounds >= result.rounds[-1] / 20
            lowest = min(lowest, float(mean[settled].min()))
            axes.plot(result.rounds, mean, line, color=colour, linewidth=1.8)
            if len(accuracy) > 1:
                std = np.nanstd(accuracy, axis=0, ddof=1)
                axes.fill_between(result.rounds, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
            ends.append((float(mean[-1]), LABELS.get(name, name), colour))
        bottom = max(0.0, 10 * np.floor(lowest / 10) - 10)  # the first rounds may start below the frame
        axes.set_ylim(bottom, 100)
        _label_ends(axes, ends, max(int(result.rounds[-1]) for result in results.values()), gap=(100 - bottom) / 18)
        seeds = max(len(result.config.experiment.seeds) for result in results.values())
        band = f"; band: ± one standard deviation of {seeds} seeds" if seeds > 1 else "; one seed"
        axes.set_xlabel(f"round{band}")
        axes.set_ylabel("test accuracy of the server model (%)")
        axes.set_xlim(left=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_title(title, fontsize=10, loc="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)
        plt.close(figure)
    return path


def _label_ends(axes: "Axes", ends: list[tuple[float, str, str]], last: int, gap: float) -> None:
    """Write each curve's name at its end, moved apart where they would overlap."""
    height = 100.0 + gap
    for value, label, colour in sorted(ends, reverse=True):
        height = min(value, height - gap)
        axes.text(last * 1.02, height, label, color=colour, va="center", clip_on=False)
