"""The page in a browser: tabs of it, what is typed in them, and what is seen there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

from waiting import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# The arguments are for root, in a small container.
CHROME: dict[str, Any] = {
    "executable_path": CHROMIUM,
    "args": ["--no-sandbox", "--disable-dev-shm-usage"],
}


def opened(browser: Any, address: str, problems: list[str], width: int = 1000) -> Any:
    tab = browser.new_context(viewport={"width": width, "height": 700}).new_page()
    tab.set_default_timeout(1000 * PATIENCE_S)
    tab.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(address)
    tab.click("#settings > summary")
    tab.wait_for_selector("#server dd")
    return tab


def until(tab: Any, is_so: str | Callable[[], object]) -> None:
    """Wait for what a script says; the page's own policy forbids playwright to do so inside it."""
    end = time.monotonic() + PATIENCE_S
    while not (tab.evaluate(is_so) if isinstance(is_so, str) else is_so()):
        assert time.monotonic() < end, is_so
        tab.wait_for_timeout(20)


def listen(tab: Any, sent: list[Any], ahead: list[Any] | None = None) -> None:
    """Put what is asked into a list, and what is read ahead into another one."""

    def take(request: Any) -> None:
        asked = request.post_data_json if request.post_data else None
        if asked is not None:
            is_ahead = "prompt_cache_options" in asked
            (sent if not is_ahead else [] if ahead is None else ahead).append(asked)

    tab.on("request", take)


def say(tab: Any, text: str) -> None:
    """Send a message and wait for the end of its answer."""
    tab.fill("#message", text)
    tab.press("#message", "Enter")
    tab.wait_for_selector("#send:visible")


def texts(tab: Any, role: str = "assistant") -> list[str]:
    return [str(one) for one in tab.locator(f"article.{role} .text").all_inner_texts()]
