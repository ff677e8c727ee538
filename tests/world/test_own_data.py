"""Data of the user's own, and CIFAR's files, written here in their formats."""

import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import otafl
from otafl.errors import ConfigError, DataError, OtaflError, PluginError, RunDirectoryError
from otafl.runs.identity import module_digest
from otafl.simulation.run import with_objects
from otafl.world import cifar, images
from otafl.world.own_data import ImageFolder, Table, dataset_of

PICTURE = np.random.default_rng(0).integers(256, size=(3, 6, 5), dtype=np.uint8)


def png(seed: int, size: tuple[int, int] = (6, 5)) -> bytes:
    """A picture of random colours, height × width, without loss."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(256, size=(*size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def tree(split: bool) -> dict[str, bytes]:
    """Names and contents: two classes with different numbers of pictures."""
    names = [f"{kind}/{k:02}.png" for kind, count in (("cat", 8), ("dog", 5)) for k in range(count)]
    files = {(f"train/{name}" if split else name): png(k) for k, name in enumerate(names)}
    if split:
        files |= {f"test/{kind}/00.png": png(100 + k) for k, kind in enumerate(("cat", "dog"))}
    return files


def written(folder: Path, form: str, files: dict[str, bytes], outer: str = "") -> Path:
    """The files as a folder, a tar or a zip."""
    if form == "folder":
        for name, content in files.items():
            place = folder / "pictures" / outer / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        return folder / "pictures"
    place = folder / f"pictures.{form}"
    if form == "zip":
        with zipfile.ZipFile(place, "w") as archive:
            for name, content in files.items():
                archive.writestr(f"{outer}{name}", content)
        return place
    with tarfile.open(place, "w:xz") as packed:
        for name, content in files.items():
            told = tarfile.TarInfo(f"{outer}{name}")
            told.size = len(content)
            packed.addfile(told, io.BytesIO(content))
    return place


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OTAFL_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.mark.parametrize("outer", ["", "root/inner/"])
@pytest.mark.parametrize("form", ["folder", "tar.xz", "zip"])
def test_folders_and_archives_give_the_same_images(home: Path, form: str, outer: str) -> None:
    place = written(home, form, tree(split=True), outer)
    found = ImageFolder(str(place), validation_share=0.0).load(4)
    assert found.image_shape == (3, 6, 5)
    assert found.num_classes == 2
    assert found.train.targets.tolist() == [0] * 8 + [1] * 5
    assert found.test.targets.tolist() == [0, 1]
    raw = np.stack([images._decode(str(place), None, 3).train.pixels])[0]
    mean, std = raw.mean((0, 2, 3)) / 255, raw.std((0, 2, 3)) / 255
    expected = ((raw / 255 - mean[:, None, None]) / std[:, None, None]).reshape(13, -1)
    assert np.allclose(found.train.features, expected, atol=1e-5)


def test_decoded_images_are_found_again_and_changed_files_are_decoded_anew(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = written(home, "zip", tree(split=False))
    first = images.decoded(str(place), None, 3)
    monkeypatch.setattr(images, "_decode", lambda *arguments: pytest.fail("decoded again"))
    again = images.decoded(str(place), None, 3)
    assert np.array_equal(first.train.pixels, again.train.pixels)
    assert again.classes == ("cat", "dog")
    monkeypatch.undo()
    monkeypatch.setenv("OTAFL_DATA", str(home / "data"))
    written(home, "zip", {**tree(split=False), "cat/new.png": png(77)})
    assert len(images.decoded(str(place), None, 3).train.labels) == 14


def test_a_folder_without_test_images_is_shared_out(home: Path) -> None:
    place = written(home, "folder", tree(split=False))
    found = ImageFolder(str(place), test_share=0.3, validation_share=0.2).load(4)
    assert found.validation is not None
    sizes = len(found.train), len(found.validation), len(found.test)
    assert sizes == (7, 2, 4)
    again = ImageFolder(str(place), test_share=0.3, validation_share=0.2, data_seed=1).load(4)
    assert not np.array_equal(found.test.features, again.test.features)


def test_other_sizes_are_resized_and_grey_has_one_channel(home: Path) -> None:
    files = {**tree(split=False), "cat/other.png": png(9, (9, 9))}
    place = str(written(home, "folder", files))
    with pytest.raises(DataError, match=r"2 different sizes; set data\.height and data\.width"):
        ImageFolder(place).load(4)
    found = ImageFolder(place, height=4, width=7, channels=1).load(4)
    assert found.image_shape == (1, 4, 7)


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"cat/a.png": b"no picture"}, "cat/a.png is no image"),
        ({"readme.txt": b"x"}, "has no image files"),
        ({"a.png": png(0)}, "neither CLASS/IMAGE"),
        ({"train/cat/a.png": png(0), "test/cat/a.png": png(0), "cat/a.png": png(0)}, "neither CLASS/IMAGE"),
    ],
)
def test_wrong_folders_are_one_line(home: Path, files: dict[str, bytes], line: str) -> None:
    place = written(home, "folder", files)
    with pytest.raises(DataError, match=line):
        ImageFolder(str(place)).load(4)


@pytest.mark.parametrize(("name", "content"), [("x.zip", b"PK\x03\x04 broken"), ("x.tar", b"nothing"), ("gone", b"")])
def test_wrong_archives_are_one_line(home: Path, name: str, content: bytes) -> None:
    if content:
        (home / name).write_bytes(content)
    with pytest.raises(DataError, match=r"data.path = .*cannot be read"):
        ImageFolder(str(home / name)).load(4)


def test_other_bytes_are_another_run(home: Path) -> None:
    """A run directory made with other images is refused; the same images at another place are not another run."""
    keys = {"data.name": "image-folder", "data.path": str(home / "pictures.zip"), "model.hidden": [3]}
    keys |= {"cell.devices": 3, "experiment.rounds": 2, "experiment.seeds": [0], "training.batch_size": 2}
    config = otafl.load_config("stationary", keys)
    written(home, "zip", tree(split=True))
    first = otafl.run(config, out=home / "run", device="cpu")
    assert otafl.run(config, out=home / "run", device="cpu").notes[0].startswith("already complete")
    written(home, "zip", {**tree(split=True), "train/cat/00.png": png(50)})
    with pytest.raises(RunDirectoryError, match="data"):
        otafl.run(config, out=home / "run", device="cpu")
    assert first.status == "complete"


# CIFAR


def packed(folder: Path, images_of: int, classes: int, files: cifar.CifarFiles) -> tuple[cifar.CifarFiles, Any]:
    """An archive in CIFAR's format with a few images, and its rows."""
    draw, rows = np.random.default_rng(1), {}
    place = folder / "data" / files.name / files.archive
    place.parent.mkdir(parents=True)
    with tarfile.open(place, "w:gz") as archive:
        for name in (*files.train, *files.test):
            table = draw.integers(256, size=(images_of, files.labels + 3072), dtype=np.uint8)
            table[:, : files.labels] %= classes
            rows[name] = table
            told = tarfile.TarInfo(f"{files.folder}/{name}")
            told.size = table.nbytes
            archive.addfile(told, io.BytesIO(table.tobytes()))
    digest = hashlib.md5(place.read_bytes(), usedforsecurity=False).hexdigest()
    return replace(files, md5=digest, images=images_of), rows


@pytest.mark.parametrize("files", [cifar.CIFAR10_FILES, cifar.CIFAR100_FILES])
def test_cifar_files_are_read_from_the_archive_and_unpacked(home: Path, files: cifar.CifarFiles) -> None:
    small, rows = packed(home, 4, files.classes, files)
    from_archive = small.read()
    train = np.concatenate([rows[name] for name in files.train])
    assert np.array_equal(from_archive["train-labels"], train[:, files.labels - 1])
    assert np.array_equal(from_archive["train-images"], train[:, files.labels :])
    place = home / "data" / files.name
    with tarfile.open(place / files.archive) as archive:
        archive.extractall(place, filter="data")
    (place / files.archive).unlink()
    unpacked = small.read()
    assert all(np.array_equal(unpacked[name], values) for name, values in from_archive.items())
    assert small.fetch() == place / files.folder


def test_cifar_images_are_standardised_by_colour(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, rows = packed(home, 4, 10, cifar.CIFAR10_FILES)
    monkeypatch.setattr(cifar.CIFAR10, "files", small)
    monkeypatch.setattr(cifar.CIFAR10, "kept", (20, 4))
    found = cifar.CIFAR10(train_images=15).load(3)
    first = rows["data_batch_1.bin"][0, 1:].reshape(3, 32, 32)
    assert found.train.features[0].reshape(3, 32, 32)[1, 2, 3] == pytest.approx(
        (first[1, 2, 3] / 255 - 0.4822) / 0.2435
    )
    assert (len(found.train), len(found.test)) == (15, 4)


def test_damaged_cifar_files_are_one_line(home: Path) -> None:
    small, _ = packed(home, 4, 10, cifar.CIFAR10_FILES)
    with pytest.raises(DataError, match="damaged or not cifar10"):
        replace(small, md5="0" * 32).read()
    with pytest.raises(DataError, match="has 12292 bytes, which is not 5 images"):
        replace(small, images=5).read()
    with pytest.raises(DataError, match="labels above 2"):
        replace(small, classes=3).read()
    (home / "data" / "cifar10" / small.archive).unlink()
    with pytest.raises(DataError, match="otafl data get cifar10"):
        small.read()


def test_cifar_that_cannot_be_had_is_one_line(home: Path) -> None:
    offline = replace(cifar.CIFAR10_FILES, mirror="http://127.0.0.1:9/")
    with pytest.raises(DataError, match=r"could not be downloaded .*put cifar-10-binary.tar.gz into"):
        offline.fetch()


# Tables


def test_tables_with_owners_are_natural_partitions(home: Path) -> None:
    draw = np.random.default_rng(0)
    writers = np.array([f"writer {k % 5}" for k in range(200)])
    np.savez(home / "t.npz", features=draw.normal(3, 2, (200, 4)), kind=draw.integers(3, size=200) + 7, writer=writers)
    spec = Table(str(home / "t.npz"), label="kind", owner="writer", validation_share=0.0)
    found = spec.load(5)
    assert found.owners is not None
    assert (len(found.train), len(found.test), found.num_classes) == (160, 40, 3)
    assert found.train.features.mean(0) == pytest.approx(np.zeros(4), abs=1e-6)
    assert np.bincount(spec.load(2).owners).sum() == 160  # several writers at a device
    with pytest.raises(ConfigError, match=r"5 owners for 6 devices; set cell\.devices = 5"):
        spec.load(6)


def test_parquet_tables_have_columns_of_numbers_and_lists(home: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"label": ["a", "b"] * 20, "x": list(range(40)), "pair": [[float(k), 1.0] for k in range(40)]}
    parquet.write_table(pyarrow.table(columns), home / "t.parquet")
    found = Table(str(home / "t.parquet"), standardise=False).load(4)
    assert found.train.features.shape[1] == 3
    assert np.array_equal(found.train.features[:, 0], found.train.features[:, 1])
    assert found.train.targets.tolist() == [int(k % 2) for k in found.train.features[:, 0].astype(int)]


def test_wrong_tables_are_one_line(home: Path) -> None:
    np.savez(home / "t.npz", features=np.zeros((5, 2)), label=np.zeros(4))
    with pytest.raises(DataError, match="as many rows of each"):
        Table(str(home / "t.npz")).load(2)
    with pytest.raises(DataError, match="has no 'kind'; there are features, label"):
        Table(str(home / "t.npz"), label="kind").load(2)
    (home / "t.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"no \.npz file"):
        Table(str(home / "t.npz")).load(2)
    with pytest.raises(DataError, match="cannot be read"):
        Table(str(home / "gone.npz")).load(2)


# Arrays and modules given in Python

DRAW = np.random.default_rng(0)
X, Y = DRAW.integers(256, size=(60, 3, 8, 8), dtype=np.uint8), DRAW.integers(4, size=60)
GIVEN = {"cell.devices": 3, "experiment.rounds": 2, "experiment.seeds": [0, 1], "training.batch_size": 4}
GIVEN |= {"training.local_steps": 2, "algorithm.name": "ota-fedavg"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))


def test_a_users_own_module_and_images_run_in_two_lines() -> None:
    config = otafl.load_config("stationary", GIVEN)
    result = otafl.run(config, data=(X, torch.from_numpy(Y), X[:20], Y[:20]), model=network(), device="cpu")
    assert result.status == "complete"
    size = sum(p.numel() for p in network().parameters())
    scaled = 1e-9 * (size / 814_090) ** 0.5
    assert result.config.algorithm.spec.gamma == pytest.approx(scaled, rel=1e-3)
    assert f"for this module's {size:,}" in result.notes[0]


@pytest.mark.parametrize("name", ["mlp", "softmax", "cnn", "resnet", "pfl-cnn"])
def test_built_in_models_take_images_of_any_shape(name: str) -> None:
    config = otafl.load_config("stationary", {**GIVEN, "model.name": name, "experiment.seeds": [0]})
    assert otafl.run(config, data=(X[:, :, :, :7], Y, X[:20, :, :, :7], Y[:20]), device="cpu").status == "complete"


def test_a_directory_of_given_data_knows_them(tmp_path: Path) -> None:
    """The same data find their run; others are refused; without them, the line says what to do."""
    config = otafl.load_config("stationary", GIVEN)
    data = (X, Y, X[:20], Y[:20])
    first = otafl.run(config, tmp_path / "run", data=data, model=network(), device="cpu")
    again = otafl.run(config, tmp_path / "run", data=data, model=network(), device="cpu")
    assert torch.equal(first.params, again.params)
    assert any(note.startswith("already complete") for note in again.notes)
    with pytest.raises(RunDirectoryError):
        otafl.run(config, tmp_path / "run", data=(255 - X, Y, X[:20], Y[:20]), model=network(), device="cpu")
    script = f"import otafl; otafl.run(otafl.load_config({str(tmp_path / 'run' / 'config.toml')!r}), device='cpu')"
    line = r"given in Python and are not here; give them again: otafl.run\(config, data="
    with pytest.raises(ConfigError, match=line):
        _elsewhere(script)


def _elsewhere(script: str) -> None:
    """Run a script in another process; its last line of error is raised here."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    raise ConfigError(done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ((X, Y), r"give \(X, y, X_test, y_test\)"),
        ((X, Y[:5], X, Y), "y has shape .5. and int64; give 60 whole numbers"),
        ((X, Y.astype(float), X, Y), "give 60 whole numbers"),
        ((X.transpose(0, 2, 3, 1), Y, X.transpose(0, 2, 3, 1), Y), "channels, height, width"),
        ((X, Y, X[:, :1], Y), r"X_test has examples of shape \[1, 8, 8\]"),
        ((np.full((60, 2), np.nan), Y, np.zeros((60, 2)), Y), "not finite"),
        ((X.astype(str), Y, X, Y), "give numbers"),
        ((X, Y - 1, X, Y), "labels outside"),
    ],
)
def test_wrong_arrays_are_one_line(data: Any, line: str) -> None:
    with pytest.raises(OtaflError, match=line):
        dataset_of(data)


def test_labels_may_be_booleans_and_pixels_as_numbers_are_noted() -> None:
    config = otafl.load_config("stationary", GIVEN)
    pixels, yes = X[:, :, :4, :4].astype(np.float32), Y > 1
    for scale, noted in ((1.0, True), (1 / 255, False)):
        x = pixels * np.float32(scale)
        result = otafl.run(config, data=(x, yes, x[:20], yes[:20]), device="cpu")
        assert any("and is not divided" in note for note in result.notes) == noted


def test_labels_from_one_are_noted() -> None:
    config = otafl.load_config("stationary", GIVEN)
    result = otafl.run(config, data=(X, Y + 1, X[:20], Y[:20] + 1), device="cpu")
    assert any("no training example has label 0: labels are counted from 0" in note for note in result.notes)


def test_wrong_modules_are_one_line() -> None:
    config = otafl.load_config("stationary", GIVEN)
    data = (X, Y, X[:20], Y[:20])
    with pytest.raises(PluginError, match="3 class scores for 4 classes"):
        otafl.run(config, data=data, model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), device="cpu")
    with pytest.raises(PluginError, match=r"cannot be trained on features of shape \(3, 8, 8\)"):
        otafl.run(config, data=data, model=nn.Conv2d(5, 3, 3), device="cpu")
    flat = (X[:, 0], Y, X[:20, 0], Y[:20])
    with pytest.raises(PluginError, match=r"of shape \(8, 8\).*give a channel, X\[:, None\]"):
        otafl.run(config, data=flat, model=nn.Conv2d(1, 4, 3), device="cpu")
    with pytest.raises(ConfigError, match=r"takes an nn.Module, not a str"):
        otafl.run(config, data=data, model="net", device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"not the class Kind; give Kind\(\)"):
        otafl.run(config, data=data, model=Kind, device="cpu")  # type: ignore[arg-type]


class Kind(nn.Module):
    """Has a number and a function beside its weights."""

    def __init__(self, factor: float = 1.0, function: Any = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor, self.function = nn.Linear(192, 4), factor, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.function(self.layer(x.flatten(1))) * self.factor
        return scores


def test_a_modules_attributes_are_part_of_its_identity(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    untied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    untied.load_state_dict(tied.state_dict())
    hooked = Kind()
    hooked.register_forward_hook(lambda part, inputs, output: output * 2)
    different = [Kind(), Kind(2.0), Kind(function=torch.relu), tied, untied, hooked]
    assert len({module_digest(module) for module in different}) == len(different)
    assert module_digest(Kind()) == module_digest(Kind())
    assert module_digest(Kind().to(torch.bfloat16)) != module_digest(Kind())
    config, data = otafl.load_config("stationary", GIVEN), (X, Y, X[:20], Y[:20])
    otafl.run(config, tmp_path / "run", data=data, model=Kind(), device="cpu")
    with pytest.raises(RunDirectoryError):
        otafl.run(config, tmp_path / "run", data=data, model=Kind(2.0), device="cpu")


def test_a_module_that_changes_later_does_not_change_its_runs() -> None:
    net = network()
    config, _ = with_objects(otafl.load_config("stationary", GIVEN), (X, Y, X[:20], Y[:20]), net)
    first = otafl.run(config, device="cpu")
    with torch.no_grad():
        net[0].weight.add_(1.0)
    assert torch.equal(otafl.run(config, device="cpu").params, first.params)


def test_a_run_in_which_nobody_is_heard_says_so() -> None:
    config = otafl.load_config("stationary", {**GIVEN, "algorithm.gamma": 1e-3})
    result = otafl.run(config, data=(X, Y, X[:20], Y[:20]), device="cpu")
    assert any("no device took part in any round" in note for note in result.notes)


def test_hidden_files_are_passed_over(home: Path) -> None:
    files = tree(split=False) | {".ipynb_checkpoints/cat.png": png(1), "cat/._00.png": b"x", "dog/.DS_Store": b"x"}
    place = written(home, "zip", files | {"__MACOSX/cat/00.png": b"x"})
    assert images.decoded(str(place), None, 3).classes == ("cat", "dog")


def test_pictures_of_16_bits_are_refused(home: Path) -> None:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.full((6, 5), 40_000, dtype=np.uint16)).save(stream, "PNG")
    place = written(home, "folder", {**tree(split=False), "cat/deep.png": stream.getvalue()})
    with pytest.raises(DataError, match=r"deep.png is no image that can be read \(more than 8 bits"):
        ImageFolder(str(place)).load(4)


def test_large_and_constant_columns_are_standardised(home: Path) -> None:
    """In float32 the mean of 60,000 numbers near 1.7e9 would be wrong by a third of their spread."""
    draw = np.random.default_rng(0)
    columns = np.stack([1.7e9 + draw.uniform(0, 2.6e6, 60_000), np.full(60_000, 0.1), draw.normal(size=60_000)], 1)
    np.savez(home / "t.npz", features=columns, label=draw.integers(2, size=60_000))
    found = Table(str(home / "t.npz"), validation_share=0.0).load(4).train.features
    assert found.mean(0) == pytest.approx([0, 0, 0], abs=1e-5)
    assert found.std(0) == pytest.approx([1, 0, 1], abs=1e-5)


def test_labels_are_whole_numbers_or_words_and_never_missing(home: Path) -> None:
    np.savez(home / "t.npz", features=np.zeros((5, 2)), label=np.linspace(0, 1, 5))
    with pytest.raises(DataError, match="numbers with decimals"):
        Table(str(home / "t.npz")).load(2)
    with pytest.raises(ConfigError, match=r"name a \.npz or a \.parquet file"):
        Table("t.csv")
