"""The documented example runs, in Python and through entry points on the command line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import plugins

    return plugins


def test_the_documented_example_learns(plugins: Any) -> None:
    result = plugins.main()
    assert result.status == "complete"
    accuracy = result.metrics["test_accuracy"].mean(0)
    assert accuracy[-1] > accuracy[0] + 0.1
    assert (result.metrics["step_norm"][:, 1:] > 0).all()  # a column of the method's own


def test_its_fading_is_what_it_says(plugins: Any) -> None:
    """Unit power, and the closed-form exceedance, within 5 standard errors."""
    import otafl

    gain = plugins.Rician(k=3.0).coefficients(np.zeros((400, 100, 2)), otafl.Streams(0))
    power = np.abs(gain.ravel()) ** 2
    assert abs(power.mean() - 1) < 5 * power.std() / np.sqrt(power.size)
    for level in (0.3, 1.0, 2.0):
        prob = float(plugins.Rician(k=3.0).exceed_prob(np.array(level)))
        assert abs((power >= level).mean() - prob) < 5 * np.sqrt(prob * (1 - prob) / power.size)


def test_the_page_on_a_first_method_has_the_example_and_it_passes_the_check() -> None:
    """All its names are those of `otafl`, and it is as short as the page says."""
    import otafl
    from otafl.registry import load_plugin

    page = (EXAMPLES.parent / "docs" / "first-method.md").read_text(encoding="utf-8")
    for file, name, most in (
        ("gbma.py", "my-gbma", 25),
        ("top_k.py", "top-k", 40),
        ("own_models.py", "fedpbc-air", 25),
    ):
        source = (EXAMPLES / file).read_text(encoding="utf-8")
        code = source[source.index('"""\n\n') + 5 :]
        assert f"```python\n{code}```" in page
        assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) <= most
        assert "from otafl" not in code
        load_plugin(str(EXAMPLES / file))
        assert [finding for finding in otafl.check(name) if finding.verdict == "FAIL"] == []


def test_the_facade_says_what_it_has() -> None:
    import otafl

    assert dir(otafl) == sorted(otafl.__all__)
    for name in dir(otafl):
        assert getattr(otafl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'sweeep'"):
        otafl.sweeep  # noqa: B018


@pytest.mark.slow
def test_entry_points_reach_the_command_line(tmp_path: Path) -> None:
    """An installed package's entry points: listed, and run."""
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[otafl.algorithms]\nserver-step-2 = my_plugins:ServerStep\nbroken = no_such_module:Thing\n"
    )
    source = (EXAMPLES / "plugins.py").read_text(encoding="utf-8")
    (tmp_path / "my_plugins.py").write_text(source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def otafl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "otafl.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)

    done = otafl("run", "quick", "--set", "data.name=digits", "--set", "algorithm.name=server-step-2",
                 "--set", "experiment.rounds=2", "--set", "algorithm.server_step=0.3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    broken = otafl("run", "quick", "--set", "algorithm.name=broken")
    assert broken.returncode == 2
    assert "plug-in 'broken' (no_such_module:Thing) cannot be loaded: ModuleNotFoundError" in broken.stderr
    listed = otafl("list", "algorithms")
    assert listed.returncode == 0
    assert "server-step-2" in listed.stdout
    assert "cannot be loaded" in listed.stdout  # a broken plug-in does not hide the others


def test_finished_runs_are_read_without_their_plug_ins(tmp_path: Path) -> None:
    """Compared, drawn and read; but neither run nor shown as a page, which needs what the file registers."""
    small = ["data.name=digits", "model.hidden=[8]", "experiment.rounds=4", "experiment.seeds=[0,1,2]"]
    words = [word for key in small for word in ("--set", key)]

    def otafl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "otafl", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    plugin = ("--plugin", str(EXAMPLES / "gbma.py"), "--set", "algorithm.name=my-gbma")
    assert otafl("run", "quick", *words, *plugin, "--out", "mine").returncode == 0
    assert otafl("run", "quick", *words, "--out", "ours").returncode == 0
    told = otafl("compare", "mine", "ours")
    assert told.returncode == 0, told.stderr
    assert [line.split()[0] for line in told.stdout.splitlines()[2:4]] == ["my-gbma", "fedoag-zero"]
    assert otafl("plot", "mine", "ours", "-o", "a.svg").returncode == 0
    assert "my-gbma" in (tmp_path / "a.csv").read_text()
    for again in (("run", "mine/config.toml", "--out", "more"), ("report", "mine")):
        refused = otafl(*again)
        assert refused.returncode == 2
        assert "nothing is named 'my-gbma'" in refused.stderr
        assert "--plugin FILE.py" in refused.stderr
    script = "import otafl; a, b = (otafl.read_run('mine').config for _ in range(2)); assert a == b"
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False).returncode == 0
    script = "import otafl; otafl.run(otafl.read_run('mine').config)"
    refused = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ConfigError: algorithm.name: nothing is named 'my-gbma'" in refused.stderr.splitlines()[-1]
    script = f"import sys, otafl; c = otafl.read_run('mine').config; sys.path.append({str(EXAMPLES)!r}); import gbma; "
    script += "print(otafl.run(c).status)"
    later = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert later.stdout == "complete\n", later.stderr


@pytest.mark.usefixtures("no_plugins")
def test_a_forgotten_decorator_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from otafl import load_config, registry
    from otafl.errors import ConfigError

    monkeypatch.setattr(registry, "_plugin_files", {})
    file = tmp_path / "law.py"
    file.write_text("class Law:\n    pass\n")
    registry.load_plugin(file)
    with pytest.raises(ConfigError, match=r"law.py registers nothing: is the line @otafl.register_… missing there\?"):
        load_config("quick", {"fading.name": "law"})


@pytest.mark.usefixtures("no_plugins")
def test_a_described_plug_in_comes_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that is printed works as it is."""
    from otafl import registry
    from otafl.config.keys import describe

    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses, otafl\nfrom otafl.world.fading import Rayleigh\n"
        "@otafl.register_fading('mine')\n@dataclasses.dataclass(frozen=True)\nclass Mine(Rayleigh):\n    'Mine.'\n"
    )
    monkeypatch.chdir(tmp_path)
    registry.load_plugin("mine.py")
    told = describe("fading.mine")
    assert "otafl run stationary --set fading.name=mine --plugin mine.py" in told
    assert "source  mine.py:Mine" in told
