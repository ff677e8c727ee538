"""Which runs each figure and table needs: the paper's, and those that our own methods add.

Hyper-parameters are those that `recipes/comparison.toml` chose (validation accuracy after 100 rounds, seeds 100–102,
the same grid of learning rates for all): see docs/results.md.

Knows: the paper's experiments.
Does not know: how runs are carried out, how figures are drawn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from otafl.config.schema import Config, load_config, scaled_gamma
from otafl.errors import ConfigError
from otafl.runs.result import Result
from otafl.studies.sweep import Case, Sweep

REGIMES = ("stationary", "nonstationary", "mixed")
GAMMAS = (1e-10, 2e-10, 3e-10, 5e-10, 1e-9, 2e-9, 3e-9, 5e-9, 1e-8)
SEEDS = list(range(10))
"""Of every reported run."""
QUICK_KEYS: dict[str, Any] = {"experiment.rounds": 100, "experiment.seeds": [0, 1], "model.hidden": [128]}
FIGURES = ("fig1", "fig2", "fig3", "fig4", "fig5", "table1", "ablation", "methods", "norms", "tradeoff", "claims")


@dataclass(frozen=True)
class Method:
    """A row of our tables: a method with the values chosen for it."""

    label: str
    algorithm: str
    lr: float
    keys: Mapping[str, Any] = field(default_factory=dict)


CLIP = {"norms": "clip"}
METHODS = {
    method.label: method
    for method in (
        Method("FedAvg", "fedavg", 0.3),
        Method("FedOAG", "fedoag", 0.1, {"gamma": 3e-10}),
        Method("FedOAG-plus", "fedoag-plus", 0.1, {"gamma": 2e-10}),
        Method("FedOAG-plus, θ_min = 1", "fedoag-plus", 0.1, {"gamma": 3e-10, "theta_min": 1.0}),
        Method("OTA-FedAvg", "ota-fedavg", 0.03, {"gamma": 3e-10}),
        Method("SCA", "sca", 0.1, {"omega": 0.03}),
        Method("vanilla", "vanilla", 0.003),
        Method("vanilla, tight", "vanilla", 0.003, {"rule": "tight"}),
        # tuning chose the whole cell, in which BB-interior and BB-alternative are the same
        Method("BB, whole cell", "bb-interior", 0.03, {"interior_radius_m": 1500.0, "truncation": 1.37}),
        Method("OPC", "opc", 0.1, {"renormalise": True}),
        Method("LCPC, truncate", "lcpc", 0.1, {"form": "truncate"}),
        Method("LCPC, clip", "lcpc", 0.1, {"form": "clip"}),
        Method("Air-FEEL", "air-feel", 0.1),
        Method("SCA, clipped", "sca", 0.3, {"omega": 0.03, "norm_limit": 5.0, **CLIP}),
        Method("vanilla, clipped", "vanilla", 0.1, {"norm_limit": 1.0, **CLIP}),
        Method(
            "BB, whole cell, clipped",
            "bb-interior",
            0.3,
            {"interior_radius_m": 1500.0, "truncation": 1.37, "norm_limit": 5.0, **CLIP},
        ),
        Method("OPC, clipped", "opc", 1.0, {"renormalise": True, "norm_limit": 5.0, **CLIP}),
        Method("LCPC, clip, clipped", "lcpc", 1.0, {"form": "clip", "norm_limit": 5.0, **CLIP}),
        Method("Air-FEEL, clipped", "air-feel", 0.3, {"norm_limit": 5.0, **CLIP}),
        Method("FedPBC", "fedpbc", 0.3, {"gamma": 3e-10}),
        Method("FedAWE", "fedawe", 0.3, {"gamma": 3e-10}),
        Method("MIFA", "mifa", 0.3, {"gamma": 3e-10}),
    )
}
FIG2 = ("FedAvg", "FedOAG", "SCA", "BB, whole cell", "vanilla")
ABLATION = ("OTA-FedAvg", "FedOAG", "FedOAG-plus, θ_min = 1", "FedOAG-plus")
NORMS = ("SCA", "vanilla", "BB, whole cell", "OPC", "LCPC, clip", "Air-FEEL")


def config_of(method: Method, regime: str, quick: bool, keys: Mapping[str, Any] | None = None) -> Config:
    """A method's configuration in a regime; `quick` is the reduction of the preset of that name."""
    values = {"algorithm.name": method.algorithm, "training.lr": method.lr, "experiment.name": regime}
    values |= {f"algorithm.{key}": value for key, value in {**method.keys, **(keys or {})}.items()}
    if not quick:
        return load_config(regime, {**values, "experiment.seeds": SEEDS})
    data = load_config("quick").data.name
    config = load_config(regime, {**values, **QUICK_KEYS, "data.name": data})
    if isinstance(getattr(config.algorithm.spec, "gamma", None), float):
        config = config.replace({"algorithm.gamma": scaled_gamma(config.algorithm.spec.gamma, config)})
    return config


@dataclass(frozen=True)
class Need:
    """A run that a figure needs."""

    figure: str
    label: str
    regime: str
    config: Config


Read = Callable[[Need], Result]


def needs(figure: str, quick: bool) -> list[Need]:
    """The runs that one figure or table needs; some need none."""

    def of(labels: tuple[str, ...], regimes: tuple[str, ...] = ("stationary",)) -> list[Need]:
        return [
            Need(figure, label, regime, config_of(METHODS[label], regime, quick))
            for regime in regimes
            for label in labels
        ]

    match figure:
        case "fig2":
            return of(FIG2, REGIMES)
        case "fig3" | "fig5" | "tradeoff":
            fedoag = METHODS["FedOAG"]
            return [
                Need(figure, f"{gamma:g}", "stationary", config_of(fedoag, "stationary", quick, {"gamma": gamma}))
                for gamma in GAMMAS
            ]
        case "ablation":
            return of(ABLATION)
        case "methods":
            return of(tuple(label for label in METHODS if not label.endswith("clipped")))
        case "norms":
            return of(tuple(name for label in NORMS for name in (label, f"{label}, clipped")))
        case "claims":
            paper = config_of(METHODS["FedOAG"], "stationary", quick, {"gamma": 1e-9})
            extra = [Need(figure, "FedOAG, γ = 1e-9", "stationary", paper)]
            return [*extra, *needs("fig2", quick), *needs("fig3", quick), *of(("FedOAG-plus",))]
    return []


def sweep_of(
    figures: list[str], every: Mapping[str, list[Need]], overrides: Mapping[str, Any] | None = None
) -> tuple[Sweep, dict[str, list[Need]]]:
    """One sweep of all runs that some figures need, and per figure its needs; `overrides` change every run.

    `every` has the needs of other figures, too: a run has one name, whichever figures are asked for.
    """
    if overrides:
        every = {figure: _changed(found, overrides, figure in figures) for figure, found in every.items()}
    named: dict[str, Case] = {}
    for need in (need for found in every.values() for need in found):
        named.setdefault(need.config.digest, Case({"regime": need.regime, "run": need.label}, need.config))
    wanted = {figure: every[figure] for figure in figures}
    asked = {need.config.digest for found in wanted.values() for need in found}
    cases = {digest: case for digest, case in named.items() if digest in asked}
    axes = {
        "regime": list(dict.fromkeys(case.axes["regime"] for case in cases.values())),
        "run": list(dict.fromkeys(case.axes["run"] for case in cases.values())),
    }
    return Sweep("reproduction", tuple(cases.values()), axes), wanted


def _changed(found: list[Need], overrides: Mapping[str, Any], asked: bool) -> list[Need]:
    """Needs with other values; those that cannot have them are left out of figures that nobody asked for."""
    changed = []
    for need in found:
        try:
            changed.append(replace(need, config=need.config.replace(overrides)))
        except ConfigError:
            if asked:
                raise
    return changed
