"""Messages through the `anthropic` client: what it may ask for, and what it gets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving_cases import (
    CALLS,
    HELLO,
    ConnectAnthropic,
    Failing,
    Serve,
    Speaker,
    calling_reader,
    events_of,
)

from edgespec.serve.messages import MessagesSerializer

TOOL: Any = {
    "name": "weather",
    "description": "Of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_called_and_answered(
    serve: Serve, anthropic_client: ConnectAnthropic, streams: bool
) -> None:
    backend = Speaker(f"Let me look.\n{CALL}")
    talk = anthropic_client(serve(backend)).messages
    asked: Any = {
        "model": "edgespec",
        "max_tokens": 200,
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
    }
    if streams:
        with talk.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = talk.create(**asked)
    assert answer.stop_reason == "tool_use"
    text, call = answer.content
    assert text.type == "text" and text.text == "Let me look."
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Paris"})
    said: Any = [
        *HELLO,
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    backend.ids = [*b"Take a coat."]
    last = talk.create(**{**asked, "messages": said, "max_tokens": 12})
    assert last.content[0].to_dict() == {"type": "text", "text": "Take a coat."}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "must have at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "needs its bytes"),
        ({"tool_choice": {"type": "any"}}, "requires a tool, and there is none"),
        ({"thinking": {"type": "often"}}, "thinking.type must be enabled, adaptive or disabled"),
        ({"output_config": {"effort": "huge"}}, "reasoning_effort must be one of"),
        ({"container": "x"}, "container is not supported"),
    ],
)
def test_what_is_not_supported_is_an_error_of_the_interface(
    serve: Serve, changes: dict[str, Any], problem: str
) -> None:
    body = {"model": "edgespec", "max_tokens": 5, "messages": HELLO, **changes}
    response = httpx.post(f"{serve(Speaker())}/v1/messages", json=body)
    assert response.status_code == 400
    document = response.json()
    assert document["type"] == "error" and document["error"]["type"] == "invalid_request_error"
    assert problem in document["error"]["message"]


def test_the_client_knows_its_errors(serve: Serve, anthropic_client: ConnectAnthropic) -> None:
    import anthropic  # takes 2 s, of every process that collects tests

    address = serve(Speaker(), keys=("secret",))
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_client(address).messages.create(model="edgespec", max_tokens=5, messages=HELLO)
    known = anthropic_client(address, "secret").messages
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        known.create(model="claude", max_tokens=5, messages=HELLO)
    answer = known.create(model="edgespec", max_tokens=5, messages=HELLO)
    assert answer.stop_reason == "max_tokens"


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_cut_in_the_middle_ends_with_max_tokens(
    serve: Serve, anthropic_client: ConnectAnthropic, streams: bool
) -> None:
    """It was told as a call that is whole, which a client runs."""
    written = f"Let me look.\n{CALL}"
    cut = written.index("ris")  # each byte is a token
    asked: Any = {"model": "edgespec", "max_tokens": cut, "messages": HELLO, "tools": [TOOL]}
    talk = anthropic_client(serve(Speaker(written))).messages
    if streams:
        with talk.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = talk.create(**asked)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == cut
    text, *calls = answer.content
    assert text.type == "text" and text.text.startswith("Let me look.")
    assert all(one.type == "tool_use" and one.input != {"city": "Paris"} for one in calls)


def test_an_answer_may_have_to_fit_a_schema(serve: Serve) -> None:
    """Of a model that has no grammars: refused, not ignored."""
    format_ = {"type": "json_schema", "schema": {"type": "object"}}
    body = {
        "model": "edgespec",
        "max_tokens": 5,
        "messages": HELLO,
        "output_config": {"format": format_},
    }
    response = httpx.post(f"{serve(Speaker())}/v1/messages", json=body)
    assert response.status_code == 400
    assert "a grammar needs" in response.json()["error"]["message"]


def test_an_answer_is_a_message_with_its_usage(
    serve: Serve, anthropic_client: ConnectAnthropic
) -> None:
    backend = Speaker()
    talk = anthropic_client(serve(backend, names=["tiny"])).messages
    answer = talk.create(model="tiny", max_tokens=50, messages=HELLO, system="Be brief")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.to_dict() for block in answer.content] == [
        {"type": "text", "text": "Hello, world!"}
    ]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    prompt = len("<system>Be brief<user>Hi<assistant>")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (prompt, 14)
    assert answer.usage.cache_read_input_tokens == 0
    again = talk.create(model="tiny", max_tokens=50, messages=HELLO, system="Be brief")
    assert again.usage.cache_read_input_tokens == prompt - 1
    assert again.usage.input_tokens == 1
    count = talk.count_tokens(model="tiny", messages=HELLO, system="Be brief")
    assert count.input_tokens == prompt


def test_the_ends_of_answers(serve: Serve, anthropic_client: ConnectAnthropic) -> None:
    talk = anthropic_client(serve(Speaker())).messages
    short = talk.create(model="edgespec", max_tokens=5, messages=HELLO)
    assert short.stop_reason == "max_tokens"
    stopped = talk.create(
        model="edgespec", max_tokens=50, messages=HELLO, stop_sequences=["x", "wor"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wor")


def test_a_stream_has_the_events_of_the_interface(
    serve: Serve, anthropic_client: ConnectAnthropic
) -> None:
    address = serve(Speaker())
    body = {"model": "edgespec", "max_tokens": 50, "messages": HELLO, "stream": True}
    response = httpx.post(f"{address}/v1/messages", json=body)
    events = [part.split("\n", 1) for part in response.text.split("\n\n") if part]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [o["type"] for o in documents]
    kinds = [one["type"] for one in documents]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    with anthropic_client(address).messages.stream(
        model="edgespec", max_tokens=50, messages=HELLO
    ) as stream:
        assert "".join(stream.text_stream) == "Hello, world!"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == 14


def test_thoughts_are_blocks_of_their_own(serve: Serve, anthropic_client: ConnectAnthropic) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking %}<think>{% else %}</think>{% endif %}"
    )
    backend = Speaker("hm</think>Yes")
    talk = anthropic_client(serve(backend, chat_template=template)).messages
    asked: Any = {"model": "edgespec", "max_tokens": 50, "messages": HELLO}
    answer = talk.create(**asked, thinking={"type": "adaptive"})
    assert [(block.type, block.to_dict()) for block in answer.content] == [
        ("thinking", {"type": "thinking", "thinking": "hm", "signature": ""}),
        ("text", {"type": "text", "text": "Yes"}),
    ]
    with talk.stream(**asked, thinking={"type": "adaptive"}) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [b.to_dict() for b in answer.content]


def test_every_part_of_an_answer_is_a_block() -> None:
    """Each begins, grows and ends before the next one; arguments come in parts."""
    events = events_of(MessagesSerializer("m", 3), calling_reader(), CALLS)
    assert events[0]["type"] == "message_start"
    assert [one["type"] for one in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    blocks = events[1:-2]
    starts = [one["content_block"] for one in blocks if one["type"] == "content_block_start"]
    assert [one["type"] for one in starts] == ["thinking", "text", "tool_use", "tool_use"]
    for number, (grows, whole) in enumerate(
        [
            ("thinking", "Hm."),
            ("text", "I look."),
            ("partial_json", '{"city": "Rome"}'),
            ("partial_json", "{}"),
        ]
    ):
        own = [one for one in blocks if one["index"] == number]
        kinds = ["start", *["delta"] * (len(own) - 2), "stop"]
        assert [one["type"] for one in own] == [f"content_block_{kind}" for kind in kinds]
        assert "".join(one["delta"][grows] for one in own[1:-1]) == whole
    assert [one["index"] for one in blocks] == sorted(one["index"] for one in blocks)
    assert len([one for one in blocks if one["index"] == 2]) > 10


def test_an_answer_that_fails_ends_with_an_error(serve: Serve) -> None:
    body = {"max_tokens": 50, "messages": HELLO, "stream": True}
    told = httpx.post(f"{serve(Failing())}/v1/messages", json=body).text
    last = json.loads(told.rstrip().rpartition("data: ")[2])
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


def test_its_clients_list_models(serve: Serve, anthropic_client: ConnectAnthropic) -> None:
    (model,) = anthropic_client(serve(Speaker())).models.list().data
    assert (model.type, model.display_name) == ("model", model.id) and model.created_at.year > 2024


@pytest.mark.parametrize(
    ("method", "path", "keys", "status", "kind"),
    [
        ("POST", "/v1/messages", ("k",), 401, "authentication_error"),
        ("GET", "/v1/messages", None, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", None, 404, "not_found_error"),
    ],
)
def test_every_error_below_its_path_has_its_form(
    serve: Serve, method: str, path: str, keys: tuple[str, ...] | None, status: int, kind: str
) -> None:
    told = httpx.request(method, f"{serve(Speaker(), keys=keys)}{path}")
    assert (told.status_code, told.json()["type"]) == (status, "error")
    assert told.json()["error"]["type"] == kind
