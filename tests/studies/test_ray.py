"""Sweeps on a Ray cluster of two nodes on this machine, one of which is killed now and then."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from otafl.config.schema import load_config
from otafl.errors import ConfigError
from otafl.studies.conduct import Executor, conduct
from otafl.studies.ray import _task
from otafl.studies.study import Study
from otafl.studies.sweep import parse_sweep
from tests.studies.test_sweep import SMALL, contents, rows

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray leaves sockets and files open


def asked(name: str, rounds: int) -> Any:
    keys = SMALL | {"experiment.rounds": rounds, "experiment.eval_every": rounds // 5, "experiment.checkpoint_s": 0.05}
    axes = {
        "algorithm.name": ["fedoag", "ota-fedavg", "sca", "fedpbc"],
        "training.lr": [0.02, 0.05, 0.1],
        "training.local_steps": [1, 2],
    }
    return parse_sweep({"set": keys, "axes": axes}, "test.toml", name)


def test_a_cluster_whose_node_dies_gives_the_same_bytes(tmp_path: Path) -> None:
    """24 runs; the second node is killed twice and comes back; retried runs continue from their checkpoints."""
    from ray.cluster_utils import Cluster

    sweep = asked("whole", 600)
    assert conduct(Study(tmp_path / "whole", sweep), "cpu", quiet=True).status == 0
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    killed = 0

    def disturb() -> None:
        nonlocal node, killed
        for _ in range(2):
            time.sleep(6)
            if done.is_set():
                return
            cluster.remove_node(node, allow_graceful=False)  # kill -9
            killed += 1
            time.sleep(1)
            node = cluster.add_node(num_cpus=1)

    done = threading.Event()
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        outcome = conduct(
            Study(tmp_path / "cluster", sweep), "cpu", Executor("ray", address=cluster.address), quiet=True
        )
    finally:
        done.set()
        thread.join()
        cluster.shutdown()
    assert killed >= 1
    assert outcome.status == 0, outcome.errors
    assert contents(tmp_path / "cluster") == contents(tmp_path / "whole")
    assert rows(tmp_path / "cluster") == rows(tmp_path / "whole")


def test_a_node_that_does_not_see_the_folder_sends_the_files_back(tmp_path: Path) -> None:
    class News:
        class tell:
            @staticmethod
            def remote(label: str, rounds: int) -> None:
                pass

    config = load_config("stationary", SMALL)
    sight = (str(tmp_path / "elsewhere"), "token")
    job = {"device": "cpu", "threads": 1, "plugins": []}
    report = _task(job, config.to_toml(), str(tmp_path / "never"), sight, "label", News())
    assert report["done"] == "complete"
    assert {"config.toml", "metrics.csv", "summary.json", "model.safetensors"} <= set(report["files"])
    assert not (tmp_path / "never").exists()


def test_no_cluster_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Ray cluster answers"):
        conduct(Study(tmp_path / "s", asked("s", 5)), "cpu", Executor("ray", address="127.0.0.1:1"), quiet=True)
    with pytest.raises(ConfigError, match="choose from local, ray"):
        Executor("slurm")
