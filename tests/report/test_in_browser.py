"""The page in a real browser: Debian's Chromium, headless, from a file."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from cleave.report.load_study import LoadStudy, run_study
from cleave.report.page import render_page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium; scripts/bootstrap --tests installs it (as root)"
)
SHOWN = ("what-plan", "what-per-gpu", "what-gpus", "what-goodput", "value-rate")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # As root Chromium refuses its sandbox; the page is our own.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page with its console messages and its requests."""

    def __init__(self, browser: Browser, file: Path, **options: object) -> None:
        self.context = browser.new_context(offline=True, **options)
        self.page: Page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn]", state="attached")

    def figures(self) -> dict[str, str]:
        return {name: self.page.inner_text(f"#{name}") for name in SHOWN}

    def colours(self) -> set[str]:
        lines = "[...document.querySelectorAll('.js-line')].map(l => getComputedStyle(l).stroke)"
        return set(self.page.evaluate(lines))


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory, study: LoadStudy) -> Path:
    path = tmp_path_factory.getbasetemp() / "report.html"
    path.write_text(render_page(study), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened_pages() -> dict[Path, Opened]:
    return {}


@pytest.fixture
def opened(browser: Browser, file: Path, opened_pages: dict[Path, Opened]) -> Opened:
    """The page, opened once: drawing it takes 5 s. Tests leave its figures as they were."""
    if file not in opened_pages:
        opened_pages[file] = Opened(browser, file)
    return opened_pages[file]


def test_the_page_opens_offline_asks_for_nothing_and_complains_of_nothing(opened, file) -> None:
    assert opened.messages == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [file.as_uri()]


def test_every_chart_is_drawn_with_marks(opened) -> None:
    places = opened.page.locator("[data-chart]")
    assert places.count() == 7
    marks = ".js-line, .point, .points path"
    for index in range(places.count()):
        place = places.nth(index)
        assert place.locator("svg.main-svg").count() > 0
        assert place.locator(marks).count() > 0
        assert place.bounding_box()["width"] > 200


def test_moving_a_slider_changes_the_figures_and_reset_brings_them_back(opened) -> None:
    before = opened.figures()
    assert before["value-rate"] == "5.00 req/s"
    opened.page.focus("#slider-rate")
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
    after = opened.figures()
    assert after["value-rate"] == "10.0 req/s"
    assert after["what-gpus"] != before["what-gpus"]
    opened.page.focus("#slider-ttft")
    opened.page.keyboard.press("Home")
    assert opened.figures()["what-per-gpu"] != after["what-per-gpu"]
    opened.page.click("#reset")
    assert opened.figures() == before


def test_a_dark_reader_gets_other_colours_and_paper_gets_light_ones(browser, file, opened) -> None:
    dark = Opened(browser, file, color_scheme="dark")
    assert not dark.colours() & opened.colours()
    background = "getComputedStyle(document.body).backgroundColor"
    assert dark.page.evaluate(background) != opened.page.evaluate(background)
    dark.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert dark.colours() == opened.colours()
    dark.context.close()


def test_a_phone_scrolls_down_only(browser, file) -> None:
    phone = Opened(browser, file, viewport={"width": 375, "height": 800})
    assert phone.page.evaluate("document.documentElement.scrollWidth") == 375
    phone.context.close()


def test_every_chart_can_be_read_without_seeing_it(opened) -> None:
    for place in opened.page.locator("[data-chart], svg.node").all():
        assert place.get_attribute("role") == "img"
        assert place.get_attribute("aria-label")
    for slider in ("rate", "ttft", "tpot"):
        assert opened.page.get_attribute(f"#slider-{slider}", "aria-valuetext")
    opened.page.locator("summary").first.click()
    assert opened.page.locator("details[open] tbody tr").count() > 5


def test_an_infeasible_answer_opens_too(browser, subject, infeasible, tmp_path) -> None:
    path = tmp_path / "none.html"
    path.write_text(render_page(run_study(subject, infeasible, bench=None)), encoding="utf-8")
    none = Opened(browser, path)
    assert none.messages == []
    assert "infeasible" in none.page.inner_text("h1")
    none.context.close()
