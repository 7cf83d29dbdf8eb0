"""Thoughts end at their limit, whether tokens are drafted or not."""

from __future__ import annotations

import pytest
from decoding_cases import END, ONE_HOT, VOCAB
from fake_backend import FakeBackend

from edgespec.decode.engine import Engine
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError
from edgespec.memory.times import CostCurve
from edgespec.sampling.params import SamplingParams, ThoughtLimit

PROMPT = "Q"


class Thinker(FakeBackend):
    """Thinks on and on; after `</think>` it says one text."""

    def __init__(self, thought: bytes, answer: bytes = b"Rome") -> None:
        self._thought, self._answer = thought, answer
        super().__init__(self._next, VOCAB, end=END, context_size=512)

    def _next(self, context: tuple[int, ...]) -> list[float]:
        text = bytes(token for token in context if token < 256)[len(PROMPT) :]
        said = text.partition(b"</think>")
        if said[1]:
            left = [*self._answer, END][len(said[2].lstrip()) :]
            return ONE_HOT[left[0] if left else END]
        return ONE_HOT[self._thought[len(text) % len(self._thought)]]


def answer(thought: bytes, limit: ThoughtLimit | None, *, drafts: bool = False) -> str:
    drafter = SuffixDrafter() if drafts else None
    curve = CostCurve([1.0 + 0.01 * size for size in range(32)]) if drafts else None
    with Engine(Thinker(thought), drafter=drafter, curve=curve) as engine:
        made = engine.generate(PROMPT, raw=True, max_tokens=200, thought=limit)
    return made.text


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("thought", "limit", "text"),
    [
        (b"hmm, ", ThoughtLimit(7, within=True), "hmm, hm\n</think>\n\nRome"),
        (b"hmm, ", ThoughtLimit(0, within=True), "\n</think>\n\nRome"),
        (b"<think>ab", ThoughtLimit(3), "<think>ab<\n</think>\n\nRome"),
        (b"hm</think>", ThoughtLimit(50, within=True), "hm</think>Rome"),
        ("aé".encode(), ThoughtLimit(2, within=True), "aé\n</think>\n\nRome"),
    ],
)
def test_a_thought_is_closed_at_its_limit(
    thought: bytes, limit: ThoughtLimit, text: str, drafts: bool
) -> None:
    """Not within a character, and not where the model closed it itself."""
    assert answer(thought, limit, drafts=drafts) == text


def test_an_answer_without_a_thought_has_no_limit() -> None:
    assert answer(b"hmm, ", ThoughtLimit(3)) == answer(b"hmm, ", None)


def test_a_limit_of_a_sampled_answer_keeps_its_seed() -> None:
    sampling = SamplingParams(temperature=0.01, seed=3)
    with Engine(Thinker(b"hm")) as engine:
        limit = ThoughtLimit(4, within=True)
        made = engine.stream(PROMPT, raw=True, sampling=sampling, thought=limit)
        assert made.seed == 3
        assert "".join(chunk.text for chunk in made) == "hmhm\n</think>\n\nRome"


def test_a_negative_limit_is_none() -> None:
    with pytest.raises(UnsupportedError, match="at least 0 tokens, not -1"):
        ThoughtLimit(-1)


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_a_schema_begins_behind_a_thought_that_was_closed(
    exact_engine: Engine, within: bool, speculate: bool
) -> None:
    opening = "" if within else "<think>"
    made = exact_engine.generate(
        f"Rivers of France{'<think>' if within else ''}",
        raw=True,
        speculate=speculate,
        max_tokens=40,
        json_schema='{"const": "the Loire"}',
        think_tags=(opening, "</think>"),
        thought=ThoughtLimit(6, within=within),
    )
    assert made.finish_reason == "stop"
    if within:
        thought, _, answer = made.text.partition("\n</think>\n\n")
        assert thought and answer == '"the Loire"'
    else:
        assert made.text.endswith('"the Loire"')
