"""pfl-research's CIFAR-10 workload beside pfl-research and a plain loop, on the CPU, in one run.

    python benchmarks/pfl_cifar.py [--rounds 12] [--images FOLDER_OR_ARCHIVE] [--learn 0]

1,000 users with 50 images each, a cohort of 50 in every round, one epoch in batches of 10 (5 steps), dropout, η = 0.1;
the network has 1,626,442 parameters. Images are random numbers unless a folder of CIFAR-10's images is named; then
`--learn` rounds more show the accuracy that ours and pfl-research reach. Ours draws an epoch's batches with
replacement: the same work. The contenders take turns, three times; the medians of rounds are compared.
"""

import argparse
import copy
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import HERE, environment
from convolutions import median
from torch import nn

import otafl
from otafl.core.metrics import Ledger
from otafl.simulation.graph import Rounds

USERS, IMAGES, COHORT = 1000, 50, 50


def dataset(images: str) -> otafl.Dataset:
    """The users' images; user i has 50 in a row."""
    owners = np.repeat(np.arange(USERS), IMAGES)
    if images:
        from otafl.world.own_data import ImageFolder

        found = ImageFolder(images, validation_share=0.0).load(USERS)
        order = np.random.default_rng(0).permutation(len(found.train))[: len(owners)]
        train = otafl.Split(found.train.features[order], found.train.targets[order])
        return otafl.Dataset(train, found.test, None, 10, (3, 32, 32), owners=owners)
    draw = np.random.default_rng(0)

    def split(count: int) -> otafl.Split:
        return otafl.Split(draw.standard_normal((count, 3072), dtype=np.float32), draw.integers(10, size=count))

    return otafl.Dataset(split(len(owners)), split(100), None, 10, (3, 32, 32), owners=owners)


def simulation(data: otafl.Dataset) -> otafl.Simulation:
    """Ideal FedAvg on that workload."""
    keys: dict[str, Any] = {"experiment.seeds": [0], "experiment.rounds": 2000, "data.name": "synthetic"}
    keys |= {"cell.devices": USERS, "cell.cohort": COHORT, "algorithm.name": "fedavg", "model.name": "pfl-cnn"}
    keys |= {"training.local_steps": 5, "training.batch_size": 10, "training.lr_schedule": "constant"}
    return otafl.Simulation(otafl.load_config("stationary", keys), torch.device("cpu"), dataset=data)


def plain_round(sim: otafl.Simulation, model: nn.Module, t: int) -> None:
    """A round of a hand-written loop with PyTorch's own dropout."""
    features, targets = sim.objective.train
    batches, who = sim.sampler.at(t)[0], sim.round_at(t).everyone[0].nonzero().flatten().tolist()
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for i in who:
        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
        for batch in batches[i]:
            optimiser.zero_grad()
            nn.functional.cross_entropy(local(features[batch]), targets[batch]).backward()
            optimiser.step()
        for part, parameter in zip(total, local.parameters(), strict=True):
            part += parameter.detach() / len(who)
    with torch.no_grad():
        for part, parameter in zip(total, model.parameters(), strict=True):
            parameter.copy_(part)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of each turn")
    parser.add_argument("--images", default="")
    parser.add_argument("--learn", type=int, default=0)
    options = parser.parse_args()
    data = dataset(options.images)
    sim = simulation(data)
    from otafl.engine.models import PflCNN, TaskShape

    loop = PflCNN().build(TaskShape(3072, 10, (3, 32, 32)))
    torch.nn.utils.vector_to_parameters(sim.problem.initial[0].clone(), loop.parameters())
    pfl = environment("pfl")
    times: dict[str, list[float]] = {"ours": [], "plain loop": [], "pfl-research": []}
    rounds = Rounds(sim, sim.init(), Ledger.empty(1, USERS, sim.device))
    rounds.advance(0)
    t = iter(range(1, 2000))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        np.save(folder / "features.npy", data.train.features)
        np.save(folder / "targets.npy", data.train.targets)
        np.save(folder / "users.npy", np.arange(USERS * IMAGES).reshape(USERS, IMAGES))
        np.save(folder / "start.npy", sim.problem.initial[0].numpy())

        def in_pfl(count: int) -> list[float]:
            command = [str(pfl), str(HERE / "contenders" / "pfl_cifar.py"), scratch, str(count)]
            subprocess.run(command, check=True, capture_output=True)
            found: list[float] = json.loads((folder / "pfl.json").read_text())["seconds"]
            return found[1:]  # the first one has the start-up

        for _ in range(3):
            times["ours"].append(median(lambda: rounds.advance(next(t)), options.rounds))
            times["plain loop"].append(median(lambda: plain_round(sim, loop, next(t)), options.rounds))
            if pfl is not None:
                times["pfl-research"].append(float(np.median(in_pfl(options.rounds + 1))))
        print(f"engine {sim.engine_name}, {torch.get_num_threads()} threads; medians of 3 turns of {options.rounds}")
        mine = float(np.median(times["ours"]))
        for name, found in times.items():
            if found:
                print(f"{name:<14} {np.median(found):.2f} s a round, {np.median(found) / mine:.2f} x ours")
        if options.learn:
            result = Rounds(sim, sim.init(), Ledger.empty(1, USERS, sim.device))
            for k in range(options.learn):
                result.advance(k)
            found = sim.objective.evaluate(result.state.params, sim.test).accuracy
            assert found is not None
            told = f"after {options.learn} rounds: ours {100 * float(found):.1f} %"
            if pfl is not None:
                in_pfl(options.learn)
                flat = torch.from_numpy(np.load(folder / "pfl.npy"))[None]
                other = sim.objective.evaluate(flat, sim.test).accuracy
                assert other is not None
                told += f", pfl-research {100 * float(other):.1f} %"
            print(told)


if __name__ == "__main__":
    main()
