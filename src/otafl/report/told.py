"""What a run says of itself on a terminal: its headline, its progress, its results.

Knows: configurations, results, progress bars.
Does not know: commands and their options.
"""

from pathlib import Path
from typing import Any

from otafl.config.schema import Config
from otafl.errors import say
from otafl.runs.result import Result
from otafl.terminal import Live


class Progress(Live):
    """The progress of a run, called after every round; the headline comes when the run really begins."""

    def __init__(self, config: Config, headline: str) -> None:
        super().__init__(config.experiment.rounds, "round")
        self._headline, self._accuracy = headline, ""

    def __enter__(self) -> "Progress":
        return self

    def __call__(self, done: int, row: Any) -> None:
        """Show that `done` rounds are done."""
        if self._first is None:
            say(self._headline)
        if row is not None and "test_accuracy" in row:
            values = row["test_accuracy"]
            self._accuracy = f"test accuracy {100 * sum(values) / len(values):.1f} %"
        self.show(done, self._accuracy)


def headline(config: Config) -> str:
    """One line about the run that is about to start."""
    seeds = ", ".join(map(str, config.experiment.seeds))
    return (
        f"{config.algorithm.name} on {config.data.name}: {config.experiment.rounds} rounds, "
        f"{config.cell.devices} devices, seeds {seeds}"
    )


def print_summary(result: Result, out: Path) -> None:
    """Print a run's results, and where they are stored."""
    summary = result.summary
    for note in result.notes:
        print(note)
    for name, label, factor, unit in (
        ("test_accuracy", "test accuracy", 100.0, " %"),
        ("mean_accuracy", "accuracy of the mean model", 100.0, " %"),
        ("validation_accuracy", "validation accuracy", 100.0, " %"),
        ("test_loss", "test loss", 1.0, ""),
    ):
        entry = summary.get(name)
        if entry is None or entry["mean"] is None:
            continue
        count = len(summary["seeds"])
        failed = f", {len(result.diverged)} failed with 0" if result.diverged else ""
        seeds = "1 seed" if count == 1 else f"mean ± std of {count} seeds{failed}"
        last, whole = (_spread(part, factor) for part in (entry["final"], entry))
        print(f"{label:<28} {last}{unit} at the end; {whole}{unit} over {summary['averaged_over']}  ({seeds})")
    if "num_active" in summary:
        print(f"{'active devices per round':<28} {summary['num_active']:.2f}")
    print(f"{'time':<28} {summary['wall_s']:.1f} s on {summary['device']}")
    for seed, entry in summary.get("diverged", {}).items():
        say(f"otafl: seed {seed} diverged after round {entry['round']}: {entry['cause']}")
    print(f"{summary['status']}: {out}")


def _spread(entry: Any, factor: float) -> str:
    spread = f" ± {factor * entry['std']:.3g}" if entry["std"] is not None else ""
    return f"{factor * entry['mean']:.4g}{spread}"
