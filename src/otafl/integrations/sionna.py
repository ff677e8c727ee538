"""Fading from Sionna's tapped and clustered delay lines (3GPP TR 38.901, section 7.7), as narrowband coefficients.

Sionna is loaded where it is needed only. It draws from a generator of its own, seeded by the world's stream, and
PyTorch's default generator, which loading Sionna reseeds, is left as it was.

Knows: Sionna, random streams.
Does not know: path loss, thresholds, who transmits.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Gt
from numpy.typing import NDArray

from otafl.errors import OtaflError
from otafl.random import Streams
from otafl.world.fading import Rayleigh

Array = NDArray[np.float64]
REFERENCE_DRAWS = 20_000


@contextlib.contextmanager
def sionna(key: int) -> Iterator[Any]:
    """Sionna's channel models with their generator at a key; afterwards all generators are as before."""
    with torch.random.fork_rng(devices=[]):
        try:
            from sionna.phy import config
            from sionna.phy.channel import tr38901
        except ImportError as error:
            raise OtaflError("fading from Sionna needs it: pip install 'otafl[sionna]'") from error
        generator = config.torch_rng("cpu")
        before = generator.get_state()
        generator.manual_seed(key)
        try:
            yield tr38901
        finally:
            generator.set_state(before)


@dataclass(frozen=True, kw_only=True)
class _DelayLine:
    """What both kinds share."""

    model: Literal["A", "B", "C", "D", "E"] = "A"
    """Power delay profile; D and E have a line of sight."""
    delay_spread_s: Annotated[float, Gt(0)] = 100e-9
    """Root mean square delay spread."""
    speed_mps: Annotated[float, Gt(0)] = 1.0
    """Speed that gives the Doppler, the same for all devices."""
    carrier_hz: Annotated[float, Gt(0)] = 2.4e9
    """f_c; paper: 2.4 GHz."""
    round_s: Annotated[float, Gt(0)] = 8.0
    """Duration of a round; paper: 8 s."""

    def coefficients(self, positions_m: Array, streams: Streams) -> NDArray[np.complex128]:
        """The sum of all paths in every round and device, [T, M]."""
        num_rounds, num_devices = positions_m.shape[:2]
        with sionna(streams.key("fading, sionna")) as tr38901:
            paths, _ = self._channel(tr38901)(num_devices, num_rounds, 1 / self.round_s)
        narrow = paths.sum(-2)[:, 0, 0, 0, 0, :].T.cpu().numpy().astype(np.complex128)
        return np.asarray(narrow)

    def exceed_prob(self, power: Array) -> Array:
        """Without line of sight that of Rayleigh fading; with one, the share of 20,000 draws."""
        if self.model in "ABC":
            return Rayleigh().exceed_prob(power)
        levels = _levels(self)
        return np.asarray(1 - np.searchsorted(levels, power, side="left") / len(levels))

    def _channel(self, tr38901: Any) -> Any:
        raise NotImplementedError


@lru_cache(maxsize=8)
def _levels(line: _DelayLine) -> Array:
    """Powers of many draws, sorted."""
    return np.sort(np.abs(line.coefficients(np.zeros((1, REFERENCE_DRAWS, 2)), Streams(0))[0]) ** 2)


@dataclass(frozen=True)
class TDL(_DelayLine):
    """Tapped delay line of TR 38.901, from Sionna."""

    def _channel(self, tr38901: Any) -> Any:
        speeds = {"min_speed": self.speed_mps, "max_speed": self.speed_mps}
        return tr38901.TDL(self.model, self.delay_spread_s, self.carrier_hz, **speeds)


@dataclass(frozen=True)
class CDL(_DelayLine):
    """Clustered delay line of TR 38.901, from Sionna, with one omnidirectional antenna at either end."""

    def _channel(self, tr38901: Any) -> Any:
        ends = [
            tr38901.PanelArray(
                num_rows_per_panel=1,
                num_cols_per_panel=1,
                polarization="single",
                polarization_type="V",
                antenna_pattern="omni",
                carrier_frequency=self.carrier_hz,
            )
            for _ in range(2)
        ]
        speeds = {"min_speed": self.speed_mps, "max_speed": self.speed_mps}
        return tr38901.CDL(self.model, self.delay_spread_s, self.carrier_hz, *ends, "uplink", **speeds)
