"""This library: ideal FedAvg from a shared start."""

import sys
import time
from pathlib import Path

import torch
from common import Workload

import otafl
from otafl.rounds import Rounds
from otafl.simulation import Simulation

work = Workload()
oag = "oag" in Path(sys.argv[0]).stem
keys = {"algorithm.name": "fedoag" if oag else "fedavg", "experiment.seeds": [0], "training.skip_unheard": False}
per_step = work.batches.shape[2] > 1
config = otafl.load_config("stationary", keys | {"training.batches": "per_step" if per_step else "per_round"})
sim = Simulation(config, torch.device("cpu"))
from otafl.metrics import Ledger  # noqa: E402

rounds = Rounds(sim, sim.init(), Ledger.empty(1, config.cell.devices, sim.device))
train, spent = sim._engine.train, [0.0]


def measured(work_: object) -> object:
    """Local training, with its time."""
    begin = time.perf_counter()
    updates = train(work_)  # type: ignore[arg-type]
    spent.append(time.perf_counter() - begin)
    return updates


sim._engine.train = measured  # type: ignore[method-assign, assignment]
for t in range(work.rounds):
    work.mark()
    rounds.advance(t)
work.mark()
warm = spent[2:]
times = [b - a for a, b in zip(work.marks[1:], work.marks[2:], strict=False)]
outside = 1 - sum(warm) / sum(times) if oag else 0.0
work.report([rounds.state.params[0].numpy()], outside_training=outside)
