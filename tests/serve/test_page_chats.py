"""Chats of the page: versions of messages, what the browser keeps, several tabs of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROME, opened, say, texts, until
from decoding_cases import END
from serving_cases import Serve, Speaker
from waiting import PATIENCE_S


def test_versions_are_made_and_kept(serve: Serve, browser: Any) -> None:
    backend, problems = Speaker("One."), list[str]()
    tab = opened(browser, serve(backend), problems)
    say(tab, "First")
    backend.ids = [*b"Two.", END]
    tab.click("[aria-label='Answer again']")
    until(tab, "document.querySelector('.assistant .foot')?.innerText.includes('2 / 2')")
    say(tab, "Second")
    assert texts(tab) == ["Two.", "Two."]
    tab.locator("article.user [aria-label='Edit message']").first.click()
    tab.fill("form.edit textarea", "Other")
    tab.press("form.edit textarea", "Control+Enter")
    until(tab, "document.querySelectorAll('article').length === 2")
    tab.wait_for_selector("#send:visible")
    assert texts(tab, "user") == ["Other"]
    tab.reload()
    until(tab, "document.querySelectorAll('article').length === 2")
    tab.click("[aria-label='Version before']")
    assert texts(tab, "user") == ["First", "Second"]
    tab.locator("article.assistant [aria-label='Version before']").first.click()
    assert texts(tab) == ["One."]

    tab.locator("article.user [aria-label^='Delete']").click()
    assert texts(tab, "user") == ["Other"]
    tab.click("#notice button")
    assert texts(tab, "user") == ["First"] and texts(tab) == ["One."]
    until(tab, "document.querySelector('.user .foot').innerText.includes('/ 2')")
    backend.gate.clear()  # what is stopped before its first word changes nothing
    tab.locator("article.user [aria-label='Edit message']").click()
    tab.fill("form.edit textarea", "Stopped")
    tab.click("form.edit button.main")
    tab.wait_for_selector("#stop:visible")
    tab.keyboard.press("Escape")
    until(tab, "document.querySelector('#message').value === 'Stopped'")
    assert texts(tab, "user") == ["First"] and texts(tab) == ["One."]
    backend.gate.set()
    assert problems == []


@pytest.mark.long
def test_chats_are_listed_opened_deleted_and_undone(serve: Serve, browser: Any) -> None:
    backend, problems = Speaker("Yes."), list[str]()
    tab = opened(browser, serve(backend), problems)
    for text in ("Red", "Green"):
        say(tab, text)
        tab.fill("#message", f"more {text}")
        tab.click("#clear")
    tab.click("#chats-shown")
    listed = (
        "[...document.querySelectorAll('#list li button:first-child')].map((one) => one.innerText)"
    )
    assert tab.evaluate(listed) == ["Green", "Red"]
    tab.click("#list button:text('Red')")
    until(tab, "document.querySelector('#message').value === 'more Red'")
    assert texts(tab, "user") == ["Red"]
    tab.click("#chats-shown")
    tab.click("[aria-label='Delete chat Red']")
    until(tab, "document.querySelectorAll('#list li').length === 1")
    assert tab.locator("article").count() == 0
    tab.click("#notice button")
    until(tab, "document.querySelectorAll('#list li').length === 2")
    assert texts(tab, "user") == ["Red"]

    backend.ids, backend.step_s = [*b"word "], 0.005  # what is being written ends with its chat
    tab.fill("#message", "Go on")
    tab.press("#message", "Enter")
    until(tab, "document.querySelectorAll('article.assistant .text')[1]?.innerText.length > 9")
    tab.click("#chats-shown")
    tab.click("[aria-label='Delete chat Red']")
    until(tab, "document.querySelectorAll('#list li').length === 1")
    tab.wait_for_timeout(1500)  # behind what saves a chat late
    tab.reload()
    until(tab, "document.querySelectorAll('#list li').length === 1")
    assert tab.locator("article").count() == 0
    assert problems == []


@pytest.mark.long
def test_two_tabs_of_one_chat_lose_nothing(serve: Serve, browser: Any) -> None:
    backend, problems = Speaker("Yes."), list[str]()
    address = serve(backend)
    tab = opened(browser, address, problems)
    say(tab, "Hi")
    other = tab.context.new_page()
    other.set_default_timeout(1000 * PATIENCE_S)
    other.goto(address)
    until(other, "document.querySelectorAll('article').length === 2")
    backend.gate.clear()
    for one, text in ((tab, "Left"), (other, "Right")):
        one.fill("#message", text)
        one.press("#message", "Enter")
        one.wait_for_selector("#stop:visible")
    backend.gate.set()
    for one, text in ((tab, "Left"), (other, "Right")):
        one.wait_for_selector("#send:visible")
        until(one, "document.querySelectorAll('.user .foot')[1]?.innerText.includes('/ 2')")
        assert texts(one, "user") == ["Hi", text]
    say(other, "Both")
    tab.locator("article.user").nth(1).locator("[aria-label^='Version']:enabled").click()
    until(tab, "document.querySelectorAll('article').length === 6")
    assert texts(tab, "user") == ["Hi", "Right", "Both"]
    assert problems == []


def exported(tab: Any, button: str) -> dict[str, Any]:
    with tab.expect_download() as told:
        tab.click(button)
    found = json.loads(Path(told.value.path()).read_bytes())
    assert isinstance(found, dict)
    return found


def put_in(tab: Any, name: str, document: object) -> None:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    tab.set_input_files("#import-file", {"name": name, "mimeType": "", "buffer": data})


@pytest.mark.long
def test_chats_are_exported_and_imported(serve: Serve, browser: Any) -> None:
    address, problems = serve(Speaker("Yes.")), list[str]()
    tab = opened(browser, address, problems)
    say(tab, "Hi")
    tab.click("[aria-label='Answer again']")
    tab.wait_for_selector("[aria-label='Version before']")
    tab.click("#chats-shown")
    document = exported(tab, "#export-all")
    assert exported(tab, "#export-one") == document
    other = opened(browser, address, problems)
    other.click("#chats-shown")
    for _ in range(2):  # the second time changes nothing
        put_in(other, "mine.json", document)
        other.wait_for_selector("#notice:has-text('1 chat imported.')")
        until(other, "document.querySelector('.assistant .foot')?.innerText.includes('2 / 2')")
        assert other.locator("#list li").count() == 1
        other.click("#chats-shown")
    assert exported(other, "#export-all") == document

    nodes = document["chats"][0]["nodes"]
    broken: list[tuple[object, str]] = [
        (b"{", "is no JSON"),
        (b"\xff\x00", "is no JSON"),
        ([], "was not exported by this page"),
        ({"conversations": [{"messages": []}]}, "was not exported by this page"),
        ({**document, "edgespec_chats": 2}, "another version"),
        ({**document, "chats": [{"id": "a"}]}, "is damaged: chat 1"),
        ({**document, "chats": [{"id": "a", "nodes": [{**nodes[0], "role": 3}]}]}, "message 1"),
        ({**document, "chats": [{"id": "a", "nodes": [nodes[1]]}]}, "answers no message"),
        (
            {
                **document,
                "chats": [{"id": "a", "nodes": [{**nodes[0], "images": ["https://x.example/"]}]}],
            },
            "has images that are none",
        ),
    ]
    for text, told in broken:
        put_in(other, "theirs.json", text)
        other.wait_for_selector(f"#problem:has-text('{told}')")
        assert other.inner_text("#problem").startswith("theirs.json ")
        assert other.locator("#list li").count() == 1 and texts(other) == ["Yes."]
    assert problems == []


@pytest.mark.long
def test_full_storage_is_told_and_nothing_is_lost(
    serve: Serve, browser: Any, tmp_path: Path
) -> None:
    """In a profile of its own: private windows have no quota that can be set."""
    started = browser.browser_type.launch_persistent_context(tmp_path, **CHROME)
    tab = started.new_page()
    tab.set_default_timeout(1000 * PATIENCE_S)
    tab.goto(serve(Speaker("Yes.")))
    tab.wait_for_selector("#server dd")
    wire = tab.context.new_cdp_session(tab)
    origin = tab.evaluate("location.origin")
    wire.send("Storage.overrideQuotaForOrigin", {"origin": origin, "quotaSize": 1})
    say(tab, "New " + "x" * 1000)
    tab.wait_for_selector("#problem:text('storage is full')")
    until(tab, "document.querySelector('article.assistant .text')?.innerText === 'Yes.'")
    tab.wait_for_selector("#send:visible")
    assert texts(tab) == ["Yes."]
    assert len(exported(tab, "#export-one")["chats"][0]["nodes"]) == 2
    wire.send("Storage.overrideQuotaForOrigin", {"origin": origin})
    say(tab, "Again")  # with what could not be kept before
    until(tab, "document.querySelector('#problem').hidden")
    tab.reload()
    until(tab, "document.querySelectorAll('article').length === 4")
    started.close()
