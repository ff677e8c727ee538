"""The contract between a method and the world.

A method is a frozen dataclass of hyper-parameters that has what `Algorithm` lists, and anything it wants of
`Foresight`. Its state is what the next round needs; `Info` is diagnostics. A method touches the world only through the
instruments of its `Round`: devices compute from `round.device` and from what was broadcast, and the server uses only
`round.server`, `round.report` and `round.uplink`. All shapes have the seeds S in front. A method is written for the
trailing axes, active sets are masks, and "nobody is active" is a `where` per seed.

`step` owns the state it is given: `round.train` may overwrite the models of its `Devices`.

Knows: tensors, views of the channel, devices.
Does not know: configuration, files, which method is running.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from otafl.engine.devices import Anchors, Devices
from otafl.errors import PluginError
from otafl.radio.air import Transmission
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge
from otafl.radio.vectors import Vectors

if TYPE_CHECKING:
    from otafl.core.round import Round

ALIGNMENT = 32  # elements: the largest alignment that matrix products ask for


@dataclass(frozen=True)
class Problem:
    """What a method is given once, before round 0."""

    num_devices: int
    num_params: int
    symbol_energy_j: float
    noise_var_j: float
    initial: Tensor
    """x^0, [S, P]."""
    server: View
    """What the server declared to know, at round 0."""
    plan: Mapping[str, Tensor] = field(default_factory=dict)
    """What the method's `plan` decided, each [T, S, ...]."""
    cohort: int = 0
    """Devices that may take part in a round (`cell.cohort`); 0 for all."""

    @property
    def taking_part(self) -> int:
        """How many devices may take part in a round: the cohort, or all."""
        return self.cohort or self.num_devices

    def devices(self, anchor: Tensor | None = None) -> Devices:
        """Devices that each start from x^0.

        With a first `anchor` [S, P], x^0 or what the server keeps of it, they remember from then on which server model
        each last received, and measure their updates against it.
        """
        if anchor is not None and (type(anchor) is not Tensor or anchor.shape != self.initial.shape):
            raise PluginError(f"problem.devices(): an anchor is a model for each seed, {list(self.initial.shape)}")
        models = self._aligned().copy_(self.initial[:, None, :].expand(-1, self.num_devices, -1))
        return Devices(models, None if anchor is None else Anchors.initial(anchor, self.num_devices))

    def vectors(self) -> Vectors:
        """A vector of zeros, as long as the model, for every device to remember something in."""
        return Vectors(self._aligned().zero_())

    def _aligned(self) -> Tensor:
        """[S, M, P], each device's part in memory aligned for matrix products."""
        num_seeds, num_params = self.initial.shape
        aligned = -(-num_params // ALIGNMENT) * ALIGNMENT
        return self.initial.new_empty(num_seeds, self.num_devices, aligned)[..., :num_params]


@dataclass(frozen=True)
class Info:
    """Diagnostics of one round."""

    active: Tensor
    """Devices that took part, bool [S, M]."""
    norm_bound: Tensor | None = None
    """B_t, [S]."""
    anchors: Tensor | None = None
    """Models the server holds for its devices, [S]."""
    weights: Tensor | None = None
    """w_i in "recovered update = Σ_i w_i Δ_i + noise", [S, M]."""
    noise_std: Tensor | None = None
    """Standard deviation of that noise per coordinate, [S]."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of the method's own, each [S]."""


class Algorithm(Protocol):
    """A method: what it must have."""

    knowledge: ClassVar[Knowledge]
    """What it reads of the channel, on which side."""

    def init(self, problem: Problem) -> Any:
        """The state before round 0: a dataclass of tensors, `Vectors` and such dataclasses, what the next round needs.

        It has a field `params`, the server model [S, P]. If it has `Devices`, what `problem.devices` gave, the mean
        model and the consensus distance are those of their models.
        """
        ...

    def step(self, state: Any, round: "Round") -> tuple[Any, Info]:  # noqa: A002 - the field's own word
        """One round: the next state, and diagnostics."""
        ...


class Foresight(Protocol):
    """What a method may say of itself beforehand; each is looked for by its name, and none is needed."""

    ideal_radio: ClassVar[bool] = False
    """Whether its uplink is the error-free one: no channel, noise or energy."""

    downlink_errors: ClassVar[bool] = True
    """False: errors of what devices receive would get into what they send, so `imperfect.downlink_std` is refused."""

    gamma: float
    """A key of this name is FedOAG's γ: presets scale it with √d, and `otafl theory` and maps take its threshold."""

    def plan(self, server: View, problem: Problem, draw: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """What the server decides from its view alone and tells everybody, for all rounds at once, each [T, S, ...].

        Thresholds designed from channel statistics, for instance. `draw(name)` gives uniform random numbers [T, S]. It
        is then `problem.plan`, and a round has its own part as `round.plan`.
        """
        ...

    def active(self, device: View, problem: Problem) -> Tensor | None:
        """Who transmits, where what devices know and the plan decide it, for all rounds at once: a mask [T, S, M].

        Then it is known beforehand: a round has it as `round.active`, devices that do not transmit need not train, and
        only these may report and transmit. None where it depends on what happens.
        """
        ...


class Spent(NamedTuple):
    """What the uplink of a round was, for the ledger."""

    transmissions: tuple[Transmission, ...]
    energy_j: Tensor
    """Energy of every device, float64 [S, M]."""
    energy_ratio: Tensor
    """That of an upload over its limit, the largest of the round, float64 [S, M]."""
    scalars: Tensor
    """Reported scalars, int [S]."""
    strays: Tensor
    """Whether a device was heard that the method had declared silent, bool [S]."""
    absent: Tensor
    """Whether a device is said to have taken part that neither reported nor transmitted, bool [S]."""


class Step(NamedTuple):
    """One round done."""

    state: Any
    info: Info
    spent: Spent
    energy_ratio: Tensor
    """Largest energy of a device over the limit, [S]."""
    finite: Tensor
    """Whether the server model is finite and has not exploded, bool [S]."""
