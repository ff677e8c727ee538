"""FedOAG: over-the-air federated learning by implicit gossiping.

M. Xiang, N. Michelusi, Y. C. Eldar, L. Su, "Over-the-Air Federated Learning in Heterogeneous Mobile Wireless
Networks", Algorithm 1; line numbers below are its.

    Δ_i = (x̃_i − x^{τ_i+1})/η        everything device i has not sent since its last upload
    A   = {i : |h_i| ≥ γ/√(d E_s)},   B = max_{i∈A} ‖Δ_i‖,   x̂_i = (γ/h_i) Δ_i/B
    x^{t+1} = η B/(γ|A|) (Σ_{i∈A} h_i x̂_i + z) + mean_{i∈A} x^{τ_i+1}
    i ∈ A: x_i, anchor ← x^{t+1} at the end of the round;   others: x_i ← x̃_i

Knows: its own h at each device; the server learns who is active and the norms ‖Δ_i‖ from the handshake.
Does not know: channel statistics on any side, h at the server.
Communicates: d channel uses and one scalar per active device and round.
Departures: the server keeps only anchors that some device still has (same result, bounded memory; the column
anchors_paper counts those that the paper's line 21 would keep); τ is updated before the prune.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from otafl.algorithms.parts.gossip import Keeping, State, active_now, anchors_of, first_state, stored
from otafl.algorithms.parts.threshold import Threshold, next_gamma
from otafl.algorithms.parts.truncated import above_threshold, heard_mean
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge

NOISE_WEIGHT = 0.1  # of an adaptive γ


@dataclass(frozen=True)
class FedOAG:
    """Truncated inversion, norm handshake and postponed broadcast: gossip through the server."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    gamma: Threshold = 1e-9
    """γ: devices with |h_i| ≥ γ/√(d E_s) are active; paper: 1e-9 for its 814,090 parameters. Or "adaptive"."""
    anchors: Keeping = "kept"
    """How the server keeps the models its devices last received: as they are, or rounded to 16 bits."""

    @property
    def downlink_errors(self) -> bool:
        """True if downlink errors cancel in the innovation: anchors are not rounded and γ is fixed."""
        return self.gamma != "adaptive" and self.anchors == "kept"

    def init(self, problem: Problem) -> State:
        """Line 1."""
        return first_state(problem, self.gamma, self.anchors, NOISE_WEIGHT)

    def active(self, device: View, problem: Problem) -> Tensor | None:
        """Line 10; None if γ is adaptive, since the mask is then not known beforehand."""
        return None if self.gamma == "adaptive" else above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Lines 4–28."""
        # Lines 4–9, all devices: train from the own, possibly stale, model; measure against the anchor.
        innovation = round.train(state.devices)

        # Lines 10–18: the active devices report norms and send; the server recovers the mean innovation.
        gamma, active = active_now(state, round, self.gamma)
        heard = heard_mean(round, innovation, gamma, active)

        # Line 19 and line 26: add the mean anchor; if nobody was active, keep the model.
        rebuilt = round.lr * heard.mean + anchors_of(state.devices).mean(heard.who)
        params = torch.where(heard.who.any(-1, keepdim=True), rebuilt, state.params)

        # Lines 20–28: postponed broadcast to the active devices only; the others keep what they trained.
        kept = stored(params, self.anchors)
        devices = round.broadcast(params, heard.who, state.devices, innovation, stored=kept)

        columns = {"anchors_paper": anchors_of(devices).count_since_oldest()}
        if state.gamma is not None:  # adaptive
            columns["gamma"] = state.gamma.clone()
            gamma = next_gamma(state.gamma, heard.who.sum(-1), heard.signal_energy, round.problem, NOISE_WEIGHT)
        info = Info(
            active=heard.who,
            norm_bound=heard.norm_bound,
            anchors=anchors_of(devices).count(),
            weights=heard.weights,
            noise_std=heard.noise_std,
            extra=columns,
        )
        return State(params, devices, gamma if isinstance(gamma, Tensor) else None), info
