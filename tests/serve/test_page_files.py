"""Texts, images and sounds that go with a message of the page."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import listen, opened, say, until
from serving_cases import Serve, Speaker
from sound_gguf import flac, samples, wav, write_hearing
from vision_cases import open_engine
from vision_gguf import jpeg, picture, png

from edgespec.models.images import Sound, read_image
from edgespec.serve.server import Server


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
