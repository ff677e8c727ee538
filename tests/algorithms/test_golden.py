"""One tiny run per method, its numbers stored: a change is result-changing or it is not.

After a change that is meant to move results, run `python -m tests.algorithms.test_golden` and say why in the commit.
"""

import json
from pathlib import Path

import pytest

import otafl
from otafl import registry
from tests.conftest import make_config

STORE = Path(__file__).with_name("golden.json")
COLUMNS = ("test_accuracy", "test_loss", "num_active", "norm_bound", "energy_j", "snr_db")


def measure(algorithm: str) -> dict[str, list[list[float]]]:
    result = otafl.run(make_config(algorithm), device="cpu")
    return {name: result.metrics[name].tolist() for name in COLUMNS}


@pytest.mark.parametrize("algorithm", sorted(registry.BUILTIN["algorithms"]))
def test_golden_run(algorithm: str) -> None:
    stored = json.loads(STORE.read_text(encoding="utf-8"))[algorithm]
    measured = measure(algorithm)
    for name in COLUMNS:
        for row, expected in zip(measured[name], stored[name], strict=True):
            assert row == pytest.approx(expected, rel=1e-8, abs=1e-12, nan_ok=True), name


if __name__ == "__main__":
    goldens = {name: measure(name) for name in sorted(registry.BUILTIN["algorithms"])}
    STORE.write_text(json.dumps(goldens, indent=1) + "\n", encoding="utf-8")
