"""The page in a real browser. Needs playwright and Chromium (one test: node), or is skipped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from browsing import listen, opened, say, texts, until
from decoding_cases import END
from delaying import DelayingProxy
from fake_backend import FakeBackend
from frozen_times import free_drafts
from pool_cases import Made, Start
from serving_cases import CALL, TEMPLATE, Serve, Speaker, Tools
from waiting import PATIENCE_S

import edgespec.serve.page
from edgespec.backends.base import Logits
from edgespec.decode.engine import Engine
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import ModelFileError
from edgespec.serve.page import page_files
from edgespec.serve.pool import Member
from edgespec.serve.server import Server

NODE = shutil.which("node")


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


class Slow(Speaker):
    """Reads no more than a piece of a prompt while it is held."""

    def prefill(self, tokens: Sequence[int]) -> Logits:
        if self.length == 0:
            return FakeBackend.prefill(self, tokens)
        return super().prefill(tokens)


@pytest.mark.long
def test_reading_is_told_with_the_time_left(serve: Serve, browser: Any) -> None:
    backend, problems = Slow("Yes."), list[str]()
    tab = opened(browser, serve(backend), problems)
    backend.gate.clear()
    tab.fill("#message", "x" * 200)
    tab.press("#message", "Enter")
    note = tab.locator("article.assistant .note")
    until(tab, "document.querySelector('article.assistant .note').innerText.includes('left')")
    assert re.fullmatch(
        r"reading the prompt, \d+ s: 64 of 217 tokens, about \d+ s left", note.inner_text()
    )
    backend.gate.set()
    until(tab, "document.querySelector('article.assistant .text')?.innerText === 'Yes.'")
    assert problems == []


@pytest.mark.long
def test_loading_is_told_and_can_be_stopped(start: Start, browser: Any) -> None:
    server, problems = start(), list[str]()
    server.models["a"].gate.clear()
    tab = opened(browser, server.address, problems)
    for _ in range(2):  # stopped at first
        tab.fill("#message", "Hi")
        tab.press("#message", "Enter")
        loading = "article.assistant .note:text-matches('loading the model, \\\\d+ s, 50%')"
        tab.wait_for_selector(loading)
        tab.keyboard.press("Escape")
        until(tab, "document.querySelector('#message').value === 'Hi'")
        assert tab.locator("article").count() == 0
    server.models["a"].gate.set()
    say(tab, "Hi")
    assert texts(tab) == ["I am a."] and problems == []


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
    tab.focus("#message")
    tab.keyboard.insert_text("words that are typed")
    end = time.monotonic() + PATIENCE_S
    while totals()["read_ahead"] < len("<user>These are words that are typed<assistant>"):
        assert time.monotonic() < end
        tab.wait_for_timeout(50)
    assert sent == [] and tab.locator("article").count() == 0
    tab.press("#message", "Enter")
    until(tab, "document.querySelector('article.assistant .text')?.innerText === 'Yes.'")
    assert totals()["read_ahead_used"] >= len("<user>These are words that are typed")
    while [one["content"] for one in ahead[-1]["messages"]][1:] != ["Yes.", ""]:
        assert time.monotonic() < end  # behind the answer, what comes before the next one
        tab.wait_for_timeout(50)
    assert problems == []


@pytest.mark.long
def test_what_is_read_already_goes_on_while_more_is_typed(serve: Serve, browser: Any) -> None:
    """Each pause began it anew, and waited for two seconds: the page took itself for another."""
    backend, sent, ahead, ended = Speaker("Yes."), list[Any](), list[Any](), list[str]()
    tab = opened(browser, serve(backend), list[str]())
    listen(tab, sent, ahead)
    for kind in ("requestfailed", "requestfinished"):
        tab.on(kind, lambda told, kind=kind: ended.append(kind) if told.post_data else None)
    tab.select_option("#ahead", "always")

    def types(text: str) -> None:
        tab.focus("#message")
        tab.keyboard.insert_text(text)

    backend.gate.clear()
    types("These are ")
    until(tab, lambda: ahead)
    types("more words")
    tab.wait_for_timeout(500)
    assert len(ahead) == 1 and not ended
    backend.gate.set()
    until(tab, lambda: ended == ["requestfinished"] * 2)
    contents = [one["messages"][-1]["content"] for one in ahead]
    assert contents == ["These are", "These are more words"]
    backend.gate.clear()
    types(" and others ")
    until(tab, lambda: len(ahead) == 3)
    tab.fill("#message", "Something else ")  # what is read is of no use any more
    until(tab, lambda: ended[2:] == ["requestfailed"])
    backend.gate.set()
    until(tab, lambda: ahead[-1]["messages"][-1]["content"] == "Something else")
    tab.set_input_files("#file", {"name": "a.txt", "mimeType": "", "buffer": b"A text"})
    until(tab, lambda: "A text" in ahead[-1]["messages"][-1]["content"])
    assert sent == []


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
def test_calls_of_tools_are_made_when_the_person_agrees(serve: Serve, browser: Any) -> None:
    problems, sent, tools = list[str](), list[Any](), Tools()
    backend = Speaker(CALL)
    tab = opened(browser, serve(backend, tools=tools), problems)
    listen(tab, sent)
    say(tab, "Weather?")
    assert sent[-1]["tools"] == tools.tools and tools.made == []
    backend.ids = [*b"No.", END]
    tab.click("#may-call button:text('Do not call it')")
    until(tab, "document.querySelectorAll('article').length === 4")
    tab.wait_for_selector("#send:visible")
    assert tools.made == [] and "does not want" in texts(tab, "tool")[0]
    backend.ids = [*CALL.encode(), END]
    say(tab, "Again")
    tab.reload()  # which calls nothing
    backend.ids = [*b"Rain.", END]
    tab.click("#may-call button:text('Always call it')")
    until(tab, "document.querySelectorAll('article').length === 8")
    tab.wait_for_selector("#send:visible")
    assert tools.made == [{"city": "Rome"}] and texts(tab, "tool")[-1] == "Rain in Rome"
    backend.ids = [*CALL.encode(), END]  # for ever: after some rounds the person is asked again
    say(tab, "And now?")
    tab.wait_for_selector("#may-call button:text('Call weather')")
    until(tab, "document.querySelectorAll('#may-call button').length === 3")
    assert len(tools.made) == 9
    assert problems == []


# -- the whole page --------------------------------------------------------------------------------


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
def test_a_server_that_dies_in_an_answer_leaves_what_was_written(
    serve: Serve, browser: Any
) -> None:
    backend = Speaker("word ", loops=True)
    backend.step_s = 0.005
    target = ("127.0.0.1", urlsplit(serve(backend)).port or 0)
    with DelayingProxy(target) as proxy:
        address = proxy.address
        tab = opened(browser, f"http://{address}", list[str]())
        tab.fill("#most", "200")
        tab.fill("#message", "Hi")
        tab.press("#message", "Enter")
        until(tab, "document.querySelector('article.assistant .text')?.innerText.length > 20")
        tab.type("#message", "and more")
    tab.wait_for_selector("#problem:text('does not answer')")
    tab.wait_for_selector("article.assistant .note:text('stopped')")
    assert "word word word" in texts(tab)[0]
    assert tab.input_value("#message") == "and more"
    with DelayingProxy(target, port=int(address.rpartition(":")[2])):  # it is there again
        until(tab, "document.querySelector('#problem').hidden")
        tab.reload()
        until(tab, "document.querySelectorAll('article').length === 2")
        assert "word word word" in texts(tab)[0]
        assert tab.input_value("#message") == "and more"
        tab.click("[aria-label='Answer again']")
        tab.wait_for_selector("article.assistant .note:text('cut off')")
        assert len(texts(tab)[0]) == len("word " * 40) - 1


COLOURS = "paper ink soft raised accent on-accent bad suffix recycling model grammar other".split()
LIGHT = """(names) => Object.fromEntries(names.map((name) => {
    const colour = getComputedStyle(document.documentElement).getPropertyValue("--" + name);
    const parts = colour.match(/[0-9a-f]{2}/g).map((one) => parseInt(one, 16) / 255)
      .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return [name, 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]];
  }))"""


@pytest.mark.long
def test_both_schemes_can_be_read(serve: Serve, browser: Any) -> None:
    """By the contrast of WCAG's level AA, 4.5; the browser's scheme counts, or what was chosen."""
    address = serve(Speaker())

    def seen(tab: Any) -> str:
        """Which scheme it is."""
        light = tab.evaluate(LIGHT, COLOURS)

        def contrast(one: str, other: str) -> float:
            low, high = sorted((light[one], light[other]))
            return float((high + 0.05) / (low + 0.05))

        for paper in ("paper", "raised"):
            for ink in ("ink", "soft", "accent", "bad"):
                assert contrast(ink, paper) >= 4.5, (ink, paper)
        assert contrast("on-accent", "accent") >= 4.5
        for mark in ("suffix", "recycling", "model", "grammar", "other"):
            assert contrast("ink", mark) >= 4.5, mark
        return "dark" if light["paper"] < light["ink"] else "light"

    for scheme, chosen in (("light", "dark"), ("dark", "light")):
        tab = browser.new_context(color_scheme=scheme).new_page()
        tab.set_default_timeout(1000 * PATIENCE_S)
        tab.goto(address)
        assert seen(tab) == scheme
        while chosen not in tab.inner_text("#theme"):
            tab.click("#theme")
        assert seen(tab) == chosen
        tab.reload()
        assert seen(tab) == chosen


@pytest.mark.long
def test_memory_plan_and_where_tokens_came_from_are_shown(browser: Any) -> None:
    plan, problems = edgespec.plan(context_size=256, drafter="suffix", threads=1), list[str]()
    options: dict[str, Any] = {"drafter": SuffixDrafter(), "curve": free_drafts(3)}
    engine = Engine(Speaker("word ", loops=True), chat_template=TEMPLATE, **options)
    with engine, Server(engine, plan=plan) as server:
        address = server.start()
        for width in (320, 640, 1280):
            tab = opened(browser, address, problems, width)
            tab.fill("#most", "40")
            say(tab, "word word")
            assert re.search(r"suffix\s+\d+ of \d+ accepted", tab.inner_text("#drafters"))
            assert tab.locator("article.assistant mark[data-from=suffix]").count() > 0
            told = tab.inner_text("#memory")
            assert "planned" in told and "kv cache" in told
            told = tab.inner_text("#plan")
            assert all(f"{name.replace('_', ' ')}: " in told for name in plan.as_json())
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert problems == []


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
