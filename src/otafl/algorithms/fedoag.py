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
Departures: anchors are reference-counted (same result, bounded memory); τ is updated before the prune.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from otafl.algorithms.base import Info, Round
from otafl.algorithms.gossip import Gossip, State
from otafl.algorithms.uplink import heard_mean
from otafl.engine.rows import replace_rows
from otafl.radio.knowledge import Knowledge


@dataclass(frozen=True)
class FedOAG(Gossip):
    """Truncated inversion, norm handshake and postponed broadcast: gossip through the server."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))
    noise_weight: ClassVar[float] = 0.1

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """Lines 4–28."""
        # Lines 4–9, all devices: train from the own, possibly stale, model; measure against the anchor.
        innovation = round.train(state.local_params, reference=(state.anchors.pool, state.anchors.slot))

        # Lines 10–18: the active devices report norms and send; the server recovers the mean innovation.
        heard = heard_mean(round, innovation, *self.listen(state, round))

        # Line 19 and line 26: add the mean anchor; if nobody was active, keep the model.
        rebuilt = round.lr * heard.mean + state.anchors.mean(heard.who)
        params = torch.where(heard.any, rebuilt, state.params)

        # Lines 20–28: postponed broadcast to the active devices only; the others keep what they trained.
        local_params = replace_rows(innovation.end, heard.who, params, round.donates)
        state, columns = self.follow(state, round, heard.who, params, local_params, heard.signal_energy)
        info = Info(
            active=heard.who,
            norm_bound=heard.norm_bound,
            anchors=state.anchors.count(),
            weights=heard.weights,
            noise_std=heard.noise_std,
            extra=columns,
        )
        return state, info
