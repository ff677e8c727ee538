"""Makes the figures and tables of the open problems from their runs.

Knows: which run is which point of a figure.
Does not know: methods, how runs are carried out.
"""

from pathlib import Path

import numpy as np

from otafl.papers.fedoag.experiments import Need, Read
from otafl.papers.fedoag.open_problems import ADAPTIVE, edge_amplitude
from otafl.runs.directory import publish
from otafl.runs.result import Result


def adaptive(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    """γ that finds itself beside the best of several fixed ones, world by world."""
    from otafl.papers.fedoag.open_figures import Chosen, adaptive_panels, adaptive_table

    rows = []
    for own in (need for need in needs if need.label.endswith(ADAPTIVE)):
        method = own.label.removesuffix(f", {ADAPTIVE}")
        others = [need for need in needs if need.regime == own.regime and need.label.startswith(f"{method}, ")]
        fixed = {need.config.algorithm.spec.gamma: read(need) for need in others if need is not own}
        rows.append(Chosen(own.regime, method, edge_amplitude(own.config), fixed, read(own)))
    title = f"γ by itself (stars) and fixed γ; {_size(rows[0].adaptive)} (those that diverged are left out)"
    note = (
        f"{_size(rows[0].adaptive)} unless the world says otherwise, η_0 = {rows[0].adaptive.config.training.lr:g}. "
        "The best fixed γ is that of five with the fewest diverged seeds and then the highest validation accuracy at "
        "the end of the same runs; accuracies are on the test set. Bold: more than 0.3 points below, or more lost."
    )
    table = publish(folder / "adaptive.md", adaptive_table(rows, note).encode())
    return [adaptive_panels(rows, folder / "adaptive.png", title), table]


def anchors(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    """What the server keeps of old models: memory, noise, accuracy."""
    from otafl.papers.fedoag.open_figures import anchors_over_rounds, anchors_table

    found = {(need.regime, *need.label.split(", ", 1)): read(need) for need in needs}
    shown = ("kept (at most m)", "float16")
    panels: dict[str, dict[str, Result]] = {}
    for (gamma, method, keeps), result in found.items():
        if method == "FedOAG" and keeps in shown:
            panels.setdefault(gamma, {})[keeps] = result
    size = _size(next(iter(found.values())))
    table = publish(folder / "anchors.md", anchors_table(found, f"Stationary, {size}, η_0 = 0.1.").encode())  # type: ignore[arg-type]
    return [anchors_over_rounds(panels, folder / "anchors.png", f"FedOAG's memory at the server; {size}"), table]


def speedup(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    """Rounds and gradients to a target over the number of devices and of local steps."""
    from otafl.papers.fedoag.open_figures import speedup as draw

    found: dict[str, dict[str, dict[int, Result]]] = {}
    for need in needs:
        methods = found.setdefault(need.regime, {})
        methods.setdefault(need.config.algorithm.name, {})[int(need.label.rsplit(" ", 1)[1])] = read(need)
    level = 85.0 if quick else 93.0
    title = f"{_size(read(needs[0]))}; γ adaptive, η_0 = {needs[0].config.training.lr:g} for all"
    path, table = draw(found, level, folder / "speedup.png", title)
    return [path, publish(folder / "speedup.md", table.encode())]


def tails(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    """Gradients without a bound: far starts, heavy tails."""
    from otafl.papers.fedoag.open_figures import excess_loss
    from otafl.world.data import load_dataset

    panels: dict[str, dict[str, tuple[Result, float]]] = {}
    for need in needs:
        config = need.config
        centers = load_dataset(config.data.name, config.data.spec, config.cell.devices).test.features
        optimum = 0.5 * float(np.square(centers - centers.mean(0)).sum(1).mean())
        panels.setdefault(need.regime, {})[need.label] = (read(need), optimum)
    first = read(needs[0])
    title = f"½‖x − c_i‖² in {first.summary['num_params']} dimensions, {_size(first)}"
    return [excess_loss(panels, folder / "tails.png", title)]


def _size(result: Result) -> str:
    experiment = result.config.experiment
    seeds = len(experiment.seeds)
    return f"{result.config.data.name}, {experiment.rounds} rounds, {seeds} seed{'s' if seeds > 1 else ''}"


DRAW = {"adaptive": adaptive, "anchors": anchors, "speedup": speedup, "tails": tails}
