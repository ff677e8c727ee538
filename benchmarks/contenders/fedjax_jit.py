"""FedJAX with its jit backend."""

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from common import DEVICES, STEPS, Workload

work = Workload()
features = np.array(work.features)
server = [jnp.asarray(layer) for layer in work.layers(work.start)]


def loss(params, batch):
    """Mean cross-entropy."""
    hidden = jax.nn.relu(batch["x"] @ params[0].T + params[1])
    scores = jax.nn.log_softmax(hidden @ params[2].T + params[3])
    return -jnp.take_along_axis(scores, batch["y"][:, None], axis=1).mean()


def client_step(state, batch):
    """One step of SGD."""
    slopes = jax.grad(loss)(state["params"], batch)
    params = [p - state["lr"] * g for p, g in zip(state["params"], slopes, strict=True)]
    return {"params": params, "lr": state["lr"]}


def client_final(shared, state):
    """The device's change."""
    return [end - start for start, end in zip(shared["params"], state["params"], strict=True)]


with fedjax.for_each_client_backend("jit"):
    train = fedjax.for_each_client(lambda shared, _: dict(shared), client_step, client_final)


def batches(t, i):
    """The steps' batches of a device."""
    rows = work.batches[t, i]
    return [
        {"x": features[rows[k % len(rows)]], "y": work.targets[rows[k % len(rows)]].astype(np.int32)}
        for k in range(STEPS)
    ]


for t in range(work.rounds):
    work.mark()
    shared = {"params": server, "lr": jnp.float32(work.lr[t])}
    total = [jnp.zeros_like(layer) for layer in server]
    for _, change in train(shared, [(i, batches(t, i), 0) for i in range(DEVICES)]):
        total = [a + b for a, b in zip(total, change, strict=True)]
    server = jax.block_until_ready([a + b / DEVICES for a, b in zip(server, total, strict=True)])
work.mark()
work.report([np.asarray(layer) for layer in server])
