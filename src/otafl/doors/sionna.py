"""Fading from Sionna, as narrowband coefficients: TR 38.901's scenarios, and its tapped and clustered delay lines.

Sionna is loaded where it is needed only, and computes on the CPU, so that worlds are the same with and without a GPU.
It draws from a generator of its own, seeded by the world's stream, and PyTorch's default generator of the CPU, which
loading Sionna reseeds, is left as it was. Its delay lines compute in float32: the first of more rounds agree to 1e-6.

Knows: Sionna, random streams.
Does not know: path loss, thresholds, who transmits.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Gt
from numpy.typing import NDArray

from otafl.errors import ConfigError, OtaflError
from otafl.random import Streams
from otafl.world.fading import Rayleigh
from otafl.world.placement import Cell
from otafl.world.process import check_shared
from otafl.world.tr38901 import RMa, Scenario, UMa, UMi

Array = NDArray[np.float64]
REFERENCE_DRAWS = 20_000
DROPS = 32  # rounds that Sionna draws at once
SCENARIOS: dict[str, type[Scenario]] = {"uma": UMa, "umi": UMi, "rma": RMa}


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
class _DelayLine(ABC):
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

    def check_world(self, sections: Mapping[str, Any]) -> None:
        """One round's duration and one carrier with the motion and the path loss."""
        check_shared(self, sections)

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

    @abstractmethod
    def _channel(self, tr38901: Any) -> Any:
        """Sionna's own model."""


@lru_cache(maxsize=8)
def _levels(line: _DelayLine) -> Array:
    """Powers of many draws, sorted."""
    return np.sort(np.abs(line.coefficients(np.zeros((1, REFERENCE_DRAWS, 2)), Streams(0))[0]) ** 2)


def _antenna(tr38901: Any, carrier_hz: float) -> Any:
    """One omnidirectional antenna."""
    one = {"num_rows_per_panel": 1, "num_cols_per_panel": 1}
    kind = {"polarization": "single", "polarization_type": "V", "antenna_pattern": "omni"}
    return tr38901.PanelArray(**one, **kind, carrier_frequency=carrier_hz, device="cpu")


@dataclass(frozen=True)
class TDL(_DelayLine):
    """Tapped delay line of TR 38.901, from Sionna."""

    def _channel(self, tr38901: Any) -> Any:
        speeds = {"min_speed": self.speed_mps, "max_speed": self.speed_mps}
        return tr38901.TDL(self.model, self.delay_spread_s, self.carrier_hz, device="cpu", **speeds)


@dataclass(frozen=True)
class CDL(_DelayLine):
    """Clustered delay line of TR 38.901, from Sionna, with one omnidirectional antenna at either end."""

    def _channel(self, tr38901: Any) -> Any:
        ends = [_antenna(tr38901, self.carrier_hz), _antenna(tr38901, self.carrier_hz)]
        speeds = {"min_speed": self.speed_mps, "max_speed": self.speed_mps}
        return tr38901.CDL(self.model, self.delay_spread_s, self.carrier_hz, *ends, "uplink", device="cpu", **speeds)


@dataclass(frozen=True)
class ScenarioFading:
    """Small-scale fading of a TR 38.901 scenario, from Sionna; slow. Choose the same scenario as path loss.

    Line of sight is that of the path loss (of which only `shadowing` may differ from its defaults), round by round, so
    that both tell one story; path loss and shadowing are the path loss's. Successive rounds are drawn afresh.
    """

    pooled: ClassVar[bool] = True

    scenario: Literal["uma", "umi", "rma"] = "uma"
    """As `pathloss.name`."""

    def check_world(self, sections: Mapping[str, Any]) -> None:
        """Line of sight is that of the path loss, which must be the same scenario with its defaults."""
        loss = sections["pathloss"]
        if self.scenario != loss.name:
            raise ConfigError(
                f"fading.scenario = {self.scenario!r}, pathloss.name = {loss.name!r}: line of sight is one for both"
            )
        if replace(loss.spec, shadowing=True) != type(loss.spec)():
            raise ConfigError('fading.name = "sionna-38901": leave [pathloss] at its defaults, but for shadowing')

    def coefficients(self, positions_m: Array, streams: Streams) -> NDArray[np.complex128]:
        """The sum of all paths in every round and device, [T, M]."""
        law = SCENARIOS[self.scenario]()
        seen = law.in_sight(positions_m, streams)
        parts = []
        for start in range(0, len(positions_m), DROPS):
            rows = np.minimum(np.arange(start, start + DROPS), len(positions_m) - 1)  # always as many draws
            with sionna(streams.key("fading, sionna", start)) as tr38901:
                parts.append(self._drops(tr38901, law, positions_m[rows], seen[rows]))
        return np.concatenate(parts)[: len(positions_m)]

    def _drops(self, tr38901: Any, law: Scenario, positions_m: Array, seen: NDArray[np.bool_]) -> Any:
        ends = {f"{end}_array": _antenna(tr38901, law.carrier_hz) for end in ("ut", "bs")}
        indoor = {} if self.scenario == "rma" else {"o2i_model": "low"}
        channel = getattr(tr38901, type(law).__name__)(
            carrier_frequency=law.carrier_hz,
            direction="uplink",
            enable_pathloss=False,
            enable_shadow_fading=False,
            device="cpu",
            **ends,
            **indoor,
        )
        drops, devices = positions_m.shape[:2]
        places, server = torch.zeros(drops, devices, 3), torch.zeros(drops, 1, 3)
        places[..., :2] = torch.from_numpy(positions_m)
        places[..., 2], server[..., 2] = law.device_height_m, law.server_height_m
        still = torch.zeros(drops, devices, 3)
        channel.set_topology(
            ut_loc=places,
            bs_loc=server,
            ut_orientations=still,
            bs_orientations=torch.zeros(drops, 1, 3),
            ut_velocities=still,
            in_state=torch.zeros(drops, devices, dtype=torch.bool),
            los=torch.from_numpy(seen)[:, None, :],
        )
        paths, _ = channel(1, 1.0)
        return paths.sum(-2)[:, 0, 0, :, 0, 0].cpu().numpy().astype(np.complex128)

    def exceed_prob(self, power: Array) -> Array:
        """The share of draws at uniform places of a cell of 1500 m, whether in sight or not."""
        levels = _scenario_levels(self)
        return np.asarray(1 - np.searchsorted(levels, power, side="left") / len(levels))


@lru_cache(maxsize=4)
def _scenario_levels(fading: ScenarioFading) -> Array:
    """Powers of many draws, sorted."""
    where = np.stack([Cell(devices=100, placement="uniform").place(Streams(seed)) for seed in range(DROPS)])
    return np.sort(np.abs(fading.coefficients(where, Streams(0))).ravel() ** 2)
