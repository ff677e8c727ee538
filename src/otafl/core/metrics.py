"""What is measured, each quantity defined once.

A row describes x^r after r rounds. Quantities of rounds (num_active … noise_to_update) are taken over the rounds
since the previous row; round 0 has none. Blank means that a quantity does not exist there.

    test_accuracy, test_loss          share of right answers and mean loss of x^r on the test set
    validation_accuracy, …_loss       the same on the validation set (record "validation")
    mean_accuracy, mean_loss          the same on the test set for x̄^r, the mean of the devices' models ("mean")
    num_active                        devices that took part, mean over the rounds
    norm_bound                        largest norm ‖Δ_i‖ that may be sent: B_t, that of the active devices' vectors, or
                                      the bound at which they are clipped; mean over the rounds in which somebody was
                                      active
    staleness_mean, staleness_max     r − τ_i, with τ_i the last round before r in which device i took part (−1 at
                                      first), over devices
    anchors                           models the server holds for its devices after r rounds
    energy_ratio_max                  largest energy of a device in a round over the limit d E_s
    snr_db                            received signal-to-noise ratio ‖Σ h_i x̂_i‖²/(Q σ_z²), mean over the rounds
                                      with a transmission, in dB
    noise_to_update                   ‖z‖/‖Σ h_i x̂_i‖, the noise in the recovered mean update over that update,
                                      mean over the rounds with a transmission
    consensus                         (1/m) Σ_i ‖x_i − x̄‖² ("consensus")
    grad_norm_sq, mean_grad_norm_sq   ‖∇F‖² of the full training objective at x^r and, with "mean", at x̄^r
                                      ("gradient")
    energy_j                          energy spent by all devices so far
    channel_uses                      analog channel uses so far: Q per transmission, d for updates
    uplink_s                          seconds that these take, each 1/B for a bandwidth B
    scalar_reports                    scalars reported over the error-free digital link so far

Knows: states, what rounds did.
Does not know: methods, files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from otafl.core.contract import Step
from otafl.units import linear_to_db

Rows = dict[str, list[float]]
"""Column to one value per seed; NaN is blank."""


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
"""Columns of metrics.csv after seed and round, in order; a method's own follow."""
RESERVED_COLUMNS = frozenset({"seed", "round", *COLUMNS})
INTEGER_COLUMNS = frozenset({"staleness_max", "anchors", "channel_uses", "scalar_reports"})
EXPLODED = 1e15  # a parameter beyond this, or that is no number: the seed has diverged
SNR = "snr_db"  # a power ratio until it is on the host
INTERVAL = ("active", "bound", "bound_rounds", "energy_ratio", "snr", "noise_to_update", "sent_rounds")
"""Fields of the ledger that start anew with every row."""


@dataclass
class Ledger:
    """Running totals of a run: everything a row needs besides the models. Tensors stay on the compute device."""

    uploads: Tensor
    """Rounds in which each device took part, int [S, M]."""
    last_active: Tensor
    """τ_i, int [S, M]; −1 before the first time."""
    energy_j: Tensor
    """float64 [S, M]."""
    channel_uses: Tensor
    """int [S]."""
    scalar_reports: Tensor
    """int [S]."""
    diverged_at: Tensor
    """Number of rounds after which the model had first exploded, int [S]; −1 while it has not."""
    anchors: Tensor
    """Models held, float64 [S]; NaN where the method has none."""
    rounds: Tensor
    """Rounds since the last row, a scalar; what follows is summed or maximised over these, float64 [S]."""
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
        """Before round 0."""

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
        """Columns of the ledger after r rounds, each [S]; then the interval starts anew."""
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
            "uplink_s": self.channel_uses / bandwidth_hz,
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
        """For a checkpoint."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra"}
        return named | {f"extra.{name}": value for name, value in self.extra.items()}

    def copied(self) -> "Ledger":
        """A ledger with the same numbers and memory of its own."""
        return Ledger.from_tensors({name: value.clone() for name, value in self.tensors().items()})

    def take(self, other: "Ledger") -> None:
        """The numbers of another ledger of the same run."""
        for name, value in other.tensors().items():
            if name.startswith("extra."):
                self.extra.setdefault(name[6:], torch.empty_like(value)).copy_(value)
            else:
                getattr(self, name).copy_(value)

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> "Ledger":
        """From a checkpoint."""
        extra = {name.removeprefix("extra."): value for name, value in tensors.items() if name[:6] == "extra."}
        return Ledger(**{name: value for name, value in tensors.items() if name[:6] != "extra."}, extra=extra)


def on_host(columns: Mapping[str, Tensor]) -> Rows:
    """Columns as numbers, fetched from the compute device at once; a signal-to-noise ratio in dB."""
    values = torch.stack([value.to(torch.float64) for value in columns.values()]).tolist()
    rows: Rows = dict(zip(columns, values, strict=True))
    rows[SNR] = [linear_to_db(value) if value > 0 else math.nan for value in rows[SNR]]
    return rows


def consensus(device_models: Tensor) -> Tensor:
    """(1/m) Σ_i ‖x_i − x̄‖², float64 [S], from [S, M, P]."""
    result = []
    for models in device_models:
        mean = models.mean(0)
        squares = [torch.linalg.vector_norm(model - mean, dtype=torch.float64).square() for model in models]
        result.append(torch.stack(squares).mean())
    return torch.stack(result)
