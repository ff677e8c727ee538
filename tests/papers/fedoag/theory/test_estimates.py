"""Constants of the bounds, where they are known."""

import numpy as np
import pytest
import torch

from otafl.papers.fedoag.theory.estimates import constants
from tests.conftest import make_config, make_quadratic, simulate


def test_quadratics_have_known_constants() -> None:
    """½‖x − c_i‖²: L = 1, σ² = 0, ζ² = mean ‖c_i − c̄‖², G² = max ‖x − c_i‖², F(x⁰) the mean loss."""
    centers = [[0.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, -1.0, 0.0], [1.0, 1.0, 1.0]]
    sim = simulate(make_quadratic("fedoag", {"data.centers": centers}))
    found = constants(sim, [sim.problem.initial[0]])
    c = np.array(centers)
    x = np.full(3, 0.5)
    assert found["smoothness"].value == pytest.approx(1.0)
    assert found["gradient_var"].value == pytest.approx(0.0, abs=1e-20)
    assert found["dissimilarity"].value == pytest.approx(((c - c.mean(0)) ** 2).sum(1).mean())
    assert found["gradient_bound"].value == pytest.approx(((x - c) ** 2).sum(1).max())
    assert found["initial_gap"].value == pytest.approx(0.5 * ((x - c) ** 2).sum(1).mean())
    assert "too small" in found["smoothness"].how


def test_softmax_regression_against_dense_algebra() -> None:
    """The largest Hessian eigenvalue and the variance of a mini-batch's gradient, from all examples at once."""
    keys = {"model.name": "softmax", "data.train_images": 60, "cell.devices": 2, "experiment.seeds": [0]}
    config = make_config("fedoag").replace(keys)
    sim = simulate(config)
    point = sim.problem.initial[0]
    found = constants(sim, [point])
    objective = sim.objective
    largest, variances = 0.0, []
    for share in sim.shares[0]:
        chosen = torch.as_tensor(share)
        features, targets = objective.train.features[chosen], objective.train.targets[chosen]

        def loss(flat: torch.Tensor, f: torch.Tensor = features, t: torch.Tensor = targets) -> torch.Tensor:
            return objective.loss(objective.unflatten(flat), f, t)

        hessian = torch.func.jacrev(torch.func.grad(loss))(point)
        largest = max(largest, float(torch.linalg.eigvalsh(hessian).abs().max()))
        each = torch.stack(
            [torch.func.grad(loss)(point, f[None], t[None]) for f, t in zip(features, targets, strict=True)]
        )
        variances.append(float((each - each.mean(0)).square().sum(1).mean()) / config.training.batch_size)
    assert found["smoothness"].value == pytest.approx(largest, rel=1e-3)
    assert found["gradient_var"].value == pytest.approx(max(variances), rel=0.9)  # eight draws
    assert found["gradient_var"].value > 0
