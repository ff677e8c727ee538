"""pfl-research's CIFAR-10 workload with its simulated backend, one process: `python pfl_cifar.py FOLDER ROUNDS`."""

import json
import logging
import sys
import time
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import nn

logging.disable(logging.CRITICAL)
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
features = torch.from_numpy(np.load(folder / "features.npy")).view(-1, 3, 32, 32)
targets = torch.from_numpy(np.load(folder / "targets.npy"))
users = np.load(folder / "users.npy")
"""[users, images]"""
order = np.random.default_rng(0)
DROP = (0.25, 0.5)


class Network(nn.Sequential):
    """The model with the loss that pfl asks for."""

    def loss(self, x, y, eval=False):  # noqa: A002, D102
        self.train(not eval)
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y):  # noqa: D102
        return {}


network = Network(
    *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    *(nn.Dropout(DROP[0]), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(DROP[1]), nn.Linear(128, 10)),
)
start = torch.from_numpy(np.load(folder / "start.npy"))
torch.nn.utils.vector_to_parameters(start, network.parameters())
model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
marks = [time.perf_counter()]


def data_of(i):
    """A user's images."""
    images = torch.from_numpy(users[i])
    return Dataset([features[images], targets[images]], user_id=str(i))


class Mark(TrainingProcessCallback):
    """Says when rounds end."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # noqa: D102
        marks.append(time.perf_counter())
        return False, aggregate_metrics.__class__()


FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=50, val_cohort_size=0
    ),
    SimulatedBackend(FederatedDataset(data_of, lambda: int(order.integers(len(users)))), None),
    model,
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10, local_max_grad_norm=None),
    callbacks=[Mark()],
    send_metrics_to_platform=False,
)
np.save(folder / "pfl.npy", torch.nn.utils.parameters_to_vector(network.parameters()).detach().numpy())
(folder / "pfl.json").write_text(json.dumps({"seconds": np.diff(marks).tolist()}))
