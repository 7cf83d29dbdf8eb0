"""The fields that ask for a form of the answer, by each client's name of them."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

import edgespec
from edgespec.serve.fields import Fields
from edgespec.serve.limits import Limits
from edgespec.serve.refusal import Refusal
from edgespec.serve.schemas import take_format, typed_format
from edgespec.serve.server import Server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
ANY = {"json_schema": '{"type": "object"}'}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": TEXT}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"json_schema": TEXT},
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": TEXT}),
        ({"json_schema": SCHEMA}, {"json_schema": TEXT}),
        ({"json_schema": True}, {"json_schema": "true"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": "", "json_schema": SCHEMA}, {"json_schema": TEXT}),
        ({"guided_json": TEXT}, {"json_schema": TEXT}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": TEXT}),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, {"regex": "a+"}),
    ],
    ids=lambda one: str(one)[:60],
)
def test_forms_are_taken_by_every_name(body: dict[str, Any], form: dict[str, str]) -> None:
    fields = Fields(body)
    assert take_format(fields, Limits()) == form
    fields.end()


@pytest.mark.parametrize("field", ["guided_choice", "choice"])
def test_a_choice_is_an_expression_of_its_texts(field: str) -> None:
    choices = ["yes", "no (.*)", 'a"\\\n', "é😀"]
    body: Any = {field: choices} if field != "choice" else {"structured_outputs": {field: choices}}
    expression = take_format(Fields(body), Limits())["regex"]
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", expression)
    assert all(re.fullmatch(python, one) for one in choices)
    assert not any(re.fullmatch(python, one) for one in ("", "yesno", "no ab"))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"json_schema": SCHEMA, "guided_regex": "a"}, "guided_regex and json_schema cannot both"),
        ({"json_schema": 5}, "json_schema must be an object"),
        ({"guided_choice": []}, "guided_choice must be a list of texts"),
        ({"guided_choice": [1]}, "guided_choice must be a list of texts"),
        ({"guided_choice": ["a"] * 1025}, "1025 items"),
        ({"guided_regex": "a" * 300_000}, "262,144 are the most"),
        ({"json_schema": {"description": "x" * 300_000}}, "262,144 are the most"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ({"response_format": {"type": "xml"}}, "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "schema must be an object"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_what_cannot_be_taken_is_refused_by_name(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refusal, match=re.escape(problem)):
        take_format(Fields(body), Limits())


def test_large_schemas_of_the_public_are_taken() -> None:
    """Depth and parts are the grammar engine's to bound."""
    deep: Any = {"type": "string"}
    for _ in range(40):
        deep = {"type": "object", "properties": {f"p{i}": {} for i in range(40)} | {"deeper": deep}}
    assert typed_format(Fields({"type": "json_schema", "schema": deep}), Limits())


@pytest.mark.model
@pytest.mark.parametrize(
    ("path", "body", "fits"),
    [
        ("/v1/chat/completions", {"guided_choice": ["red", "blue"]}, "red|blue"),
        ("/v1/chat/completions", {"json_schema": {"enum": [1, 2]}}, "1|2"),
        ("/v1/completions", {"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ("/completion", {"grammar": 'root ::= "x" | "y"'}, "x|y"),
    ],
    ids=str,
)
def test_answers_of_a_server_keep_to_them(
    exact_engine: edgespec.Engine, path: str, body: dict[str, Any], fits: str
) -> None:
    server = Server(exact_engine)
    try:
        url = server.start() + path
        is_chat = "chat" in path
        asked: Any = (
            {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Hi"}
        )
        sent = {"max_tokens": 12, **asked, **body}
        answer = httpx.post(url, json=sent, timeout=60).json()
        if path == "/completion":
            text = answer["content"]
        else:
            [choice] = answer["choices"]
            text = choice["message"]["content"] if is_chat else choice["text"]
        assert re.fullmatch(fits, text)
        refused = httpx.post(url, json={**sent, **dict.fromkeys(body, None), "guided_regex": "("})
        assert refused.status_code == 400 and "unclosed group" in refused.json()["error"]["message"]
    finally:
        server.close()
