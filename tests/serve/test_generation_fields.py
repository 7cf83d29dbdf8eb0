"""How a request says tokens are picked, and which form its answer has."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

import edgespec
from edgespec.sampling.params import SamplingParams
from edgespec.serve.parsing import (
    ApiError,
    Defaults,
    Fields,
    Limits,
    ServedModel,
    parse_format,
    parse_max_tokens,
    parse_options,
    parse_sampling,
    seed_of_choice,
    takes_prewarm,
    typed_format,
)
from edgespec.serve.server import Server

DEFAULTS = SamplingParams(temperature=0.7, top_k=40, seed=5, logit_bias={3: 1.0})


def taken(**values: Any) -> SamplingParams:
    fields = Fields(values)
    found = parse_sampling(fields, DEFAULTS, Limits())
    fields.end()
    return found


def test_what_is_not_said_is_as_the_server_was_started() -> None:
    assert taken() == DEFAULTS
    assert taken(top_k=-1, seed=-1) == SamplingParams(temperature=0.7, logit_bias={3: 1.0})
    # 0 means the best token alone, which is what no share of the probability gives.
    assert 0.0 < taken(top_p=0).top_p < 1e-6


def test_a_penalty_has_two_names() -> None:
    assert taken(repeat_penalty=1.5) == taken(repetition_penalty=1.5)
    with pytest.raises(ApiError, match=r"^repeat_penalty is not supported: repet"):
        taken(repeat_penalty=1.5, repetition_penalty=1.2)


def test_biases_are_an_object() -> None:
    """An empty one takes those of the server away."""
    assert taken(logit_bias={"7": -5, "2": 1}).logit_bias == ((2, 1.0), (7, -5.0))
    assert taken(logit_bias={}).logit_bias == ()


@pytest.mark.parametrize("bias", [{"a": "b"}, {"7": True}, {"7": 101}, {"a" * 300: 1}, [[7]], "7"])
def test_biases_that_cannot_be(bias: Any) -> None:
    with pytest.raises(ApiError, match=r"^logit_bias must "):
        taken(logit_bias=bias)


def test_biases_are_bounded() -> None:
    with pytest.raises(ApiError, match=r"^logit_bias has more than"):
        taken(logit_bias={str(token): 1 for token in range(Limits().biases + 1)})


def test_each_answer_of_several_has_a_seed_of_its_own() -> None:
    assert [seed_of_choice(DEFAULTS, index).seed for index in range(3)] == [5, 6, 7]
    assert seed_of_choice(SamplingParams(), 2).seed is None  # each is drawn anyway


def test_the_first_name_of_a_length_counts_and_all_are_checked() -> None:
    names = ("max_completion_tokens", "max_tokens")
    both = Fields({"max_tokens": 9, "max_completion_tokens": 4})
    assert parse_max_tokens(both, 16, 2048, *names) == 4
    both.end()
    assert parse_max_tokens(Fields({}), 16, 2048, *names) == 16
    assert parse_max_tokens(Fields({}), None, 2048, *names) == 2048
    assert parse_max_tokens(Fields({"max_tokens": -1}), 16, 2048, *names) == 2048
    assert parse_max_tokens(Fields({"max_tokens": 0}), 16, 2048, *names) == 0
    prewarm = {"prompt_cache_options": {"prewarm": True, "ttl": "5m"}}
    assert takes_prewarm(Fields(prewarm)) and not takes_prewarm(Fields({}))
    with pytest.raises(ApiError, match=r"^max_tokens must be"):
        parse_max_tokens(Fields({"max_tokens": -9, "max_completion_tokens": 4}), 16, 2048, *names)


def test_stops_are_one_text_or_some() -> None:
    setup = ServedModel(("tiny",), 2048, Defaults(), Limits(stops=2, stop_chars=3))
    assert parse_options(Fields({"stop": "end"}), setup, 1).stop == ("end",)
    assert parse_options(Fields({"stop": ["a", ""]}), setup, 1).stop == ("a",)
    for stop in (["a", "b", "c"], "long", ["a", 1], {"a": 1}):
        with pytest.raises(ApiError, match=r"^stop "):
            parse_options(Fields({"stop": stop}), setup, 1)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["top-k", "typical_p", "temp", "infill"], ("top_k", "typ_p", "temperature")),
        ([], ()),
    ],
)
def test_samplers_have_llama_cpps_other_names(given: object, names: tuple[str, ...]) -> None:
    assert taken(samplers=given).samplers == names


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
        ({"structured_outputs": {"json": TEXT}}, {"json_schema": TEXT}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": TEXT}),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, {"regex": "a+"}),
    ],
    ids=lambda one: str(one)[:60],
)
def test_forms_are_taken_by_every_name(body: dict[str, Any], form: dict[str, str]) -> None:
    fields = Fields(body)
    assert parse_format(fields, Limits()) == form
    fields.end()


def test_a_choice_is_an_expression_of_its_texts() -> None:
    choices = ["yes", "no (.*)", 'a"\\\n', "é😀"]
    body = {"structured_outputs": {"choice": choices}}
    expression = parse_format(Fields(body), Limits())["regex"]
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", expression)
    assert all(re.fullmatch(python, one) for one in choices)
    assert not any(re.fullmatch(python, one) for one in ("", "yesno", "no ab"))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"json_schema": SCHEMA, "grammar": "a"}, "json_schema and grammar cannot both"),
        ({"guided_regex": "a"}, "guided_regex is not supported: use structured_outputs"),
        ({"json_schema": 5}, "json_schema must be an object"),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice must be a list of texts",
        ),
        ({"structured_outputs": {"choice": [1]}}, "choice must be a list of texts"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "1025 items"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "262,144 are the most"),
        ({"json_schema": {"description": "x" * 300_000}}, "262,144 are the most"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ({"response_format": {"type": "xml"}}, "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "schema must be an object"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_what_cannot_be_taken_is_refused_by_name(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(ApiError, match=re.escape(problem)):
        parse_format(Fields(body), Limits())


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
        ("/v1/chat/completions", {"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
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
        refused = httpx.post(
            url, json={**sent, **dict.fromkeys(body, None), "structured_outputs": {"regex": "("}}
        )
        assert refused.status_code == 400 and "unclosed group" in refused.json()["error"]["message"]
    finally:
        server.close()


@pytest.mark.model
def test_a_schema_that_cannot_be_kept_to_names_its_tool_and_the_place(
    exact_engine: edgespec.Engine,
) -> None:
    fine = {"type": "object", "properties": {"city": {"type": "string"}}}
    bad = {"type": "object", "properties": {"days": {"type": "array", "uniqueItems": True}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("weather", fine), ("plan", bad), ("rest", fine))
    ]
    server = Server(exact_engine)
    try:
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        told = httpx.post(
            f"{server.start()}/v1/chat/completions", json={**body, "tool_choice": "required"}
        )
    finally:
        server.close()
    error = told.json()["error"]
    assert (told.status_code, error["param"]) == (400, "tools")
    expected = "a call of plan cannot be required: the JSON schema cannot be used at "
    assert error["message"].startswith(expected + "properties.days: unsupported keywords uniqueIt")
