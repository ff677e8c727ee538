"""`otafl check fading.NAME`: every law of ours passes, and each way to be wrong is found."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import otafl
from otafl import registry
from otafl.errors import PluginError
from otafl.laws import check_fading

LAWS = sorted(name for name in registry.BUILTIN["fading"] if name != "measured" and "sionna" not in name)


@pytest.mark.parametrize("name", LAWS)
def test_our_laws_pass(name: str) -> None:
    for finding in check_fading(name):
        assert finding.verdict == "ok", finding


@pytest.mark.parametrize("memory", ["autoregressive", "clarke"])
def test_laws_with_memory_pass(memory: str) -> None:
    for finding in check_fading("rayleigh", {"fading.memory": memory}):
        assert finding.verdict == "ok", finding


@dataclass(frozen=True)
class Law:
    """Rayleigh fading, with one thing wrong."""

    scale: ClassVar[float] = 1.0
    seed: ClassVar[Any] = 0
    whole: ClassVar[bool] = True
    tail: ClassVar[float] = 1.0
    line: ClassVar[float] = 0.0
    still: ClassVar[bool] = False
    zero_mean: ClassVar[bool] = True

    def coefficients(self, positions_m: np.ndarray, streams: otafl.Streams) -> np.ndarray:
        """Fading [T, M]."""
        shape = (1, positions_m.shape[1]) if self.still else positions_m.shape[:2]
        draw = (
            streams.at("fading", 0 if self.whole else positions_m.shape[0])
            if self.seed == 0
            else np.random.default_rng()
        )
        parts = draw.standard_normal((*shape, 2))
        waves = np.sqrt(0.5) * (parts[..., 0] + 1j * parts[..., 1])
        found = self.scale * (self.line + np.sqrt(1 - self.line**2) * waves)  # 0.8: Rician, K = 1.8
        return np.broadcast_to(found, positions_m.shape[:2])

    def exceed_prob(self, power: np.ndarray) -> np.ndarray:
        """P(|g|² ≥ power)."""
        return self.tail * np.exp(-power)


@pytest.mark.parametrize(
    ("wrong", "failing"),
    [
        ({}, set()),
        ({"scale": 0.8}, {"power", "tail"}),
        ({"tail": 1.2}, {"tail"}),
        ({"tail": 0.8}, {"power", "tail"}),
        ({"scale": 1.25**0.5, "still": True}, {"power", "tail"}),
        ({"seed": None}, {"again", "beginning"}),
        ({"whole": False}, {"beginning"}),
        ({"line": 0.8}, {"mean", "tail"}),
    ],
)
@pytest.mark.usefixtures("no_plugins")
def test_what_is_wrong_is_found(wrong: dict[str, Any], failing: set[str]) -> None:
    made = dataclass(frozen=True)(type("Wrong", (Law,), {**wrong, "__module__": __name__}))
    otafl.register_fading("wrong")(made)
    assert {finding.name for finding in check_fading("wrong") if finding.verdict == "FAIL"} == failing


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"exceed_prob": None}, "has no function exceed_prob"),
        ({"coefficients": lambda self, positions_m, streams: np.ones(positions_m.shape[:2])}, "fading is complex"),
    ],
)
@pytest.mark.usefixtures("no_plugins")
def test_a_law_that_cannot_be_used_is_refused_by_every_run(body: dict[str, Any], line: str) -> None:
    otafl.register_fading("wrong")(dataclass(frozen=True)(type("Wrong", (Law,), {**body, "__module__": __name__})))
    with pytest.raises(PluginError, match=line):
        otafl.run(otafl.load_config("quick", {"data.name": "digits", "fading.name": "wrong"}))


@pytest.mark.parametrize(("name", "keys"), [("suzuki", {"fading.std_db": 16.0}), ("weibull", {"fading.shape": 0.2})])
def test_heavy_tails_are_no_mistake(name: str, keys: dict[str, Any]) -> None:
    assert "FAIL" not in [finding.verdict for finding in check_fading(name, keys)]


def test_few_devices_are_refused() -> None:
    with pytest.raises(otafl.OtaflError, match="checked on 100 devices or more"):
        list(check_fading("rayleigh", {"cell.devices": 20}))
