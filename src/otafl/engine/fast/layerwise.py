"""Local steps by `otafl.engine.fast.layers`: convolutional models on a GPU, with kernels of our own.

Knows: objectives, local work.
Does not know: how layers are computed.
"""

import torch
from torch import Tensor

from otafl.engine.fast import layers, maps
from otafl.engine.objective import Objective
from otafl.engine.training import ChunkEngine, LocalWork, Step

BUFFER_BYTES = 2**34  # of images of all layers, for the rows that are computed at once


def layer_engine(objective: Objective, batch: int) -> ChunkEngine | None:
    """An engine for this model on a GPU; None if one of its layers is not known, or if the kernels do not fit."""
    fits = maps.available(objective.train.features) and objective.classifies
    model = objective.read_layers() if fits else None
    if model is None or model.convolutions == 0:
        return None

    def steps(work: LocalWork, params: dict[str, Tensor]) -> Step:
        precision = "bf16" if objective.bf16 else "tf32" if objective.tf32 else "ieee"
        inner = layers.Steps(model, params, precision)

        def step(features: Tensor, targets: Tensor, keys: Tensor | None) -> None:
            inner.step(features, lambda scores: _slopes(scores, targets), work.lr, keys)

        return step

    most = BUFFER_BYTES
    if objective.device.type == "cuda":
        most = min(most, torch.cuda.get_device_properties(objective.device).total_memory // 4)
    return ChunkEngine(steps, chunk=max(1, most // (4 * batch * model.row_elements)))


def _slopes(scores: Tensor, targets: Tensor) -> Tensor:
    """Gradient of the mean cross entropy of every row's batch at its class scores [R, B, classes]."""
    slopes = scores.softmax(-1)
    slopes.scatter_add_(-1, targets[..., None], torch.full_like(slopes[..., :1], -1.0))
    return slopes.div_(scores.shape[1])
