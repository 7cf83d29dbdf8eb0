"""The page in a real browser. Needs playwright and Chromium (one test: node), or is skipped."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from decoding_cases import END
from pool_cases import Made, Start
from serving_cases import CALL, Serve, Speaker
from sound_gguf import flac, samples, wav, write_hearing
from vision_cases import open_engine
from vision_gguf import jpeg, picture, png
from waiting import PATIENCE_S

import edgespec.serve.page
from edgespec.errors import ModelFileError
from edgespec.models.images import Sound, read_image
from edgespec.serve.page import page_files
from edgespec.serve.pool import Member
from edgespec.serve.server import Server

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# The arguments are for root, in a small container.
CHROME: dict[str, Any] = {
    "executable_path": CHROMIUM,
    "args": ["--no-sandbox", "--disable-dev-shm-usage"],
}


def test_the_page_is_small_files_that_need_nothing_from_outside() -> None:
    files = {path: content.decode() for path, (_, content) in page_files().items()}
    assert set(files) >= {"/", "/page/main.js", "/page/style.css", "/page/markdown-it.LICENSE.txt"}
    library = files.pop("/page/markdown-it.js")
    assert "innerHTML" not in library and "eval(" not in library and len(library) < 150_000
    del files["/page/markdown-it.LICENSE.txt"]
    for path, text in files.items():
        assert len(text) < 40_000, path
        outside = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in outside and "https://" not in outside and "//cdn" not in outside
        assert not re.search(r"@import|HTML =|insertAdjacent|style=|<script>|document\.write", text)


def test_the_files_of_the_page_need_no_key_and_have_a_strict_policy(serve: Serve) -> None:
    address = serve(Speaker(), keys=["secret"])
    for path, (kind, content) in page_files().items():
        told = httpx.get(f"{address}{path}")
        assert (told.status_code, told.content) == (200, content)
        assert told.headers["content-type"].startswith(kind)
        assert "unsafe" not in told.headers["content-security-policy"]
    assert httpx.get(f"{address}/page/no.js").status_code == 401
    assert httpx.get(f"{address}/status").status_code == 401


PIECES = [  # content, an event's tokens, and what is shown
    ("", [["<think>", ""]], []),  # a tag alone
    ("Yes", [["</think>", ""], ["\n\nY", "suffix"], ["es", ""]], [["Y", "suffix"], ["es", ""]]),
    ("Hi <b", [["<b", "suffix"]], [["Hi ", ""], ["<b", "suffix"]]),  # "Hi " was held back
    ("Hi ", [["Hi ", ""], ["<to", ""]], [["Hi ", ""]]),  # "<to" is held back
    ("Hi", [], [["Hi", ""]]),
]


@pytest.mark.skipif(NODE is None, reason="needs node, which runs one function of the page")
def test_content_is_shown_whatever_the_tokens_of_its_event_are() -> None:
    assert NODE
    cases = [[content, sources] for content, sources, _ in PIECES]
    file = (Path(edgespec.serve.page.__file__).parent / "asking.js").read_text("utf-8")
    function = re.search(r"^export (function piecesOf.*?^})", file, re.S | re.M)
    assert function
    script = f"{function[1]}; for (const one of {json.dumps(cases)})"
    script += "console.log(JSON.stringify(piecesOf(...one)))"
    done = subprocess.run([NODE, "-e", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [one[2] for one in PIECES]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with api.sync_playwright() as started:
        opened = started.chromium.launch(**CHROME)
        yield opened
        opened.close()


def opened(browser: Any, address: str, problems: list[str], width: int = 1000) -> Any:
    tab = browser.new_context(viewport={"width": width, "height": 700}).new_page()
    tab.set_default_timeout(1000 * PATIENCE_S)
    tab.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(address)
    tab.click("#settings > summary")
    tab.wait_for_selector("#server dd")
    return tab


def until(tab: Any, is_so: str) -> None:
    """Wait for what a script says; the page's own policy forbids playwright to do so inside it."""
    end = time.monotonic() + PATIENCE_S
    while not tab.evaluate(is_so):
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


def test_a_chat_in_a_browser(serve: Serve, browser: Any) -> None:
    backend = Speaker("Hello <b>there</b>! ", loops=True)
    address, problems = serve(backend), list[str]()
    tab = opened(browser, address, problems)
    assert tab.get_attribute("#temperature", "placeholder") == "0: the likeliest token"
    assert tab.get_attribute("#most", "placeholder") == "to the end of the context, 2048"
    tab.fill("#most", "20")
    say(tab, "Hi")
    assert tab.inner_text("article.assistant .note") == "cut off"
    assert texts(tab) == ["Hello <b>there</b>!"]
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
    until(tab, "document.querySelectorAll('article').length === 4")
    other = opened(browser, address, problems, width=320)
    assert other.locator("article").count() == 0
    assert other.evaluate("document.documentElement.scrollWidth") <= 320
    tab.click("#settings > summary")
    for one in (tab, other):  # at once
        one.fill("#most", "40")
        one.fill("#message", "Again")
    for one in (tab, other):
        one.press("#message", "Enter")
    for one in (tab, other):
        until(one, "document.querySelector('article:last-child .note').innerText === 'cut off'")
    assert problems == []


@pytest.mark.long
@pytest.mark.parametrize("step_s", [0.0, 0.002])  # several tokens an event, and one
def test_a_thought_is_folded_and_no_word_is_lost(serve: Serve, browser: Any, step_s: float) -> None:
    backend = Speaker("<think>\nHm, tags.\n</think>\n\nThe first words.")
    backend.step_s = step_s
    problems = list[str]()
    tab = opened(browser, serve(backend), problems)
    for _ in range(3):
        say(tab, "Hi")
    for _ in range(2):  # and once more after a reload
        until(tab, "document.querySelectorAll('article.assistant').length === 3")
        assert texts(tab) == ["The first words."] * 3
        assert tab.locator("details.thought div").first.text_content() == "Hm, tags."
        assert not tab.locator("details.thought div").first.is_visible()
        assert "think>" not in tab.inner_html("#talk")
        tab.reload()
    assert problems == []


@pytest.mark.long
def test_a_reload_loses_neither_a_question_nor_words(serve: Serve, browser: Any) -> None:
    backend, problems = Speaker("word ", loops=True), list[str]()
    tab = opened(browser, serve(backend), problems)
    backend.gate.clear()
    tab.fill("#message", "A question")
    tab.press("#message", "Enter")
    tab.wait_for_selector("#stop:visible")
    tab.fill("#message", "and a thought")
    tab.reload()
    until(tab, "document.querySelector('#message').value === 'A question\\n\\nand a thought'")
    assert tab.locator("article").count() == 0
    backend.gate.set()
    backend.step_s = 0.005
    tab.press("#message", "Enter")
    until(tab, "document.querySelector('article.assistant .text')?.innerText.length > 20")
    tab.reload()
    until(tab, "document.querySelectorAll('article').length === 2")
    assert tab.input_value("#message") == ""
    assert texts(tab, "user") == ["A question\n\nand a thought"]
    assert "word word word" in texts(tab)[0]


@pytest.mark.long
def test_a_new_tab_begins_with_the_last_chat_and_without_its_key(
    serve: Serve, browser: Any
) -> None:
    """Closing a tab lost the conversation."""
    backend, problems = Speaker("Yes."), list[str]()
    address = serve(backend)
    tab = opened(browser, address, problems)
    tab.fill("#key", "secret")
    say(tab, "Are you there?")
    assert texts(tab) == ["Yes."]
    context = tab.context
    tab.close(run_before_unload=False)
    again = context.new_page()
    again.set_default_timeout(1000 * PATIENCE_S)
    again.goto(address)
    until(again, "document.querySelectorAll('article').length === 2")
    assert (texts(again, "user"), texts(again)) == (["Are you there?"], ["Yes."])
    assert again.input_value("#key") == ""
    assert "secret" not in again.evaluate("JSON.stringify(localStorage)")
    assert problems == []


@pytest.mark.long
def test_what_takes_its_time_is_told_until_the_first_token(serve: Serve, browser: Any) -> None:
    backend, problems = Speaker("Yes."), list[str]()
    tab = opened(browser, serve(backend), problems)
    backend.gate.clear()
    tab.fill("#message", "Hi")
    tab.press("#message", "Enter")
    tab.wait_for_selector("article.assistant .note:text('reading the prompt, 1 s')")
    assert tab.inner_text("#drafters") == "Being written."
    tab.click("#stop")  # at any moment: what was typed is there again
    until(tab, "document.querySelector('#message').value === 'Hi'")
    assert tab.locator("article").count() == 0
    tab.press("#message", "Enter")
    backend.gate.set()
    until(tab, "document.querySelector('article.assistant .text')?.innerText === 'Yes.'")
    until(tab, "document.querySelector('article.assistant .note').innerText === ''")
    assert problems == []


def test_what_is_typed_is_read_before_it_is_sent(serve: Serve, browser: Any) -> None:
    problems, sent, ahead = list[str](), list[Any](), list[Any]()
    address = serve(Speaker("Yes."))
    tab = opened(browser, address, problems)
    listen(tab, sent, ahead)

    def totals() -> dict[str, int]:
        found: dict[str, int] = httpx.get(f"{address}/status").json()["totals"]
        return found

    tab.select_option("#ahead", "never")
    tab.type("#message", "These are ")
    tab.wait_for_timeout(500)
    assert totals()["read_ahead"] == 0
    tab.select_option("#ahead", "always")
    tab.type("#message", "words that are typed")
    end = time.monotonic() + PATIENCE_S
    while totals()["read_ahead"] < len("<user>These are words that are<assistant>"):
        assert time.monotonic() < end
        tab.wait_for_timeout(50)
    assert sent == [] and tab.locator("article").count() == 0
    tab.press("#message", "Enter")
    until(tab, "document.querySelector('article.assistant .text')?.innerText === 'Yes.'")
    assert totals()["read_ahead_used"] >= len("<user>These are words that are")
    while [one["content"] for one in ahead[-1]["messages"]][1:] != ["Yes.", ""]:
        assert time.monotonic() < end  # behind the answer, what comes before the next one
        tab.wait_for_timeout(50)
    assert problems == []


# -- Markdown --------------------------------------------------------------------------------------

MARKDOWN = """# A *title*

**Bold**, `a<b`, [a link](https://example.com/ "x"), [no link](javascript:alert(1)) and
![an image](https://example.com/x.png).

1. one
   - nested
2. two

| name | value |
|------|------:|
| a    | 1     |

> Said.

<script>alert(1)</script> <img src=x onerror=alert(1)>

```python
print("\u202e<b>")
"""


def test_markdown_is_shown_and_nothing_of_it_is_html(serve: Serve, browser: Any) -> None:
    problems = list[str]()
    tab = opened(browser, serve(Speaker(MARKDOWN)), problems, width=360)
    say(tab, "**Hi**")
    assert texts(tab, "user") == ["**Hi**"]  # as it was typed
    text = "article.assistant .text "
    found = "h4.h1 em, strong, p > code, ol > li > ul > li, td, blockquote, .code pre"
    assert tab.locator(text + found).all_inner_texts() == [
        *("title", "Bold", "a<b", "nested", "a", "1", "Said."),
        'print("U+202E<b>")',  # a block that nothing ends
    ]
    links = tab.locator(text + "a").all()  # an image is fetched from nowhere
    targets = [one.get_attribute("href") for one in links]
    assert targets == ["https://example.com/", "https://example.com/x.png"]
    assert {one.get_attribute("rel") for one in links} == {"noopener noreferrer"}
    assert "[no link](javascript:alert(1))" in texts(tab)[0]
    assert "<script>alert(1)</script> <img src=x onerror=alert(1)>" in texts(tab)[0]
    assert tab.locator(text + "script").count() == tab.locator(text + "img").count() == 0
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("[aria-label='Copy code']")
    tab.wait_for_selector("button:text('Copied')")
    assert tab.evaluate("navigator.clipboard.readText()") == 'print("\u202e<b>")\n'
    assert problems == []


SHOWN = """([text, pieces, step]) => import("./page/markdown.js").then(({ Markdown }) => {
  const whole = document.createElement("div"), grown = document.createElement("div");
  new Markdown(whole).show(text, pieces);
  const growing = new Markdown(grown), most = step ? text.length : 0;
  for (let n = 1; n <= most; n += step) growing.show(text.slice(0, n), pieces);
  if (step) growing.show(text, pieces);
  const marks = [...whole.querySelectorAll("mark")].map((one) => [one.innerText, one.dataset.from]);
  return [whole.textContent, !step || whole.isEqualNode(grown), marks];
})"""


@pytest.mark.long
def test_what_grows_is_shown_as_if_it_came_at_once_and_tinted(serve: Serve, browser: Any) -> None:
    tab = opened(browser, serve(Speaker()), list[str]())
    text = f"{MARKDOWN}```\n\n{MARKDOWN}"
    assert tab.evaluate(SHOWN, [text, [], 1])[1]
    pieces = [
        *(["A **", ""], ["bold word", "suffix"], ["** and\n", ""]),
        *(["- a list\n\n```\n", "model"], ["co", ""], ["de\n```", "suffix"]),
    ]
    whole = "".join(text for text, _ in pieces)
    assert tab.evaluate(SHOWN, [whole, pieces, 1])[2] == [
        *(["bold word", "suffix"], ["a list", "model"], ["de", "suffix"]),
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("- " * 10_000 + "x", "> " * 10_000 + "x", "x " * 500_000, "[" * 100_000),
        *("*a **b" * 20_000, "a" + "`" * 100_000, "| a " * 20_000 + "|\n" + "|-" * 20_000),
        "\ud800 \u202e \u2066\x00",
    ],
    ids=lambda text: ascii(text[:8]),
)
def test_what_strangers_write_is_shown_whole_and_soon(browser: Any, text: str, plain: Any) -> None:
    shown, _, _ = plain.evaluate(SHOWN, [text, [], 0])
    letters = re.compile(r"[\s>|-]|\x00|\ufffd")
    assert letters.sub("", shown) == letters.sub("", text)


@pytest.fixture(scope="module")
def plain(browser: Any) -> Iterator[Any]:
    """A tab with the files of the page and no server behind it."""
    tab = browser.new_page()
    tab.set_default_timeout(1000 * PATIENCE_S)
    files = page_files()

    def answer(route: Any) -> None:
        path = urlsplit(route.request.url).path
        kind, content = files.get(path, ("", b""))
        route.fulfill(status=200 if kind else 404, body=content, content_type=kind)

    tab.route("**/*", answer)
    tab.goto("http://localhost/")
    yield tab
    tab.close()


# -- versions and chats ----------------------------------------------------------------------------


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


# -- settings and tools ----------------------------------------------------------------------------


@pytest.mark.long
def test_a_schema_and_settings_are_sent_and_kept(serve: Serve, browser: Any) -> None:
    problems, sent = list[str](), list[Any]()
    tab = opened(browser, serve(Speaker("Yes.")), problems)
    listen(tab, sent)
    tab.fill("#schema", "{")
    tab.fill("#message", "Hi")
    tab.press("#message", "Enter")
    tab.wait_for_selector("#problem:text('The JSON schema is no JSON')")
    assert tab.input_value("#message") == "Hi" and sent == []
    tab.fill("#schema", '{"type": "string"}')
    tab.fill("#topp", "0.5")
    tab.press("#topp", "Tab")
    tab.reload()
    until(tab, "document.querySelector('#message').value === 'Hi'")
    tab.press("#message", "Enter")
    tab.wait_for_selector("#send:visible")
    wanted = {"name": "answer", "schema": {"type": "string"}}
    assert sent[0]["response_format"] == {"type": "json_schema", "json_schema": wanted}
    assert sent[0]["top_p"] == 0.5 and "temperature" not in sent[0]


@pytest.mark.long
def test_calls_are_shown_and_their_results_are_asked_for(serve: Serve, browser: Any) -> None:
    problems, sent = list[str](), list[Any]()
    backend = Speaker(CALL)
    tab = opened(browser, serve(backend), problems)
    listen(tab, sent)
    tab.fill("#tools", '[{"type": "function", "function": {"name": "weather"}}]')
    say(tab, "Weather?")
    assert tab.inner_text(".call summary") == "Calls weather"
    assert json.loads(tab.inner_text(".call pre")) == {"city": "Rome"}
    assert tab.get_attribute("#message", "placeholder") == "Result of weather"
    backend.ids = [*b"Rain.", END]
    say(tab, "wet")
    assert texts(tab)[-1] == "Rain." and texts(tab, "tool") == ["wet"]
    _, called, result = sent[-1]["messages"]
    assert result == {
        "role": "tool",
        "content": "wet",
        "tool_call_id": called["tool_calls"][0]["id"],
    }
    assert problems == []


@pytest.mark.long
def test_calls_of_the_servers_tools_are_made_when_the_person_agrees(
    serve: Serve, browser: Any
) -> None:
    class Tools:
        def __init__(self) -> None:
            self.tools = [{"type": "function", "function": {"name": "weather"}}]
            self.allowed, self.made = set[str](), list[Any]()

        def has(self, name: str) -> bool:
            return name == "weather"

        def result(self, _name: str, values: Any, _most_chars: int) -> str:
            self.made.append(values)
            return f"wet {len(self.made)}"

        def close(self) -> None: ...

    problems, sent, tools = list[str](), list[Any](), Tools()
    backend = Speaker(CALL)
    tab = opened(browser, serve(backend, tools=tools), problems)
    listen(tab, sent)
    say(tab, "Weather?")
    assert sent[-1]["tools"] == tools.tools and tools.made == []
    backend.ids = [*b"No.", END]
    tab.click("#may-call button:text('Do not call it')")
    until(tab, "document.querySelectorAll('article').length === 4")
    assert tools.made == [] and "does not want" in texts(tab, "tool")[0]
    backend.ids = [*CALL.encode(), END]
    say(tab, "Again")
    tab.reload()  # which calls nothing
    backend.ids = [*b"Rain.", END]
    tab.click("#may-call button:text('Always call it')")
    until(tab, "document.querySelectorAll('article').length === 8")
    tab.wait_for_selector("#send:visible")
    assert tools.made == [{"city": "Rome"}] and texts(tab, "tool")[-1] == "wet 1"
    backend.ids = [*CALL.encode(), END]  # for ever: after some rounds the person is asked again
    say(tab, "And now?")
    tab.wait_for_selector("#may-call button:text('Call weather')")
    until(tab, "document.querySelectorAll('#may-call button').length === 3")
    assert len(tools.made) == 9
    assert problems == []


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_text_file_goes_with_a_message(serve: Serve, browser: Any) -> None:
    problems, sent = list[str](), list[Any]()
    tab = opened(browser, serve(Speaker("Yes.")), problems)
    listen(tab, sent)
    for name, data in (("a.py", b"x = '```'\n"), ("b.txt", b"Two\n")):
        tab.set_input_files("#file", {"name": name, "mimeType": "", "buffer": data})
    until(tab, "document.querySelectorAll('#images button').length === 2")
    tab.set_input_files("#file", {"name": "big.txt", "mimeType": "", "buffer": b"x" * (2**20 + 1)})
    tab.wait_for_selector("#problem:text('big.txt is larger than 1 MiB.')")
    tab.click("[aria-label='Remove file b.txt']")
    tab.reload()
    until(tab, "document.querySelectorAll('#images button').length === 1")
    say(tab, "Look")
    said = "a.py:\n````\nx = '```'\n````\n\nLook"
    assert sent[-1]["messages"] == [{"role": "user", "content": said}]
    assert tab.inner_text("article.user details.file summary") == "a.py"
    assert tab.locator("#images button").count() == 0
    assert problems == []


@pytest.mark.long
def test_everything_is_reached_by_keys_and_has_a_name(serve: Serve, browser: Any) -> None:
    tab = opened(browser, serve(Speaker("```\ncode\n```")), list[str]())
    tab.click("#chats-shown")
    tab.keyboard.press("Escape")
    say(tab, "Hi")
    reached = set()
    for _ in range(45):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.ariaLabel || document.activeElement.id"))
    wanted = {"chats-shown", "tint", "theme", "clear", "export-one", "import", "attach", "send"}
    wanted |= {"Copy code", "Answer again", "Edit message", "Delete chat Hi", "Conversation"}
    assert reached >= {*wanted, "schema", "temperature", "Message", "Code"}
    tree = tab.locator("body").aria_snapshot()
    assert not re.search(r"- (button|textbox|combobox|spinbutton)(:|$)", tree, re.M)


GIVE = """([data, kind, name]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0)), given = new DataTransfer();
  const types = { png: "image/png", jpg: "image/jpeg", wav: "audio/wav" }, cancelable = true;
  const type = types[name.split(".").pop()];
  given.items.add(new File([bytes], name, { type }));
  const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: given, cancelable })
    : new DragEvent(kind, { dataTransfer: given, cancelable });
  document.dispatchEvent(event);
  return event.defaultPrevented;
}"""


def give(tab: Any, kind: str, data: bytes, name: str) -> None:
    """A file by drop or paste."""
    assert tab.evaluate(GIVE, [base64.b64encode(data).decode(), kind, name])


@pytest.mark.long
def test_an_image_by_drop_paste_and_choice(browser: Any, vision_folder: Path) -> None:
    """What is dropped is shown, sent with the next message, and there again after a reload."""
    problems, sent = list[str](), list[Any]()
    with open_engine(vision_folder, "gemma3") as engine, Server(engine) as server:
        tab = opened(browser, server.start(), problems)
        listen(tab, sent)
        tab.wait_for_selector("#attach:text('Image, file')")
        tab.fill("#most", "24")
        give(tab, "drop", png(picture(1)), "one.png")
        until(tab, "document.querySelectorAll('#images img').length === 1")
        give(tab, "paste", jpeg(64, 32, turn=6), "turned.jpg")
        until(tab, "document.querySelectorAll('#images img').length === 2")
        tab.set_input_files("#file", {"name": "big.png", "mimeType": "", "buffer": jpeg(3000, 30)})
        until(tab, "document.querySelectorAll('#images img').length === 3")
        tab.click("[aria-label='Remove image 3']")
        tab.set_input_files("#file", {"name": "no.png", "mimeType": "", "buffer": b"no image"})
        tab.wait_for_selector("#problem:text('no.png is no image')")
        tab.reload()
        until(tab, "document.querySelectorAll('#images img').length === 2")
        tab.fill("#message", "What is this?")
        tab.press("#message", "Enter")
        tab.wait_for_selector("article.assistant .note:text('cut off')")
        content = sent[-1]["messages"][0]["content"]
        shown = [read_image(one["image_url"]["url"]) for one in content[:-1]]
        assert [(one.width, one.height) for one in shown] == [(96, 64), (32, 64)]
        assert content[-1] == {"type": "text", "text": "What is this?"}
        assert tab.locator("article.user img").count() == 2
        assert tab.locator("#images img").count() == 0
        tab.reload()
        until(tab, "document.querySelectorAll('article.user img').length === 2")
    assert problems == []


@pytest.mark.long
def test_a_sound_by_drop_paste_and_choice(browser: Any, tmp_path: Path) -> None:
    """What is sent is one channel of 16,000 samples a second, as long as what was given."""
    write_hearing(tmp_path, "qwen2a")
    problems, sent = list[str](), list[Any]()
    engine = open_engine(tmp_path, "qwen2a", context_size=2048)
    with engine, Server(engine) as server:
        tab = opened(browser, server.start(), problems)
        listen(tab, sent)
        tab.wait_for_selector("#attach:text('Sound, file')")
        tab.fill("#most", "8")
        give(tab, "drop", wav(samples(1), 16000), "one.wav")
        until(tab, "document.querySelectorAll('#images button').length === 1")
        give(tab, "paste", wav(samples(2, 0.5, 44100), 44100, 2), "two.wav")
        until(tab, "document.querySelectorAll('#images button').length === 2")
        flac_file = {"name": "three", "mimeType": "", "buffer": flac(samples(3))}
        tab.set_input_files("#file", flac_file)
        until(tab, "document.querySelectorAll('#images button').length === 3")
        tab.click("[aria-label='Remove sound 3']")
        tab.set_input_files("#file", {"name": "no.wav", "mimeType": "", "buffer": b"no sound"})
        tab.wait_for_selector("#problem:text('no.wav is no sound')")
        tab.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b""})
        tab.wait_for_selector("#problem:text('a.png is no sound')")
        tab.reload()
        until(tab, "document.querySelectorAll('#images button').length === 2")
        tab.fill("#message", "What is said?")
        tab.press("#message", "Enter")
        tab.wait_for_selector("#send:visible")
        content = sent[-1]["messages"][0]["content"]
        heard = [read_image(base64.b64decode(one["input_audio"]["data"])) for one in content[:-1]]
        assert [round(one.seconds, 2) for one in heard if isinstance(one, Sound)] == [1.0, 0.5]
        values = np.frombuffer(heard[0].data[44:], "<i2").astype(int)
        assert np.abs(values - samples(1)).max() <= 1
        assert content[-1] == {"type": "text", "text": "What is said?"}
        assert tab.locator("article.user audio").count() == 2
        assert tab.locator("article.assistant").count() == 1
    assert problems == []


@pytest.mark.long
def test_a_model_that_sees_alone_takes_no_sound(browser: Any, vision_folder: Path) -> None:
    problems = list[str]()
    with open_engine(vision_folder, "gemma3") as engine, Server(engine) as server:
        tab = opened(browser, server.start(), problems)
        tab.wait_for_selector("#attach:text('Image, file')")
        give(tab, "drop", wav(samples(1)), "one.wav")
        tab.wait_for_selector("#problem:text('This model takes no sounds, as one.wav')")
        assert tab.locator("#images button").count() == 0
    assert problems == []


@pytest.mark.long
def test_a_model_that_reads_text_alone_takes_no_image(serve: Serve, browser: Any) -> None:
    tab = opened(browser, serve(Speaker()), list[str]())
    assert tab.inner_text("#attach") == "File"
    give(tab, "drop", png(picture(1)), "one.png")
    tab.wait_for_selector("#problem:text('This model reads text alone')")
    assert tab.locator("#images img").count() == 0


WIDE = f"| {'wide | ' * 30}\n|{'---|' * 30}\n\n```\n{'code ' * 40}\n```\n" + "The end. " * 20


@pytest.mark.long
def test_wide_lines_scroll_in_a_box_with_a_shadow(serve: Serve, browser: Any) -> None:
    problems = list[str]()
    tab = opened(browser, serve(Speaker(WIDE)), problems, width=360)
    say(tab, "Hi")
    boxes = "[...document.querySelectorAll('.assistant .scrolls')]"
    assert (
        tab.evaluate(f"{boxes}.map((one) => one.scrollWidth > 2 * one.clientWidth)") == [True] * 2
    )
    shadows = (
        f"{boxes}.map((one) => getComputedStyle(one).backgroundImage.split('gradient').length)"
    )
    assert tab.evaluate(shadows) == [5, 5]
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert problems == []


@pytest.mark.long
def test_a_server_that_goes_away_is_told(serve: Serve, browser: Any) -> None:
    address, problems = serve(Speaker()), list[str]()
    tab = opened(browser, address, problems)
    tab.route("**/*", lambda route: route.abort())
    tab.fill("#message", "Hi")
    tab.press("#message", "Enter")
    tab.wait_for_selector("#problem:text('does not answer')")
    assert tab.input_value("#message") == "Hi"  # nothing is lost
    tab.unroute("**/*")
    tab.press("#message", "Enter")
    until(tab, "document.querySelector('article.assistant .text')?.innerText")
    assert tab.is_hidden("#problem")


@pytest.mark.long
def test_several_models_are_shown_and_one_is_chosen(start: Start, browser: Any) -> None:
    server, problems = start(), list[str]()
    tab = opened(browser, server.address, problems)
    choice = "[...document.querySelectorAll('#choice option')].map((one) => one.textContent)"
    until(tab, "document.querySelectorAll('#choice option').length")
    assert tab.evaluate(choice) == ["a (unloaded)", "b (unloaded)", "c (unloaded)"]
    for _ in range(2):  # the choice outlives a reload
        tab.select_option("#choice", "b")
        tab.fill("#message", "Hi")
        tab.press("#message", "Enter")
        tab.wait_for_selector("#send:visible")
        assert tab.locator("article.assistant .text").last.inner_text() == "I am b."
        tab.wait_for_selector("#models:has-text('ready')")
        tab.reload()
        until(tab, "document.querySelector('#choice').value === 'b'")
    assert server.states() == {"a": "unloaded", "b": "ready", "c": "unloaded"}
    assert "ready" in tab.inner_text("#models") and "unloaded" in tab.inner_text("#models")
    assert problems == []


@pytest.mark.long
def test_a_broken_file_cannot_be_chosen(start: Start, browser: Any) -> None:
    """It was offered as the others, and the first one of a folder was the page's."""
    broken, problems = Made("a"), list[str]()
    broken.failure = ModelFileError("bytes are missing")
    server = start(Member(broken), Member(Made("b")), Member(Made("c")))
    said = httpx.post(
        f"{server.address}/v1/completions", json={"model": "a", "prompt": "Hi", "max_tokens": 1}
    )
    assert said.status_code == 500  # it was looked at
    tab = opened(browser, server.address, problems)
    until(tab, "document.querySelector('#choice option')?.innerText.includes('cannot be loaded')")
    choice = "[...document.querySelectorAll('#choice option')].map((one) => one.disabled)"
    assert tab.evaluate(choice) == [True, False, False]
    tab.fill("#message", "Hi")
    tab.press("#message", "Enter")
    tab.wait_for_selector("#send:visible")
    assert tab.locator("article.assistant .text").last.inner_text() == "I am b."
    assert problems == []
