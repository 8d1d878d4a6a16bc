"""The page in headless Chromium: what a reader sees, without a network, in both colour schemes and on a phone.

Skipped where chromium and chromedriver are not installed.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from result_folders import DATA, a_row, two_policies, write_run

from prunevit.experiments.comparison.report_run import write_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
FAILED = {"name": "bad", "policy": "my:P", "kind": "policy", "error": "boom", "data": DATA}


class Browser:
    """Chromium on one page, driven through chromedriver."""

    def __init__(self, profile: Path) -> None:
        from selenium.webdriver import Chrome, ChromeOptions
        from selenium.webdriver.chrome.service import Service

        options = ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}", "about:blank"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(str(DRIVER)))

    def open(self, page: Path, scheme: str = "light", width: int = 1280) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get_log("performance")
        self.driver.get(page.as_uri())

    def send(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def ask(self, script: str) -> Any:
        """What a JavaScript expression gives."""
        return self.driver.execute_script(f"return {script}")

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four policies' rows of one set of images, one of another, one that failed, two pictures."""
    root = tmp_path_factory.mktemp("runs")
    folder = write_run(root / "A", [*two_policies(), FAILED])
    (folder / "pictures").mkdir()
    for number in range(2):
        pixels = np.full((60, 90, 3), 100 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
    other = write_run(root / "B", [a_row("ats", 60, 2.0, data={**DATA, "sha256": "2e" * 32})])
    return write_report([folder, other], root / "page.html")[0]


def test_every_point_is_drawn_and_nothing_is_fetched(browser: Browser, page: Path) -> None:
    browser.open(page)
    counts = browser.ask(
        "[...document.querySelectorAll('section.data')].map(section => [...section.querySelectorAll('[data-chart]')]"
        ".map(box => box.querySelectorAll('.scatterlayer .point').length))"
    )
    # Four rows and the unpruned model in three charts; lines without points for the tokens.
    assert counts == [[5, 5, 5, 0], [2, 2, 2, 0]]
    assert browser.ask("document.querySelectorAll('#chart-3-of-0 .scatterlayer .js-line').length") == 4
    assert browser.ask("document.querySelectorAll('#chart-0-of-0 .errorbar').length") == 5
    assert browser.ask("document.querySelectorAll('.difference .point').length") == 4 + 1
    loaded = browser.ask("[...document.images].map(image => image.complete && image.naturalWidth)")
    assert loaded == [90, 90]
    assert browser.driver.get_log("browser") == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]


def column(browser: Browser, number: int) -> list[str]:
    return browser.ask(
        f"[...document.querySelector('table.rows').tBodies[0].rows].map(row => row.cells[{number}].dataset.value)"
    )


def test_a_heading_sorts_rising_then_falling(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert column(browser, 1) == ["85.0", "80.0", "86.0", "70.0"]
    heading = "document.querySelectorAll('table.rows th')[1]"
    browser.ask(f"{heading}.querySelector('button').click()")
    assert column(browser, 1) == ["70.0", "80.0", "85.0", "86.0"]
    assert browser.ask(f"{heading}.getAttribute('aria-sort')") == "ascending"
    browser.ask(f"{heading}.querySelector('button').click()")
    assert column(browser, 1) == ["86.0", "85.0", "80.0", "70.0"]
    assert column(browser, 0)[0] == "tome r=8"
    browser.ask("document.querySelectorAll('table.rows th')[0].querySelector('button').click()")
    assert column(browser, 0) == ["evit keep_rate=0.5", "evit keep_rate=0.7", "tome r=16", "tome r=8"]


def test_all_columns_and_another_reference(browser: Browser, page: Path) -> None:
    browser.open(page)
    shown = "[...document.querySelectorAll('table.rows')[0].querySelectorAll('th')].filter(th => th.offsetWidth).length"
    before = browser.ask(shown)
    browser.ask("document.querySelector('.all-columns').click()")
    assert browser.ask(shown) > before + 15
    middle = "document.querySelector('.difference').data[0].x"
    assert browser.ask(middle) == [-21, -11, -6, -5]  # of the unpruned model
    browser.ask(
        "(choice => { choice.value = 'tome r=16'; choice.dispatchEvent(new Event('change')); })"
        "(document.querySelector('.reference'))"
    )
    assert browser.ask(middle) == [10, 15, 16, 21]


@pytest.mark.parametrize("width", [1280, 390])
def test_both_colour_schemes_at_both_widths(browser: Browser, page: Path, width: int) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(page, scheme, width)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        ground = browser.ask("getComputedStyle(document.body).backgroundColor")
        title = browser.ask("getComputedStyle(document.querySelector('h1')).color")
        axis = browser.ask("getComputedStyle(document.querySelector('.xtick text')).fill")
        unpruned = browser.ask("document.querySelector('#chart-0-of-0').data.at(-1).marker.color")
        assert title == axis
        seen[scheme] = (ground, title, unpruned)
        assert browser.driver.get_log("browser") == []
    assert seen["light"] == ("rgb(255, 255, 255)", "rgb(27, 27, 27)", "#1b1b1b")
    assert seen["dark"] == ("rgb(22, 24, 27)", "rgb(232, 232, 232)", "#e8e8e8")


@pytest.mark.parametrize("width", [1280, 400])
def test_several_runs_leave_room_for_titles(browser: Browser, tmp_path: Path, width: int) -> None:
    parents = [tmp_path / f"a_long_name_of_a_folder_{number}" for number in range(2)]
    folders = [write_run(parents[0] / name, two_policies()) for name in ("2026-12-01_02-14-15", "second")]
    folders.append(write_run(parents[1] / "second", two_policies()))
    browser.open(write_report(folders, tmp_path / "page.html")[0], width=width)
    cut = browser.ask(
        "[...document.querySelectorAll('.xtitle, .ytitle')].filter(title => {"
        " const [own, box] = [title, title.closest('.js-plotly-plot')].map(each => each.getBoundingClientRect());"
        " return Math.min(own.top - box.top, box.bottom - own.bottom, own.left - box.left, box.right - own.right) < -1;"
        " }).map(title => title.textContent)"
    )
    assert cut == []
    labels = browser.ask(
        "[...document.querySelectorAll('#chart-0-of-0 .legendtext')].map(text => text.textContent)"
    )
    runs = ("0/2026-12-01_02-14-15", "0/second", "1/second")
    expected = {f"{name} (a_long_name_of_a_folder_{run})" for name in ("evit", "tome") for run in runs}
    assert {*labels} == {*expected, "unpruned", "Pareto front"}


def test_a_change_of_scheme_is_followed(browser: Browser, page: Path) -> None:
    browser.open(page, "light")
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.ask("document.querySelector('#chart-0-of-0').data.at(-1).marker.color") == "#e8e8e8"


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen rows of long names, whose table is wider than a phone."""
    folder = tmp_path_factory.mktemp("long")
    rows = [
        a_row(
            f"{policy} keep_rate={rate}",
            90 - 10 / rate,
            4 * rate,
            weights=f"outputs/{policy}/best.safetensors",
        )
        for policy in ("evit", "topk", "random", "fixed_rate", "dpc_knn")
        for rate in (0.7, 0.5, 0.3)
    ]
    rows.append(a_row("evit keep_rate=0.5 2026-12-01_10-00-00/best", 80, 2.5))
    return write_report([write_run(folder / "A", rows)], folder / "page.html")[0]


LEGENDS = """[...document.querySelectorAll('[data-chart]')].map(box => {
 const place = name => box.querySelector(name).getBoundingClientRect();
 const [legend, title, plot, figure] = ['.legend .bg', '.xtitle', '.bglayer', '.main-svg'].map(place);
 const inner = [...box.querySelectorAll('.legendtext')].map(text => text.getBoundingClientRect());
 return legend.top >= title.bottom && legend.bottom <= box.getBoundingClientRect().bottom + 1
  && inner.every(text => text.bottom <= legend.bottom + 1 && text.right <= figure.right)
  && figure.bottom <= box.nextElementSibling.getBoundingClientRect().top + 1 && plot.height > 240; })"""


@pytest.mark.parametrize("widths", [[1280], [700], [500], [1280, 660], [1280, 500], [500, 1280]])
def test_a_long_legend_stands_between_chart_and_note(
    browser: Browser, long_page: Path, widths: list[int]
) -> None:
    """Where the page is opened, and after each change of width."""
    browser.open(long_page, width=widths[0])
    for width in widths[1:]:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.send("Emulation.setDeviceMetricsOverride", **size)
        browser.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.ask(LEGENDS) == [True] * 4


@pytest.mark.parametrize("width", [1280, 500])
def test_a_wide_table_scrolls_within_its_place(browser: Browser, long_page: Path, width: int) -> None:
    browser.open(long_page, width=width)
    box = "document.querySelector('.scroll:has(table.rows)')"
    hidden = f"{box}.scrollWidth - {box}.clientWidth"
    assert (browser.ask(hidden) > 0) == (width == 500)  # the first columns fit on a screen
    browser.ask("document.querySelector('.all-columns').click()")
    assert browser.ask(hidden) > 500
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(f"getComputedStyle({box}).overflowX") == "auto"
    assert "local" in browser.ask(f"getComputedStyle({box}).backgroundAttachment")  # the shadow at its end
    browser.ask(f"{box}.scrollTo(9999, 0)")
    end = f"{box}.querySelector('th:last-child').getBoundingClientRect().right"
    assert browser.ask(end) <= browser.ask(f"{box}.getBoundingClientRect().right") + 1
