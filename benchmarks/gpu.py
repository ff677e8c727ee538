"""How fast rounds are on a CUDA GPU, against a plain PyTorch loop on the same GPU and against the card's ceilings.

    python benchmarks/gpu.py [--out results/gpu.csv] [--only methods|others|values|paper|devices]

Every device is trained (`skip_unheard = false`), models are evaluated every 10 rounds. A run's time is from its
first round to its last row; building its world ("set-up") and compiling kernels ("first run") are stated apart.
"""

import argparse
import csv
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import otafl
from otafl import registry
from otafl.simulation.build import Simulation
from otafl.simulation.run import Turn, run, run_in_turns

GAMMAS = (1e-10, 3e-10, 5e-10, 8e-10, 1e-9, 1.5e-9, 2e-9, 3e-9, 5e-9)
MAIN = ("fedoag", "fedavg", "ota-fedavg")
OTHERS = sorted(set(registry.BUILTIN["algorithms"]) - set(MAIN))
ROUND_FLOP = 39.1e9  # of pre-activation-space training, one seed and round of the paper's workload
MODEL_BYTES = 814_090 * 4


class Table:
    """Rows that are printed as they come and written as CSV."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []

    def add(self, what: str, value: float, unit: str, note: str = "") -> None:
        """One measurement."""
        print(f"{what:<58} {value:>10.4g} {unit:<12} {note}", flush=True)
        self.rows.append((what, f"{value:.6g}", unit, note))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("what", "value", "unit", "note"), *self.rows])


def seconds(work: Any, repeats: int = 10) -> float:
    """Time of one call, the GPU's work included."""
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def ceilings(table: Table) -> dict[str, float]:
    """Measured rates of matrix products and of copying."""
    a, b = (torch.randn(8192, 8192, device="cuda") for _ in range(2))
    rates = {}
    for name in ("float32", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        rates[name] = 2 * 8192**3 / seconds(lambda: a @ b)
        table.add(f"ceiling: {name} product of 8192", rates[name] / 1e12, "TFLOP/s")
    torch.backends.cuda.matmul.allow_tf32 = False
    x = torch.empty(2**28, device="cuda")
    y = torch.empty_like(x)
    rates["bytes"] = 2 * x.nbytes / seconds(lambda: y.copy_(x))
    table.add("ceiling: copy", rates["bytes"] / 1e9, "GB/s")
    return rates


def timed(algorithm: str, precision: str, rounds: int, **overrides: Any) -> tuple[float, float, otafl.Result]:
    """(set-up, rounds) in seconds, and the result."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    base = {"training.precision": precision, "training.skip_unheard": False, "experiment.rounds": rounds}
    if algorithm not in MAIN:
        base["training.lr"] = 1e-5  # with more some diverge, and a run that stops early would look fast
    config = otafl.load_config("stationary", {"algorithm.name": algorithm, **base, **keys})
    start = time.perf_counter()
    started: list[float] = []
    result = run(config, device="cuda", observer=lambda done, row: started.append(time.perf_counter()))
    torch.cuda.synchronize()
    return started[0] - start, time.perf_counter() - started[0], result


def failures(*results: otafl.Result) -> str:
    """A run whose seeds fail ends early: its time is not a speed."""
    count = sum(len(result.diverged) for result in results)
    return f"{count} seeds FAILED: not a speed" if count else ""


def plain_loop(seconds_for_rounds: int = 2) -> float:
    """Seconds per seed and round of the paper's workload in plain PyTorch on this GPU."""
    sim = Simulation(otafl.load_config("stationary", {"experiment.seeds": [0]}), torch.device("cuda"))
    features, targets = sim.objective.train
    start = sim.objective.unflatten(sim.problem.initial[0])
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = sim.sampler.at(0)[0]

    def one_round() -> None:
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for i in range(30):
            model.load_state_dict(start)
            for batch in batches[i]:
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(features[batch]), targets[batch]).backward()
                optimiser.step()
            for name, value in model.state_dict().items():
                total[name] += value / 30

    return seconds(one_round, seconds_for_rounds)


def methods(table: Table, rates: dict[str, float]) -> None:
    """800 rounds of five seeds, each method and precision."""
    plain = plain_loop()
    table.add("plain PyTorch loop, one seed", plain * 1e3, "ms/round")
    for precision in ("tf32", "float32"):
        floor = 5 * max(ROUND_FLOP / rates[precision], 3 * 30 * MODEL_BYTES / rates["bytes"])
        table.add(f"floor of fedoag, {precision}, 800 rounds x 5 seeds", 800 * floor, "s")
        for algorithm in MAIN:
            first = sum(timed(algorithm, precision, 20)[:2])
            table.add(f"{algorithm}, {precision}: first run (compilation), 20 rounds", first, "s")
            torch.cuda.reset_peak_memory_stats()
            setup, spent, result = timed(algorithm, precision, 800)
            accuracy = 100 * float(result.metrics["test_accuracy"][:, -5:].mean())
            memory = torch.cuda.max_memory_allocated() / 2**30
            table.add(f"{algorithm}, {precision}, 800 rounds x 5 seeds", spent, "s", f"accuracy {accuracy:.2f} %")
            table.add(f"{algorithm}, {precision}: set-up", setup, "s", f"peak memory {memory:.2f} GiB")
            again = timed(algorithm, precision, 800)[1]
            table.add(f"{algorithm}, {precision}: batches already drawn", again, "s")
            table.add(f"{algorithm}, {precision}: fraction of the floor", 800 * floor / again, "")
            table.add(f"{algorithm}, {precision}: ratio to the plain loop", plain * 4000 / again, "x")


def others(table: Table) -> None:
    """Every other method, and how often FedOAG's time it takes; fewer rounds, since none depends on their number."""
    timed("fedoag", "tf32", 20)
    _, ours, _ = timed("fedoag", "tf32", 200)
    for algorithm in OTHERS:
        timed(algorithm, "tf32", 20)
        _, spent, result = timed(algorithm, "tf32", 200)
        note = failures(result) or f"{spent / ours:.2f} x fedoag"
        table.add(f"{algorithm}, tf32, 200 rounds x 5 seeds", spent, "s", note)


def several_values(table: Table) -> None:
    """Seven values of γ, one after the other and in turns, which is what `otafl sweep --together 7` does."""
    timed("fedoag", "tf32", 20)
    base = {"training.precision": "tf32", "training.skip_unheard": False}
    configs = [otafl.load_config("stationary", {**base, "algorithm.gamma": gamma}) for gamma in GAMMAS[:7]]
    spent = []
    for together in (1, 2, 4, 7):
        with tempfile.TemporaryDirectory() as folder:
            turns = [Turn(config, Path(folder) / str(i)) for i, config in enumerate(configs)]
            start = time.perf_counter()
            for i in range(0, len(turns), together):
                run_in_turns(turns[i : i + together], "cuda")
            torch.cuda.synchronize()
            spent.append(time.perf_counter() - start)
        note = f"{spent[-1] / spent[0]:.2f} of one after the other" if together > 1 else ""
        table.add(f"seven values of gamma, {together} at a time, set-up and files included", spent[-1], "s", note)


def paper_set(table: Table) -> None:
    """18 cells of figure 2 and 9 values of gamma."""
    names = ["fedoag", "fedavg", "sca", "bb-interior", "bb-alternative", "vanilla"]
    start = time.perf_counter()
    for name in names:
        timed(name, "tf32", 20)
    table.add("paper's set: start-up and compilation, six runs of 20 rounds", time.perf_counter() - start, "s")
    start = time.perf_counter()
    runs = []
    for regime in ("stationary", "nonstationary", "mixed"):
        mobility = otafl.load_config(regime).to_dict()["mobility"]
        keys = {f"mobility__{key}": value for key, value in mobility.items()}
        for name in names:
            runs.append(timed(name, "tf32", 800, **keys))
    runs += [timed("fedoag", "tf32", 800, algorithm__gamma=gamma) for gamma in GAMMAS]
    spent = time.perf_counter() - start
    note = f"of which set-up {sum(run[0] for run in runs):.1f} s; {failures(*(run[2] for run in runs))}"
    table.add("paper's set: 27 runs of 800 rounds x 5 seeds, tf32", spent, "s", note)


def many_devices(table: Table, rates: dict[str, float], devices: int = 10_000, rounds: int = 6) -> None:
    """FedOAG with the paper's network and very many devices, one seed."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    keys: dict[str, Any] = {
        "experiment__seeds": [0],
        "experiment__eval_every": rounds,
        "cell__devices": devices,
        "data__name": "synthetic",
        "data__features": 784,
        "data__train_images": 40 * devices,
    }
    marks: list[float] = []
    config = otafl.load_config(
        "stationary",
        {"training.precision": "tf32", "training.skip_unheard": False, "experiment.rounds": rounds}
        | {key.replace("__", "."): value for key, value in keys.items()},
    )

    def mark(done: int, row: Any) -> None:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    run(config, device="cuda", observer=mark)
    size = devices * MODEL_BYTES
    data = 40 * devices * 785 * 4
    peak = torch.cuda.max_memory_allocated() - before
    floor = devices / 30 * max(ROUND_FLOP / rates["tf32"], 3 * 30 * MODEL_BYTES / rates["bytes"])
    spent = min(b - a for a, b in pairwise(marks[3:]))  # graphs are recorded by then
    table.add(f"fedoag, {devices} devices, tf32", spent, "s/round", f"floor {floor:.3f}")
    table.add(f"fedoag, {devices} devices: device models", size / 1e9, "GB")
    table.add(f"fedoag, {devices} devices: peak memory", peak / 1e9, "GB", f"of which data {data / 1e9:.2f}")
    table.add(f"fedoag, {devices} devices: peak over device models", peak / size, "x")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu.csv"))
    parser.add_argument("--only", choices=("methods", "others", "values", "paper", "devices"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py: torch sees no CUDA device here; the CPU's are in benchmarks/compare.py")
    table = Table(arguments.out)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    rates = ceilings(table)
    if arguments.only in (None, "methods"):
        methods(table, rates)
    if arguments.only in (None, "others"):
        others(table)
    if arguments.only in (None, "values"):
        several_values(table)
    if arguments.only in (None, "devices"):
        many_devices(table, rates)
    if arguments.only in (None, "paper"):
        paper_set(table)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    try:
        main()
    except otafl.OtaflError as error:  # no data, say
        raise SystemExit(f"benchmarks/gpu.py: {error}") from None
