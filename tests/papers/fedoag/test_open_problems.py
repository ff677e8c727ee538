"""The open problems' runs, figures and tables: what they need, and that what they say follows from the runs."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from otafl.config.schema import load_config
from otafl.papers.fedoag import open_problems, open_results
from otafl.papers.fedoag.experiments import Need
from otafl.papers.fedoag.open_figures import Chosen, adaptive_table
from otafl.report.statistics import last_accuracy
from otafl.runs.result import Result
from tests.conftest import make_config

SEEDS = [0, 1, 2]


def result(config: Any, accuracy: Any, diverged: dict[int, int] | None = None, **columns: Any) -> Result:
    """A run that was not made: accuracies [S, R] of rounds 0, 10, …, NaN after a seed's end."""
    values = np.asarray(accuracy, dtype=float) / 100
    rounds = 10 * np.arange(values.shape[1])
    metrics = {"test_accuracy": values, "validation_accuracy": values, "test_loss": 30 - 20 * values}
    metrics |= {name: np.broadcast_to(value, values.shape) for name, value in columns.items()}
    config = config.replace({"experiment.seeds": SEEDS, "experiment.rounds": int(rounds[-1])})
    return Result(config, rounds, metrics, torch.zeros(3, 1), diverged or {}, {"status": "complete", "num_params": 1})


def curve(last: float, seeds: int = 3) -> np.ndarray:
    """From 10 % up to a last accuracy that differs between seeds by a point."""
    rise = np.linspace(10, last, 11)
    return np.stack([rise + np.r_[0, np.ones(10)] * s for s in range(seeds)])


def test_worlds_cover_what_is_claimed() -> None:
    """Three regimes, three cells, three powers, 100 devices, other fading, another model and data set."""
    needs = open_problems.needs("adaptive", quick=True)
    assert {need.regime for need in needs} == set(open_problems.QUICK_WORLDS)
    own = [need for need in needs if need.config.algorithm.spec.gamma == "adaptive"]
    assert len(own) == 2 * len(open_problems.QUICK_WORLDS)
    for world in open_problems.WORLDS.values():
        if world.get("data.name") != "fashion-mnist":  # its size is known only where its files are
            load_config("stationary", world)
    worlds = open_problems.WORLDS
    assert {"stationary", "nonstationary", "mixed"} <= set(worlds)
    assert {keys.get("cell.radius_m", 1500.0) for keys in worlds.values()} == {500.0, 1500.0, 3000.0}
    assert {keys.get("radio.tx_power_dbm", 0.0) for keys in worlds.values()} == {-10.0, 0.0, 10.0}
    assert 100 in {keys.get("cell.devices") for keys in worlds.values()}
    assert any("fading.name" in keys for keys in worlds.values())
    assert any({"data.name", "model.hidden"} <= set(keys) for keys in worlds.values())


def test_edge_amplitude_is_where_an_edge_device_is_heard_a_third_of_the_time() -> None:
    """P(|h|² ≥ γ²/(d E_s)) = exp(−γ²/(d E_s Λ)) = 1/e with Λ = 10^{−5} r^{−3.5}."""
    config = make_config("fedoag", {"cell.radius_m": 700.0})
    gain = 1e-5 * 700.0**-3.5
    size = 6 * 5 + 5 + 5 * 3 + 3
    exponent = open_problems.edge_amplitude(config) ** 2 / (size * config.radio.symbol_energy_j * gain)
    assert exponent == pytest.approx(1, rel=1e-9)


def test_the_best_fixed_gamma_is_chosen_on_validation_and_failed_seeds_count() -> None:
    config = make_config("fedoag")
    broken = curve(99)
    broken[1, 5:] = np.nan
    fixed = {1e-10: result(config, broken, {1: 45}), 2e-10: result(config, curve(80)), 4e-10: result(config, curve(90))}
    adaptive = result(config, curve(89), gamma=3e-10)
    row = Chosen("here", "FedOAG", 2e-10, fixed, adaptive)
    assert row.best == 4e-10
    assert row.gap.mean == pytest.approx(-0.8, abs=0.05)  # 0.8 of the last rise from 10 to 89 or 90, rounds r > 50
    assert row.found == pytest.approx(3e-10)
    table = adaptive_table([row], "note")
    assert "4e-10 (edge of the grid)" in table
    lost = Chosen("there", "FedOAG", 2e-10, {1e-10: fixed[1e-10]}, result(config, broken, {1: 45}, gamma=1e-10))
    assert "1 of 3 seeds failed and count with 0" in adaptive_table([lost], "note")
    beside = Chosen("there", "FedOAG", 2e-10, {2e-10: fixed[2e-10]}, lost.adaptive)
    kept = np.delete(last_accuracy(lost.adaptive), 1)
    assert last_accuracy(lost.adaptive)[1] == 0
    assert beside.gap.mean == pytest.approx(kept.sum() / 3 - last_accuracy(fixed[2e-10]).mean())


def drawn(figure: str, needs: list[Need], made: dict[int, Result], folder: Path) -> list[Path]:
    files: list[Path] = open_results.DRAW[figure](needs, lambda need: made[id(need)], folder, True)
    for path in files:
        assert path.stat().st_size > 200
    return files


def test_figures_of_gamma_and_of_anchors(tmp_path: Path) -> None:
    needs = open_problems.needs("adaptive", quick=True)
    made = {id(n): result(n.config, curve(80 + i % 7), gamma=2e-10) for i, n in enumerate(needs)}
    dead = np.full((3, 11), np.nan)
    dead[:, 0] = 10
    made[id(needs[1])] = result(needs[1].config, dead, {0: 3, 1: 4, 2: 5})
    _, table = drawn("adaptive", needs, made, tmp_path)
    assert len(table.read_text(encoding="utf-8").splitlines()) == 4 + 2 * len(open_problems.QUICK_WORLDS)
    needs = open_problems.needs("anchors", quick=True)
    columns = {"anchors": 5.0, "anchors_paper": 9.0, "norm_bound": 40.0}
    made = {}
    for need in needs:
        lost = (dead, {0: 3, 1: 4, 2: 5}) if "bfloat16" in need.label else (curve(90), {})
        made[id(need)] = result(need.config, *lost, **columns)
    _, table = drawn("anchors", needs, made, tmp_path)
    text = table.read_text(encoding="utf-8")
    assert "| FedOAG | float16 | 5.0 | 5 | 9.0 | 2.5 | 40 |" in text
    assert "| FedOAG | kept (at most m) | 5.0 | 5 | 9.0 | 5.0 | 40 |" in text
    assert "diverged, first after round 3" in text


def test_speed_up_counts_rounds_and_gradients(tmp_path: Path) -> None:
    """Twice the devices, half the rounds: linear, and the same number of gradients."""
    needs = open_problems.needs("speedup", quick=True)
    made = {}
    for need in needs:
        size = int(need.label.rsplit(" ", 1)[1])
        reach = 40 if size <= 5 else 20  # the round in which 85 % is reached
        accuracy = np.where(10 * np.arange(11) >= reach, 90.0, 50.0)
        made[id(need)] = result(need.config, np.stack([accuracy] * 3))
    path, _ = drawn("speedup", needs, made, tmp_path)
    with open(path.with_suffix(".csv"), encoding="utf-8") as file:
        rows = {(row["over"], row["method"], row["size"]): row for row in csv.DictReader(file)}
    assert rows["devices", "fedoag", "5"]["gradient_steps"] == str(40 * 5 * 10)
    assert rows["devices", "fedoag", "10"]["gradient_steps"] == str(20 * 10 * 10)
    assert rows["steps", "fedavg", "20"]["rounds"] == "20"
    assert rows["steps", "fedavg", "20"]["seeds_that_reach_it"] == "3/3"


@pytest.mark.slow
def test_gradients_without_a_bound(tmp_path: Path) -> None:
    """Starts 10,000 times as far end at the same loss: noise scales with the innovations, not with a bound on them."""
    from otafl.simulation.run import run

    needs = [
        n for n in open_problems.needs("tails", quick=True) if n.regime == "far starts" and "AVG" not in n.label.upper()
    ]
    made = {id(need): run(need.config, device="cpu") for need in needs}
    files = drawn("tails", needs, made, tmp_path)
    with open(files[0].with_suffix(".csv"), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for method in ("FedOAG", "FedOAG-plus"):
        ends = {
            row["run"]: float(row["excess_loss"])
            for row in rows
            if row["run"].startswith(f"{method}, ") and row["round"] == "400"
        }
        assert max(ends.values()) == pytest.approx(min(ends.values()), rel=1e-2)
        start = next(
            float(row["excess_loss"]) for row in rows if row["run"] == f"{method}, start 10000" and row["round"] == "0"
        )
        assert start > 1e9 * max(ends.values())
