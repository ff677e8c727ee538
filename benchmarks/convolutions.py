"""How fast convolutional networks are trained, beside a plain loop and JAX on the same machine, in one run.

    python benchmarks/convolutions.py [--device cuda|cpu] [--seeds 5] [--precision tf32] [--devices 30] [--only resnet]

The workload is 30 devices × 10 steps × 32 images of 3 × 32 × 32 (random numbers: speed does not depend on them), with
pfl-research's network (without dropout) and ResNet-8. One number is the time of a round of error-free averaging per
seed: training, averaging, the new model. JAX has the same work, jitted, as a scan over steps in a vmap over devices.
Also stated: how far the fast engine's models are from those of `torch.func` after a round, and the floor, the
operations of all products over the machine's measured rate of a large product.
"""

import argparse
import copy
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import otafl
from otafl.core.metrics import Ledger
from otafl.simulation.graph import Rounds

NETS: dict[str, dict[str, Any]] = {
    "pfl-cnn": {"model.name": "pfl-cnn", "model.dropout": [0.0, 0.0]},
    "resnet-8": {"model.name": "resnet"},
    "conv 32-64": {"model.name": "cnn", "model.channels": [32, 64], "model.dense": [128]},
    "flatten-mlp": {},
}
IN_JAX = ("pfl-cnn", "resnet-8")


def dataset(shape: tuple[int, int, int]) -> otafl.Dataset:
    """Images of random numbers."""
    draw = np.random.default_rng(0)

    def split(count: int) -> otafl.Split:
        pixels = draw.standard_normal((count, int(np.prod(shape))), dtype=np.float32)
        return otafl.Split(pixels, draw.integers(10, size=count))

    return otafl.Dataset(split(5000), split(100), None, 10, shape)


def flatten_mlp() -> nn.Module:
    """The paper's network as many would write it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))


def simulation(net: str, options: argparse.Namespace, seeds: int, **keys: Any) -> otafl.Simulation:
    """All seeds of one network."""
    given = {key.replace("__", "."): value for key, value in keys.items()}
    base = {"experiment.seeds": list(range(seeds)), "experiment.rounds": 1000, "cell.devices": options.devices}
    base |= {"data.name": "synthetic", "algorithm.name": "fedavg", "training.precision": options.precision}
    base["training.lr"] = 0.01  # so that nothing diverges
    config = otafl.load_config("stationary", {**base, **NETS[net], **given})
    own = net == "flatten-mlp"
    images = dataset((1, 28, 28) if own else (3, 32, 32))
    return otafl.Simulation(config, torch.device(options.device), flatten_mlp() if own else None, dataset=images)


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(work: Callable[[], Any], repeats: int) -> float:
    """Median time of some calls, in seconds."""
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def ours(sim: otafl.Simulation, repeats: int) -> tuple[float, str]:
    """Seconds of a round of all seeds, and how rounds were done."""
    rounds = Rounds(sim, sim.init(), Ledger.empty(len(sim.seeds), sim.config.cell.devices, sim.device))
    t = iter(range(1000))
    for _ in range(4 if sim.device.type == "cuda" else 1):
        rounds.advance(next(t))
    return median(lambda: rounds.advance(next(t)), repeats), "a graph" if rounds.replayed else "one by one"


def plain(sim: otafl.Simulation, devices: int, repeats: int = 3) -> float:
    """Seconds of a round of one seed in a hand-written loop, from some of its devices."""
    features, targets = sim.objective.train
    batches, start = sim.sampler.at(0)[0], sim.problem.initial[0]
    model = copy.deepcopy(sim.objective._module)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def some_devices() -> None:
        for i in range(devices):
            torch.nn.utils.vector_to_parameters(start, model.parameters())
            for batch in batches[i]:
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(features[batch]), targets[batch]).backward()
                optimiser.step()

    some_devices()  # as ours has a round before
    return median(some_devices, repeats) * len(batches) / devices


def operations(sim: otafl.Simulation) -> float:
    """Floating-point operations of all products of a round of one seed."""
    total, first = 0.0, True
    module, images = sim.objective._module, sim.objective.train.features[:1]

    def count(part: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal total, first
        weight = part.weight
        assert isinstance(weight, torch.Tensor)
        per_value = weight[0].numel()
        passes = 2 if first else 3  # no gradient at the images
        total, first = total + 2.0 * passes * output.numel() * per_value, False

    parts = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    hooks = [part.register_forward_hook(count) for part in parts]
    module(images)
    for hook in hooks:
        hook.remove()
    return total * sim.sampler.at(0)[0].numel()


def rate(options: argparse.Namespace) -> float:
    """Measured rate of a large product, in operations per second."""
    size = 8192 if options.device == "cuda" else 2048
    a, b = (torch.randn(size, size, device=options.device) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = options.precision != "float32"
    found = 2 * size**3 / median(lambda: a @ b, 10)
    torch.backends.cuda.matmul.allow_tf32 = before
    return found


def in_jax(net: str, sim: otafl.Simulation, repeats: int) -> float:
    """Seconds of a round of one seed in JAX."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    def conv(x: Any, w: Any, stride: int = 1, padding: str = "VALID") -> Any:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "OIHW", "NHWC"))

    def norm(x: Any, scale: Any, offset: Any) -> Any:
        n, h, w, c = x.shape
        grouped = x.reshape(n, h * w, c // 8, 8)
        mean = grouped.mean((1, 3), keepdims=True)
        spread = ((grouped - mean) ** 2).mean((1, 3), keepdims=True)
        return ((grouped - mean) / jnp.sqrt(spread + 1e-5)).reshape(x.shape) * scale + offset

    def pfl(p: list[Any], x: Any) -> Any:
        x = jax.nn.relu(conv(x, p[0]) + p[1])
        x = jax.nn.relu(conv(x, p[2]) + p[3])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(x.reshape(len(x), -1) @ p[4].T + p[5])
        return x @ p[6].T + p[7]

    def resnet(p: list[Any], x: Any) -> Any:
        left = iter(p)

        def convolved(x: Any, stride: int, pad: str) -> Any:
            return conv(x, next(left), stride, pad)

        x = jax.nn.relu(norm(convolved(x, 1, "SAME"), next(left), next(left)))
        for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
            stride, edge = (2, ((1, 1), (1, 1))) if inputs != outputs else (1, "SAME")
            inner = jax.nn.relu(norm(convolved(x, stride, edge), next(left), next(left)))  # type: ignore[arg-type]
            inner = norm(convolved(inner, 1, "SAME"), next(left), next(left))
            short = convolved(x, stride, "VALID") if inputs != outputs else x
            x = jax.nn.relu(inner + short)
        return x.mean((1, 2)) @ next(left).T + next(left)

    forward = pfl if net == "pfl-cnn" else resnet
    params = [jnp.asarray(p.cpu().numpy()) for p in sim.objective.unflatten(sim.problem.initial[0]).values()]

    def loss(p: list[Any], x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(forward(p, x)), y[:, None], 1).mean()

    def device(p: list[Any], xs: Any, ys: Any) -> Any:
        def step(p: list[Any], batch: Any) -> Any:
            return [w - 0.1 * g for w, g in zip(p, jax.grad(loss)(p, *batch), strict=True)], None

        return jax.lax.scan(step, p, (xs, ys))[0]

    images = jnp.asarray(sim.objective.train.features.cpu().numpy().reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    labels = jnp.asarray(sim.objective.train.targets.cpu().numpy())
    chosen = jnp.asarray(sim.sampler.at(0)[0].cpu().numpy())

    @jax.jit
    def one_round(p: list[Any]) -> Any:
        ends = jax.vmap(device, (None, 0, 0))(p, images[chosen], labels[chosen])
        return [end.mean(0) for end in ends]

    jax.block_until_ready(one_round(params))
    return median(lambda: jax.block_until_ready(one_round(params)), repeats)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=5 if torch.cuda.is_available() else 1)
    parser.add_argument("--devices", type=int, default=30)
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--only", default="")
    parser.add_argument("--without", nargs="*", default=[], help="contenders: plain, jax, batched")
    parser.add_argument("--alone", choices=("ours", "plain"), help="only this one, and its peak memory")
    parser.add_argument("--repeats", type=int, default=7 if torch.cuda.is_available() else 3)
    options = parser.parse_args()
    if options.alone:
        sim = simulation(options.only, options, options.seeds)
        _ = ours(sim, 2) if options.alone == "ours" else plain(sim, options.devices)
        print(f"{options.only}, {options.alone}: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
        return
    large = rate(options)
    print(f"large product, {options.precision}: {large / 1e12:.4g} TFLOP/s")
    for net in NETS:
        if not net.startswith(options.only):
            continue
        sim = simulation(net, options, options.seeds)
        found, how = ours(sim, options.repeats)
        mine, floor = found / options.seeds, operations(sim) / large
        kind = sim.engine_name
        print(f"{net}: {kind}, {how}: {1e3 * mine:.4g} ms per round and seed; floor {1e3 * floor:.4g} ms, "
              f"{floor / mine:.0%} of it", flush=True)  # fmt: skip
        if "batched" not in options.without:
            other = simulation(net, options, options.seeds, training__engine="batched")
            ends = [s.round_at(0).train(s.problem.initial).end for s in (sim, other)]
            moved = (ends[1] - sim.problem.initial[:, None]).norm()
            print(f"  models after a round differ from torch.func's by {float((ends[0] - ends[1]).norm() / moved):.1e}")
            del ends
            slow = ours(other, 2)[0] / options.seeds
            print(f"  torch.func: {1e3 * slow:.4g} ms, {slow / mine:.2f} x", flush=True)
            del other
        if "plain" not in options.without:
            turns = []  # of both, so that a machine that slows down slows both
            for _ in range(options.repeats if options.device == "cpu" else 1):
                here = ours(sim, 1)[0] / options.seeds
                turns.append((here, plain(sim, 3 if options.device == "cuda" else options.devices, 1)))
            here, slow = np.median(turns, axis=0)
            print(
                f"  plain loop: {1e3 * slow:.4g} ms, {slow / here:.2f} x ours in turns, {1e3 * here:.4g} ms", flush=True
            )
        if "jax" not in options.without and net in IN_JAX:
            try:
                slow = in_jax(net, sim, options.repeats)
            except ImportError:
                print("  JAX is not here")
                continue
            print(f"  JAX, vmap: {1e3 * slow:.4g} ms, {slow / mine:.2f} x", flush=True)


if __name__ == "__main__":
    main()
