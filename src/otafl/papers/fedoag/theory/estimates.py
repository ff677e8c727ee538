"""The constants that the bounds need, estimated from a model and its data at some points.

The assumptions ask for suprema over all models; an estimate at points is a lower bound on them, and each says how it
came about. The first seed of a simulation is looked at.

Knows: a simulation's objective, data and devices.
Does not know: the bounds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from otafl.simulation.build import Simulation

POWER_ITERATIONS = 40
HESSIAN_IMAGES = 256  # of a device
HESSIAN_DEVICES = 5  # those with the largest gradients
BATCHES = 8  # rounds whose first mini-batches measure the gradient's variance


class Measured(NamedTuple):
    """An estimate, and how it was made."""

    value: float
    how: str


def constants(sim: Simulation, points: Sequence[Tensor]) -> dict[str, Measured]:
    """L, σ², ζ², β², G² and F(x⁰) − F* at models [P]; the first point is x⁰."""
    count = f"{len(points)} point{'s' if len(points) > 1 else ''}"
    devices = [_device_gradients(sim, point) for point in points]
    means = [gradients.mean(0) for gradients in devices]
    spreads = [float((g - mean).square().sum(1).mean()) for g, mean in zip(devices, means, strict=True)]
    largest = max(float(gradients.square().sum(1).max()) for gradients in devices)
    gap = float(sum(_loss(sim, points[0], i) for i in range(len(sim.shares[0]))) / len(sim.shares[0]))
    return {
        "smoothness": Measured(
            max(_curvature(sim, point, gradients) for point, gradients in zip(points, devices, strict=True)),
            f"largest |eigenvalue| of devices' Hessians by {POWER_ITERATIONS} power iterations, {count}: too small",
        ),
        "gradient_var": Measured(
            max(_variance(sim, point, gradients) for point, gradients in zip(points, devices, strict=True)),
            f"largest device's mean over {BATCHES} mini-batches, {count}",
        ),
        "dissimilarity": Measured(max(spreads), f"largest spread of devices' gradients with β = 0, {count}: too small"),
        "dissimilarity_slope": Measured(0.0, "taken as 0; ζ² has it all"),
        "gradient_bound": Measured(largest, f"largest device's ‖∇F_i‖², {count}: too small"),
        "initial_gap": Measured(gap, "F(x⁰) with F* ≥ 0: too large by F*"),
    }


def _images(sim: Simulation, i: int) -> tuple[Tensor, Tensor]:
    chosen = torch.as_tensor(sim.shares[0][i], device=sim.device)
    return sim.objective.train.features[chosen], sim.objective.train.targets[chosen]


def _gradient(sim: Simulation, point: Tensor, features: Tensor, targets: Tensor) -> Tensor:
    objective = sim.objective
    gradient: Tensor = grad(lambda flat: objective.loss(objective.unflatten(flat), features, targets))(point)
    return gradient


def _device_gradients(sim: Simulation, point: Tensor) -> Tensor:
    """∇F_i of every device, [M, P]."""
    return torch.stack([_gradient(sim, point, *_images(sim, i)) for i in range(len(sim.shares[0]))])


def _loss(sim: Simulation, point: Tensor, i: int) -> float:
    with torch.no_grad():
        return float(sim.objective.loss(sim.objective.unflatten(point), *_images(sim, i)))


def _curvature(sim: Simulation, point: Tensor, gradients: Tensor) -> float:
    """Largest |eigenvalue| of some devices' Hessians."""
    busiest = gradients.square().sum(1).topk(min(HESSIAN_DEVICES, len(gradients))).indices.tolist()
    largest = 0.0
    for i in busiest:
        features, targets = (part[:HESSIAN_IMAGES] for part in _images(sim, i))

        def along(flat: Tensor, vector: Tensor, features: Tensor = features, targets: Tensor = targets) -> Tensor:
            return (_gradient(sim, flat, features, targets) * vector).sum()

        start = gradients[i] if float(gradients[i].norm()) > 0 else torch.ones_like(point)
        vector = start / start.norm()
        value = 0.0
        for _ in range(POWER_ITERATIONS):
            product: Tensor = grad(along)(point, vector)  # Hessian times vector
            value = float(product.norm())
            if value == 0:
                break
            vector = product / value
        largest = max(largest, value)
    return largest


def _variance(sim: Simulation, point: Tensor, gradients: Tensor) -> float:
    """E‖g − ∇F_i‖² of mini-batches, of the device where it is largest."""
    totals = torch.zeros(len(gradients), dtype=torch.float64)
    rounds = min(BATCHES, sim.config.experiment.rounds)
    for r in range(rounds):
        images = sim.sampler.at(r)[0, :, 0]  # the first batch of every device
        for i, chosen in enumerate(images):
            features, targets = sim.objective.train.features[chosen], sim.objective.train.targets[chosen]
            totals[i] += float((_gradient(sim, point, features, targets) - gradients[i]).square().sum())
    return float(totals.max()) / rounds
