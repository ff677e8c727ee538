"""Link budget: converts dBm and dBm/Hz to joule per real dimension, in one place.

Convention for the whole library: each real parameter is sent in one channel use. After channel inversion the
signal is real and the server keeps the in-phase part. `symbol_energy_j` and `noise_var_j` are per real
dimension. The paper writes z ~ N(0, σ_z² I) and gives only N_0. The default takes σ_z² = N_0. The in-phase part of
circular noise of density N_0 would have variance N_0/2 (`noise_convention = "n0/2"`, 3 dB less).

Knows: powers and bandwidth.
Does not know: channels, models.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from otafl.errors import ConfigError
from otafl.units import dbm_to_watt

MOST_DENSITY_DBM_HZ = 0.0  # largest density of noise or interference: a milliwatt per hertz


@dataclass(frozen=True)
class LinkBudget:
    """Transmit power, bandwidth and noise density."""

    tx_power_dbm: float = 0.0
    """Transmit power P_tx; paper: 0 dBm."""
    bandwidth_hz: Annotated[float, Gt(0)] = 1e6
    """Bandwidth B; paper: 1 MHz."""
    noise_dbm_hz: float = -173.0
    """Noise density N_0; −inf switches noise off; paper: −173 dBm/Hz."""
    noise_convention: Literal["n0", "n0/2"] = "n0"
    """Noise variance per real dimension: N_0 (default) or N_0/2."""
    antennas: Annotated[int, Ge(1), Le(128)] = 1
    """Server antennas, with independent fading and maximum-ratio combining for the sum of all devices; paper: 1."""

    def __post_init__(self) -> None:
        if not 0 < self.symbol_energy_j < math.inf:
            raise ConfigError(
                f"radio.tx_power_dbm = {self.tx_power_dbm}: gives an energy of {self.symbol_energy_j} J per symbol; "
                "give a power in dBm"
            )
        if not self.noise_dbm_hz <= MOST_DENSITY_DBM_HZ:
            raise ConfigError(
                f"radio.noise_dbm_hz = {self.noise_dbm_hz}: give a density in dBm/Hz, or -inf for no noise"
            )

    @property
    def symbol_energy_j(self) -> float:
        """Symbol energy E_s = P_tx/B, joule per real dimension."""
        return dbm_to_watt(self.tx_power_dbm) / self.bandwidth_hz

    @property
    def noise_var_j(self) -> float:
        """Noise variance σ_z², joule per real dimension."""
        density_j = dbm_to_watt(self.noise_dbm_hz)
        return density_j if self.noise_convention == "n0" else density_j / 2


def inversion_threshold(gamma: float, num_params: int, symbol_energy_j: float) -> float:
    """Smallest |h| at which γ/h times a vector of norm 1 keeps the energy limit: γ/√(d E_s)."""
    return gamma / math.sqrt(num_params * symbol_energy_j)
