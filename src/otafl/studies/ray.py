"""Carries out runs on a Ray cluster: one task per run, retried when its node dies.

If a node sees the study's folder (shared storage, or the same machine), the run directory is there, and a retried run
continues from its last checkpoint. If not, the run is made in a temporary folder of the node, its files come back with
the result, and a retry begins anew.

Knows: studies, Ray.
Does not know: what the runs are about.
"""

import contextlib
import logging
import os
import socket
import tempfile
import uuid
from pathlib import Path
from typing import Any

from otafl.disk import explained, put
from otafl.errors import ConfigError, OtaflError
from otafl.registry import plugin_files
from otafl.signals import caught_signals
from otafl.studies.local import Board, Stopped
from otafl.studies.study import Study
from otafl.studies.sweep import Case

RETRIES = 3
POLL_S = 0.5
RETURNED = ("config.toml", "metrics.csv", "devices.csv", "summary.json", "model.safetensors", "log.txt")
TOKEN = ".ray-token"


def carry_out(
    study: Study, cases: list[Case], board: Board, address: str | None, device: str, cpus: float, gpus: float
) -> None:
    """Run the cases on a cluster; errors are noted in `board.errors`, and other runs go on."""
    try:
        import ray
    except ImportError as error:
        raise OtaflError("--executor ray needs Ray: pip install 'otafl[ray]'") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    _check_address(address)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address is None else None,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--address {address}: no Ray cluster answers there ({str(error).splitlines()[0]})"
        ) from error
    try:
        _check_resources(ray.nodes(), cpus, gpus)  # type: ignore[no-untyped-call]
    except OtaflError:
        ray.shutdown()
        raise
    token = f"{uuid.uuid4()}"
    (study.folder / TOKEN).write_text(token)
    news: Any = ray.remote(num_cpus=0)(_News).remote()
    task: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(_task)
    waiting: dict[Any, Case] = {}
    try:
        with caught_signals() as stop:
            for case in cases:
                text = case.config.to_toml()
                place = str(study.place(case).resolve())
                sight = (str((study.folder / TOKEN).resolve()), token)
                job = {"device": device, "threads": max(1, int(cpus)), "plugins": plugin_files()}
                waiting[task.remote(job, text, place, sight, case.label, news)] = case
            while waiting and not stop:
                done, _ = ray.wait(list(waiting), timeout=POLL_S)
                for reference in done:
                    _settle(ray, reference, waiting.pop(reference), study, board)
                with contextlib.suppress(ray.exceptions.RayError):
                    progress = ray.get(news.read.remote(), timeout=5)
                    for case in waiting.values():
                        if case.label in progress:
                            board.advance(case, progress[case.label])
            if stop:
                for reference in waiting:
                    ray.cancel(reference)  # the worker writes a checkpoint first
                ray.wait(list(waiting), num_returns=len(waiting), timeout=30)
                raise Stopped(stop[0])
    finally:
        (study.folder / TOKEN).unlink(missing_ok=True)
        ray.shutdown()


def _check_resources(nodes: list[dict[str, Any]], cpus: float, gpus: float) -> None:
    """Refuse resources that no node has, for which Ray would wait for ever."""
    for resource, wanted, option in (("CPU", cpus, "--cpus"), ("GPU", gpus, "--gpus")):
        most = max((node["Resources"].get(resource, 0.0) for node in nodes if node["Alive"]), default=0.0)
        if wanted > most:
            raise ConfigError(f"{option} {wanted:g}: no node of the cluster has more than {most:g} {resource}s")
    if not any(
        node["Alive"] and node["Resources"].get("CPU", 0) >= cpus and node["Resources"].get("GPU", 0) >= gpus
        for node in nodes
    ):
        raise ConfigError(f"--cpus {cpus:g} --gpus {gpus:g}: no single node of the cluster has both")


def _check_address(address: str | None) -> None:
    """Refuse an address where nobody answers, which Ray would try for minutes."""
    if address is None or address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"--address {address}: write host:port, ray://host:port or auto")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(f"--address {address}: no Ray cluster answers there ({error})") from error


def _settle(ray: Any, reference: Any, case: Case, study: Study, board: Board) -> None:
    try:
        report = ray.get(reference)
    except ray.exceptions.RayError as error:
        report = {"error": f"its task failed: {str(error).strip().splitlines()[0]}"}
    place = study.place(case)
    try:
        with explained(place):
            for name, content in report.get("files", {}).items():  # from a node that does not see the folder
                place.mkdir(parents=True, exist_ok=True)
                put(place / name, content)
    except OtaflError as error:
        report = {"error": str(error)}
    board.settle(case, report)


class _News:
    """An actor that collects the progress of all runs."""

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}

    def tell(self, label: str, rounds: int) -> None:
        self._rounds[label] = rounds

    def read(self) -> dict[str, int]:
        return self._rounds


def _task(
    job: dict[str, Any], config: str, place: str, sight: tuple[str, str], label: str, news: Any
) -> dict[str, Any]:
    """Carry out one run on a node."""
    from otafl.studies.worker import carry_out as run_one

    report: dict[str, Any] = {}

    def tell(message: dict[str, Any]) -> None:
        if "progress" in message:
            news.tell.remote(label, message["progress"])
        else:
            report.update(message)

    path, token = Path(sight[0]), sight[1]
    shared = path.exists() and path.read_text() == token
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(place) if shared else Path(scratch) / "run"
        run_one({**job, "runs": {label: {"config": config, "out": str(out)}}}, tell)
        if not shared and "done" in report:
            report["files"] = {name: (out / name).read_bytes() for name in RETURNED if (out / name).exists()}
    return report
