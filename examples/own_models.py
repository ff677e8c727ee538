"""FedPBC over the air: every device keeps a model of its own, and receives the server's at the end of a round."""

from dataclasses import dataclass

import torch

import otafl


@dataclass(frozen=True)
class Own:
    """The state: the server model, and what devices remember."""

    params: torch.Tensor
    devices: otafl.Devices


@otafl.register_algorithm("fedpbc-air")
@dataclass(frozen=True)
class FedPBCAir:
    """Own models, FedOAG's uplink, postponed broadcast; updates against the present server model."""

    knowledge = otafl.Knowledge(device={"h"})
    gamma: float = 1e-9
    """γ, FedOAG's: larger is less noise and fewer devices."""

    def init(self, problem):
        return Own(problem.initial, problem.devices())

    def active(self, device, problem):
        return otafl.above_threshold(device, problem, self.gamma)

    def step(self, state, round):
        updates = round.train(state.devices, reference=state.params)  # (x̃_i − x^t)/η
        heard = otafl.heard_mean(round, updates, self.gamma, round.active)
        anybody = heard.who.any(-1, keepdim=True)
        params = torch.where(anybody, state.params + round.lr * heard.mean, state.params)
        devices = round.broadcast(params, heard.who, state.devices, updates)
        return Own(params, devices), otafl.Info(active=heard.who, norm_bound=heard.norm_bound)
