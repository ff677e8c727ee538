"""Curves of runs for a paper or a notebook: any column over rounds, uses, seconds, joules, or an axis of a sweep.

Knows: results, what columns are called in print.
Does not know: how results came about.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from otafl import registry
from otafl.errors import ConfigError, say
from otafl.report.axes import X_AXES, Budget, averaged, column
from otafl.report.figures import LABELS, STYLES, drawing, write_csv
from otafl.report.runs import Named, Runs, along, checked_labels, collect, labels_of
from otafl.runs.directory import publish
from otafl.runs.result import Result, first_averaged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS = {"single": (3.5, 2.6), "double": (7.16, 3.6)}
"""Width and height in inches; the widths are those of IEEE's columns."""
TITLES = {
    "round": "round",
    "channel_uses": "channel uses",
    "uplink_s": "uplink airtime (s)",
    "energy_j": "radio energy of all devices (J)",
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
MOST_BARS = 8  # and, over an axis, with error bars
LEGEND_ROW, USUAL_ROWS = 0.17, 3  # inches that a row of a legend needs, and rows that a figure has room for
MOST_LETTERS = {"single": 40, "double": 95}  # of words below an axis; more stand beside it, one below the other
WORD_ROW = 0.17  # inches of such a row
PLAIN, FEW_DECADES = (1e-3, 1e5), 100  # numbers written out on a logarithmic axis; ratio below which 2 and 5 are, too
MOST_TICKS = 7  # values on an axis of a sweep that each have a tick
LOGARITHMIC_FROM = 30  # ratio of the largest to the least value on an axis of a sweep
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")
DASHES = ("-", "--", "-.", ":")
MARKERS = dict(zip(DASHES, "os^D", strict=True))  # of points over an axis; they hide a dash from its dots
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


@dataclass(frozen=True)
class Curve:
    """What is drawn in one colour."""

    label: str
    run: Result
    """The run, or the first of them: its method gives the colour."""
    failed: str
    """How many seeds failed, in words; "" if none did."""
    x: Sequence[Any]
    """Where the points are: numbers, or words that stand beside each other; None for a point that holds everywhere."""
    mean: Sequence[float]
    """Over seeds."""
    std: Sequence[float]
    """Between seeds."""
    seeds: int


def plot(
    runs: Runs,
    x: str = "rounds",
    y: str = "test_accuracy",
    labels: Sequence[str] | None = None,
    width: str = "single",
    title: str = "",
    log: bool = False,
    bottom: float | None = None,
    at: str | None = None,
    log_x: bool = False,
) -> Picture:
    """Draw a column of some runs as curves, or its level at the end over an axis of a sweep; means over seeds.

    Bands and bars are one standard deviation between seeds; with more than five curves there are none.

    Args:
        runs: run directories, folders of them, sweeps' folders or results; or any of these by label.
        x: "rounds", "uses" of the channel, "seconds" of airtime, "joules" of all devices, "time" of the world
            (`round_s` for each round), or a column; or an axis of a sweep or a key, for instance "cell.radius_m": then
            every run is a point, and runs that have no such key hold everywhere.
        y: a column of metrics.csv; accuracies are drawn in percent, and a failed seed counts with 0.
        labels: a label for each run, or for each curve over an axis, in their order; default: what tells them apart.
        width: "single" or "double", in columns of a journal.
        title: a line above the axes.
        log: a logarithmic y axis.
        bottom: where the y axis begins; accuracies begin below the lowest curve that has settled.
        at: over an axis, a budget such as "seconds=600" or "joules=0.1": each seed's last recorded row within it;
            default: the mean over the recorded rounds r > T − 50, and the last row of what only grows.
        log_x: a logarithmic x axis.

    Returns:
        A picture that shows itself in a notebook, and that `save("figure.pdf")` writes.

    >>> import otafl
    >>> small = otafl.load_config("quick", {"data.name": "digits", "model.hidden": [8], "experiment.rounds": 2})
    >>> plot({"ours": otafl.run(small, device="cpu")}, x="joules").numbers[0]
    ('run', 'energy_j', 'test_accuracy_mean', 'test_accuracy_std', 'seeds')
    """
    if width not in WIDTHS:
        raise ConfigError(f"width {width!r}: choose from {', '.join(WIDTHS)}")
    if log and bottom is not None and bottom <= 0:
        raise ConfigError(f"bottom {bottom:g}: a logarithmic axis has no such place")
    found = collect(runs)
    across = X_AXES.get(x, x)
    over_axis = x not in X_AXES and not any(across in run.result.metrics for run in found)
    if over_axis:
        budget = None if at is None else Budget.parse(at)
        curves = _over_axis(found, across, y, budget)
        if labels is not None:
            labels = checked_labels(labels, len(curves), "curves")
            curves = [replace(curve, label=label) for curve, label in zip(curves, labels, strict=True)]
    elif at is not None:
        raise ConfigError(f"at {at!r}: is for figures over an axis of a sweep, such as -x cell.radius_m, not over {x}")
    else:
        curves = _over_rounds(collect(runs, labels), across, y)
    if not curves:
        raise ConfigError(f"-x {x} -y {y}: none of these runs has both")
    rows: list[Sequence[Any]] = [("run", across, f"{y}_mean", f"{y}_std", "seeds")]
    few = len(curves) <= (MOST_BARS if over_axis else MOST_BANDS)
    words = list(dict.fromkeys(value for curve in curves for value in curve.x if isinstance(value, str)))
    if log_x and over_axis and (words or any(isinstance(a, float) and a <= 0 for curve in curves for a in curve.x)):
        raise ConfigError(f"-x {x}: has {'words' if words else 'values of 0 or less'}, for which --log-x has no place")
    columns = min(len(curves), _legend_columns([curve.label for curve in curves], width))
    inches, height = WIDTHS[width]
    lying = sum(len(word) + 2 for word in words) > MOST_LETTERS[width]  # values to the right, words below one another
    if lying:
        height = max(height, 0.8 + WORD_ROW * len(words))
    height += LEGEND_ROW * max(0, -(-len(curves) // columns) - USUAL_ROWS)
    with drawing(inches, height, style=STYLE) as (figure, axes):
        for curve, (colour, line) in zip(curves, _styles([curve.run for curve in curves]), strict=True):
            label, spread = _printed(curve.label) + curve.failed, few and curve.seeds > 1
            where: Any = [words.index(value) if isinstance(value, str) else value for value in curve.x]
            mean, std = np.array(curve.mean), np.array(curve.std)
            if log_x and not over_axis:  # where the first round is, there is no place
                where = np.where(np.array(where) > 0, where, np.nan)
            if curve.x[0] is None:
                (axes.axvline if lying else axes.axhline)(mean[0], linestyle=line, color=colour, label=label)
            elif over_axis:
                bars = std if spread else None
                shape = "none" if words else line  # words have no order that a line could follow
                look = {"linestyle": shape, "color": colour, "label": label, "marker": MARKERS.get(line, "o")}
                if lying:
                    axes.errorbar(mean, where, xerr=bars, ms=3, elinewidth=0.7, **look)
                else:
                    axes.errorbar(where, mean, bars, ms=3, elinewidth=0.7, **look)
            else:
                axes.plot(where, mean, line, color=colour, label=label)
                if spread:
                    axes.fill_between(where, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
            rows += [
                (curve.label, f"{a:.9g}" if isinstance(a, float) else a or "", f"{m:.6g}", f"{d:.6g}", curve.seeds)
                for a, m, d in zip(curve.x, curve.mean, curve.std, strict=True)
            ]
        if bottom is None and y.endswith("_accuracy"):
            bottom = _below(curves, over_axis)
        _value_axis(axes, y, log, bottom, lying)
        _frame(axes, across, log_x, title)
        if over_axis:
            _axis_of_sweep(axes, across, words, [a for curve in curves for a in curve.x if isinstance(a, float)], lying)
            told = {run.result.summary["averaged_over"] for run in found}
            when = f"after {budget}" if budget is not None else ""
            if budget is None and len(told) == 1 and y not in X_AXES.values():
                when = averaged(told.pop())
            (axes.set_xlabel if lying else axes.set_ylabel)(f"{TITLES.get(y, y)}\n{when}".rstrip())
        elif not log_x:
            axes.set_xlim(left=0)
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, handlelength=2.2, columnspacing=1.2)
        figure.set_layout_engine("constrained")
    return Picture(figure, rows)


def _over_rounds(runs: Sequence[Named], across: str, y: str) -> list[Curve]:
    """A curve for every run that has both columns."""
    curves = []
    for run in runs:
        ends = _carried(column(run.result, across, run.label, [*X_AXES, *run.result.metrics]))
        heights = column(run.result, y, run.label)
        if across != "round" and not ends.any():
            why = (
                "failed before its first recorded row"
                if run.result.diverged
                else f"has no {TITLES.get(across, across)}"
            )
            say(f"otafl: {run.label}: {why}; left out")
        elif np.isnan(heights).all():
            say(f"otafl: {run.label}: has no {TITLES.get(y, y)}; left out")
        else:
            mean, std = _over_seeds(heights, np.mean), _over_seeds(heights, _spread)
            failed = _failed(len(run.result.diverged), len(heights))
            curves.append(Curve(run.label, run.result, failed, list(ends.mean(0)), list(mean), list(std), len(heights)))
    return curves


def _carried(spent: NDArray[np.float64]) -> NDArray[np.float64]:
    """Costs [S, R] in which a seed that failed stays at what it had spent; 0 before the first row that says."""
    known = np.maximum.accumulate(np.where(np.isfinite(spent), np.arange(spent.shape[1]), -1), axis=1)
    return np.where(known >= 0, np.take_along_axis(spent, known.clip(min=0), axis=1), 0.0)


def _over_axis(runs: Sequence[Named], axis: str, y: str, budget: Budget | None) -> list[Curve]:
    """A curve for all runs that differ in nothing but an axis."""
    values = [run.find(axis) for run in runs]
    numbers = any(_is_number(value) for value in values)
    groups: dict[float | str | None, list[Named]] = {}
    for value, rest in zip(values, along(runs, axis), strict=True):
        groups.setdefault(float(value) if _is_number(value) else None if value is None else str(value), []).append(rest)
    if set(groups) == {None}:
        columns = [*X_AXES, *runs[0].result.metrics]
        near = registry.nearest(axis, [*columns, *runs[0].known()])
        raise ConfigError(
            f"-x {axis}: no column, no axis and no key of these runs{near}; columns: {', '.join(columns)}"
        )
    if len(groups.keys() - {None}) == 1:
        only = next(str(value) for value in values if value is not None)
        say(f"otafl: {axis} is {only} in every run that has it: the figure has one column")
    curves: dict[tuple[str, bool], list[tuple[Any, Named, NDArray[np.float64]]]] = {}
    rich = 0
    for value, members in groups.items():
        for run, label in zip(members, labels_of(members), strict=True):
            heights, left = _level(run.named(label), y, budget)
            rich += left
            point = value
            if numbers and isinstance(value, str):  # a word among numbers, γ = "adaptive", holds everywhere
                label, point = f"{label}, {axis.partition('.')[2] or axis} {value}", None
            curves.setdefault((label, point is not None), []).append((point, run, heights))
    if rich:
        say(f"otafl: {rich} of {len(runs)} runs had not spent {budget} at their end: their last models count")
    found = []
    for (label, _), points in curves.items():
        if isinstance(points[0][0], float):
            points = sorted(points, key=lambda point: float(point[0]))
        levels = [values for _, _, values in points]
        failed = _failed(sum(len(run.result.diverged) for _, run, _ in points), sum(map(len, levels)))
        found.append(
            Curve(
                label,
                points[0][1].result,
                failed,
                [value for value, _, _ in points],
                [float(values.mean()) for values in levels],
                [_spread(values) for values in levels],
                min(map(len, levels)),
            )
        )
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _level(run: Named, y: str, budget: Budget | None) -> tuple[NDArray[np.float64], bool]:
    """A column's level at the end of a run or of a budget, [S], and whether a budget was left over."""
    result, values = run.result, column(run.result, y, run.label)
    if budget is not None:
        rows = budget.rows(result, run.label)
        level = values[np.arange(len(values)), rows]
        left = bool((rows == len(result.rounds) - 1).any() and budget.left_over(result, run.label))
    else:
        late = [-1] if y in X_AXES.values() else np.flatnonzero(result.rounds > first_averaged(result.config))
        level, left = values[:, late].mean(1), False
    if y.endswith("_accuracy"):
        level = np.where([seed in result.diverged for seed in result.config.experiment.seeds], 0.0, level)
    return level, left


def _failed(count: int, seeds: int) -> str:
    return f" ({count} of {seeds} failed)" if count else ""


def _axis_of_sweep(axes: "Axes", key: str, words: Sequence[str], numbers: Sequence[float], lying: bool) -> None:
    """Name, ticks and scale of an axis with a sweep's values."""
    name = key.partition(".")[2] or key
    stem, _, unit = name.rpartition("_")
    known = SYMBOLS.get(name, f"{stem} ({UNITS[unit]})" if unit in UNITS and stem else name)
    (axes.set_ylabel if lying else axes.set_xlabel)(_spelt(known))
    places = sorted(set(numbers))
    if lying:
        axes.set_yticks(range(len(words)), words)
        axes.invert_yaxis()  # the first on top
    elif words:
        axes.set_xticks(range(len(words)), words)
    elif min(numbers) > 0 and max(numbers) >= LOGARITHMIC_FROM * min(numbers):
        axes.set_xscale("log")
    elif len(places) <= MOST_TICKS:
        axes.set_xticks(places)


def _below(curves: Iterable[Curve], whole: bool) -> float:
    """A round number below every curve; below its values after the first twentieth, if not the `whole` counts."""
    lowest = 100.0
    for curve in curves:
        settled = np.array(
            [mean for x, mean in zip(curve.x, curve.mean, strict=True) if whole or x >= curve.x[-1] / 20]
        )
        lowest = min(lowest, float(settled[np.isfinite(settled)].min(initial=100.0)))
    return float(max(0.0, 10 * np.floor(lowest / 10) - 5))


def _over_seeds(values: NDArray[np.float64], what: Any) -> NDArray[np.float64]:
    """A statistic of every round over the seeds that have a value; NaN where none has."""
    found = [column[np.isfinite(column)] for column in values.T]
    return np.array([what(column) if len(column) else np.nan for column in found])


def _spread(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _styles(runs: Sequence[Result]) -> list[tuple[str, str]]:
    """A colour and a line style for every curve.

    Each method has its own colour; runs of one method differ in the line; values of one key of one method are shades
    from dark to light; else a palette that can be told apart with any colour vision.
    """
    methods = [run.config.algorithm.name for run in runs]
    if len(set(methods)) == len(methods) and all(method in STYLES for method in methods):
        return [STYLES[method] for method in methods]
    if len(set(methods)) > 1 and max(map(methods.count, methods)) <= len(DASHES) and set(methods) <= set(STYLES):
        return [(STYLES[method][0], DASHES[methods[:i].count(method)]) for i, method in enumerate(methods)]
    if len(set(methods)) == 1 and len(runs) > 4:
        import matplotlib
        from matplotlib.colors import to_hex

        return [(to_hex(shade), "-") for shade in matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(runs)))]
    return [(PALETTE[i % len(PALETTE)], DASHES[(i + i // len(PALETTE)) % len(DASHES)]) for i in range(len(runs))]


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
            words.append(f"{_spelt(stem)} {value} {UNITS[unit]}")
        else:
            words.append(word if " " not in word else _spelt(word))
    return ", ".join(words)


def _spelt(name: str) -> str:
    """A key's name in words."""
    return name.replace("tx_", "transmit_").replace("_", " ")


def _legend_columns(labels: Sequence[str], width: str) -> int:
    """How many labels fit beside each other."""
    room = 58 if width == "single" else 120  # characters
    return max(1, int(room / (max(map(len, labels)) + 6)))


def _value_axis(axes: "Axes", y: str, log: bool, bottom: float | None, lying: bool) -> None:
    """Name, limits and ticks of the axis of values, which is the x axis of a figure that is `lying`."""
    from matplotlib.ticker import MaxNLocator

    axis, limits = (axes.xaxis, axes.set_xlim) if lying else (axes.yaxis, axes.set_ylim)
    axis.set_label_text(TITLES.get(y, y))
    if log:
        (axes.set_xscale if lying else axes.set_yscale)("log")
        _plain_decades(axis)
        return
    low, high = axes.dataLim.intervalx if lying else axes.dataLim.intervaly
    begin = axis.get_view_interval()[0] if bottom is None else bottom
    if not np.isfinite([begin, low, high]).all():
        return
    ticks = [float(tick) for tick in MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(begin, high)]
    top = next((tick for tick in ticks if tick >= high), high)
    if y.endswith("_accuracy"):
        top = min(100.0, top)
    axis.set_ticks([tick for tick in ticks if begin - 1e-9 * top <= tick <= top])
    limits(begin, top)


def _plain_decades(axis: Any) -> None:
    """Numbers instead of powers on a logarithmic axis that has only usual ones, also between few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    least, largest = axis.get_view_interval()
    if least >= PLAIN[0] and largest <= PLAIN[1]:
        if largest < FEW_DECADES * least:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _frame(axes: "Axes", x: str, log_x: bool, title: str) -> None:
    """Name, ticks and scale of the x axis; lines and title."""
    from matplotlib.ticker import MaxNLocator

    if not axes.get_xlabel():
        axes.set_xlabel(TITLES.get(x, x))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=x == "round"))
    if log_x:
        axes.set_xscale("log")
        _plain_decades(axes.xaxis)
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, fontsize=9, loc="left")
