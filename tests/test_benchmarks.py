"""The benchmark's contenders do the same work: a plain loop and ours end with the same model."""

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_contenders_end_with_the_plain_loops_model(mnist: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    import compare

    own = Path(sys.executable)
    for batches in ("per_step", "per_round"):
        more = {"ours_fedoag": own, "ours_flatten": own} if batches == "per_step" else {}
        scripts = {"plain": own, "ours": own} | more
        rows = {row["contender"]: row for row in compare.compare(batches, scripts, repeats=1, rounds=2)}
        ours, plain = rows["otafl, shared start"], rows["plain PyTorch loop"]
        assert float(ours["distance_to_plain"]) < 1e-4
        assert ours["accuracy_percent"] == pytest.approx(plain["accuracy_percent"], abs=0.1)
        assert ours["seconds_per_round"] > 0
        assert 0 < ours["peak_memory_gb"] < 5
