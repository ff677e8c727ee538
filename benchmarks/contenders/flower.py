"""Flower's simulation: Ray actors with one thread each, which was its fastest setting on two cores."""

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DEDUP_LOGS": "0"}
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = str(Path(__file__).parent)

import torch
from common import CLASSES, DEVICES, HIDDEN, INPUTS, STEPS, Workload
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

ARGUMENTS = list(sys.argv)
work = Workload()
loaded: dict[str, object] = {}


class Device(NumPyClient):
    """One device: plain PyTorch."""

    def __init__(self, i: int) -> None:
        self.i = i

    def fit(self, parameters, config):  # noqa: D102
        if not loaded:  # once per actor
            torch.set_num_threads(1)
            sys.argv = ARGUMENTS
            here = Workload()
            loaded["work"] = here
            loaded["x"], loaded["y"] = torch.from_numpy(here.features), torch.from_numpy(here.targets)
            loaded["model"] = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        here, model = loaded["work"], loaded["model"]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), parameters, strict=True):
                parameter.copy_(torch.from_numpy(value))
        t = int(config["t"])
        optimiser = torch.optim.SGD(model.parameters(), lr=float(here.lr[t]))
        rows = torch.from_numpy(here.batches[t, self.i])
        for k in range(STEPS):
            batch = rows[k % len(rows)]
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(loaded["x"][batch]), loaded["y"][batch]).backward()
            optimiser.step()
        return [parameter.detach().numpy() for parameter in model.parameters()], 1, {}


class Timed(FedAvg):
    """FedAvg that says when its rounds begin."""

    def configure_fit(self, server_round, parameters, client_manager):  # noqa: D102
        work.mark()
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round, results, failures):  # noqa: D102
        assert len(results) == DEVICES, failures
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if server_round == work.rounds:
            work.mark()
            work.report(parameters_to_ndarrays(parameters))
        return parameters, metrics


def server(context):
    """The server's parts."""
    strategy = Timed(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=DEVICES,
        min_available_clients=DEVICES,
        initial_parameters=ndarrays_to_parameters(work.layers(work.start)),
        on_fit_config_fn=lambda server_round: {"t": server_round - 1},
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=work.rounds))


run_simulation(
    server_app=ServerApp(server_fn=server),
    client_app=ClientApp(client_fn=lambda context: Device(int(context.node_config["partition-id"])).to_client()),
    num_supernodes=DEVICES,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
)
