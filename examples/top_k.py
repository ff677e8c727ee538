"""The largest tenth of every update is sent, the rest is kept for later; see docs/first-method.md."""

import math
from dataclasses import dataclass

import torch

import otafl


@dataclass(frozen=True)
class Remembering:
    """The state: what the next round needs."""

    params: torch.Tensor
    unsent: otafl.Vectors


@otafl.register_algorithm("top-k")
@dataclass(frozen=True)
class TopK:
    """Devices above a threshold send the largest entries of update and memory, by FedOAG's handshake."""

    knowledge = otafl.Knowledge(device={"h"})
    level: float = 3e-10
    """γ: larger is less noise and fewer devices."""

    def init(self, problem):
        return Remembering(problem.initial, problem.vectors())

    def step(self, state, round):
        size, h, unsent = round.problem.num_params, round.device.h, state.unsent.values
        updates = round.train(state.params)

        def largest(update, left):  # [n, P] each, of some devices at a time
            total = update + left
            places = total.abs().topk(size // 10).indices
            return torch.zeros_like(total).scatter(1, places, total.gather(1, places))

        # Threshold, handshake, inversion: |h_i| ≥ γ/√(Q E_s), B = max ‖v_i‖, x̂_i = γ v_i/(h_i B)
        who = round.everyone & (h.abs() >= self.level / math.sqrt(size * round.problem.symbol_energy_j))
        sent = updates.encode(largest, size, who, unsent)  # 0 for who does not transmit
        reports = round.report(sent.norms(who), who)
        bound, count = reports.max().clamp(min=1e-300), reports.count().clamp(min=1)  # [S]
        heard = round.uplink(sent, torch.where(who, self.level / (h * bound[:, None]), 0.0), who)
        mean = heard * (bound / (self.level * count))[:, None].to(heard.dtype)
        mean = torch.where(reports.who.any(-1)[:, None], mean, 0.0)  # nobody: the model stays
        left = otafl.Vectors(unsent + updates.dense() - sent.values)
        return Remembering(state.params + round.lr * mean, left), otafl.Info(active=who, norm_bound=bound)
