"""The documentation holds: pages that follow from the code, links, every command line and block of Python, the site."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import otafl
from otafl import cli
from tests.test_cli import ENVIRONMENT

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
REDUCED = {"data.name": "digits", "experiment.rounds": 2, "experiment.seeds": [0], "model.hidden": [8]}


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration.md", "command-line.md", "metrics.md"])
def test_pages_that_follow_from_the_code_are_up_to_date(name: str) -> None:
    """`python docs/reference.py` writes them."""
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generator().PAGES[name]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def blocks(page: Path, language: str) -> Iterator[str]:
    for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        yield match[1]


def commands() -> Iterator[tuple[str, str]]:
    """Every command line of the pages: those of code blocks, and those in the text."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        inside = [line for block in blocks(page, "") for line in block.splitlines()]
        text = page.read_text(encoding="utf-8")
        outside = [match.replace("\n", " ") for match in re.findall(r"`(otafl [a-z][^`]*)`", text)]
        for line in [*inside, *outside]:
            line = line.strip().removeprefix("$ ")
            if line.startswith("otafl ") and not re.search(r"…|\.\.\.|\[[A-Z-]", line):
                yield name, re.sub(r"\s+#.*|;.*", "", line)


LINES = sorted(set(commands()))


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line}" for page, line in LINES])
def test_command_lines_of_the_pages_are_understood(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb exists and takes these arguments and options."""
    monkeypatch.chdir(ROOT)
    words = [word for word in shlex.split(line)[1:] if word != "--plugin" and not word.endswith(".py")]
    app: Any = typer.main.get_command(cli.app)
    if words[0].startswith("--"):
        return
    command = app.commands[words[0]]
    if words[1:2] and words[1] in getattr(command, "commands", {}):
        command, words = command.commands[words[1]], words[1:]
    required = [p for p in command.params if p.required]
    if len(words) == 1 and required:
        return  # the name of the verb alone
    command.make_context(words[0], words[1:])


@pytest.mark.slow
def test_the_readmes_commands_run_in_their_order(tmp_path: Path) -> None:
    """As they stand there, but for the size of runs; long ones end after their first line."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [re.sub(r"\s+#.*", "", line) for line in text.splitlines() if line.startswith("otafl ")]
    assert len(lines) > 15
    small = [part for key, value in REDUCED.items() for part in ("--set", f"{key}={value}")]
    for line in lines:
        words = shlex.split(line)[1:]
        if words[0] in ("data", "doctor") or words[0].startswith("--") or "reproduce" in words:
            continue  # have tests of their own
        if words[0] in ("run", "sweep", "theory", "tune"):
            words = [*words, *small, *(["--device", "cpu"] if words[0] != "theory" else [])]
        if words[0] == "check":
            words[1] = "ota-fedavg"
        done = subprocess.run(
            [sys.executable, "-m", "otafl.cli", *words],
            capture_output=True, text=True, cwd=tmp_path, check=False, env=ENVIRONMENT, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert "Traceback" not in done.stderr
    assert (tmp_path / "energy.pdf").exists()
    assert (tmp_path / "sweeps" / "first" / "accuracy.png").exists()


GIVEN = """
import numpy as np, otafl, torch
from dataclasses import dataclass
draw = np.random.default_rng(0)
X, X_test = draw.standard_normal((60, 1, 8, 8), dtype=np.float32), draw.standard_normal((20, 1, 8, 8), dtype=np.float32)
y, y_test = draw.integers(3, size=60), draw.integers(3, size=20)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
my_module = torch.nn.Sequential(torch.nn.Linear(64, 10))
"""
PYTHON = [
    (page, number)
    for page in PAGES
    if page.name != "first-method.md"  # has a test of its own
    for number in range(len(list(blocks(page, "python"))))
]


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(("page", "number"), PYTHON, ids=lambda value: getattr(value, "name", str(value)))
def test_python_of_the_pages_runs(page: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With smaller runs; X, y, net and so on are what the page's reader has."""
    full = otafl.load_config
    monkeypatch.setattr(otafl, "load_config", lambda source, keys=None: full(source, {**REDUCED, **(keys or {})}),
                        raising=False)  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code = list(blocks(page, "python"))[number].replace('"experiment.rounds": 20', '"experiment.rounds": 2')
    names: dict[str, Any] = {}
    exec(GIVEN + code, names)


@pytest.mark.slow
def test_the_site_builds_and_opens(tmp_path: Path) -> None:
    """No warning, notebooks executed, no broken image; formulas are set and search answers, all without a network."""
    pytest.importorskip("sphinx")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path / "site")]
    done = subprocess.run(build, capture_output=True, text=True, cwd=ROOT, check=False, env=ENVIRONMENT, timeout=900)
    assert done.returncode == 0, done.stderr
    from tests.report.test_page import CHROMIUM, FLAGS

    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    from playwright.sync_api import sync_playwright

    site, problems, outside = tmp_path / "site", [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 390, "height": 800})  # a telephone
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else outside.append(r.url))
        for file in sorted(site.glob("**/*.html")):
            page.goto(file.as_uri())
            broken = page.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
            assert broken == [], file
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{file.name} is wider than a telephone"
        page.goto((site / "concepts.html").as_uri())
        assert page.locator("math").count() >= 3
        page.goto((site / "search.html").as_uri() + "?q=threshold")
        page.locator("#search-results li").first.wait_for(timeout=20_000)
        browser.close()
    assert problems == []
    assert outside == []
    shutil.rmtree(site)
