import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from otafl.errors import ConfigError
from otafl.random import Streams
from otafl.world.partition import Partition


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["dirichlet", "iid", "shards"]),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    devices=st.integers(1, 40),
    images=st.integers(40, 400),
    classes=st.integers(1, 12),
    batch=st.integers(1, 64),
    seed=st.integers(0, 1000),
)
def test_every_image_goes_to_exactly_one_device_and_nobody_is_empty(
    kind: str, alpha: float, devices: int, images: int, classes: int, batch: int, seed: int
) -> None:
    targets = np.random.default_rng(seed).integers(classes, size=images)
    partition = Partition(partition=kind, dirichlet_alpha=alpha)  # type: ignore[arg-type]
    parts = partition.split(targets, devices, batch, Streams(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(images))
    assert min(map(len, parts)) >= min(batch, images // devices) >= 1


def test_dirichlet_shares_follow_the_device_preferences() -> None:
    """A class's images are shared in proportion to the devices' Dirichlet draws, up to rounding."""
    targets = np.repeat(np.arange(10), 5000)
    parts = Partition(dirichlet_alpha=1.0).split(targets, 30, 1, Streams(2))
    preference = Streams(2).at("partition").dirichlet(np.full(10, 1.0), size=30)
    counts = np.array([np.bincount(targets[part], minlength=10) for part in parts])
    assert np.abs(counts - 5000 * preference / preference.sum(axis=0)).max() <= 1.0


def test_small_alpha_is_more_unequal() -> None:
    targets = np.repeat(np.arange(10), 600)

    def largest_share(alpha: float) -> float:
        parts = Partition(dirichlet_alpha=alpha).split(targets, 20, 1, Streams(0))
        return float(np.mean([np.bincount(targets[part]).max() / len(part) for part in parts]))

    assert largest_share(0.1) > 0.6 > 0.3 > largest_share(100.0)


def test_iid_parts_have_equal_sizes_and_all_classes() -> None:
    targets = np.repeat(np.arange(10), 600)
    parts = Partition(partition="iid").split(targets, 20, 32, Streams(0))
    assert {len(part) for part in parts} == {300}
    assert all(len(np.unique(targets[part])) == 10 for part in parts)


def test_shards_give_few_classes() -> None:
    targets = np.repeat(np.arange(10), 600)
    parts = Partition(partition="shards", shards_per_device=2).split(targets, 20, 32, Streams(0))
    assert all(len(np.unique(targets[part])) <= 4 for part in parts)


def test_more_devices_than_images_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cell\.devices = 30.*only 20 training images"):
        Partition().split(np.zeros(20, dtype=np.int64), 30, 32, Streams(0))
