"""This library: ideal FedAvg, also with a module of one's own, or FedOAG, where every device has its own model."""

import time
from itertools import pairwise
from typing import Any

import torch
from common import CLASSES, HIDDEN, INPUTS, Workload
from torch import nn

import otafl
from otafl.core.metrics import Ledger
from otafl.simulation.build import Simulation
from otafl.simulation.graph import Rounds

work = Workload()
fedoag = work.name == "ours_fedoag"
keys = {"algorithm.name": "fedoag" if fedoag else "fedavg", "experiment.seeds": [0], "training.skip_unheard": False}
per_step = work.batches.shape[2] > 1
config = otafl.load_config("stationary", keys | {"training.batches": "per_step" if per_step else "per_round"})
module = None
if work.name == "ours_flatten":
    module = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), work.layers(work.start), strict=True):
            parameter.copy_(torch.from_numpy(value))
sim = Simulation(config, torch.device("cpu"), module)
rounds = Rounds(sim, sim.init(), Ledger.empty(1, config.cell.devices, sim.device))
train, spent = sim._engine.train, []


def measured(local_work: Any) -> Any:
    """Local training, with its time."""
    begin = time.perf_counter()
    updates = train(local_work)
    spent.append(time.perf_counter() - begin)
    return updates


sim._engine.train = measured  # type: ignore[method-assign]
for t in range(work.rounds):
    work.mark()
    rounds.advance(t)
work.mark()
times = [b - a for a, b in pairwise(work.marks)]
outside = 1 - sum(spent[1:]) / sum(times[1:])  # the first round warms up
work.report([rounds.state.params[0].numpy()], outside_training=outside)
