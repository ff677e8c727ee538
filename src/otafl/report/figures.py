"""What all figures share: the style of methods, axes to draw on, files.

Knows: matplotlib, colours.
Does not know: results.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otafl.errors import OtaflError
from otafl.registry import TOLD
from otafl.runs.directory import publish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = {name: (told["style"][0], told["style"][1]) for name, told in TOLD["algorithms"].items()}
"""Method to its colour and line."""
SPARE_STYLES = (("#009E73", "-."), ("#0072B2", "--"), ("#D55E00", "--"), ("#56B4E9", "--"), ("#777777", "-"))
LABELS = {name: told["label"] for name, told in TOLD["algorithms"].items()}
"""Method to what its paper calls it."""


@contextmanager
def drawing(
    width: float = 6.4,
    height: float = 4.0,
    columns: int = 1,
    lines: int = 1,
    style: Mapping[str, Any] | None = None,
    heights: Sequence[float] | None = None,
) -> Iterator[tuple["Figure", Any]]:
    """A figure and its axes in the library's style, closed at the end; panels in a column share their x axis."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise OtaflError("figures need matplotlib: pip install 'otafl[plot]'") from error
    common: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42}
    with plt.rc_context(common | dict(style or {})):
        figure, axes = plt.subplots(
            lines, columns, figsize=(width, height), layout="constrained", sharex="col", height_ratios=heights
        )
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG and PDF; returns the PNG's path."""
    for suffix, keys in ((".pdf", {"metadata": {"CreationDate": None}}), (".png", {"dpi": 200})):
        drawn = io.BytesIO()
        figure.savefig(drawn, format=suffix[1:], **keys)
        publish(path.with_suffix(suffix), drawn.getvalue())
    return path.with_suffix(".png")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write the numbers of a figure beside it."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return publish(path.with_suffix(".csv"), text.getvalue().encode())
