"""The report in a real browser: it renders, the slider moves devices, nothing is fetched, no errors."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import otafl
from otafl.report.page import report
from otafl.report.runs import collect
from tests.conftest import make_config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    walking = {"mobility.name": "bounded-waypoint", "mobility.speed_mps": [20.0, 30.0], "mobility.territory_m": 300.0}
    paths = []
    for name in ("fedoag", "fedavg", "vanilla"):
        paths.append(folder / name)
        otafl.run(make_config(name, {"experiment.rounds": 30, **walking}), out=paths[-1])
    text = report(collect(paths))
    (folder / "report.html").write_text(text, encoding="utf-8")
    return folder / "report.html"


def test_page_names_nothing_elsewhere(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    outside = set(re.findall(r"(?:https?:)?//[\w.]+", text)) - {"http://www.w3.org"}  # the name of SVG, not an address
    assert not outside
    assert "{{" not in text
    assert "NaN" not in text.split('id="data"')[1].split("</script>")[0]


@pytest.mark.slow
def test_page_works_in_a_browser(page_file: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    requests: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_file.as_uri())

        assert page.locator("#table tr").count() == 4
        assert page.locator("#curves .curve").count() == 3
        page.select_option("#column", "num_active")
        assert page.locator("#curves .curve").count() == 3
        assert page.locator("#map .device").count() == 4

        def places() -> list[Any]:
            return [dot.get_attribute("cx") for dot in page.locator("#map .device").all()]

        before = places()
        page.locator("#slider").fill("20")
        assert page.locator("#round").inner_text() == "20"
        assert places() != before
        page.select_option("#which", "2")
        assert "no uplink probability" in page.locator("#legend").inner_text()
        assert page.locator("#participation circle").count() == 3 * 2 * 4
        assert "keys that all runs share" in page.locator("#configuration").inner_text()
        browser.close()
    assert problems == []
    assert [url for url in requests if not url.startswith("file:")] == []
