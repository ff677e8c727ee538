"""What the paper leaves open: which runs show how far `gamma = "adaptive"`, fewer checkpoints and FedOAG's speed-up go.

Worlds and values are those of docs/open-problems.md. All methods have the presets' learning rate, η_0 = 0.1.

Knows: our experiments beyond the paper's.
Does not know: how runs are carried out, how figures are drawn.
"""

import math
from typing import Any

import numpy as np

from otafl.config.schema import Config, load_config, num_params, scaled_gamma
from otafl.papers.fedoag.experiments import QUICK_KEYS, Need

OPEN = ("adaptive", "anchors", "speedup", "tails")
METHODS = {"FedOAG": "fedoag", "FedOAG-plus": "fedoag-plus"}
ADAPTIVE = "adaptive"

WORLDS: dict[str, dict[str, Any]] = {
    "stationary": {},
    "nonstationary": {"mobility.name": "bounded-waypoint", "mobility.moving_fraction": 1.0},
    "mixed": {"mobility.name": "bounded-waypoint", "mobility.moving_fraction": 0.5},
    "cell of 500 m": {"cell.radius_m": 500.0},
    "cell of 3,000 m": {"cell.radius_m": 3000.0},
    "−10 dBm": {"radio.tx_power_dbm": -10.0},
    "+10 dBm": {"radio.tx_power_dbm": 10.0},
    "100 devices": {"cell.devices": 100},
    "Rician fading, K = 5": {"fading.name": "rician", "fading.k_factor": 5.0},
    "correlated fading": {"fading.memory": "clarke", "fading.scatter_doppler_hz": 0.002},
    "shadowing, 8 dB": {"pathloss.shadowing_db": 8.0, "mobility.name": "bounded-waypoint"},
    "Fashion-MNIST, 256–128 units": {"data.name": "fashion-mnist", "model.hidden": [256, 128]},
}
QUICK_WORLDS = ("stationary", "cell of 500 m", "+10 dBm")
NOISY = ("cell of 3,000 m", "−10 dBm")
FIXED = {
    "FedOAG": (0.5, 0.8, 1.2, 1.8, 2.7),
    "FedOAG-plus": (0.3, 0.5, 0.8, 1.2, 1.8),
}
FIXED_NOISY = {"FedOAG": (1.2, 1.8, 2.7, 4.0, 6.0), "FedOAG-plus": (0.5, 0.8, 1.2, 1.8, 2.7)}
"""Fixed γ to choose from, over √(d E_s) times the r.m.s. |h| at the cell's edge."""

KEEPING: dict[str, dict[str, Any]] = {
    "kept (at most m)": {},
    "float16": {"anchors": "float16"},
    "bfloat16": {"anchors": "bfloat16"},
}
GAMMAS = (1e-9, 3e-10)

SPEEDUP_BASE: dict[str, Any] = {"cell.radius_m": 1000.0, "model.hidden": [256], "experiment.rounds": 400}
SPEEDUP_DEVICES = (5, 10, 20, 40, 80)
SPEEDUP_STEPS = (1, 2, 5, 10, 20)
SPEEDUP_METHODS = {"FedAvg": "fedavg", **METHODS}

TAILS_BASE: dict[str, Any] = {
    "data.name": "quadratic",
    "data.dimension": 50,
    "data.samples_per_device": 2000,
    "data.sample_noise": 1.0,
    "model.name": "point",
    "training.batch_size": 8,
    "training.local_steps": 5,
    "training.lr": 0.05,
    "cell.radius_m": 500.0,
    "radio.noise_dbm_hz": -203.0,
    "experiment.rounds": 2000,
    "experiment.eval_every": 20,
}
TAILS = {"normal": 0.0, "Student's t, 3": 3.0, "Student's t, 1.5": 1.5}
STARTS = (1.0, 100.0, 10_000.0)


def needs(figure: str, quick: bool) -> list[Need]:
    """The runs of one figure."""
    match figure:
        case "adaptive":
            return _adaptive(quick)
        case "anchors":
            return _anchors(quick)
        case "speedup":
            return _speedup(quick)
    return _tails(quick)


def edge_amplitude(config: Config) -> float:
    """√(d E_s Λ) at the cell's edge: with this γ a device there, under Rayleigh fading, is active 37 % of the time."""
    gain = config.pathloss.spec.mean_gain(np.array(config.cell.radius_m))
    return math.sqrt(num_params(config) * config.radio.symbol_energy_j * gain)


def _config(algorithm: str, world: dict[str, Any], quick: bool, **keys: Any) -> Config:
    values = {"algorithm.name": algorithm, "training.precision": "tf32", **world}
    values |= {f"algorithm.{key}": value for key, value in keys.items()}
    if quick:
        values |= QUICK_KEYS | {"data.name": load_config("quick").data.name}
    return load_config("stationary", values)


def _adaptive(quick: bool) -> list[Need]:
    found = []
    for name, world in WORLDS.items():
        if quick and name not in QUICK_WORLDS:
            continue
        keys = {**world, "experiment.record": ["server", "validation"], "experiment.name": "adaptive"}
        for label, algorithm in METHODS.items():
            config = _config(algorithm, keys, quick, gamma=ADAPTIVE)
            found.append(Need("adaptive", f"{label}, {ADAPTIVE}", name, config))
            for multiple in (FIXED_NOISY if name in NOISY else FIXED)[label]:
                gamma = float(f"{multiple * edge_amplitude(config):.3g}")
                found.append(Need("adaptive", f"{label}, {gamma:g}", name, config.replace({"algorithm.gamma": gamma})))
    return found


def _anchors(quick: bool) -> list[Need]:
    found = []
    for label, algorithm in METHODS.items():
        for gamma in GAMMAS:
            for name, keys in KEEPING.items():
                config = _config(algorithm, {"experiment.name": "anchors"}, quick, gamma=gamma, **keys)
                if quick:
                    config = config.replace({"algorithm.gamma": scaled_gamma(gamma, config)})
                found.append(Need("anchors", f"{label}, {name}", f"γ = {gamma:g}", config))
    return found


def _speedup(quick: bool) -> list[Need]:
    found = []
    base = {**SPEEDUP_BASE, "experiment.name": "speedup", "experiment.eval_every": 2 if quick else 10}
    for label, algorithm in SPEEDUP_METHODS.items():
        keys = {} if algorithm == "fedavg" else {"gamma": ADAPTIVE}
        for count in SPEEDUP_DEVICES:
            config = _config(algorithm, {**base, "cell.devices": count}, quick, **keys)
            found.append(Need("speedup", f"{label}, m = {count}", "devices", config))
        for steps in SPEEDUP_STEPS:
            config = _config(algorithm, {**base, "training.local_steps": steps}, quick, **keys)
            found.append(Need("speedup", f"{label}, s = {steps}", "steps", config))
    return found


def _tails(quick: bool) -> list[Need]:
    found = []
    few = {"experiment.rounds": 400, "experiment.seeds": [0, 1]} if quick else {}
    base = {**TAILS_BASE, **few, "experiment.name": "tails", "training.precision": "float64"}
    for label, algorithm in SPEEDUP_METHODS.items():
        keys = {} if algorithm == "fedavg" else {"gamma": ADAPTIVE}
        for name, tail in TAILS.items():
            config = _config(algorithm, {**base, "data.sample_tail": tail}, False, **keys)
            found.append(Need("tails", f"{label}, {name}", "heavy tails", config))
        for start in STARTS:
            config = _config(algorithm, {**base, "data.sample_noise": 0.0, "model.start": start}, False, **keys)
            found.append(Need("tails", f"{label}, start {start:g}", "far starts", config))
    return found
