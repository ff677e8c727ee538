"""pfl-research with its simulated backend, one process."""

import logging

import numpy as np
import torch
from common import BATCH, CLASSES, DEVICES, HIDDEN, INPUTS, STEPS, Workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import HyperParam, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import nn

logging.disable(logging.CRITICAL)
work = Workload()
features, targets = torch.tensor(work.features), torch.from_numpy(work.targets)


class Network(nn.Sequential):
    """The model with the loss that pfl asks for."""

    def loss(self, x, y, eval=False):  # noqa: A002, D102
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y):  # noqa: D102
        return {}


network = Network(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
with torch.no_grad():
    for parameter, value in zip(network.parameters(), work.layers(work.start), strict=True):
        parameter.copy_(torch.from_numpy(value))
model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
order = iter(np.tile(np.arange(DEVICES), work.rounds + 1))
seen = np.zeros(DEVICES, dtype=int)


def data_of(i):
    """A device's data of its next round."""
    rows = work.batches[min(seen[i], work.rounds - 1), i]
    seen[i] += 1
    images = torch.from_numpy(np.concatenate([rows[k % len(rows)] for k in range(STEPS)]))
    return Dataset([features[images], targets[images]], user_id=str(i))


class LearningRate(HyperParam):
    """η of the round that is going on."""

    def value(self):  # noqa: D102
        return float(work.lr[min(len(work.marks) - 1, work.rounds - 1)])


class Mark(TrainingProcessCallback):
    """Says when rounds begin."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # noqa: D102
        work.mark()
        return False, aggregate_metrics.__class__()


work.mark()
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=work.rounds,
        evaluation_frequency=10**6,
        train_cohort_size=DEVICES,
        val_cohort_size=0,
    ),
    SimulatedBackend(FederatedDataset(data_of, lambda: int(next(order))), None),
    model,
    NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=LearningRate(), local_batch_size=BATCH, local_max_grad_norm=None
    ),
    callbacks=[Mark()],
    send_metrics_to_platform=False,
)
work.report([parameter.detach().numpy() for parameter in network.parameters()])
