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
    "fedoag-plus": ("#D55E00", "-"),
    "ota-fedavg": ("#56B4E9", "-."),
    "sca": ("#009E73", "-"),
    "vanilla": ("#777777", ":"),
    "bb-interior": ("#E69F00", "-"),
    "bb-alternative": ("#E69F00", "--"),
    "opc": ("#CC79A7", "-"),
    "lcpc": ("#CC79A7", "--"),
    "air-feel": ("#CC79A7", "-."),
    "fedpbc": ("#000000", ":"),
    "fedawe": ("#777777", "--"),
    "mifa": ("#777777", "-."),
}
SPARE_STYLES = (("#009E73", "-."), ("#0072B2", "--"), ("#D55E00", "--"), ("#56B4E9", "--"), ("#777777", "-"))
LABELS = {
    "fedavg": "ideal FedAvg",
    "fedoag": "FedOAG",
    "fedoag-plus": "FedOAG-plus",
    "ota-fedavg": "OTA-FedAvg (no memory)",
    "sca": "SCA",
    "vanilla": "vanilla OTA",
    "bb-interior": "BB-interior",
    "bb-alternative": "BB-alternative",
    "opc": "OPC",
    "lcpc": "LCPC",
    "air-feel": "Air-FEEL",
    "fedpbc": "FedPBC",
    "fedawe": "FedAWE",
    "mifa": "MIFA",
}


def accuracy_over_rounds(results: Mapping[str, Result], path: Path, title: str, bottom: float | None = None) -> Path:
    """Mean test accuracy over rounds with a band of one standard deviation between seeds, as a PNG.

    Keys are method names or labels of your own; the axis begins at `bottom`, or below the lowest settled curve.
    """
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
        drawn: set[str] = set()
        for name, result in results.items():
            method = result.config.algorithm.name
            known = STYLES.get(method) if method not in drawn else None
            drawn.add(method)
            colour, line = known or next(spare, ("#999999", ":"))
            accuracy = 100 * result.metrics["test_accuracy"]
            mean = np.nanmean(accuracy, axis=0)
            settled = result.rounds >= result.rounds[-1] / 20
            lowest = min(lowest, float(mean[settled].min()))
            axes.plot(result.rounds, mean, line, color=colour, linewidth=1.8)
            if len(accuracy) > 1:
                std = np.nanstd(accuracy, axis=0, ddof=1)
                axes.fill_between(result.rounds, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
            ends.append((float(mean[-1]), LABELS.get(name, name), colour))
        if bottom is None:
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
