"""Tools in Python: what is offered, what must be called, and the calls of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import edgespec
from edgespec import ChatMessage
from edgespec.decode.engine import Engine
from edgespec.decode.options import Tool
from edgespec.serve.tool_calls import definition

pytestmark = pytest.mark.model


def weather(city: str, days: int = 1, unit: Literal["C", "F"] | None = None) -> str:
    """Get the weather of a city."""
    return f"{city} {days} {unit}"


DEFINED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 12}},
            "required": ["word"],
        },
    },
}


@pytest.fixture(scope="module")
def engine(measured_cache: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_CACHE", str(measured_cache))
        with edgespec.load(context_size=768, threads=1, drafter="none") as engine:
            yield engine


def test_a_function_is_told_by_its_name_its_docstring_and_its_annotations() -> None:
    told = definition(weather)["function"]
    assert (told["name"], told["description"]) == ("weather", "Get the weather of a city.")
    assert told["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
        },
        "required": ["city"],
    }
    assert definition(DEFINED) == DEFINED


def test_more_annotations() -> None:
    class Place:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object", "title": "Place"}

    def find(
        names: list[str],
        more: dict[str, int],
        near: Annotated[float, "in km"],
        place: Any,
        **rest: int,
    ) -> None:
        pass

    find.__annotations__["place"] = Place
    find.__annotations__.update(
        names=list[str], more=dict[str, int], near=Annotated[float, "in km"]
    )
    assert definition(find)["function"]["parameters"]["properties"] == {
        "names": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
        "near": {"type": "number"},
        "place": {"type": "object", "title": "Place"},
    }


@pytest.mark.parametrize("choice", ["weather", "required"])
def test_what_must_be_called_is_called(engine: Engine, choice: str) -> None:
    asked = "What is the weather in Paris?"
    result = engine.generate(asked, tools=[weather], tool_choice=choice, max_tokens=80)
    (call,) = result.tool_calls
    assert call.name == "weather" and call.is_whole and isinstance(call.values["city"], str)
    assert result.text == ""
    assert isinstance(weather(**call.values), str)


def test_a_stream_hands_out_parts_of_calls(engine: Engine) -> None:
    messages: list[ChatMessage] = [{"role": "user", "content": "Look up the word moon."}]
    stream = engine.stream(messages, tools=[DEFINED, weather], tool_choice="lookup", max_tokens=60)
    parts = [call for chunk in stream for call in chunk.tool_calls]
    (call,) = stream.result.tool_calls
    assert len(parts) > 1 and {part.id for part in parts} == {call.id}
    assert "".join(part.arguments for part in parts) == call.arguments
    assert json.loads(call.arguments).keys() == {"word"}


def test_a_call_and_its_result_may_be_in_the_messages(engine: Engine) -> None:
    call = {"name": "weather", "arguments": '{"city": "Paris"}'}
    messages: list[ChatMessage] = [
        {"role": "user", "content": "Is it warm in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "31 degrees"},
    ]
    result = engine.generate(messages, tools=[weather], tool_choice="none", max_tokens=12)
    assert result.text and not result.tool_calls


def test_a_call_that_is_cut_off_says_so(engine: Engine) -> None:
    result = engine.generate("Weather?", tools=[weather], tool_choice="weather", max_tokens=2)
    assert result.finish_reason == "length"
    assert all(not call.is_whole for call in result.tool_calls)


def test_an_answer_without_a_call_is_a_text(engine: Engine) -> None:
    result = engine.generate("Say hi.", tools=[weather], max_tokens=12)
    assert result.text and result.tool_calls == ()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tools": [5]}, "tools must be a list of functions or definitions"),
        ({"tools": [weather], "tool_choice": "nope"}, "nope"),
        ({"tools": [print]}, "print takes arguments without names"),
        ({"tools": [weather], "raw": True}, "tools need messages"),
        ({"tools": [{"type": "function", "function": {}}]}, "name"),
    ],
)
def test_what_cannot_be_offered_is_refused(
    engine: Engine, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(edgespec.UnsupportedError, match=told):
        engine.generate("x", max_tokens=2, **given)


def test_a_session_takes_calls_and_sends_their_results_by_id(engine: Engine) -> None:
    session = edgespec.Session(engine, tools=[weather], max_tokens=60)
    asked = session.send("What is the weather in Paris?", tool_choice="weather")
    (call,) = asked.tool_calls
    turn = session.stream([call.result({"sun": True})], max_tokens=8)
    assert list(turn) and session.messages[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [told_of(call)]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"sun": true}'},
    ]
    assert weather.__name__ in turn.prompt.text and '{"sun": true}' in turn.prompt.text
    reused = turn.result.counters.reused_tokens  # also most of what the model wrote
    assert reused > asked.counters.prompt_tokens + len(asked.token_ids) // 2
    assert session.undo() == "What is the weather in Paris?" and session.messages == []


def told_of(call: edgespec.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def test_turns_of_a_session_hand_out_parts_of_calls(engine: Engine) -> None:
    session, tools = edgespec.Session(engine), list[Tool]([DEFINED, weather])
    turn = session.stream("Look up moon.", tools=tools, tool_choice="lookup", max_tokens=60)
    parts = [call for chunk in turn for call in chunk.tool_calls]
    (call,) = turn.result.tool_calls
    assert len(parts) > 1 and "".join(one.arguments for one in parts) == call.arguments
    retried = session.retry(tools=tools, tool_choice="weather", max_tokens=80)
    assert next(one.name for chunk in retried for one in chunk.tool_calls) == "weather"
    assert [one["role"] for one in session.messages] == ["user", "assistant"]


def test_calls_of_a_session_survive_a_file_and_another_engine(
    engine: Engine, tmp_path: Path
) -> None:
    session = edgespec.Session(engine, tools=[weather])
    result = session.send("Weather in Rome?", tool_choice="weather", max_tokens=60)
    session.save(tmp_path / "talk")
    loaded = edgespec.Session.load(engine, tmp_path / "talk")
    assert loaded.messages == session.messages and loaded.tools == ()
    answers = [call.result("warm") for call in result.tool_calls]
    for one in (loaded, session.moved_to(engine)):
        assert one.send(answers, max_tokens=4).token_ids
        assert one.messages[2]["content"] == "warm"


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ([{"role": "tool", "tool_call_id": "other", "content": "1"}], "those of other, and the"),
        ([{"role": "user", "content": "1"}], "and nothing else"),
        ([{"type": "text", "text": "1"}, {"role": "tool"}], "and nothing else"),
    ],
)
def test_results_of_other_calls_are_refused(
    engine: Engine, results: list[dict[str, Any]], told: str
) -> None:
    session = edgespec.Session(engine, tools=[weather])
    with pytest.raises(edgespec.UnsupportedError, match=r"made are none|nothing else"):
        session.send(results)
    session.send("Weather in Rome?", tool_choice="weather", max_tokens=60)
    before = session.messages
    with pytest.raises(edgespec.UnsupportedError, match=told):
        session.send(results)
    assert session.messages == before


def test_calls_are_told_where_no_tools_are_offered_any_more(engine: Engine) -> None:
    """The embedded model's template drops them; they are told in words then."""
    call = edgespec.ToolCall("a", "weather", '{"city": "Paris"}')
    begun: ChatMessage = {"role": "user", "content": "?"}
    said = [begun, message_of(call), call.result("31 degrees")]
    prompt = engine.stream(said, max_tokens=1).prompt_ids
    text = b"".join(map(engine.backend.tokenizer.token_bytes, prompt)).decode()
    assert '"city"' in text and "<tool_response>\n31 degrees" in text
    session = edgespec.Session(engine, messages=said[:-1])
    turn = session.stream(said[-1:], max_tokens=1)
    assert turn.prompt_ids == prompt


def message_of(call: edgespec.ToolCall) -> ChatMessage:
    return {"role": "assistant", "content": None, "tool_calls": [told_of(call)]}
