"""Curves of runs for a paper or a notebook: any column over rounds, channel uses, seconds or joules.

Knows: results, what columns are called in print.
Does not know: how results came about.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from otafl.errors import ConfigError, say
from otafl.report.axes import X_AXES, column
from otafl.report.figures import LABELS, STYLES, drawing, write_csv
from otafl.report.runs import Named, Runs, collect
from otafl.runs.directory import publish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = {"single": (3.5, 2.6), "double": (7.16, 3.6)}
"""Width and height in inches; the widths are those of IEEE's columns."""
TITLES = {
    "round": "round",
    "channel_uses": "channel uses",
    "uplink_s": "uplink airtime (s)",
    "energy_j": "energy of all devices (J)",
    "time_s": "time (s)",
    "test_accuracy": "test accuracy (%)",
    "test_loss": "test loss",
    "validation_accuracy": "validation accuracy (%)",
    "validation_loss": "validation loss",
    "mean_accuracy": "test accuracy of the devices' mean model (%)",
    "mean_loss": "test loss of the devices' mean model",
    "num_active": "active devices",
    "norm_bound": "norm bound $B_t$",
    "staleness_mean": "mean staleness (rounds)",
    "staleness_max": "largest staleness (rounds)",
    "anchors": "models held by the server",
    "energy_ratio_max": "largest energy over the limit",
    "snr_db": "received SNR (dB)",
    "noise_to_update": "noise over update",
    "consensus": r"consensus distance $\frac{1}{m}\sum_i \|x_i-\bar x\|^2$",
    "grad_norm_sq": r"$\|\nabla F(x^t)\|^2$",
    "mean_grad_norm_sq": r"$\|\nabla F(\bar x^t)\|^2$",
    "scalar_reports": "scalars reported",
}
"""Column to what an axis calls it."""
SYMBOLS = {"gamma": "γ", "lr": "η₀", "omega": "ω", "nu": "ν", "dirichlet_alpha": "α"}
UNITS = {"m": "m", "mps": "m/s", "s": "s", "hz": "Hz", "w": "W", "j": "J", "db": "dB", "dbm": "dBm"}
MOST_BANDS = 5  # curves beyond which bands would hide each other
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")
DASHES = ("-", "--", "-.", ":")
STYLE: dict[str, Any] = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Picture:
    """A figure: shows itself in a notebook; `save` writes it."""

    figure: "Figure"
    """Matplotlib's figure, to be changed at will."""
    numbers: Sequence[Sequence[Any]]
    """What is drawn, with a header: run, x, mean and standard deviation of y over seeds."""

    def save(self, path: str | Path) -> list[Path]:
        """Write the figure, by its suffix .pdf, .png or .svg, and its numbers beside it as .csv; returns the files."""
        path = Path(path)
        if path.suffix not in (".pdf", ".png", ".svg"):
            raise ConfigError(f"{path}: name a file that ends in .pdf, .png or .svg")
        publish(path, self._drawn(path.suffix[1:]))
        return [path, write_csv(path, self.numbers[0], self.numbers[1:])]

    def _drawn(self, kind: str) -> bytes:
        file = io.BytesIO()
        stable: dict[str, Any] = {"dpi": 300} if kind == "png" else {"metadata": {"CreationDate": None}}
        if kind == "svg":
            stable = {"metadata": {"Date": None}}
        with drawing_style():
            self.figure.savefig(file, format=kind, **stable)
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self._drawn("png")


def drawing_style() -> Any:
    """Matplotlib's settings of these figures, as a context."""
    import matplotlib

    settings: Any = {**STYLE, "pdf.fonttype": 42}
    return matplotlib.rc_context(settings)


def plot(
    runs: Runs,
    x: str = "rounds",
    y: str = "test_accuracy",
    labels: Sequence[str] | None = None,
    width: str = "single",
    title: str = "",
    log: bool = False,
    bottom: float | None = None,
) -> Picture:
    """Draw a column of some runs: the mean over seeds, with a band of one standard deviation if there are few curves.

    Args:
        runs: run directories, folders of them, sweeps' folders or results; or any of these by label.
        x: "rounds", "uses" of the channel, "seconds" of airtime, "joules" of all devices, "time" of the world
            (`round_s` for each round), or a column.
        y: a column of metrics.csv; accuracies are drawn in percent, and a failed seed counts with 0.
        labels: a label for each run, in their order; default: what tells them apart.
        width: "single" or "double", in columns of a journal.
        title: a line above the axes.
        log: a logarithmic y axis.
        bottom: where the y axis begins; accuracies begin below the lowest curve that has settled.

    Returns:
        A picture that shows itself in a notebook, and that `save("figure.pdf")` writes.
    """
    if width not in WIDTHS:
        raise ConfigError(f"width {width!r}: choose from {', '.join(WIDTHS)}")
    named = collect(runs, labels)
    across = X_AXES.get(x, x)
    curves = {}
    for run in named:
        ends = column(run.result, across, run.label, [*X_AXES, *run.result.metrics])
        heights = column(run.result, y, run.label)
        if across != "round" and not np.nan_to_num(ends).any():
            say(f"otafl: {run.label}: spends no {TITLES.get(across, across)}; left out")
        elif np.isnan(heights).all():
            say(f"otafl: {run.label}: has no {TITLES.get(y, y)}; left out")
        else:
            curves[run.label] = (run, ends, heights)
    if not curves:
        raise ConfigError(f"-x {x} -y {y}: none of these runs has both")
    rows: list[Sequence[Any]] = [("run", across, f"{y}_mean", f"{y}_std", "seeds")]
    styles = _styles([run for run, _, _ in curves.values()])
    few = len(curves) <= MOST_BANDS
    with drawing(*WIDTHS[width], style=STYLE) as (figure, axes):
        for (label, (run, ends, heights)), (colour, line) in zip(curves.items(), styles, strict=True):
            where, mean, std = ends.mean(0), _over_seeds(heights, np.mean), _over_seeds(heights, _spread)
            failed = f" ({len(run.result.diverged)} of {len(heights)} failed)" if run.result.diverged else ""
            axes.plot(where, mean, line, color=colour, label=_printed(label) + failed)
            if few and len(heights) > 1:
                axes.fill_between(where, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
            rows += [
                (label, f"{a:.9g}", f"{m:.6g}", f"{d:.6g}", len(heights))
                for a, m, d in zip(where, mean, std, strict=True)
            ]
        if bottom is None and y.endswith("_accuracy"):
            bottom = _below(curves.values())
        _frame(axes, across, y, log, bottom, title)
        columns = min(len(curves), _legend_columns(list(curves), width))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, handlelength=2.2, columnspacing=1.2)
        figure.set_layout_engine("constrained")
    return Picture(figure, rows)


def _below(curves: Iterable[tuple[Named, NDArray[np.float64], NDArray[np.float64]]]) -> float:
    """A round number below every curve after its first twentieth, which may start below the frame."""
    lowest = 100.0
    for _, ends, heights in curves:
        settled = ends.mean(0) >= ends.mean(0)[-1] / 20
        lowest = min(lowest, float(heights.mean(0)[settled].min()))
    return float(max(0.0, 10 * np.floor(lowest / 10) - 5))


def _over_seeds(values: NDArray[np.float64], what: Any) -> NDArray[np.float64]:
    """A statistic of every round over the seeds that have a value; NaN where none has."""
    found = [column[np.isfinite(column)] for column in values.T]
    return np.array([what(column) if len(column) else np.nan for column in found])


def _spread(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _styles(runs: Sequence[Named]) -> list[tuple[str, str]]:
    """A colour and a line style for every curve.

    Each method has its own colour; runs of one method differ in the line; values of one key of one method are shades
    from dark to light; else a palette that can be told apart with any colour vision.
    """
    methods = [run.result.config.algorithm.name for run in runs]
    if len(set(methods)) == len(methods) and all(method in STYLES for method in methods):
        return [STYLES[method] for method in methods]
    if len(set(methods)) > 1 and max(map(methods.count, methods)) <= len(DASHES) and set(methods) <= set(STYLES):
        return [(STYLES[method][0], DASHES[methods[:i].count(method)]) for i, method in enumerate(methods)]
    if len(set(methods)) == 1 and len(runs) > 4:
        import matplotlib
        from matplotlib.colors import to_hex

        return [(to_hex(shade), "-") for shade in matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(runs)))]
    return [(PALETTE[i % len(PALETTE)], DASHES[i % len(DASHES)]) for i in range(len(runs))]


def _printed(label: str) -> str:
    """A label as a reader of a paper expects it: names of methods as their papers write them, symbols for keys."""
    words = []
    for word in label.split(", "):
        name, _, value = word.partition(" ")
        stem, _, unit = name.rpartition("_")
        if word in LABELS:
            words.append(LABELS[word])
        elif value and name in SYMBOLS:
            words.append(f"{SYMBOLS[name]} = {value}")
        elif value and unit in UNITS:
            words.append(f"{stem.replace('_', ' ')} {value} {UNITS[unit]}")
        else:
            words.append(word if " " not in word else word.replace("_", " "))
    return ", ".join(words)


def _legend_columns(labels: Sequence[str], width: str) -> int:
    """How many labels fit beside each other."""
    room = 58 if width == "single" else 120  # characters
    return max(1, int(room / (max(map(len, labels)) + 6)))


def _frame(axes: "Axes", x: str, y: str, log: bool, bottom: float | None, title: str) -> None:
    """Names, limits and lines of the axes."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(TITLES.get(x, x))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=x == "round"))
    axes.set_ylabel(TITLES.get(y, y))
    if log:
        axes.set_yscale("log")
    elif y.endswith("_accuracy"):
        axes.set_ylim(bottom, min(100.0, axes.get_ylim()[1]))
    elif bottom is not None:
        axes.set_ylim(bottom=bottom)
    axes.set_xlim(left=0)
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, fontsize=9, loc="left")
