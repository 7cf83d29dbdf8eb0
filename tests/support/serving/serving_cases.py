"""Models that are functions, for tests of servers."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from decoding_cases import END, ONE_HOT, VOCAB
from fake_backend import FakeBackend
from waiting import PATIENCE_S

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.generation import Counters, Result, ToolCall, joined_calls
from edgespec.models.control_texts import ControlTexts
from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.serializers import Delta, Serializer
from edgespec.serve.tool_formats import HERMES
from edgespec.serve.tool_servers import ToolServers
from edgespec.testing import ByteTokenizer

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Speaker(FakeBackend):
    """Says one text after every prompt, over and over or until its end; held where a test asks."""

    def __init__(self, text: str = "Hello, world!", *, loops: bool = False) -> None:
        self.ids = [*text.encode(), *([] if loops else [END])]
        self.prompt_length = 0
        self.gate = threading.Event()
        self.gate.set()
        self.steps_made, self.step_s = 0, 0.0
        super().__init__(self._next, VOCAB, end=END, context_size=2048)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        assert self.gate.wait(PATIENCE_S)
        self.prompt_length = self.length + len(tokens)
        return super().prefill(tokens)

    def verify(self, tree: DraftTree) -> Logits:
        assert self.gate.wait(PATIENCE_S)
        time.sleep(self.step_s)
        self.steps_made += 1
        return super().verify(tree)

    def _next(self, context: tuple[int, ...]) -> list[float]:
        return ONE_HOT[self.ids[(len(context) - self.prompt_length) % len(self.ids)]]


def letters(context: tuple[int, ...]) -> Sequence[float]:
    """Logits of lower-case letters, by all that came before."""
    rng = random.Random(hash((context[-3:], sum(context))))
    row = [0.0] * VOCAB
    for letter in range(97, 123):
        row[letter] = 5.0 + rng.random()
    return row


class Gated(FakeBackend):
    """Makes no step of several users before the gate is open."""

    def __init__(self, **options: Any) -> None:
        self.gate = threading.Event()
        self.together = [0]
        super().__init__(letters, VOCAB, end=END, context_size=2048, **options)

    def verify_together(
        self,
        steps: Sequence[tuple[int, DraftTree]],
        pieces: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> list[Logits]:
        assert self.gate.wait(PATIENCE_S)
        self.together.append(len(steps))
        return super().verify_together(steps, pieces)


class Controlled(ByteTokenizer):
    """Has one control token, id 7, where its text is not marked."""

    control_texts = ControlTexts(("<user>",))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids: list[int] = []
        for piece, is_meant in self.control_texts.pieces(text):
            data = piece.encode()
            ids += data.replace(b"<user>", b"\x07") if is_meant else data
        return ids


Serve = Callable[..., str]  # starts a server of a model; its address
Connect: TypeAlias = "Callable[[str], OpenAI]"  # a client of the server at an address
ConnectAnthropic: TypeAlias = "Callable[..., Anthropic]"  # the same, with a key


def read(reader: AnswerReader, pieces: list[str]) -> tuple[str, str, list[tuple[str, object]]]:
    """Content, reasoning and calls."""
    deltas: list[Delta] = [reader.push(piece) for piece in pieces]
    deltas.append(reader.finish())
    found = joined_calls(call for one in deltas for call in one.calls)
    calls = [(call.name, json.loads(call.arguments)) for call in found]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


def events_of(serializer: Serializer, reader: AnswerReader, text: str) -> list[dict[str, Any]]:
    """Events of an answer that comes by characters."""
    events = serializer.begin(0)
    for delta in [*map(reader.push, text), reader.finish()]:
        events += serializer.add(0, delta, ()) if delta else []
    result = Result(text, tuple(text.encode()), "stop", Counters(generated_tokens=len(text)))
    choice = reader.choice(0, result)
    return events + serializer.end(choice) + serializer.close([choice])


CALLS = (
    '<think>Hm.</think>I look.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}'
    '</tool_call><tool_call>{"name": "weather", "arguments": {}}</tool_call>'
)


def calling_reader() -> AnswerReader:
    """Of answers that call `weather`."""
    return AnswerReader([HERMES], {"weather": {}}, most=9)


class Failing(Speaker):
    """Says some letters, then fails."""

    def verify(self, tree: DraftTree) -> Logits:
        if self.steps_made > 4:
            raise RuntimeError
        return super().verify(tree)


HELLO: Any = [{"role": "user", "content": "Hi"}]


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Tools(ToolServers):
    """One tool that needs no server, and the calls of it that were made."""

    def __init__(self) -> None:
        self.tools, self.allowed, self.made = [WEATHER], set[str](), list[Any]()
        self._servers, self._by_name = [], dict.fromkeys(["weather"])  # type: ignore[assignment]

    def result(self, call: ToolCall, _context_size: int) -> str:
        self.made.append(call.values)
        return "Rain in Rome"
