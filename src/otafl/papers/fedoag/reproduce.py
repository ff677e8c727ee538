"""Reproduces the paper's figures and tables: runs what is missing, then draws.

Knows: which figure needs which runs, how to draw them.
Does not know: methods.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from otafl import registry
from otafl.config.schema import PAPER_PARAMS, load_config
from otafl.disk import explained
from otafl.errors import ConfigError
from otafl.papers.fedoag import open_problems, open_results
from otafl.papers.fedoag.experiments import FIG2, FIGURES, GAMMAS, METHODS, NORMS, REGIMES, Need, Read, needs, sweep_of
from otafl.papers.fedoag.open_problems import OPEN
from otafl.papers.fedoag.table1 import table1
from otafl.radio.link import inversion_threshold
from otafl.report.statistics import estimate, last_accuracy
from otafl.runs.directory import publish
from otafl.runs.result import Result, read_run
from otafl.studies.conduct import conduct
from otafl.studies.study import Study


@dataclass(frozen=True)
class Drawn:
    """The files that were made, and the exit status of the runs."""

    files: tuple[Path, ...]
    status: int


def reproduce(
    what: Sequence[str], out: Path, quick: bool, overrides: Mapping[str, Any] | None = None, **executor: Any
) -> Drawn:
    """Make figures and tables; "all" is the paper's set, "open" is that of its open problems."""
    groups = {"all": FIGURES, "open": OPEN}
    for name in what:
        if name not in (known := [*FIGURES, *OPEN, *groups]):
            raise ConfigError(
                f"reproduce {name!r}: unknown{registry.nearest(name, known)}; there are {', '.join(known)}"
            )
    figures = list(dict.fromkeys(figure for name in what for figure in groups.get(name, (name,))))
    every = {figure: needs(figure, quick) for figure in FIGURES}
    every |= {figure: open_problems.needs(figure, quick) for figure in OPEN if figure in figures}
    sweep, wanted = sweep_of(figures, every, overrides)
    study = Study(out, sweep)
    status = 0
    if sweep.cases:
        status = conduct(study, **executor).status
        if status:
            return Drawn((), status)
    cache: dict[str, Result] = {}
    places = {case.config.digest: study.place(case) for case in sweep.cases}

    def read(need: Need) -> Result:
        digest = need.config.digest
        if digest not in cache:
            cache[digest] = read_run(places[digest])
        return cache[digest]

    files: list[Path] = []
    for figure in figures:
        begin = time.monotonic()
        with explained(out):
            made = (DRAW | open_results.DRAW)[figure](wanted[figure], read, out / "figures", quick)
        files += made
        print(f"{figure}: {', '.join(str(path) for path in made)} ({time.monotonic() - begin:.1f} s)", file=sys.stderr)
    return Drawn(tuple(files), status)


def conditions(results: Iterable[Result]) -> str:
    """The size of some runs in words, for titles and notes."""
    config = next(iter(results)).config
    rounds, seeds = config.experiment.rounds, len(config.experiment.seeds)
    hidden = getattr(config.model.spec, "hidden", ())
    size = f"{', '.join(map(str, hidden))} hidden units, " if hidden else ""
    reduced = "reduced: " if rounds < 800 or seeds < 5 or hidden != (1024,) else ""
    return f"{reduced}{size}{rounds} rounds, {seeds} seed{'s' if seeds > 1 else ''}"


def _fig1(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    """The cell after 100 rounds of walking."""
    from otafl.papers.fedoag.figures import cell_map
    from otafl.world.channel import active_prob, trajectory

    config = load_config("nonstationary", {"experiment.rounds": 100, "experiment.seeds": [0]})
    mobility, gamma = config.mobility.spec, config.algorithm.spec.gamma
    world = trajectory(config.cell, mobility, config.pathloss.spec, config.fading.spec, 100, 0)
    threshold = inversion_threshold(gamma, PAPER_PARAMS, config.radio.symbol_energy_j)
    probability = active_prob(world, config.fading.spec, threshold, -1)
    title = "Territories, paths of 100 rounds, and who is heard at γ = 1e-9"
    return [
        cell_map(config.cell.radius_m, world.positions_m, mobility.territory_m, probability, folder / "fig1.png", title)
    ]


def _fig2(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    made = []
    for letter, regime in zip("abc", REGIMES, strict=True):
        curves = {need.label: read(need) for need in needs if need.regime == regime}
        title = f"{_data(curves)}, {regime} devices\n{conditions(curves.values())}"
        shown = {label: curves[label] for label in FIG2}
        made.append(_curves(shown, folder / f"fig2{letter}.png", title, bottom=40.0 if quick else 60.0))
    return made


def _curves(curves: Mapping[str, Result], path: Path, title: str, bottom: float | None = None) -> Path:
    """Accuracy over rounds, as PNG and PDF."""
    from otafl.report.plot import plot

    picture = plot(curves, width="double", title=title, bottom=bottom)
    picture.save(path.with_suffix(".pdf"))
    return picture.save(path)[0]


def _fig3(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    from otafl.papers.fedoag.figures import accuracy_over_gamma

    results = [read(need) for need in needs]
    title = f"FedOAG on {results[0].config.data.name.upper()}, stationary\n{conditions(results)}"
    if quick:
        title += "; γ as for the paper's model"
    return [accuracy_over_gamma([float(need.label) for need in needs], results, folder / "fig3.png", title)]


def _fig4(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    """How Dirichlet(0.1) shares out classes among 20 devices."""
    from otafl.papers.fedoag.figures import class_bubbles
    from otafl.random import Streams
    from otafl.world.data import load_dataset

    config = load_config("quick" if quick else "stationary", {"cell.devices": 20})
    dataset = load_dataset(config.data.name, config.data.spec, 20)
    parts = config.partition.split(dataset.train.targets, 20, config.training.batch_size, Streams(0))
    targets = np.asarray(dataset.train.targets)
    counts = np.stack([np.bincount(targets[part], minlength=int(targets.max()) + 1) for part in parts])
    title = f"{config.data.name}, Dirichlet({config.partition.dirichlet_alpha:g}) over 20 devices, seed 0"
    return [class_bubbles(counts, folder / "fig4.png", title)]


def _fig5(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    curves = {f"γ = {need.label}": read(need) for need in needs}
    title = f"FedOAG on {_data(curves)}, stationary\n{conditions(curves.values())}"
    return [_curves(curves, folder / "fig5.png", title)]


def _table1(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    return [publish(folder / "table1.md", f"{table1()}\n".encode())]


def _ablation(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    from otafl.papers.fedoag.figures import accuracies

    rows = {need.label: read(need) for need in needs}
    title = f"What each step adds: memory, tight scaling, held-back shares\n{conditions(rows.values())}"
    return [accuracies({"": rows}, folder / "ablation.png", title)]


def _methods(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    from otafl.papers.fedoag.figures import accuracies

    rows = {need.label: read(need) for need in needs}
    rows = dict(sorted(rows.items(), key=lambda item: -np.nan_to_num(estimate(last_accuracy(item[1])).mean)))
    title = f"{_data(rows)}, stationary, norms normalised\n{conditions(rows.values())}"
    return [accuracies({"": rows}, folder / "methods.png", title)]


def _norms(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    from otafl.papers.fedoag.figures import accuracies

    found = {need.label: read(need) for need in needs}
    groups = {
        "normalised by FedOAG's handshake": {label: found[label] for label in NORMS},
        "clipped at a fixed bound (as published)": {label: found[f"{label}, clipped"] for label in NORMS},
    }
    return [accuracies(groups, folder / "norms.png", f"How norms are bounded\n{conditions(found.values())}")]


def _tradeoff(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    """γ as Theorem 1 sees it, both parts of D, and B, beside the measured accuracy."""
    from otafl.papers.fedoag.theory.bounds import gamma_factors
    from otafl.papers.fedoag.theory.figures import gamma_tradeoff
    from otafl.world.channel import active_prob, trajectory

    results = [read(need) for need in needs]
    config, num_params = results[0].config, results[0].summary["num_params"]
    scale = config.algorithm.spec.gamma / float(needs[0].label)  # a smaller model's γ, for the paper's in the label
    worlds = [
        trajectory(
            config.cell, config.mobility.spec, config.pathloss.spec, config.fading.spec, 1, seed, config.radio.antennas
        )
        for seed in config.experiment.seeds
    ]
    fine = np.geomspace(min(GAMMAS), max(GAMMAS), 81)
    found = np.empty((len(worlds), len(fine), 3))
    for i, world in enumerate(worlds):
        for j, gamma in enumerate(fine):
            threshold = inversion_threshold(gamma * scale, num_params, config.radio.symbol_energy_j)
            found[i, j] = gamma_factors(active_prob(world, config.fading.spec, threshold, 0), gamma)
    with np.errstate(divide="ignore"):
        terms = np.exp(np.log(found).mean(0))  # geometric mean over the seeds' worlds
    accuracy = [estimate(last_accuracy(result)) for result in results]
    title = f"FedOAG on {config.data.name.upper()}, stationary\n{conditions(results)}"
    named = dict(
        zip(("(D), noise in the mean model", "(D), noise between models", "(B), consensus"), terms.T, strict=True)
    )
    gammas = [float(need.label) for need in needs]
    return [gamma_tradeoff(gammas, accuracy, fine, named, folder / "tradeoff.png", title)]


def _claims(needs: list[Need], read: Read, folder: Path, quick: bool) -> list[Path]:
    from otafl.papers.fedoag.claims import as_markdown, claims

    results = {(need.regime, need.label): read(need) for need in needs if not need.label[0].isdigit()}
    gammas = {float(need.label): read(need) for need in needs if need.label[0].isdigit()}
    chosen = "hyper-parameters chosen on the validation set by one rule for all methods"
    verdicts = "verdicts by paired t-tests, Holm's correction for all of this table"
    note = f"Runs: {conditions(results.values())}; {chosen}; {verdicts}."
    peak = METHODS["FedOAG"].keys["gamma"]
    return [publish(folder / "claims.md", as_markdown(claims(results, gammas, peak), note).encode())]


def _data(results: Any) -> str:
    return str(next(iter(results.values())).config.data.name).upper().replace("DIGITS", "digits")


DRAW: dict[str, Callable[[list[Need], Read, Path, bool], list[Path]]] = {
    "fig1": _fig1,
    "fig2": _fig2,
    "fig3": _fig3,
    "fig4": _fig4,
    "fig5": _fig5,
    "table1": _table1,
    "ablation": _ablation,
    "methods": _methods,
    "norms": _norms,
    "tradeoff": _tradeoff,
    "claims": _claims,
}
