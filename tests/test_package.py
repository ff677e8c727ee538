"""The wheel and the source distribution hold all that a user needs: no source tree beside them."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.test_cli import ENVIRONMENT

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(out),
        str(ROOT),
    ]  # the wheel from the sdist
    done = subprocess.run(build, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_the_source_distribution_has_tests_docs_and_recipes(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for wanted in ("src/otafl/cli.py", "tests/test_package.py", "docs/index.md", "recipes/cifar.toml", "CITATION.cff"):
        assert wanted in names


@pytest.mark.slow
def test_the_wheel_alone_gives_a_first_result(built: Path, tmp_path: Path) -> None:
    wheel = next(built.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("names.toml", "py.typed", "report/page.html", "studies/examples/first.toml"):
        assert f"otafl/{wanted}" in names
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=120)
    place = {**ENVIRONMENT, "PYTHONPATH": str(site)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, check=False, env=place, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(site) in run("-c", "import otafl; print(otafl.__file__)")
    small = ["--set", "data.name=digits", "--set", "experiment.rounds=2", "--device", "cpu"]
    assert "figure" in run("-m", "otafl.cli", "run", "quick", *small, "--out", "mine")
    assert "runs are missing" in run("-m", "otafl.cli", "sweep", "first", "--dry-run")
    assert "MB" in run("-m", "otafl.cli", "report", "mine")
    assert "k_factor" in run("-m", "otafl.cli", "describe", "fading.rician")
