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

import numpy as np
import pytest
from pool_cases import Start
from serving_cases import Serve, Speaker
from sound_gguf import flac, samples, wav, write_hearing
from vision_cases import open_engine
from vision_gguf import jpeg, picture, png
from waiting import PATIENCE_S

from edgespec.models.images import Sound, read_image
from edgespec.serve.app import page
from edgespec.serve.server import Server

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_is_one_small_file_that_needs_nothing_from_outside() -> None:
    text = page().decode()
    assert len(text) < 100_000
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in outside and "https://" not in outside and "//cdn" not in outside
    assert "src=" not in text and "@import" not in text


PIECES = [  # content, an event's tokens, and what is shown
    ("", [["<think>", ""]], []),  # a tag alone
    ("Yes", [["</think>", ""], ["\n\nY", "suffix"], ["es", ""]], [["Y", "suffix"], ["es", ""]]),
    ("Hi <b", [["<b", "suffix"]], [["Hi ", ""], ["<b", "suffix"]]),  # "Hi " was held back
    ("Hi ", [["Hi ", ""], ["<to", ""]], [["Hi ", ""]]),  # "<to" is held back
    ("Hi", [], [["Hi", ""]]),
]


@pytest.mark.skipif(NODE is None, reason="needs node, which runs one function of the page")
def test_content_is_shown_whatever_the_tokens_of_its_event_are() -> None:
    function = re.search(r"^function piecesOf.*?^}", page().decode(), re.S | re.M)
    assert NODE and function
    cases = [[content, sources] for content, sources, _ in PIECES]
    script = f"{function[0]}; for (const one of {json.dumps(cases)})"
    script += "console.log(JSON.stringify(piecesOf(...one)))"
    done = subprocess.run([NODE, "-e", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [one[2] for one in PIECES]


@pytest.fixture
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with api.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]  # of root, in a small container
        opened = started.chromium.launch(executable_path=CHROMIUM, args=options)
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
        until(one, "document.querySelector('article:last-child .note').innerText === 'cut off'")
    assert problems == []


@pytest.mark.parametrize("step_s", [0.0, 0.002])  # several tokens an event, and one
def test_a_thought_is_folded_and_no_word_is_lost(serve: Serve, browser: Any, step_s: float) -> None:
    backend = Speaker("<think>\nHm, tags.\n</think>\n\nThe first words.")
    backend.step_s = step_s
    problems = list[str]()
    tab = opened(browser, serve(backend), problems)
    for _ in range(3):
        tab.fill("#message", "Hi")
        tab.press("#message", "Enter")
        tab.wait_for_selector("#send:visible")
    for _ in range(2):  # and once more after a reload
        texts = tab.locator("article.assistant .text").all_inner_texts()
        assert texts == ["The first words."] * 3
        assert tab.locator("details.thought div").first.text_content() == "Hm, tags."
        assert not tab.locator("details.thought div").first.is_visible()
        assert "think>" not in tab.inner_html("#talk")
        tab.reload()
    assert problems == []


def test_a_reload_loses_neither_a_question_nor_words(serve: Serve, browser: Any) -> None:
    backend, problems = Speaker("word ", loops=True), list[str]()
    tab = opened(browser, serve(backend), problems)
    backend.gate.clear()
    tab.fill("#message", "A question")
    tab.press("#message", "Enter")
    tab.wait_for_selector("#stop:visible")
    tab.fill("#message", "and a thought")
    tab.reload()
    assert tab.input_value("#message") == "A question\n\nand a thought"
    assert tab.locator("article").count() == 0
    backend.gate.set()
    backend.step_s = 0.005
    tab.press("#message", "Enter")
    until(tab, "document.querySelector('article.assistant .text')?.innerText.length > 20")
    tab.reload()
    assert tab.input_value("#message") == ""
    assert tab.inner_text("article.user .text") == "A question\n\nand a thought"
    assert "word word word" in tab.inner_text("article.assistant .text")
    assert tab.inner_text("article.assistant .note") == "stopped"


def test_a_new_tab_begins_with_the_last_chat_and_without_its_key(
    serve: Serve, browser: Any
) -> None:
    """Closing a tab lost the conversation; two that are open do not mix."""
    backend, problems = Speaker("Yes."), list[str]()
    address = serve(backend)
    tab = opened(browser, address, problems)
    tab.fill("#key", "secret")
    tab.fill("#message", "Are you there?")
    tab.press("#message", "Enter")
    until(tab, "document.querySelector('article.assistant .text')?.innerText === 'Yes.'")
    until(tab, "document.querySelector('#stop').hidden")
    context = tab.context
    tab.close(run_before_unload=False)
    again = context.new_page()
    again.set_default_timeout(10_000)
    again.goto(address)
    assert again.inner_text("article.user .text") == "Are you there?"
    assert again.inner_text("article.assistant .text") == "Yes."
    again.click("summary")
    assert again.input_value("#key") == ""
    assert "secret" not in again.evaluate("JSON.stringify(localStorage)")
    assert problems == []


def test_what_takes_its_time_is_told_until_the_first_token(serve: Serve, browser: Any) -> None:
    backend, problems = Speaker("Yes."), list[str]()
    tab = opened(browser, serve(backend), problems)
    backend.gate.clear()
    tab.fill("#message", "Hi")
    tab.press("#message", "Enter")
    tab.wait_for_selector("article.assistant .note:text('reading the prompt, 1 s')")
    assert tab.inner_text("#drafters") == "Being written."
    backend.gate.set()
    until(tab, "document.querySelector('article.assistant .text').innerText === 'Yes.'")
    until(tab, "document.querySelector('article.assistant .note').innerText === ''")
    assert problems == []


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


def test_an_image_by_drop_paste_and_choice(browser: Any, vision_folder: Path) -> None:
    """What is dropped is shown, sent with the next message, and there again after a reload."""
    problems, sent = list[str](), list[Any]()
    with open_engine(vision_folder, "gemma3") as engine, Server(engine) as server:
        tab = opened(browser, server.start(), problems)
        tab.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
        tab.wait_for_selector("#attach:visible")
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
        assert tab.locator("#images img").count() == 2
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
        assert tab.locator("article.user img").count() == 2
    assert problems == []


def test_a_sound_by_drop_paste_and_choice(browser: Any, tmp_path: Path) -> None:
    """What is sent is one channel of 16,000 samples a second, as long as what was given."""
    write_hearing(tmp_path, "qwen2a")
    problems, sent = list[str](), list[Any]()
    engine = open_engine(tmp_path, "qwen2a", context_size=2048)
    with engine, Server(engine) as server:
        tab = opened(browser, server.start(), problems)
        tab.on("request", lambda one: sent.append(one.post_data_json) if one.post_data else None)
        tab.wait_for_selector("#attach:visible")
        assert tab.inner_text("#attach") == "Sound"
        assert tab.get_attribute("#file", "accept") == "audio/*"
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
        assert tab.locator("#images button").count() == 2
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


def test_a_model_that_sees_alone_takes_no_sound(browser: Any, vision_folder: Path) -> None:
    problems = list[str]()
    with open_engine(vision_folder, "gemma3") as engine, Server(engine) as server:
        tab = opened(browser, server.start(), problems)
        tab.wait_for_selector("#attach:visible")
        assert tab.get_attribute("#file", "accept") == "image/*"
        give(tab, "drop", wav(samples(1)), "one.wav")
        tab.wait_for_selector("#problem:text('This model takes no sounds, as one.wav')")
        assert tab.locator("#images button").count() == 0
    assert problems == []


def test_a_model_that_reads_text_alone_takes_no_image(serve: Serve, browser: Any) -> None:
    tab = opened(browser, serve(Speaker()), list[str]())
    tab.wait_for_selector("#server dd")
    assert tab.is_hidden("#attach")
    give(tab, "drop", png(picture(1)), "one.png")
    tab.wait_for_selector("#problem:text('This model reads text alone')")
    assert tab.locator("#images img").count() == 0


TABLE = f"See:\n| {'wide | ' * 30}\n|---|\n```\n{'code ' * 40}\n```\n" + "The end. " * 20


def test_wide_lines_scroll_in_a_box_with_a_shadow(serve: Serve, browser: Any) -> None:
    problems = list[str]()
    tab = opened(browser, serve(Speaker(TABLE)), problems, width=360)
    tab.fill("#message", "Hi")
    tab.press("#message", "Enter")
    tab.wait_for_selector("#send:visible")
    kinds = "[...document.querySelectorAll('.assistant .text > *')].map((one) => one.tagName)"
    assert tab.evaluate(kinds) == ["DIV", "PRE", "DIV"]
    assert tab.text_content("article.assistant .text") == TABLE
    box = "document.querySelector('.assistant pre')"
    assert tab.evaluate(f"{box}.scrollWidth > 2 * {box}.clientWidth")
    assert tab.evaluate(f"getComputedStyle({box}).backgroundImage").count("gradient") == 4
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
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
