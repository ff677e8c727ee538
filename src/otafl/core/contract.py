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
from otafl.engine.rows import aligned
from otafl.errors import PluginError
from otafl.radio.air import Transmission
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge
from otafl.radio.vectors import Vectors

if TYPE_CHECKING:
    from otafl.core.round import Round


@dataclass(frozen=True)
class Problem:
    """The constants of a run, which a method is given before round 0 and as `round.problem` in every round.

    >>> import otafl, torch
    >>> problem = otafl.Simulation(otafl.load_config("quick", {"data.name": "digits"}), torch.device("cpu")).problem
    >>> problem.num_devices, problem.vectors().size == problem.num_params
    (30, True)
    """

    num_devices: int
    """Number of devices m; M in shapes."""
    num_params: int
    """Number of model parameters d; P in shapes."""
    symbol_energy_j: float
    """Energy limit E_s per channel use, joule per real dimension: a device may spend d E_s on an update."""
    noise_var_j: float
    """Variance σ_z² of the receiver noise, joule per real dimension."""
    initial: Tensor
    """Initial model x^0, [S, P]."""
    server: View
    """What the server knows of the channel at round 0."""
    plan: Mapping[str, Tensor] = field(default_factory=dict)
    """What the method's `plan` decided for all T rounds: name to tensor [T, S, ...]."""
    cohort: int = 0
    """Number of devices that may take part in a round (`cell.cohort`); 0 for all."""
    bandwidth_hz: float = 1e6
    """Bandwidth B, the number of channel uses in a second."""
    local_steps: int = 10
    """Number of local steps s in a round, and the most that `round.train(steps=...)` does."""
    rounds: int = 0
    """Number of rounds T of the run; 0 if it is not known."""

    @property
    def taking_part(self) -> int:
        """How many devices may take part in a round: the cohort, or all."""
        return self.cohort or self.num_devices

    def devices(self, anchor: Tensor | None = None) -> Devices:
        """Devices that each start from x^0, for a field of the method's state.

        Args:
            anchor: x^0, or what the server stores of it, [S, P]. If given, each device also remembers the server model
                that it last received, its anchor, and its updates are measured against that.

        Returns:
            Models [S, M, P], in memory of their own, and anchors if asked for.

        Raises:
            PluginError: the anchor is not a plain tensor [S, P].

        >>> import otafl, torch
        >>> small = otafl.load_config("quick", {"data.name": "digits", "model.hidden": [8]})
        >>> problem = otafl.Simulation(small, torch.device("cpu")).problem
        >>> problem.devices(anchor=problem.initial).models.shape
        torch.Size([2, 30, 610])
        """
        if anchor is not None and (type(anchor) is not Tensor or anchor.shape != self.initial.shape):
            raise PluginError(f"problem.devices(): an anchor is a model for each seed, {list(self.initial.shape)}")
        models = aligned(self._shape, self.initial).copy_(self.initial[:, None, :].expand(-1, self.num_devices, -1))
        if anchor is None:
            return Devices(models)
        most = min(self.num_devices, self.rounds + 1) if self.rounds else self.num_devices  # one more in every round
        return Devices(models, Anchors.initial(anchor, self.num_devices, most))

    def vectors(self) -> Vectors:
        """One vector of zeros per device, [S, M, P]: a memory for the method's state, for instance the last update."""
        return Vectors(aligned(self._shape, self.initial).zero_())

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.initial), self.num_devices, self.initial.shape[1]


@dataclass(frozen=True)
class Info:
    """Diagnostics of one round; all but `weights` and `noise_std` go into metrics.csv.

    A row has the number of active devices and the method's own columns as means over the rounds since the row before,
    the norm bound as a mean over those of them with an active device, and the anchors of the last round.

    >>> import torch
    >>> Info(active=torch.ones(2, 5, dtype=torch.bool), extra={"mine": torch.zeros(2)}).active.shape
    torch.Size([2, 5])
    """

    active: Tensor
    """Devices that took part, bool [S, M]; each of them must have reported or transmitted."""
    norm_bound: Tensor | None = None
    """Norm bound B_t, [S]: the largest norm of an active device's update, or the norm at which they are clipped."""
    anchors: Tensor | None = None
    """Number of models that the server holds for its devices, [S]."""
    weights: Tensor | None = None
    """Weights w_i in "recovered update = Σ_i w_i Δ_i + noise", [S, M]; for tests."""
    noise_std: Tensor | None = None
    """Standard deviation of that noise per coordinate, [S]; for tests."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of the method's own: name to tensor [S], the same names in every round."""


class Algorithm(Protocol):
    """What every method must have; `Foresight` lists what it may have in addition.

    A method is a frozen dataclass whose fields are its keys in `[algorithm]`; see docs/first-method.md.
    """

    knowledge: ClassVar[Knowledge]
    """The channel quantities that its devices and its server read."""

    def init(self, problem: Problem) -> Any:
        """The state before round 0, which is all that the method remembers.

        Args:
            problem: the constants of the run.

        Returns:
            A dataclass whose fields are tensors, `Vectors`, `Devices`, None, or again such dataclasses, always with the
            same fields. It must have a field `params`, the server model [S, P]. If it has `Devices`, the mean model and
            the consensus distance are those of their models.
        """
        ...

    def step(self, state: Any, round: "Round") -> tuple[Any, Info]:  # noqa: A002 - the field's own word
        """Carry out one round for all seeds at once.

        Args:
            state: what `init` or the step before returned; its `Devices` may be overwritten.
            round: the instruments of this round.

        Returns:
            The next state, of the same form, and diagnostics.
        """
        ...


class Foresight(Protocol):
    """Optional members, found by name, with which a method tells beforehand what it will do."""

    ideal_radio: ClassVar[bool] = False
    """Whether its uplink is error-free, without channel, noise or energy limit."""

    downlink_errors: ClassVar[bool] = True
    """If False, `imperfect.downlink_std` is refused, since the errors would get into what devices send."""

    gamma: float
    """A key of this name is FedOAG's γ: the preset `quick` scales it with √d; `otafl theory` and maps use it."""

    def plan(self, server: View, problem: Problem, draw: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """What the server decides for all rounds from its view alone and tells everybody; each tensor [T, S, ...].

        An example is thresholds designed from channel statistics. `draw(name)` gives uniform random numbers [T, S]. The
        result becomes `problem.plan`, and a round has its own part as `round.plan`.
        """
        ...

    def active(self, device: View, problem: Problem) -> Tensor | None:
        """Mask of who transmits in each round, [T, S, M], if channel knowledge and the plan alone decide it; else None.

        A round has its own part as `round.active`. Only these devices may report and transmit, and devices that will
        not be heard again need not train.
        """
        ...


class Spent(NamedTuple):
    """What devices sent and spent in a round, for the ledger."""

    transmissions: tuple[Transmission, ...]
    energy_j: Tensor
    """Energy of every device, float64 [S, M]."""
    energy_ratio: Tensor
    """Largest energy of an upload over its limit, for every device, float64 [S, M]."""
    scalars: Tensor
    """Reported scalars, int [S]."""
    slots_s: Tensor
    """Seconds that digital uplinks took, float64 [S]."""
    strays: Tensor
    """Whether a device was heard that the method had declared silent, bool [S]."""
    absent: Tensor
    """Whether `Info.active` names a device that neither reported nor transmitted, bool [S]."""


class Step(NamedTuple):
    """The result of one round."""

    state: Any
    info: Info
    spent: Spent
    energy_ratio: Tensor
    """Largest energy of any device's upload over its limit, [S]."""
    finite: Tensor
    """Whether the server model is finite and has not exploded, bool [S]."""
