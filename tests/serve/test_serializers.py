"""What all answers say of themselves: tokens, speed, logprobs, sources, why they ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from decoding_cases import END, VOCAB
from fake_backend import FakeBackend
from serving_cases import Connect, Serve

from edgespec.decode.generation import Chunk, Counters, FinishReason, Result, ToolCall
from edgespec.sampling.chain import TokenLogprob
from edgespec.serve.messages import MessagesSerializer
from edgespec.serve.parsing import ApiError
from edgespec.serve.serializers import Choice, ToldTokens, sources, timings, usage
from edgespec.testing import ByteTokenizer


def choice(index: int = 0, reason: FinishReason = "stop", calls: Any = (), **counts: Any) -> Choice:
    result = Result("", (), reason, Counters(**counts))
    return Choice(index, "", "", calls, result)


def test_a_prompt_counts_once_for_all_of_its_answers() -> None:
    """Two prompts of 10 and 20 tokens with two answers each, of which the second found its own."""
    several = [
        choice(index, prompt_tokens=size, reused_tokens=reused, generated_tokens=3)
        for index, (size, reused) in enumerate([(10, 4), (10, 9), (20, 0), (20, 19)])
    ]
    assert usage(several, 2) == {
        "prompt_tokens": 30,
        "completion_tokens": 12,
        "total_tokens": 42,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_speed_by_hand() -> None:
    """Of 10 prompt tokens 6 were read in 2 s; 4 rounds with 5 right drafts are 9 tokens in 3 s."""
    one = choice(
        prompt_tokens=10,
        reused_tokens=4,
        generated_tokens=10,
        rounds=4,
        drafted_tokens=8,
        accepted_tokens=5,
        time_to_first_token_s=5.0,
        prompt_s=2.0,
        decode_s=3.0,
        drafted_by=Counter(suffix=8),
        accepted_by=Counter(suffix=5),
    )
    told = timings([one])
    assert (told["prompt_n"], told["prompt_per_second"]) == (6, 3.0)
    assert (told["predicted_n"], told["predicted_per_second"]) == (10, 3.0)
    assert (told["drafted_by"], told["accepted_by"]) == ({"suffix": 8}, {"suffix": 5})
    assert told["acceptance_length"] == 2.25
    # An answer of one token took no step.
    nothing = timings([choice(generated_tokens=1)])
    assert (nothing["predicted_per_second"], nothing["acceptance_length"]) == (0.0, 1.0)


def test_text_is_cut_where_its_source_changes() -> None:
    """A drafted id may bring no text, as the first half of a character does."""
    chunks = [
        Chunk("abcd", (1, 2, 3), 2, 3, sources=(("suffix", 1), ("model", 2))),
        Chunk("", (4,)),
        Chunk("xy", (5, 6), 1, 0, sources=(("suffix", 0),)),
    ]
    assert sources(chunks) == [["a", "suffix"], ["bc", "model"], ["d", ""], ["xy", ""]]


def test_why_an_answer_ended_in_the_words_of_the_interface() -> None:
    assert choice(reason="context_full").reason == choice(reason="length").reason == "length"
    call = ToolCall("c", "add", "{}")
    assert choice(reason="stop", calls=(call,)).reason == "tool_calls"
    with pytest.raises(ApiError) as caught:
        _ = choice(reason="cancelled").reason
    assert (caught.value.status, caught.value.code) == (503, "cancelled")
    with pytest.raises(ApiError, match="cancelled"):
        MessagesSerializer("m", 3).whole([choice(reason="cancelled")])


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
