"""This library: ideal FedAvg from a shared start, or FedOAG, where every device has a model of its own."""

import time
from itertools import pairwise
from typing import Any

import torch
from common import Workload

import otafl
from otafl.core.metrics import Ledger
from otafl.simulation.build import Simulation
from otafl.simulation.graph import Rounds

work = Workload()
fedoag = work.name == "ours_fedoag"
keys = {"algorithm.name": "fedoag" if fedoag else "fedavg", "experiment.seeds": [0], "training.skip_unheard": False}
per_step = work.batches.shape[2] > 1
config = otafl.load_config("stationary", keys | {"training.batches": "per_step" if per_step else "per_round"})
sim = Simulation(config, torch.device("cpu"))
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
