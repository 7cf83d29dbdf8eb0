"""Fields that nobody knows, wherever they stand in a request: the log names each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from serving_cases import Serve, Speaker

from edgespec.serve import messages, responses
from edgespec.serve.chat import read_chat
from edgespec.serve.completions import read_completion
from edgespec.serve.embeddings import read_embeddings, read_rerank
from edgespec.serve.llama_server import read_ids, read_infill, read_llama, read_text
from edgespec.serve.messages import read_messages
from edgespec.serve.ollama import read_embed, read_prompt, read_talk
from edgespec.serve.parsing import Defaults, Fields, Limits, ServedModel
from edgespec.serve.responses import read_response

_OPEN = {"parameters", "schema", "input_schema", "input"}  # objects that hold what a client likes
_FUNCTION = {"name": "sum", "parameters": {"type": "object", "properties": {}}}
_SCHEMA = {"name": "a", "schema": {"type": "object"}}
_TEXT = {"type": "text", "text": "Hi"}

CHAT = {
    "messages": [
        {"role": "user", "content": [_TEXT]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "sum", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "sum"}},
    "prediction": {"type": "content", "content": "Hi"},
    "stream_options": {"include_usage": True},
    "prompt_cache_options": {"prewarm": False},
    "thinking": {"type": "disabled"},
    "lora": [{"id": 0, "scale": 0.5}],
}
FORM = {"messages": [{"role": "user", "content": "Hi"}]} | {
    "response_format": {"type": "json_schema", "json_schema": _SCHEMA}
}
CHOICE = {"prompt": "Hi", "structured_outputs": {"choice": ["a", "b"]}}
MESSAGES = {
    "max_tokens": 5,
    "messages": [
        {"role": "user", "content": [_TEXT]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "So"},
                {"type": "tool_use", "id": "1", "name": "sum", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3"}]},
    ],
    "tools": [{"name": "sum", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "sum"},
}
ANSWER = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]} | {
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}
}
RESPONSE = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So"}]},
        {"type": "function_call", "call_id": "1", "name": "sum", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
    ],
    "tools": [{"type": "function", **_FUNCTION}],
    "text": {"format": {"type": "json_object"}},
}
OLLAMA = {"messages": [{"role": "user", "content": "Hi"}], "options": {"seed": 1}}
Chat = Callable[[Mapping[str, Any]], dict[str, Any]]


def of_ollama(body: Mapping[str, Any]) -> dict[str, Any]:
    """Its chat: options are fields of it."""
    return {name: value for name, value in body.items() if name != "options"}


REQUESTS: list[tuple[Callable[[Fields, ServedModel], object], dict[str, Any], Chat]] = [
    (read_chat, CHAT, dict),
    (read_chat, FORM, dict),
    (read_completion, CHOICE, dict),
    (read_messages, MESSAGES, messages.as_chat),
    (read_messages, ANSWER, messages.as_chat),
    (read_response, RESPONSE, responses.as_chat),
    (read_llama, {"prompt": "Hi"}, dict),
    (
        read_infill,
        {"input_extra": [{"filename": "a", "text": "b"}]}
        | dict.fromkeys(("input_prefix", "input_suffix"), ""),
        dict,
    ),
    (read_text, {"content": "Hi"}, dict),
    (read_ids, {"tokens": [1]}, dict),
    (read_embeddings, {"input": "Hi"}, dict),
    (read_rerank, {"query": "Hi", "documents": ["Hi"]}, dict),
    (read_talk, OLLAMA, of_ollama),
    (read_prompt, {"prompt": "Hi", "options": {}}, of_ollama),
    (read_embed, {"input": "Hi"}, dict),
]


def spoiled(value: Any) -> Any:
    """The same with a field more in each object."""
    if isinstance(value, list):
        return [spoiled(one) for one in value]
    if not isinstance(value, dict):
        return value
    parts = {name: one if _is_open(name, one) else spoiled(one) for name, one in value.items()}
    return {**parts, "surprise": 1}


def places(value: Any, path: str = "") -> Iterator[str]:
    """The names of these fields, as the log has them."""
    for one in value if isinstance(value, list) else ():
        yield from places(one, f"{path}[]")
    for name, one in value.items() if isinstance(value, dict) else ():
        place = f"{path}.{name}".removeprefix(".")
        yield from [place] if name == "surprise" else places(one, place)


def _is_open(name: str, value: Any) -> bool:
    return name in _OPEN and isinstance(value, dict)


@pytest.mark.parametrize(("read", "body", "chat"), REQUESTS)
def test_a_field_that_nobody_knows_is_named(
    read: Callable[[Fields, ServedModel], object],
    body: dict[str, Any],
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its place in the chat that a request stands for."""
    named = set[str]()
    monkeypatch.setattr("edgespec.serve.parsing._NAMED", named)
    fields = Fields(spoiled(body))
    read(fields, ServedModel(("tiny",), 2048, Defaults(), Limits()))
    fields.end()
    assert named == set(places(chat(spoiled(body)))) >= {"surprise"}


def test_fields_that_change_no_answer_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """How thoughts are shown, and calls that are strict: they always are."""
    monkeypatch.setattr("edgespec.serve.parsing._NAMED", (named := set[str]()))
    shown = dict.fromkeys(
        ("summary", "generate_summary", "exclude", "display", "encrypted_content"), "auto"
    )
    tools = [{"type": "function", "function": {**_FUNCTION, "strict": True}}]
    fields = Fields({**FORM, "reasoning": shown, "thinking": shown, "tools": tools})
    read_chat(fields, ServedModel(("tiny",), 2048, Defaults(), Limits()))
    fields.end()
    assert not named


def test_the_server_names_what_nobody_took(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each request that it answers, and not of what readers are told in a test alone."""
    monkeypatch.setattr("edgespec.serve.parsing._NAMED", (named := set[str]()))
    body = {"messages": [{"role": "user", "content": "Hi", "more": 1}], "surprise": 1}
    assert httpx.post(f"{serve(Speaker('Hi'))}/v1/chat/completions", json=body).status_code == 200
    assert named == {"surprise", "messages[].more"}
