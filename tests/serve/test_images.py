"""Images over HTTP: parts of the three interfaces, what is refused, and who sees whose."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_cases import Serve, Speaker
from sound_gguf import samples, wav, write_hearing
from vision_cases import open_engine
from vision_gguf import images, picture, png
from waiting import PATIENCE_S

import edgespec
from edgespec.decode.engine import Engine
from edgespec.decode.options import Tool
from edgespec.models.chat import ChatMessage
from edgespec.models.images import read_image
from edgespec.serve.parsing import Limits
from edgespec.serve.server import Server

Part = dict[str, Any]
QUESTION = "What is this?"


@pytest.fixture(params=["gemma3", "qwen3vl"])
def seeing(request: pytest.FixtureRequest, vision_folder: Path) -> Iterator[tuple[Engine, str]]:
    """An engine of two users that sees, and the address of its server."""
    with (
        open_engine(vision_folder, request.param, drafts=True, users=2, cells=2048) as engine,
        Server(engine, limits=Limits(body_bytes=50_000)) as server,
    ):
        yield engine, server.start()


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{text_of(data)}"


def post(address: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{address}/v1/{path}", json=body, timeout=PATIENCE_S)


def asked(*several: bytes) -> dict[str, Any]:
    parts: list[Part] = [
        {"type": "image_url", "image_url": {"url": url_of(one)}} for one in several
    ]
    content = [*parts, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": content}], **SHORT}


SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_each_interface_shows_the_same_image(seeing: tuple[Engine, str]) -> None:
    engine, address = seeing
    data = images(1)[0]
    parts = [{"type": "image", "image": data}, {"text": QUESTION}]
    prompt: list[ChatMessage] = [{"role": "user", "content": parts}]
    expected = engine.generate(prompt, max_tokens=8, speculate=False)
    text = {"type": "text", "text": QUESTION}
    chat = post(address, "chat/completions", asked(data))
    assert said(chat) == expected.text
    assert chat.json()["usage"]["prompt_tokens"] == len(engine.encode(prompt))
    item = [{"type": "input_image", "image_url": url_of(data), "detail": "auto"}]
    body = {"input": [{"role": "user", "content": [*item, {**text, "type": "input_text"}]}]}
    answer = post(address, "responses", {**body, "max_output_tokens": 8, "temperature": 0}).json()
    assert answer["output"][0]["content"][0]["text"] == expected.text
    so_far = [*body["input"], *answer["output"], {"role": "user", "content": "And?"}]
    more = {"input": so_far, "temperature": 0}
    assert post(address, "responses", more).json()["usage"]["input_tokens_details"]["cached_tokens"]
    source = {"type": "base64", "media_type": "image/png", "data": text_of(data)}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, text]}]}
    answer = post(address, "messages", {**body, **SHORT}).json()
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    counted = post(address, "messages/count_tokens", body).json()
    assert counted == {"input_tokens": len(engine.encode(prompt))}


def test_a_sound_is_heard(tmp_path: Path) -> None:
    """Where a projector hears; an image is refused there, and a sound where it only sees."""
    write_hearing(tmp_path, "qwen2a")
    data = wav(samples(1))
    part: Part = {"type": "input_audio", "input_audio": {"data": text_of(data), "format": "wav"}}
    content = [part, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], **SHORT}
    with open_engine(tmp_path, "qwen2a", context_size=2048) as engine, Server(engine) as server:
        address = server.start()
        expected = engine.generate(QUESTION, images=[data], max_tokens=8, speculate=False)
        assert said(post(address, "chat/completions", body)) == expected.text
        refused = post(address, "chat/completions", asked(images(1)[0]))
        assert refused.status_code == 400 and "hears alone" in refused.text
        part["input_audio"] = {"data": text_of(data[:40]), "format": "wav"}
        refused = post(address, "chat/completions", body)
        assert refused.status_code == 400 and "broken or cut off" in refused.text
        told = httpx.get(f"{address}/props").json()["modalities"]
        assert told == {"vision": False, "audio": True}


def test_a_tool_may_answer_with_an_image(seeing: tuple[Engine, str]) -> None:
    _, address = seeing
    one, other = images(2)
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}

    def after(data: bytes) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": text_of(data)}
        result = [{"type": "text", "text": "Seen:"}, {"type": "image", "source": source}]
        block = {"type": "tool_result", "tool_use_id": "a", "content": result}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [block, {"type": "text", "text": QUESTION}]},
        ]
        return post(address, "messages", {"messages": messages, **SHORT}).json()["content"]

    assert after(one) == after(one) != after(other)


def test_texts_around_images_are_joined_as_llama_server_does(seeing: tuple[Engine, str]) -> None:
    _, address = seeing
    image = read_image(images(1)[0])
    parts: list[Part] = [{"type": "text", "text": one} for one in ("a", "b", "c", "d")]
    parts.insert(2, {"type": "image_url", "image_url": {"url": url_of(image.data)}})
    body = {"messages": [{"role": "user", "content": parts}]}
    found = httpx.post(f"{address}/apply-template", json=body).json()["prompt"]
    assert f"a\nb{image.mark}c\nd" in found


def test_two_keys_with_the_same_words_see_their_own_image(seeing: tuple[Engine, str]) -> None:
    """At once, again and again, one of them without an image that the cache may hold."""
    engine, address = seeing
    bodies = [asked(images(1)[0]), asked(images(1, first=2)[0]), asked()]
    alone = [post(address, "chat/completions", body) for body in bodies]
    expected = [said(one) for one in alone]
    assert len(set(expected)) == 3
    with ThreadPoolExecutor(6) as pool:
        made = [pool.submit(post, address, "chat/completions", one) for one in bodies * 4]
        assert [said(one.result()) for one in made] == expected * 4
    assert engine.generate("Hi", max_tokens=2).token_ids


def test_a_follow_up_reads_only_what_is_new(seeing: tuple[Engine, str]) -> None:
    _, address = seeing
    body = asked(*images(2))
    first = said(post(address, "chat/completions", body))
    body["messages"] += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    usage = post(address, "chat/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 60


# -- what is refused -----------------------------------------------------------------------

PART: Part = {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}
REFUSED = [
    (PART, "are not fetched from addresses, such as 'https://x.org/a.png'"),
    ({"type": "image_url", "image_url": "file:///etc/hostname"}, "are not fetched from addresses"),
    ({"type": "image_url", "image_url": {"url": "/etc/hostname"}}, "are not fetched"),
    ({"type": "image", "image": "/etc/hostname"}, "an image needs its bytes"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}, "is no base64"),
    ({"type": "image_url", "image_url": {"url": url_of(b"GIF89a")}}, "the file is broken"),
    (
        {"type": "image_url", "image_url": {"url": url_of(b"%PDF-1.7 ")}},
        "is no image or sound of a known",
    ),
    ({"type": "input_image", "file_id": "file-1"}, "send the image itself, as a data: URL"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "no image or sound"),
]


@pytest.mark.parametrize(("part", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_no_image_is_refused_by_its_place(serve: Serve, part: Part, words: str) -> None:
    body = {"messages": [{"role": "user", "content": [part]}]}
    response = httpx.post(f"{serve(Speaker())}/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"]
    assert error["param"].startswith("messages[0].content[0].")


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_model_without_a_projector_says_what_it_needs(serve: Serve, path: str) -> None:
    source = {"type": "base64", "data": text_of(images(1)[0])}
    part = {"type": "image", "source": source}
    body = {"messages": [{"role": "user", "content": [part]}], **SHORT}
    response = post(serve(Speaker()), path, body)
    assert response.status_code == 400
    assert "reads text alone" in response.text and "--mmproj FILE" in response.text


def test_an_assistant_sent_back_has_no_image(serve: Serve) -> None:
    body = {"messages": [{"role": "assistant", "content": [PART]}]}
    error = httpx.post(f"{serve(Speaker())}/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == 'messages[0].content[0].type "image_url" is not supported'


def test_a_broken_image_ends_one_request(seeing: tuple[Engine, str]) -> None:
    _, address = seeing
    data = bytearray(images(1)[0])
    data[60:80] = bytes(20)
    response = post(address, "chat/completions", asked(bytes(data)))
    assert response.status_code == 400 and "is broken" in response.text
    assert said(post(address, "chat/completions", asked(images(1)[0])))


# -- sizes ---------------------------------------------------------------------------------


def test_larger_bodies_are_taken_where_images_are_seen(seeing: tuple[Engine, str]) -> None:
    body = asked(png(picture(1, 200, 120)))
    assert len(json.dumps(body)) > 60_000
    assert said(post(seeing[1], "chat/completions", body))
    assert post(seeing[1], "models/load", body).status_code == 413


def test_and_nowhere_else(serve: Serve) -> None:
    body = asked(png(picture(1, 200, 120)))
    blind = serve(Speaker(), limits=Limits(body_bytes=50_000))
    assert post(blind, "chat/completions", body).status_code == 413


def test_the_server_says_whether_it_sees(seeing: tuple[Engine, str]) -> None:
    check_modalities(seeing[1], sees=True)


def test_the_server_says_that_it_does_not(serve: Serve) -> None:
    check_modalities(serve(Speaker()), sees=False)


def check_modalities(address: str, *, sees: bool) -> None:
    expected = {"vision": sees, "audio": False}
    assert httpx.get(f"{address}/props").json()["modalities"] == expected
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["modalities"] == expected


def test_images_and_tools_beside_each_other_in_python(seeing: tuple[Engine, str]) -> None:
    engine, image = seeing[0], read_image(png(picture(40)))
    tools: list[Tool] = [{"type": "function", "function": {"name": "zoom"}}]
    content: list[Part] = [image.part, {"type": "text", "text": QUESTION}]
    messages: list[ChatMessage] = [{"role": "user", "content": content}]
    turn = edgespec.Session(engine, tools=tools, max_tokens=1).stream(content)
    as_parts = engine.stream(messages, tools=tools, max_tokens=1).prompt_ids
    as_option = engine.stream(QUESTION, images=[image], tools=tools, max_tokens=1).prompt_ids
    assert as_parts == as_option == turn.prompt_ids and min(as_parts) < 0
