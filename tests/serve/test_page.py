"""The page in a real browser. Needs playwright and Chromium, which are not installed for tests."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving_cases import Serve, Speaker
from waiting import PATIENCE_S

from edgespec.serve.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_is_one_small_file_that_needs_nothing_from_outside() -> None:
    text = page().decode()
    assert len(text) < 100_000
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in outside and "https://" not in outside and "//cdn" not in outside
    assert "src=" not in text and "@import" not in text


@pytest.fixture
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, address: str, problems: list[str], width: int = 1000) -> Any:
    tab = browser.new_context(viewport={"width": width, "height": 700}).new_page()
    tab.set_default_timeout(10_000)
    tab.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(address)
    tab.click("summary")
    return tab


def until(tab: Any, is_so: str) -> None:
    """Wait for what a script says; the page's own policy forbids playwright to do so inside it."""
    end = time.monotonic() + PATIENCE_S
    while not tab.evaluate(is_so):
        assert time.monotonic() < end, is_so
        tab.wait_for_timeout(20)


def test_a_chat_in_a_browser(serve: Serve, browser: Any) -> None:
    backend = Speaker("Hello <b>there</b>! ", loops=True)
    address, problems = serve(backend), list[str]()
    tab = opened(browser, address, problems)
    tab.fill("#most", "20")
    tab.fill("#message", "Hi")
    tab.press("#message", "Enter")
    tab.wait_for_selector("article.assistant .note:text('cut off')")
    assert tab.inner_text("article.assistant .text") == "Hello <b>there</b>! "
    assert "tokens/s" in tab.inner_text("#answer")

    tab.fill("#most", "")  # and stop a long one
    backend.step_s = 0.005
    tab.fill("#message", "More")
    tab.click("#send")
    until(tab, "document.querySelectorAll('article.assistant .text')[1]?.innerText")
    tab.click("#stop")
    tab.wait_for_selector("article.assistant .note:text('stopped')")

    backend.step_s = 0.0
    tab.reload()
    tab.click("summary")
    assert len(tab.query_selector_all("article")) == 4
    other = opened(browser, address, problems, width=360)
    assert len(other.query_selector_all("article")) == 0
    assert other.evaluate("document.documentElement.scrollWidth") <= 360
    for one in (tab, other):  # at once
        one.fill("#most", "40")
        one.fill("#message", "Again")
    for one in (tab, other):
        one.press("#message", "Enter")
    for one in (tab, other):
        until(one, "document.querySelector('article:last-child .note').innerText")
    assert problems == []


def test_a_server_that_goes_away_is_told(serve: Serve, browser: Any) -> None:
    address, problems = serve(Speaker()), list[str]()
    tab = opened(browser, address, problems)
    tab.wait_for_selector("#server dd")
    tab.route("**/*", lambda route: route.abort())
    tab.fill("#message", "Hi")
    tab.press("#message", "Enter")
    tab.wait_for_selector("#problem:text('does not answer')")
    assert tab.input_value("#message") == "Hi"  # nothing is lost
    tab.unroute("**/*")
    tab.press("#message", "Enter")
    until(tab, "document.querySelector('article.assistant .text')?.innerText")
    assert tab.is_hidden("#problem")
