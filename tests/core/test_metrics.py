"""Columns of metrics.csv against their definitions, computed from rounds done by hand."""

import math

import numpy as np
import pytest
import torch

import otafl
from tests.algorithms.test_fedoag import noise
from tests.conftest import make_config, simulate

EVERY = 3  # rounds of a row


@pytest.mark.parametrize("algorithm", ["fedoag", "ota-fedavg", "sca", "fedoag-zero"])
def test_radio_columns_are_their_definitions(algorithm: str) -> None:
    """snr_db, noise_to_update and staleness_max of every row."""
    keys = {"experiment.rounds": 12, "experiment.eval_every": EVERY, "training.engine": "reference"}
    config = make_config(algorithm, {**keys, "cell.devices": 3})
    sim = simulate(config, noise=noise)
    found = otafl.run(config, noise=noise).metrics
    d, sigma, seeds = sim.problem.num_params, math.sqrt(sim.noise_var_j), len(sim.seeds)
    assert np.isfinite(found["snr_db"][:, 1:]).any()
    state, last = sim.init(), -np.ones((seeds, 3))
    snr: list[list[float]] = [[] for _ in range(seeds)]
    ratio: list[list[float]] = [[] for _ in range(seeds)]
    for t in range(12):
        after, info, *_ = sim.step(state, t)
        unit = noise(sim.seeds, "noise", t, d)
        quiet = simulate(config, noise=lambda seeds, name, t, size: torch.zeros(len(seeds), size, dtype=torch.float64))
        silent, *_ = quiet.step(state, t)  # the same round without its noise: what differs is the noise
        for s in range(seeds):
            last[s, info.active[s].numpy()] = t
            added = float((after.params[s] - silent.params[s]).norm())
            if added > 0:
                scale = sim.config.training.lr_at(t) * float(info.noise_std[s]) / sigma  # of what was heard
                heard = received(sim, state, t)[s]
                assert added == pytest.approx(scale * sigma * float(unit[s].norm()), rel=1e-9)
                snr[s].append(float(heard.square().sum()) / (d * sigma**2))
                ratio[s].append(sigma * float(unit[s].norm()) / float(heard.norm()))
        state = after
        if (t + 1) % EVERY == 0:
            row = (t + 1) // EVERY
            for s in range(seeds):
                assert found["staleness_max"][s, row] == t + 1 - last[s].min()
                assert found["staleness_mean"][s, row] == pytest.approx(t + 1 - last[s].mean())
                for column, values in (("snr_db", snr[s]), ("noise_to_update", ratio[s])):
                    mean = np.mean(values) if values else math.nan
                    expected = 10 * math.log10(mean) if column == "snr_db" and values else mean
                    assert found[column][s, row] == pytest.approx(expected, rel=1e-6, nan_ok=True), column
                snr[s].clear()
                ratio[s].clear()


def received(sim: otafl.Simulation, state: object, t: int) -> torch.Tensor:
    """Σ h_i x̂_i of round t, [S, P], without noise."""
    quiet = simulate(sim.config, noise=lambda seeds, name, t, size: torch.zeros(len(seeds), size, dtype=torch.float64))
    round_ = quiet.round_at(t)
    heard: list[torch.Tensor] = []
    uplink = round_.uplink

    def listen(*args: object, **keys: object) -> torch.Tensor:
        heard.append(uplink(*args, **keys))  # type: ignore[arg-type]
        return heard[-1]

    round_.uplink = listen  # type: ignore[method-assign]
    quiet.algorithm.step(state, round_)
    (only,) = heard
    return only
