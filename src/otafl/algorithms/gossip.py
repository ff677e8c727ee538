"""What FedOAG and FedOAG-plus share: who transmits, and what innovations are measured against.

Knows: γ, fixed or adaptive; anchors.
Does not know: what is sent, how the server recovers it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge
from torch import Tensor

from otafl.algorithms.anchors import Anchors, Common, Keeping, Pruning, rounded
from otafl.algorithms.base import Problem, Round
from otafl.algorithms.threshold import Threshold, first_gamma, next_gamma
from otafl.algorithms.uplink import above_threshold
from otafl.radio.csi import View


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    local_params: Tensor
    """x_i^t, [S, M, P]."""
    anchors: Anchors | Common
    """What devices measure their innovations against: x^{τ_i+1}, or one model for all."""


@dataclass(frozen=True)
class Adapting(State):
    """With a γ of its own in every round."""

    gamma: Tensor
    """γ_t, float64 [S]."""


@dataclass(frozen=True)
class Gossip:
    """The hyper-parameters of implicit gossiping."""

    ideal_radio: ClassVar[bool] = False
    noise_weight: ClassVar[float]
    """Of an adaptive γ."""

    gamma: Threshold = 1e-9
    """γ: devices with |h_i| ≥ γ/√(d E_s) are active; paper: 1e-9 for its 814,090 parameters. Or "adaptive"."""
    anchors: Keeping = "kept"
    """What the server keeps of the models its devices last received; "common" and "none" use one for all devices."""
    refresh: Annotated[int, Ge(1)] = 10
    """Rounds after which a "common" reference is broadcast anew."""
    pruning: Pruning = "references"
    """Which old models the server keeps: those a device refers to, or all since the oldest such ("paper")."""

    @property
    def static(self) -> bool:
        """The paper's pruning rule keeps more and more models, so its rounds differ."""
        return self.pruning == "references" or self.anchors in ("common", "none")

    @property
    def downlink_errors(self) -> bool:
        """Whether they stay out of what is sent: where devices measure against what they received, in known rounds."""
        return self.gamma != "adaptive" and self.anchors == "kept"

    def init(self, problem: Problem) -> State:
        """Every device starts from x^0 and has it as its anchor."""
        one = self.anchors in ("common", "none")
        anchors = Common.initial(problem) if one else Anchors.initial(problem, self.anchors)
        if self.gamma == "adaptive":
            first = first_gamma(problem, self.noise_weight)
            return Adapting(problem.initial, problem.device_models(), anchors, first)
        return State(problem.initial, problem.device_models(), anchors)

    def active(self, device: View, problem: Problem) -> Tensor | None:
        """Line 10 of FedOAG's Algorithm 1; not known beforehand where γ is adaptive."""
        return None if self.gamma == "adaptive" else above_threshold(device, problem, self.gamma)

    def listen(self, state: State, round: Round) -> tuple[float | Tensor, Tensor]:  # noqa: A002
        """γ of this round, and who is active."""
        if not isinstance(state, Adapting):
            assert self.gamma != "adaptive"
            return self.gamma, round.active
        return state.gamma, round.decide(above_threshold(round.device, round.problem, state.gamma[:, None]))

    def follow(
        self,
        state: State,
        round: Round,  # noqa: A002
        who: Tensor,
        params: Tensor,
        local_params: Tensor,
        signal_energy: Callable[[], Tensor],
    ) -> tuple[State, dict[str, Tensor]]:
        """The next state, once the devices `who` have received x^{t+1}, and columns of its own."""
        match state.anchors:
            case Common():
                every = self.refresh if self.anchors == "common" else None
                anchors: Anchors | Common = state.anchors.receive(params, round.t + 1, every)
            case Anchors():
                stored = rounded(params, self.anchors)
                anchors = state.anchors.receive(stored, round.t + 1, who, self.pruning, round.donates)
        if not isinstance(state, Adapting):
            return State(params, local_params, anchors), {}
        gamma = next_gamma(state.gamma, who.sum(-1), signal_energy(), round.problem, self.noise_weight)
        return Adapting(params, local_params, anchors, gamma), {"gamma": state.gamma.clone()}
