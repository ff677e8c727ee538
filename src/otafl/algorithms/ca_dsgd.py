"""CA-DSGD: sparse updates, compressed by a random projection, over truncated inversion; the server reconstructs.

M. M. Amiri, D. Gündüz, "Federated Learning over Wireless Fading Channels", 2020. Devices keep what they do not send
(error feedback), send the k largest entries on q < d channel uses, and the server recovers their weighted mean:

    v_i = Δ_i + e_i,   s_i = top_k(v_i),   w_i = P s_i, both shortened to ‖w_i‖ ≤ G,   P of q − 1 rows, the same for all
    |h_i| ≥ θ:   x̂_i = (c_i/h_i) [w_i; G],   c_i = √(q E_s) θ/√(‖w_i‖² + G²),   e_i ← v_i − s_i;   others e_i ← v_i
    (Σ c_i w_i + z)/(Σ c_i G + z')·G = P ŝ + noise,   D̂ = AMP(P, ·),   x^{t+1} = x^t + η D̂

The last symbol, a constant G, tells the server Σ c_i; where it is heard within 4 σ_z, nobody may have sent: x^t is
kept, by which devices see that they were not heard, and all keep v_i. P is a subsampled orthonormal transform after
random signs. What is heard has up to |A| k entries, and can be reconstructed if they are few: about q/5 for AMP.

Knows: its own h at each device.
Does not know: norms, channel statistics, h at the server.
Communicates: q channel uses; no side link.
Departures: written from the paper's idea, see docs/algorithms/ca-dsgd.md.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from otafl.algorithms.parts.projection import Projection, reconstruct
from otafl.algorithms.parts.truncated import Gamma, above_threshold
from otafl.core.contract import Info, Problem
from otafl.core.round import Round
from otafl.radio.csi import View
from otafl.radio.knowledge import Knowledge
from otafl.radio.vectors import Vectors

DETECTED = 4.0  # standard deviations of the noise that the last symbol must exceed: else nobody may have sent


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    params: Tensor
    """x^t, [S, P]."""
    unsent: Vectors
    """e_i, what each device has not sent."""


@dataclass(frozen=True)
class CADSGD:
    """The largest entries of updates on a quarter of the channel uses, with error feedback and reconstruction."""

    knowledge: ClassVar[Knowledge] = Knowledge(device=frozenset({"h"}))

    gamma: Gamma = 1e-9
    """γ: devices with |h_i| ≥ θ = γ/√(d E_s) transmit, as in FedOAG."""
    uses: Annotated[float, Gt(0), Le(1)] = 0.25
    """Channel uses q over the number of parameters d."""
    sparsity: Annotated[float, Gt(0), Le(1)] = 0.01
    """Entries k that a device sends, over d; reconstruction needs about five uses for each entry that anybody sends."""
    pilot: Annotated[float, Gt(0)] = 10.0
    """G: the last symbol, and the largest norm of what a device sends in a round; the rest waits."""
    steps: Annotated[int, Ge(1)] = 20
    """Steps of the reconstruction."""
    threshold: Annotated[float, Ge(0)] = 1.4
    """Soft threshold of the reconstruction, in standard deviations of what disturbs it."""

    def init(self, problem: Problem) -> State:
        """Start from x^0, with nothing kept."""
        return State(problem.initial, problem.vectors())

    def active(self, device: View, problem: Problem) -> Tensor:
        """FedOAG's line 10."""
        return above_threshold(device, problem, self.gamma)

    def step(self, state: State, round: Round) -> tuple[State, Info]:  # noqa: A002
        """All devices train from x^t; strong channels send their largest entries."""
        problem, who, size = round.problem, round.active, round.problem.num_params
        uses = max(2, math.ceil(self.uses * size))
        count = max(1, math.ceil(self.sparsity * size))
        projection = Projection.of(size, uses - 1, state.params)
        updates, unsent = round.train(state.params), state.unsent.values

        def largest(update: Tensor, left: Tensor) -> Tensor:
            total = update + left
            places = total.abs().topk(count).indices
            return torch.zeros_like(total).scatter(1, places, total.gather(1, places))

        sparse = updates.encode(largest, size, who, unsent).values  # 0 for who does not transmit
        total, projected = unsent + updates.dense(), projection.apply(sparse)
        shorter = self.pilot / torch.linalg.vector_norm(projected, dim=-1, keepdim=True).clamp(min=self.pilot)
        sparse, projected = sparse * shorter, projected * shorter
        signal = torch.nn.functional.pad(projected, (0, 1), value=self.pilot)
        norms = torch.linalg.vector_norm(signal, dim=-1, dtype=torch.float64)
        theta = self.gamma / math.sqrt(size * problem.symbol_energy_j)
        amplitude = math.sqrt(uses * problem.symbol_energy_j) * theta / norms
        scale = torch.where(who, amplitude / torch.where(who, round.device.h, 1.0), 0.0)
        heard = round.uplink(Vectors(signal), scale, who)
        weight = heard[:, -1:] / self.pilot  # Σ c_i, with noise
        known = ~(weight * self.pilot <= DETECTED * problem.noise_var_j**0.5)  # also if it is NaN: the seed diverges
        mixed = torch.where(known, heard[:, :-1] / torch.where(known, weight, 1.0), 0.0)
        mean = reconstruct(projection, mixed, self.steps, self.threshold)
        left = Vectors(total - torch.where((who & known)[..., None], sparse, 0.0))
        info = Info(active=who, extra={"heard": known[:, 0].double()})
        return State(state.params + round.lr * mean, left), info
