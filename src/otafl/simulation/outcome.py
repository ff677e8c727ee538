"""What a finished run leaves besides its rows and model: summary.json and devices.csv.

Knows: simulations, the ledger.
Does not know: where files go.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from otafl.core.metrics import Ledger
from otafl.runs.result import current_commit, summary_scores, versions
from otafl.simulation.build import Simulation


def summarise(
    sim: Simulation,
    rounds: NDArray[np.int64],
    metrics: Mapping[str, NDArray[np.float64]],
    diverged: Mapping[int, int],
    wall_s: float,
) -> dict[str, Any]:
    """The content of summary.json."""
    config = sim.config
    summary: dict[str, Any] = {
        "status": "failed" if diverged else "complete",
        "name": config.experiment.name,
        "algorithm": config.algorithm.name,
        "data": config.data.name,
        "num_params": sim.objective.num_params,
        "rounds": config.experiment.rounds,
        "seeds": list(sim.seeds),
        **summary_scores(config, rounds, metrics, diverged),
    }
    summary |= {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 3),
        "rounds_per_s": round(config.experiment.rounds / wall_s, 3) if wall_s > 0 else None,
        "device": describe_device(sim.device),
        "engine": sim.engine_name,
        "versions": versions(),
        "commit": current_commit(),
        "config": config.digest,
    }
    return summary


def describe_device(device: torch.device) -> str:
    """The compute device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def devices_csv(sim: Simulation, ledger: Ledger) -> str:
    """The content of devices.csv."""
    lines = ["seed,device,images,uploads,energy_j,last_active,mean_distance_m\n"]
    uploads, energy_j, last = ledger.uploads.tolist(), ledger.energy_j.tolist(), ledger.last_active.tolist()
    for s, seed in enumerate(sim.seeds):
        distance_m = sim.worlds[s].distance_m.mean(0).tolist()
        for i in range(sim.problem.num_devices):
            images = len(sim.shares[s][i])
            lines.append(f"{seed},{i},{images},{uploads[s][i]},{energy_j[s][i]!r},{last[s][i]},{distance_m[i]!r}\n")
    return "".join(lines)
