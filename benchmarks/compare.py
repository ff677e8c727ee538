"""How fast a round is on this machine's CPU, against a plain PyTorch loop and other libraries, in one run.

    make bench                                            or
    python benchmarks/compare.py [--repeats 5] [--rounds 5] [--peers fedjax flower pfl] [--out results/cpu.csv]

The workload is the paper's: 30 devices, 10 steps, batches of 32 on the 784-1024-10 network and MNIST, one seed,
training and aggregation without evaluation. Everybody gets the same data, partition, first model and batches; the
models they end with are compared. Every contender is a process of its own; contenders take turns, so that a slow
minute of the machine hits all of them. Libraries that are asked for get a virtual environment each in
benchmarks/.envs, made here. Then the time of a round over devices, seeds, width and rounds, with fitted exponents.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import otafl
from otafl.core.metrics import Ledger
from otafl.simulation.build import Simulation
from otafl.simulation.graph import Rounds

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE / ".envs"
PEERS = {  # what a peer's environment needs, and its script
    "fedjax": (["fedjax==0.0.17", "jax"], "fedjax_jit"),
    "flower": (["flwr==1.41.0", "ray==2.55.1", "torch"], "flower"),
    "pfl": (["pfl==0.6.0", "torch"], "pfl_research"),
}
GFLOP = {  # of a round in pre-activation space, K only where it is needed
    ("ours", "per_step"): 37.1,
    ("ours", "per_round"): 4.35,
    ("ours_flatten", "per_step"): 37.1,
    ("ours_fedoag", "per_step"): 33.4,  # in three groups of steps
}
LABELS = {
    "ours": "otafl, shared start",
    "ours_fedoag": "otafl, FedOAG, own models",
    "ours_flatten": "otafl, a module with Flatten",
    "plain": "plain PyTorch loop",
    "fedjax_jit": "FedJAX, jit",
    "flower": "Flower simulation",
    "pfl_research": "pfl-research",
}


def write_workload(folder: Path, rounds: int, batches: str) -> Simulation:
    """The paper's workload as files that any library can read."""
    keys = {"algorithm.name": "fedavg", "experiment.seeds": [0], "training.batches": batches}
    sim = Simulation(otafl.load_config("stationary", keys), torch.device("cpu"))
    np.save(folder / "features.npy", sim.objective.train.features.numpy())
    np.save(folder / "targets.npy", sim.objective.train.targets.numpy())
    np.save(folder / "batches.npy", np.stack([sim.sampler.at(t)[0].numpy() for t in range(rounds)]))
    np.save(folder / "lr.npy", np.array([sim.config.training.lr_at(t) for t in range(rounds)]))
    np.save(folder / "start.npy", sim.problem.initial[0].numpy())
    return sim


def environment(peer: str) -> Path | None:
    """The Python of a peer's environment, made if it is not there; None if it cannot be had."""
    folder = ENVIRONMENTS / peer
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    print(f"making an environment for {peer} in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(HERE.parent / "constraints.txt")]
    done = subprocess.run([*map(str, command), *constraints, *PEERS[peer][0]], check=False, capture_output=True)
    if done.returncode:
        print(f"left out: {peer} cannot be installed here: {done.stderr.decode().strip().splitlines()[-1]}")
        return None
    (folder / "ready").touch()
    return python


class Memory(threading.Thread):
    """Largest proportional set size of a process and its children."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.alive = pid, 0.0, True

    def run(self) -> None:
        """Look ten times a second."""
        while self.alive:
            self.peak = max(self.peak, sum(_pss(pid) for pid in _session(self.pid)))
            time.sleep(0.1)


def _session(leader: int) -> list[int]:
    """The processes of a session, and those that descend from them."""
    parents, sessions = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)], sessions[int(entry.name)] = int(fields[1]), int(fields[3])
    wanted = {pid for pid, session in sessions.items() if session == leader}
    while more := {pid for pid, parent in parents.items() if parent in wanted} - wanted:
        wanted |= more
    return list(wanted)


def _pss(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e6 for line in text.splitlines() if line.startswith("Pss:")), 0.0)


def contend(python: Path, script: str, folder: Path, rounds: int, watch: bool) -> dict[str, Any]:
    """One run of a contender in a process of its own; to watch its memory takes time from it."""
    file = HERE / "contenders" / f"{'ours' if script.startswith('ours') else script}.py"
    command = [str(python), str(file), str(folder), str(rounds), script]
    with (folder / f"{script}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder)
        memory = Memory(process.pid)
        if watch:
            memory.start()
        code = process.wait()
        if watch:
            memory.alive = False
            memory.join()
    if code or not (folder / f"{script}.json").exists():
        raise RuntimeError(f"{script} ended with status {code}: {(folder / f'{script}.log').read_text()[-400:]}")
    found: dict[str, Any] = json.loads((folder / f"{script}.json").read_text())
    return found | {"memory_gb": memory.peak, "seconds": found["seconds"][1:]}  # the first round warms up


def rate() -> float:
    """This machine's matrix product rate now, GFLOP/s."""
    a = torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best / 1e9


def accuracy(sim: Simulation, flat: np.ndarray) -> float:
    """Test accuracy of a model, percent."""
    scores = sim.objective.evaluate(torch.from_numpy(flat)[None].float(), sim.test)
    return 100 * float(scores.accuracy[0])


def compare(batches: str, scripts: dict[str, Path], repeats: int, rounds: int) -> list[dict[str, Any]]:
    """Contenders by turns; medians over all rounds of all repeats."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sim = write_workload(folder, rounds, batches)
        runs: dict[str, list[dict[str, Any]]] = {script: [] for script in scripts}
        rates = []
        memory: dict[str, float] = {}
        for repeat in range(repeats + 1):
            rates.append(rate())
            for script, python in list(scripts.items()):
                try:
                    found = contend(python, script, folder, rounds, watch=repeat == 0)
                    if repeat == 0:  # watched, so not timed
                        memory[script] = found["memory_gb"]
                    else:
                        runs[script].append(found)
                except RuntimeError as error:
                    if python == Path(sys.executable):
                        raise
                    print(f"left out: {error}")
                    del scripts[script], runs[script]
            print(f"{batches}: repeat {repeat} of {repeats} done, {rates[-1]:.0f} GFLOP/s", flush=True)
        reference = np.load(folder / "plain.npy")
        start = np.load(folder / "start.npy")
        rows = []
        plain = statistics.median(s for run in runs["plain"] for s in run["seconds"])
        for script, timed in runs.items():
            seconds = statistics.median(s for run in timed for s in run["seconds"])
            flat = np.load(folder / f"{script}.npy")
            ours = script.startswith("ours")
            rows.append(
                {
                    "contender": LABELS[script],
                    "batches": batches,
                    "seconds_per_round": round(seconds, 4),
                    "times_as_fast_as_plain": round(plain / seconds, 2),
                    "peak_memory_gb": round(memory[script], 2),
                    "fraction_of_floor": round(GFLOP[script, batches] / statistics.median(rates) / seconds, 2)
                    if ours
                    else "",
                    "outside_training": round(statistics.median(r["outside_training"] for r in timed), 3)
                    if script == "ours_fedoag"
                    else "",
                    "accuracy_percent": round(accuracy(sim, flat), 2),
                    "distance_to_plain": ""
                    if script == "ours_fedoag"
                    else f"{np.linalg.norm(flat - reference) / np.linalg.norm(reference - start):.1e}",
                    "repeats": len(timed),
                }
            )
        rows.append({"contender": "matrix products, GFLOP/s", "seconds_per_round": round(statistics.median(rates), 1)})
    return rows


def round_seconds(algorithm: str, overrides: dict[str, Any], rounds: int = 3) -> float:
    """Median time of a round of ours."""
    base = {"algorithm.name": algorithm, "experiment.seeds": [0], "training.skip_unheard": False}
    config = otafl.load_config("stationary", base | overrides)
    sim = Simulation(config, torch.device("cpu"))
    rounds_of = Rounds(sim, sim.init(), Ledger.empty(len(sim.seeds), config.cell.devices, sim.device))
    times = []
    for t in range(rounds + 1):
        start = time.perf_counter()
        rounds_of.advance(t)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _point(axis: str, value: float, seconds: float, exponent: float | None = None) -> dict[str, Any]:
    fitted = {} if exponent is None else {"exponent": round(exponent, 3)}
    return {"axis": axis, "value": value, "seconds_per_round": round(seconds, 4), **fitted}


def scaling() -> list[dict[str, Any]]:
    """Seconds per round of FedOAG over one thing at a time, and the exponent of a fitted power."""
    axes: dict[str, list[tuple[float, dict[str, Any]]]] = {
        "devices": [(m, {"cell.devices": m}) for m in (30, 60, 120, 240, 480)],
        "seeds": [(s, {"experiment.seeds": list(range(s))}) for s in (1, 2, 4, 8)],
        "hidden units": [(h, {"model.hidden": [h]}) for h in (256, 512, 1024, 2048, 4096)],
    }
    rows = []
    for axis, points in axes.items():
        seconds = [round_seconds("fedoag", overrides) for _, overrides in points]
        exponent = np.polyfit(np.log([x for x, _ in points]), np.log(seconds), 1)[0]
        for (x, _), spent in zip(points, seconds, strict=True):
            rows.append(_point(axis, x, spent, exponent))
        print(f"over {axis}: exponent {exponent:.3f}", flush=True)
    config = otafl.load_config("stationary", {"experiment.seeds": [0], "training.skip_unheard": False})
    sim = Simulation(config, torch.device("cpu"))
    rounds_of = Rounds(sim, sim.init(), Ledger.empty(1, 30, sim.device))
    marks = [time.perf_counter()]
    for t in range(80):
        rounds_of.advance(t)
        marks.append(time.perf_counter())
    points_of_time = (10, 20, 40, 80)
    total = [marks[r] - marks[0] for r in points_of_time]
    exponent = np.polyfit(np.log(points_of_time), np.log(total), 1)[0]
    for r, spent in zip(points_of_time, total, strict=True):
        rows.append(_point("rounds", r, spent / r, exponent))
    print(f"over rounds: exponent {exponent:.3f}", flush=True)
    return rows


def large_cell(devices: int = 1000) -> list[dict[str, Any]]:
    """FedOAG with many devices: seconds per round and peak memory, in a process of its own."""
    script = (
        "import json, resource, sys; sys.path.insert(0, sys.argv[1]); import compare;"
        f"s = compare.round_seconds('fedoag', {{'cell.devices': {devices}}}, 2);"
        "print(json.dumps([s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(HERE)], check=True, capture_output=True, text=True)
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    print(f"{devices} devices: {seconds:.2f} s per round, {memory:.2f} GB", flush=True)
    return [_point("large cell", devices, seconds) | {"memory_gb": round(memory, 2)}]


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {path}", flush=True)


def show(rows: list[dict[str, Any]]) -> None:
    """Rows as a table."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    widths = [max(len(name), *(len(str(row.get(name, ""))) for row in rows)) for name in columns]
    for line in [dict(zip(columns, columns, strict=True)), *rows]:
        print("  ".join(str(line.get(name, "")).ljust(width) for name, width in zip(columns, widths, strict=True)))


def main() -> None:
    """Measure everything that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="per repeat; the first warms up")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=sorted(PEERS))
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/cpu.csv"))
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.rounds < 2:
        parser.error("--repeats must be at least 1, and --rounds at least 2: the first round warms up")
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    own = Path(sys.executable)
    scripts = {"plain": own, "ours": own, "ours_fedoag": own, "ours_flatten": own}
    for peer in arguments.peers:
        python = environment(peer)
        if python is not None:
            scripts[PEERS[peer][1]] = python
    rows = compare("per_step", scripts, arguments.repeats, arguments.rounds)
    rows += compare("per_round", {"plain": own, "ours": own}, arguments.repeats, arguments.rounds)
    show(rows)
    save(arguments.out, rows)
    if not arguments.no_scaling:
        save(arguments.out.with_name("cpu-scaling.csv"), scaling() + large_cell())


if __name__ == "__main__":
    try:
        main()
    except otafl.OtaflError as error:  # no data, say
        raise SystemExit(f"benchmarks/compare.py: {error}") from None
