"""What a server could learn of the channels from what devices report: a table for FedOAG and its successors.

    python recipes/leak.py [--rounds 100] [--seeds 20]

Rank correlations (Spearman's, one for each seed, mean ± standard error) between what the server is told and what it is
not meant to know: a report and the channel |h_i| of that round, over devices and rounds; a device's mean report, and
how often it reports, and its mean gain Λ_i, over devices. Preset `quick` with the digits that come with the package.
"""

import argparse
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

import otafl
from otafl.config.schema import scaled_gamma
from otafl.core.round import Round
from otafl.radio.csi import Reports
from otafl.report.markdown import markdown
from otafl.simulation.build import Simulation

METHODS: dict[str, dict[str, Any]] = {
    "fedoag": {"algorithm.gamma": 5e-10, "training.lr": 0.1},
    "fedoag-plus": {"algorithm.gamma": 2e-10, "training.lr": 0.1},
    "fedoag-zero": {},
}
Array = NDArray[np.float64]


class Told(Round):
    """A round that remembers what was reported."""

    told: list[Reports]

    def report(self, values: torch.Tensor, who: torch.Tensor) -> Reports:
        """As any round does it."""
        made = super().report(values, who)
        self.told.append(made)
        return made


def reports_of(config: otafl.Config) -> tuple[Array, Array, Array]:
    """Reports, NaN where there is none, channels |h| and mean gains of a run's only seed, each [T, M]."""
    sim = Simulation(config, torch.device("cpu"))
    state, said = sim.init(), []
    for t in range(config.experiment.rounds):
        round_: Any = sim.round_at(t)
        round_.__class__, round_.told = Told, []
        state = sim.take(state, round_).state
        (told,) = round_.told
        said.append(torch.where(told.who, told.values, torch.nan)[0].numpy())
    world = sim.worlds[0]
    return np.stack(said), np.abs(world.coeff), np.asarray(world.mean_gain)


def rank_correlation(one: Array, other: Array) -> float:
    """Spearman's; NaN where one side is constant."""
    if one.std() == 0 or other.std() == 0:
        return float("nan")
    return float(spearmanr(one, other).statistic)


def shown(values: list[float]) -> str:
    """Mean ± standard error over seeds."""
    if np.isnan(values).any():
        return "–"
    return f"{np.mean(values):+.2f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = ("method", "report and \\|h_i\\|", "mean report and Λ_i", "how often it reports and Λ_i")
    rows = []
    for name, keys in METHODS.items():
        found: list[tuple[float, float, float]] = []
        for seed in range(options.seeds):
            base = {"algorithm.name": name, "data.name": "digits", "experiment.rounds": options.rounds, **keys}
            config = otafl.load_config("quick", {**base, "experiment.seeds": [seed]})
            if "algorithm.gamma" in keys:
                config = config.replace({"algorithm.gamma": scaled_gamma(keys["algorithm.gamma"], config)})
            said, strength, gain = reports_of(config)
            there = ~np.isnan(said)
            heard = there.any(0)
            often = there.mean(0)
            mean = np.nanmean(said[:, heard], axis=0)
            here = np.broadcast_to(gain, said.shape)[0]
            found.append(
                (
                    rank_correlation(said[there], strength[there]),
                    rank_correlation(mean, here[heard]),
                    rank_correlation(often, here),
                )
            )
        rows.append((name, *(shown(list(column)) for column in zip(*found, strict=True))))
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
