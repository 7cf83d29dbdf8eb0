"""What all answers say of themselves: tokens, speed, where text came from, why it ended."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from edgespec.decode.generation import Chunk, Result
from edgespec.decode.stats import Counters
from edgespec.serve.refusal import Refusal
from edgespec.serve.shapes import Choice, ToolCall, sources, timings, usage


def choice(index: int = 0, reason: str = "stop", calls: Any = (), **counts: Any) -> Choice:
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
        time_to_first_token_s=2.0,
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
    call = ToolCall("add", "{}")
    assert choice(reason="stop", calls=(call,)).reason == "tool_calls"
    with pytest.raises(Refusal) as caught:
        _ = choice(reason="cancelled").reason
    assert (caught.value.status, caught.value.code) == (503, "cancelled")
