"""Tools and thoughts through the `openai` client."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import httpx
import pytest
from decoding_cases import END
from serving_cases import CALL, HELLO, TEMPLATE, WEATHER, Connect, Serve, Speaker

from edgespec.backends.base import Logits
from edgespec.serve.call_arguments import resolve_reference
from edgespec.serve.chat import Tools, parse_tools
from edgespec.serve.parsing import Fields, Limits
from edgespec.testing import ByteTokenizer


def test_a_tool_is_called_and_its_result_told(serve: Serve, client: Connect) -> None:
    talk = client(serve(Speaker(CALL))).chat.completions
    answer = talk.create(model="edgespec", messages=HELLO, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    said: Any = [
        *HELLO,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sun"},
    ]
    again = talk.create(model="edgespec", messages=said, tools=[WEATHER])
    told = len("<assistant>\n<tool_response>\nSun\n</tool_response>")
    assert again.usage is not None and answer.usage is not None
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens + told


def test_a_stream_of_calls(serve: Serve, client: Connect) -> None:
    stream = client(serve(Speaker(f"Look. {CALL}"))).chat.completions.create(
        model="edgespec", messages=HELLO, tools=[WEATHER], stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(one.delta.content or "" for one in chunks) == "Look."
    calls = [call for one in chunks for call in one.delta.tool_calls or []]
    # Their first part has the name; how many parts there are is a matter of time.
    assert {call.index for call in calls} == {0}
    assert "".join(call.function.name or "" for call in calls if call.function) == "weather"
    assert chunks[-1].finish_reason == "tool_calls"


CALLED = [("1", {"n": 1}), ("2", {"n": 2})]
RESULTS = [("2", "SECOND"), ("1", "FIRST")]  # as they arrive
# The same turn in every interface.
CHAT: Any = {
    "messages": [
        {
            "role": "assistant",
            "tool_calls": [
                {"id": one, "function": {"name": "room", "arguments": json.dumps(arguments)}}
                for one, arguments in CALLED
            ],
        },
        *({"role": "tool", "tool_call_id": one, "content": text} for one, text in RESULTS),
    ]
}
MESSAGES: Any = {
    "max_tokens": 1,
    "messages": [
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": one, "name": "room", "input": arguments}
                for one, arguments in CALLED
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": one, "content": text}
                for one, text in RESULTS
            ],
        },
    ],
}
ITEMS: Any = {
    "input": [
        *(
            {
                "type": "function_call",
                "call_id": one,
                "name": "room",
                "arguments": json.dumps(arguments),
            }
            for one, arguments in CALLED
        ),
        *(
            {"type": "function_call_output", "call_id": one, "output": text}
            for one, text in RESULTS
        ),
    ]
}


class Listener(Speaker):
    """Keeps the text that it was given."""

    text = b""

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.text += bytes(tokens)
        return super().prefill(tokens)


@pytest.mark.parametrize("template", [TEMPLATE, f"{{# tools #}}{TEMPLATE}{{{{ tools }}}}"])
@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("messages", MESSAGES), ("responses", ITEMS)]
)
def test_results_come_in_the_order_of_their_calls(
    serve: Serve, path: str, body: Any, template: str
) -> None:
    backend = Listener("Hm.")
    address = serve(backend, chat_template=template)
    httpx.post(f"{address}/v1/{path}", json=body).raise_for_status()
    assert 0 <= backend.text.find(b"FIRST") < backend.text.find(b"SECOND")


def test_tools_that_are_not_to_be_called_are_not_told(serve: Serve, client: Connect) -> None:
    talk = client(serve(Speaker())).chat.completions
    plain = talk.create(model="edgespec", messages=HELLO).usage
    none = talk.create(model="edgespec", messages=HELLO, tools=[WEATHER], tool_choice="none").usage
    told = talk.create(model="edgespec", messages=HELLO, tools=[WEATHER]).usage
    assert plain and none and told
    assert none.prompt_tokens == plain.prompt_tokens < told.prompt_tokens


def test_a_template_that_knows_tools_gets_them_as_they_are(serve: Serve, client: Connect) -> None:
    template = TEMPLATE + "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    talk = client(serve(Speaker(), chat_template=template)).chat.completions
    plain = talk.create(model="edgespec", messages=HELLO).usage
    told = talk.create(model="edgespec", messages=HELLO, tools=[WEATHER]).usage
    assert plain and told and told.prompt_tokens == plain.prompt_tokens + len("weather")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": 7}]}, "tools[0].type"),
    ({"tools": [{"type": "retrieval"}], "tool_choice": "required"}, "requires a tool"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "requires a tool"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "is none of the tools",
    ),
    ({"tools": [WEATHER], "tool_choice": 7}, "tool_choice must be"),
]


@pytest.mark.parametrize(("more", "message"), BAD)
def test_bad_tools_are_told(serve: Serve, more: dict[str, Any], message: str) -> None:
    body = {"messages": HELLO, **more}
    response = httpx.post(f"{serve(Speaker())}/v1/chat/completions", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_tools_of_other_kinds_are_left_out_in_every_interface(serve: Serve, path: str) -> None:
    backend = Listener("ok")
    tools = [{"type": "web_search", "name": "search_it"}, {"type": "bash_2025", "name": "bash_it"}]
    body = {"messages": HELLO, "input": "Hi", "max_tokens": 9, "tools": tools}
    response = httpx.post(f"{serve(backend)}/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    assert b"_it" not in backend.text


@pytest.mark.parametrize(
    ("parameters", "more"),
    [
        ({"properties": {"city": {}}}, {"type": "object"}),
        ({"required": ["city"]}, {"type": "object"}),
        ({"type": ["object", "null"]}, {}),
        ({"anyOf": [{"type": "object"}]}, {}),
    ],
)
def test_arguments_are_an_object_where_a_schema_says_nothing(parameters: Any, more: Any) -> None:
    fields = Fields({"tools": [{"type": "function", "name": "f", "parameters": parameters}]})
    assert parse_tools(fields, Limits()).schemas["f"] == {**more, **parameters}


def test_thoughts_are_apart_from_the_answer(serve: Serve) -> None:
    template = TEMPLATE + "{# </think> #}"
    address = serve(Speaker("<think>Hm.</think>\n\nYes."), chat_template=template)
    message = httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).json()
    assert message["choices"][0]["message"]["content"] == "Yes."
    assert message["choices"][0]["message"]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    "text", ['"hello"', '{"a": 1', "NaN", '{"a": "\\ud800"}', "", "[1]", "\ud800"]
)
@pytest.mark.parametrize("goes_through", [False, True])
def test_arguments_that_are_no_object_are_taken_back(
    serve: Serve, text: str, goes_through: bool
) -> None:
    inner = "{{ c.function.arguments | tojson }}"
    if goes_through:
        inner = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    template = TEMPLATE + (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}" + inner + "{% endfor %}"
        "{% endfor %}{{ tools }}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": text}}
    said = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, *HELLO]
    address = serve(Speaker("ok"), chat_template=template)
    body = json.dumps({"messages": said, "tools": [WEATHER]})
    response = httpx.post(f"{address}/v1/chat/completions", content=body)
    assert response.status_code == 200, response.text


ODD = [
    ('"arguments": {"a": NaN}', '{"a": null}'),
    ('"arguments": {"a": 1e999}', '{"a": null}'),
    ('"arguments": {"a": "\\ud800"}', '{"a": "\ufffd"}'),
    ('"arguments": "{\\"a\\": 1,}"', '{"a": 1}'),
    ('"arguments": {"a": 1}}', '{"a": 1}'),
    ('"arguments": null', "{}"),
    ('"arguments": {}', "{}"),
    ('"id": 1', "{}"),
]


@pytest.mark.parametrize(("member", "arguments"), ODD)
def test_arguments_are_always_an_object(serve: Serve, member: str, arguments: str) -> None:
    """Slips are repaired; a tool that needs none gets an empty one."""
    address = serve(Speaker(f'<tool_call>{{"name": "weather", {member}}}</tool_call>'))
    body = {"messages": HELLO, "tools": [WEATHER]}
    response = httpx.post(f"{address}/v1/chat/completions", json=body)
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    told = httpx.post(f"{address}/v1/messages", json=as_message(body))
    assert told.json()["content"][0]["input"] == json.loads(arguments)
    assert told.json()["stop_reason"] == "tool_use"


@pytest.mark.parametrize("arguments", ['"hello"', '{"a": <b>}', "{\"a\": 'b'}"])
def test_a_call_with_other_arguments_does_not_end_as_one(serve: Serve, arguments: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    address = serve(Speaker(text))
    body = {"messages": HELLO, "tools": [WEATHER]}
    response = httpx.post(f"{address}/v1/chat/completions", json=body)
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    given = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert given == arguments.strip('"')
    told = httpx.post(f"{address}/v1/messages", json=as_message(body)).json()
    assert told["stop_reason"] == "end_turn"


def as_message(body: Any) -> dict[str, Any]:
    """The same request in Anthropic's interface."""
    functions = [one["function"] for one in body["tools"]]
    tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    return {"max_tokens": 99, **body, "tools": tools}


def test_a_call_that_is_cut_off_does_not_end_as_one(serve: Serve) -> None:
    address = serve(Speaker(CALL))
    asked = {"messages": HELLO, "tools": [WEATHER], "max_tokens": len(CALL) - 17}
    choice = httpx.post(f"{address}/v1/chat/completions", json=asked).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    function = choice["message"]["tool_calls"][0]["function"]
    assert function == {"name": "weather", "arguments": '{"city": "Ro'}
    told = httpx.post(f"{address}/v1/messages", json=as_message(asked)).json()
    assert told["stop_reason"] == "max_tokens"
    assert told["content"][-1]["input"] == {}  # as in a stream, before its parts


def test_schemas_and_names_that_no_grammar_is_made_of_are_taken(serve: Serve) -> None:
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 2000, "pattern": "^(a|)+$"}},
    }
    tool = {"type": "function", "function": {"name": "files/read:" + "a" * 117}}
    tool["function"]["parameters"] = schema  # type: ignore[index]
    body = {"messages": HELLO, "tools": [tool]}
    response = httpx.post(f"{serve(Speaker('ok'))}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


def test_definitions_of_each_tool_are_its_own() -> None:
    def tool(name: str, of: str) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}, "$ref": {"enum": [{"$ref": "#/$defs/X"}]}},
            "$defs": {"X": {"type": of, "items": {"$ref": "#/$defs/X"}}},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = Tools((tool("a", "array"), tool("b", "string")), ("a", "b"))
    schema = tools.call_schema("name", "arguments")
    for place, of in enumerate(("array", "string")):
        inner = schema["anyOf"][place]["properties"]["arguments"]
        assert "$defs" not in inner
        found = resolve_reference(schema, inner["properties"]["x"]["$ref"])
        assert found["type"] == of and resolve_reference(schema, found["items"]["$ref"]) == found
        assert inner["properties"]["$ref"] == {"enum": [{"$ref": "#/$defs/X"}]}


def test_a_tool_without_parameters_is_called_with_an_empty_object() -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    schema = Tools((tool,), ("now",)).call_schema("name", "arguments")
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema["properties"]["arguments"] == empty


class Controls(ByteTokenizer):
    """Marks that are control tokens, without bytes of their own."""

    marks: ClassVar = {"[TOOL_CALLS]": 250, "[ARGS]": 251}  # no bytes of UTF-8

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        parts = re.split(r"(\[TOOL_CALLS\]|\[ARGS\])", text)
        return [one for part in parts for one in self._of(part)]

    def _of(self, part: str) -> list[int]:
        return [self.marks[part]] if part in self.marks else [*part.encode()]

    def token_bytes(self, token: int) -> bytes:
        return b"" if token in self.marks.values() else super().token_bytes(token)


@pytest.mark.parametrize("offers", [True, False])
def test_markers_that_are_control_tokens_are_read_where_tools_are_offered(
    serve: Serve, offers: bool
) -> None:
    speaker = Speaker()
    speaker.tokenizer = Controls(speaker.tokenizer.vocab_size, END)
    speaker.ids = [*speaker.tokenizer.encode('[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'), END]
    calls = (
        "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
        "{{ c.function.arguments | tojson }}{% endfor %}"
    )
    template = "{{ tools }}" + TEMPLATE.replace("{{ m.content }}", calls + "{{ m.content }}")
    address = serve(speaker, chat_template=template)
    body = {"messages": HELLO, **({"tools": [WEATHER]} if offers else {})}
    choice = httpx.post(f"{address}/v1/chat/completions", json=body).json()["choices"][0]
    if offers:
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    else:
        assert choice["message"]["content"] == 'weather{"city": "Rome"}'


def test_an_answer_in_channels_has_no_markup(serve: Serve) -> None:
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    template = (
        TEMPLATE.replace("<assistant>", "<|start|>assistant") + "{# <|channel|><|message|> #}"
    )
    address = serve(Speaker(f"{answer}Yes"), chat_template=template)
    said = httpx.post(f"{address}/v1/chat/completions", json={"messages": HELLO}).json()
    message = said["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes", "Hm.")


def test_a_schema_that_cannot_be_kept_to_names_its_tool(serve: Serve) -> None:
    """The model of this server has no grammars at all."""
    body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required"}
    told = httpx.post(f"{serve(Speaker())}/v1/chat/completions", json=body)
    error = told.json()["error"]
    assert (told.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("a call of weather cannot be required: ")
