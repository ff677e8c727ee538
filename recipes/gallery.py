"""The figures of docs/gallery.md: every law of fading, memory, path loss and motion, drawn beside its closed form.

    python recipes/gallery.py

Also prints what drawing a round's channel for 30 devices costs with each of them. Half a minute on two cores.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from otafl.doors.sionna import CDL, TDL, ScenarioFading
from otafl.errors import OtaflError
from otafl.random import Streams
from otafl.report.figures import drawing, save
from otafl.world.channel import trajectory
from otafl.world.fading import DoubleRayleigh, LogNormal, Nakagami, Rayleigh, Rician, Suzuki, Weibull
from otafl.world.mobility import BoundedWaypoint, GaussMarkov, Hotspots, RandomDirection, RandomWaypoint, Road, Static
from otafl.world.pathloss import FreeSpace, LogDistance
from otafl.world.placement import Cell
from otafl.world.tr38901 import RMa, UMa, UMi

OUT = Path("results") / "gallery"
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
FADING: dict[str, Any] = {
    "rayleigh": Rayleigh(),
    "rician, K = 5": Rician(),
    "nakagami, m = 2": Nakagami(),
    "nakagami, m = 1/2": Nakagami(m=0.5),
    "weibull, β = 1.5": Weibull(),
    "double-rayleigh": DoubleRayleigh(),
    "log-normal, 8 dB": LogNormal(),
    "suzuki, 8 dB": Suzuki(),
}
MOTION: dict[str, Any] = {
    "bounded-waypoint (the paper's)": BoundedWaypoint(),
    "random-waypoint": RandomWaypoint(),
    "random-direction": RandomDirection(),
    "gauss-markov": GaussMarkov(),
    "road": Road(),
    "hotspots": Hotspots(),
}
LOSS: dict[str, Any] = {
    "log-distance": LogDistance(),
    "free-space": FreeSpace(),
    "uma": UMa(),
    "umi": UMi(),
    "rma": RMa(),
}


def densities() -> None:
    """Histograms of |g|² in dB, and the density that the closed form of the probability gives."""
    still = np.zeros((100, 1000, 2))
    with drawing(10.5, 4.6, columns=4, lines=2) as (figure, axes):
        for ax, (name, law) in zip(axes.flat, FADING.items(), strict=True):
            power_db = 20 * np.log10(np.abs(law.coefficients(still, Streams(0))).ravel())
            edges = np.linspace(-30, 12, 85)
            ax.hist(power_db, edges, density=True, color=BLUE, alpha=0.4)
            prob = law.exceed_prob(10 ** (edges / 10))
            ax.plot((edges[1:] + edges[:-1]) / 2, -np.diff(prob) / np.diff(edges), color=ORANGE, linewidth=1.4)
            ax.set_title(name, fontsize=10, loc="left")
            ax.set_yticks([])
            ax.set_xlabel("|g|² (dB)")
        print(f"figure {save(figure, OUT / 'fading.png')}")


def memories() -> None:
    """Correlation over rounds, and what it looks like."""
    still = np.zeros((60, 4000, 2))
    lags = np.arange(21)
    kinds = (
        ("independent", Rayleigh(), lags == 0, BLUE),
        ("autoregressive, 0.9", Rayleigh(memory="autoregressive"), 0.9**lags, ORANGE),
        ("clarke, 0.02 Hz", Rayleigh(memory="clarke"), special.j0(2 * np.pi * 0.02 * 8 * lags), GREEN),
    )
    with drawing(10.5, 3.2, columns=2) as (figure, (left, right)):
        for name, law, expected, colour in kinds:
            g = law.coefficients(still, Streams(1))
            seen = [(g[: 60 - lag] * g[lag:].conj()).real.mean() for lag in lags]
            left.plot(lags, expected, color=colour, linewidth=1.2)
            left.plot(lags, seen, "o", color=colour, markersize=4, label=name)
            right.plot(20 * np.log10(np.abs(g[:, 0])), color=colour, linewidth=1.2)
        left.set_xlabel("lag (rounds)")
        left.set_ylabel("correlation of g; lines: theory")
        left.legend(frameon=False, fontsize=9)
        right.set_xlabel("round")
        right.set_ylabel("|g|² of one device (dB)")
        right.set_ylim(-30, 10)
        print(f"figure {save(figure, OUT / 'memory.png')}")


def path_losses() -> None:
    """Mean loss over distance, probability of line of sight, and a walk through a shadowed cell."""
    distance = np.geomspace(10, 3000, 300)
    colours = dict(zip(LOSS, ("black", "#777777", BLUE, ORANGE, GREEN), strict=True))
    with drawing(11.5, 3.4, columns=3) as (figure, (left, middle, right)):
        for name, law in LOSS.items():
            if hasattr(law, "loss_db"):
                seen, hidden = law.loss_db(distance)
                left.plot(distance, seen, color=colours[name], label=f"{name}, in sight and hidden (dashed)")
                left.plot(distance, hidden, "--", color=colours[name])
                middle.plot(distance, law.los_prob(distance), color=colours[name], label=name)
            else:
                left.plot(distance, -10 * np.log10(law.mean_gain(distance)), color=colours[name], label=name)
        for ax in (left, middle):
            ax.set_xscale("log")
            ax.set_xlabel("distance (m)")
        left.set_ylabel("path loss (dB)")
        left.legend(frameon=False, fontsize=7)
        middle.set_ylabel("probability of line of sight")
        middle.legend(frameon=False, fontsize=8)
        way = np.zeros((400, 1, 2))
        way[:, 0, 0] = np.linspace(60, 460, 400)
        for name, law, colour in (("uma", UMa(), BLUE), ("log-distance, 8 dB", LogDistance(shadowing_db=8.0), "black")):
            right.plot(way[:, 0, 0], -10 * np.log10(law.gains(way, Streams(4))[:, 0]), color=colour, label=name)
        right.set_xlabel("walking away from the server (m)")
        right.set_ylabel("loss of one device (dB)")
        right.legend(frameon=False, fontsize=8)
        print(f"figure {save(figure, OUT / 'pathloss.png')}")


def tracks() -> None:
    """Twelve devices for 200 rounds under each law of motion."""
    start = Cell(devices=12).place(Streams(0))
    with drawing(10.5, 7.0, columns=3, lines=2) as (figure, axes):
        for ax, (name, law) in zip(axes.flat, MOTION.items(), strict=True):
            track = law.positions(start, 1500.0, 200, Streams(1))
            turn = np.linspace(0, 2 * np.pi, 200)
            ax.plot(1500 * np.cos(turn), 1500 * np.sin(turn), color="#999999", linewidth=0.8)
            for i in range(12):
                steps = np.hypot(*np.diff(track[:, i], axis=0).T)
                shown = np.where((np.append(0, steps) > 1000)[:, None], np.nan, track[:, i])  # vehicles begin again
                ax.plot(*shown.T, linewidth=0.9)
                ax.plot(*track[0, i], "o", color="black", markersize=3)
            ax.plot(0, 0, "^", color="black", markersize=7)
            ax.set_aspect("equal")
            ax.set_title(name, fontsize=10, loc="left")
            ax.set_xticks([-1500, 0, 1500])
            ax.set_yticks([-1500, 0, 1500])
        for ax in axes[1]:
            ax.set_xlabel("metres; dot: first place")
        print(f"figure {save(figure, OUT / 'motion.png')}")


def costs() -> None:
    """Milliseconds to draw a round's channel for 30 devices."""
    clarke = {
        "rayleigh, clarke": Rayleigh(memory="clarke"),
        "rayleigh, autoregressive": Rayleigh(memory="autoregressive"),
    }
    cases = [(name, Static(), LogDistance(), law) for name, law in (FADING | clarke).items()]
    cases += [(name, BoundedWaypoint(), law, Rayleigh()) for name, law in LOSS.items()]
    cases += [("log-distance, shadowed", BoundedWaypoint(), LogDistance(shadowing_db=8.0), Rayleigh())]
    cases += [(name, law, LogDistance(), Rayleigh()) for name, law in MOTION.items()]
    for seed, (name, mobility, pathloss, fading) in enumerate(cases):  # another seed each: trajectories are kept
        begin = time.perf_counter()
        trajectory(Cell(), mobility, pathloss, fading, 800, seed)
        print(f"{name:<34} {(time.perf_counter() - begin) / 800 * 1e3:.3f} ms a round")
    where = np.broadcast_to(Cell().place(Streams(0)), (64, 30, 2))
    try:
        for name, source in (("sionna-tdl", TDL()), ("sionna-cdl", CDL()), ("sionna-38901", ScenarioFading())):
            source.coefficients(where[:1], Streams(0))  # loading Sionna is not counted
            begin = time.perf_counter()
            source.coefficients(where, Streams(0))
            print(f"{name:<34} {(time.perf_counter() - begin) / 64 * 1e3:.3f} ms a round")
    except OtaflError as error:
        print(error)


if __name__ == "__main__":
    densities()
    memories()
    path_losses()
    tracks()
    costs()
