"""Logprobs as the `openai` client gets them, of chats and completions, whole and in streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from decoding_cases import END, VOCAB
from serving_cases import Connect, Serve

from edgespec.backends.fake import ByteTokenizer, FakeBackend
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.told_tokens import ToldTokens

HELLO: Any = [{"role": "user", "content": "Hi"}]
TEXT = "Hé!"
IDS = [*TEXT.encode(), END]
PROMPT = len("<user>Hi<assistant>")
SECOND = ord("z")


class Doubtful(FakeBackend):
    """Says a text, and finds "z" half as probable each time; nothing else can be."""

    def __init__(self, prompt_length: int = PROMPT) -> None:
        self._prompt_length = prompt_length
        super().__init__(self._next, VOCAB, end=END, context_size=256)

    def _next(self, context: tuple[int, ...]) -> Sequence[float]:
        row = [-math.inf] * VOCAB
        row[SECOND] = -math.log(2)
        row[IDS[min(len(context) - self._prompt_length, len(IDS) - 1)]] = 0.0
        return row


def test_a_chat_tells_each_token_with_its_bytes(serve: Serve, client: Connect) -> None:
    """Parts of a character have bytes; the end of the answer is none of its tokens."""
    answer = client(serve(Doubtful())).chat.completions.create(
        model="edgespec", messages=HELLO, logprobs=True, top_logprobs=3
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content is not None
    assert bytes(byte for one in told.content for byte in one.bytes or ()).decode() == TEXT
    assert [one.token for one in told.content] == ["H", "\ufffd", "\ufffd", "!"]
    for one in told.content:
        assert one.logprob == pytest.approx(math.log(2 / 3))
        assert [best.token for best in one.top_logprobs] == [one.token, "z"]
        found = [best.logprob for best in one.top_logprobs]
        assert found == pytest.approx([math.log(2 / 3), math.log(1 / 3)])


def test_a_stream_tells_each_token_once(serve: Serve, client: Connect) -> None:
    stream = client(serve(Doubtful())).chat.completions.create(
        model="edgespec", messages=HELLO, logprobs=True, stream=True, stop=["!"]
    )
    text, told = "", b""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        logprobs = chunk.choices[0].logprobs
        for one in (logprobs.content or []) if logprobs else []:
            assert one.top_logprobs == []
            told += bytes(one.bytes or ())
    assert text == "Hé"
    assert told.decode() == TEXT  # what came, with the stop string


def test_without_being_asked_none_are_told(serve: Serve, client: Connect) -> None:
    answer = client(serve(Doubtful())).chat.completions.create(model="edgespec", messages=HELLO)
    assert answer.choices[0].logprobs is None


def test_a_completion_has_them_in_columns(serve: Serve, client: Connect) -> None:
    complete = client(serve(Doubtful(2))).completions
    answer = complete.create(model="edgespec", prompt="ab", logprobs=2)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens == ["H", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert told.token_logprobs == pytest.approx([math.log(2 / 3)] * 4)
    assert told.text_offset == [0, 1, 1, 2]
    assert told.top_logprobs is not None
    assert set(told.top_logprobs[0]) == {"H", "z"}
    offsets = []
    for chunk in complete.create(model="edgespec", prompt="ab", logprobs=0, stream=True):
        if chunk.choices[0].logprobs:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == [0, 1, 1, 2]


def test_they_are_the_models_own_whatever_a_bias_makes_of_them(serve: Serve) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "logprobs": 1, "logit_bias": {"122": 100}}
    address = serve(Doubtful(2))
    told = httpx.post(f"{address}/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["z"]
    assert told["token_logprobs"] == pytest.approx([math.log(1 / 3)])
    assert list(told["top_logprobs"][0]) == ["H"]


def test_what_the_model_rules_out_is_a_number() -> None:
    """JSON has no infinity."""
    told = ToldTokens(ByteTokenizer(VOCAB, END)).entries([TokenLogprob(72, -math.inf)])
    assert told[0]["logprob"] == -9999.0
