"""One tiny run per method, its numbers stored: a change is result-changing or it is not.

After a change that is meant to move results, run `python -m tests.algorithms.test_golden` and say why in the commit.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import otafl
from otafl import registry
from tests.conftest import make_config

STORE = Path(__file__).with_name("golden.json")
COLUMNS = ("test_accuracy", "test_loss", "num_active", "norm_bound", "energy_j", "snr_db")


RUNS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in sorted(registry.BUILTIN["algorithms"])} | {
    f"{name}, {value}": (name, {key: value})
    for name in ("fedoag", "fedoag-plus")
    for key, value in (
        ("algorithm.gamma", "adaptive"),
        ("algorithm.anchors", "float16"),
    )
}
RUNS["ca-dsgd"] = ("ca-dsgd", {"radio.noise_dbm_hz": -223.0})  # with more noise it hears nothing in a world this small


def measure(run: str) -> dict[str, list[list[float]]]:
    algorithm, keys = RUNS[run]
    result = otafl.run(make_config(algorithm, keys), device="cpu")
    return {name: result.metrics[name].tolist() for name in COLUMNS}


@pytest.mark.parametrize("run", RUNS)
def test_golden_runs_learn(run: str) -> None:
    """A model that never moves would have any golden numbers."""
    for losses in json.loads(STORE.read_text(encoding="utf-8"))[run]["test_loss"]:
        assert len(set(losses)) > 2


@pytest.mark.parametrize("run", RUNS)
def test_golden_run(run: str) -> None:
    stored = json.loads(STORE.read_text(encoding="utf-8"))[run]
    measured = measure(run)
    for name in COLUMNS:
        for row, expected in zip(measured[name], stored[name], strict=True):
            assert row == pytest.approx(expected, rel=1e-8, abs=1e-12, nan_ok=True), name


if __name__ == "__main__":
    goldens = {run: measure(run) for run in RUNS}
    STORE.write_text(json.dumps(goldens, indent=1) + "\n", encoding="utf-8")
