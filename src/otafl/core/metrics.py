"""The measured quantities, each defined once.

A row describes x^r after r rounds. num_active, norm_bound, energy_ratio_max, snr_db and noise_to_update are taken over
the rounds since the previous row, so row 0 has none. A blank means that a quantity does not exist there.

    test_accuracy, test_loss          share of right answers and mean loss of x^r on the test set
    validation_accuracy, …_loss       the same on the validation set (record "validation")
    mean_accuracy, mean_loss          the same on the test set for x̄^r, the mean of the devices' models ("mean")
    num_active                        devices that took part, mean over the rounds
    norm_bound                        B_t: the largest norm ‖Δ_i‖ of the active devices, or the norm at which they are
                                      clipped; mean over the rounds with an active device
    staleness_mean, staleness_max     mean and maximum of r − τ_i over the devices; τ_i is the last round in which
                                      device i took part, −1 before the first
    anchors                           models the server holds for its devices after r rounds
    energy_ratio_max                  largest energy of a device's upload over its limit Q E_s, d E_s for updates
    snr_db                            received signal-to-noise ratio ‖Σ h_i x̂_i‖²/(Q σ_z²), mean over the rounds
                                      with a transmission, in dB
    noise_to_update                   ‖z‖/‖Σ h_i x̂_i‖, the noise in the recovered mean update over that update,
                                      mean over the rounds with a transmission
    consensus                         (1/m) Σ_i ‖x_i − x̄‖² ("consensus")
    grad_norm_sq, mean_grad_norm_sq   ‖∇F‖² of the full training objective at x^r and, with "mean", at x̄^r
                                      ("gradient")
    energy_j                          energy spent by all devices so far
    channel_uses                      analog channel uses so far: Q per transmission, d for updates
    uplink_s                          seconds of airtime so far: 1/B for each channel use and each bit of a reported
                                      scalar (32 bits), and the slots of digital uplinks
    scalar_reports                    scalars reported over the error-free digital link so far

Knows: what rounds did and spent, devices' models.
Does not know: methods, files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from otafl.core.contract import Step
from otafl.radio.digital import REPORT_BITS
from otafl.units import linear_to_db

Rows = dict[str, list[float]]
"""Column name to one value per seed; NaN means blank."""


COLUMNS = (
    "test_accuracy",
    "test_loss",
    "validation_accuracy",
    "validation_loss",
    "mean_accuracy",
    "mean_loss",
    "num_active",
    "norm_bound",
    "staleness_mean",
    "staleness_max",
    "anchors",
    "energy_ratio_max",
    "snr_db",
    "noise_to_update",
    "consensus",
    "grad_norm_sq",
    "mean_grad_norm_sq",
    "energy_j",
    "channel_uses",
    "uplink_s",
    "scalar_reports",
)
"""Columns of metrics.csv after seed and round, in order; a method's own columns follow."""
RESERVED_COLUMNS = frozenset({"seed", "round", *COLUMNS})
INTEGER_COLUMNS = frozenset({"staleness_max", "anchors", "channel_uses", "scalar_reports"})
EXPLODED = 1e15  # a seed has diverged if a parameter is larger in magnitude, or NaN
SNR = "snr_db"  # a power ratio until `on_host` converts it to dB
INTERVAL = ("active", "bound", "bound_rounds", "energy_ratio", "snr", "noise_to_update", "sent_rounds")
"""Fields of the ledger that are set to zero after every row."""


@dataclass
class Ledger:
    """Running totals of a run: everything a row needs besides the models. Tensors stay on the compute device."""

    uploads: Tensor
    """Rounds in which each device took part, int [S, M]."""
    last_active: Tensor
    """Last round τ_i in which each device took part, int [S, M]; −1 before the first."""
    energy_j: Tensor
    """Energy that each device has spent, float64 [S, M]."""
    channel_uses: Tensor
    """Analog channel uses so far, int [S]."""
    scalar_reports: Tensor
    """Scalars reported so far, int [S]."""
    slots_s: Tensor
    """Seconds that digital uplinks have taken so far, float64 [S]."""
    diverged_at: Tensor
    """Number of rounds after which the model had first exploded, int [S]; −1 while it has not."""
    anchors: Tensor
    """Models held, float64 [S]; NaN where the method has none."""
    rounds: Tensor
    """Rounds since the last row, a scalar. The fields below are sums or maxima over these rounds, float64 [S]."""
    active: Tensor
    bound: Tensor
    bound_rounds: Tensor
    energy_ratio: Tensor
    snr: Tensor
    noise_to_update: Tensor
    sent_rounds: Tensor
    extra: dict[str, Tensor]

    @staticmethod
    def empty(num_seeds: int, num_devices: int, device: torch.device) -> "Ledger":
        """The ledger before round 0."""

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def real(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return Ledger(
            uploads=whole(num_seeds, num_devices),
            last_active=whole(num_seeds, num_devices) - 1,
            energy_j=real(num_seeds, num_devices),
            channel_uses=whole(num_seeds),
            scalar_reports=whole(num_seeds),
            slots_s=real(num_seeds),
            diverged_at=whole(num_seeds) - 1,
            anchors=real(num_seeds) * math.nan,
            rounds=whole(),
            **{name: real(num_seeds) for name in INTERVAL},
            extra={},
        )

    def observe(self, t: int | Tensor, step: Step, noise_var_j: float) -> None:
        """Add what round t did, in place; a seed that has diverged no longer counts."""
        info, alive = step.info, self.diverged_at < 0
        active = info.active & alive[:, None]
        self.uploads += active
        self.last_active.copy_(torch.where(active, t, self.last_active))
        self.scalar_reports += step.spent.scalars * alive
        self.slots_s += torch.where(alive, step.spent.slots_s, 0.0)
        self.diverged_at.copy_(torch.where(alive & ~step.finite, t + 1, self.diverged_at))
        self.rounds += 1
        num_active = active.sum(-1).to(torch.float64)
        self.active += num_active
        if info.norm_bound is not None:
            self.bound += torch.where(num_active > 0, info.norm_bound, 0.0)
            self.bound_rounds += num_active > 0
        if info.anchors is not None:
            self.anchors.copy_(info.anchors)
        torch.maximum(self.energy_ratio, step.energy_ratio, out=self.energy_ratio)
        self.energy_j += torch.where(step.finite[:, None], step.spent.energy_j, 0.0)
        for use in step.spent.transmissions:
            sent = use.transmitted & step.finite
            self.channel_uses += sent * use.channel_uses
            sent &= use.signal_norm > 0
            if noise_var_j > 0 and use.channel_uses:
                signal = torch.where(sent, use.signal_norm, 1.0)
                self.snr += torch.where(sent, signal.square() / (use.dimensions * noise_var_j), 0.0)
                self.noise_to_update += torch.where(sent, use.noise_norm / signal, 0.0)
                self.sent_rounds += sent
        for name, value in info.extra.items():
            self.extra.setdefault(name, torch.zeros_like(self.active)).add_(value)

    def row(self, r: int, bandwidth_hz: float) -> dict[str, Tensor]:
        """Columns of the ledger after r rounds, each [S]; then resets what is counted per row."""
        staleness = (r - self.last_active).to(torch.float64)
        columns = {
            "num_active": self.active / self.rounds,
            "norm_bound": self.bound / self.bound_rounds,
            "staleness_mean": staleness.mean(-1),
            "staleness_max": staleness.max(-1).values,
            "anchors": self.anchors.clone(),
            "energy_ratio_max": torch.where(self.rounds > 0, self.energy_ratio, math.nan),
            SNR: self.snr / self.sent_rounds,
            "noise_to_update": self.noise_to_update / self.sent_rounds,
            "energy_j": self.energy_j.sum(-1),
            "channel_uses": self.channel_uses.to(torch.float64),
            "uplink_s": (self.channel_uses + REPORT_BITS * self.scalar_reports) / bandwidth_hz + self.slots_s,
            "scalar_reports": self.scalar_reports.to(torch.float64),
        }
        columns |= {name: value / self.rounds for name, value in self.extra.items()}
        for name in INTERVAL:
            getattr(self, name).zero_()
        self.rounds.zero_()
        for value in self.extra.values():
            value.zero_()
        return columns

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for a checkpoint."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        return named | {f"extra.{name}": value for name, value in self.extra.items()}

    def copied(self) -> "Ledger":
        """A copy that shares no memory with this ledger."""
        return Ledger.from_tensors({name: value.clone() for name, value in self.tensors().items()})

    def take(self, other: "Ledger") -> None:
        """Copy the numbers of another ledger of the same run into this one."""
        for name, value in other.tensors().items():
            if name.startswith("extra."):
                self.extra.setdefault(name[6:], torch.empty_like(value)).copy_(value)
            else:
                getattr(self, name).copy_(value)

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> "Ledger":
        """The ledger whose `tensors` a checkpoint holds."""
        extra = {name.removeprefix("extra."): value for name, value in tensors.items() if name[:6] == "extra."}
        named = {name: value for name, value in tensors.items() if name[:6] != "extra."}
        named.setdefault("slots_s", torch.zeros_like(named["active"]))  # a checkpoint from before there were any
        return Ledger(**named, extra=extra)


def on_host(columns: Mapping[str, Tensor]) -> Rows:
    """Columns as Python numbers, fetched from the compute device in one transfer; converts the SNR to dB."""
    values = torch.stack([value.to(torch.float64) for value in columns.values()]).tolist()
    rows: Rows = dict(zip(columns, values, strict=True))
    rows[SNR] = [linear_to_db(value) if value > 0 else math.nan for value in rows[SNR]]
    return rows


def consensus(device_models: Tensor) -> Tensor:
    """Consensus distance (1/m) Σ_i ‖x_i − x̄‖² of the devices' models [S, M, P], float64 [S]."""
    result = []
    for models in device_models:
        mean = models.mean(0)
        squares = [torch.linalg.vector_norm(model - mean, dtype=torch.float64).square() for model in models]
        result.append(torch.stack(squares).mean())
    return torch.stack(result)
