"""How many tokens a prompt takes: never fewer than the engine will read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.models.chat import Message, prompt_text
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.planning import most_prompt_tokens

pytestmark = pytest.mark.model
SHORT = 512


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_model_spec(embedded_model())


@pytest.fixture(scope="module")
def tokenizer(spec: ModelSpec) -> Iterator[VocabularyTokenizer]:
    with closing(VocabularyTokenizer(spec.path)) as opened:
        yield opened


def tokens_of(
    spec: ModelSpec, tokenizer: VocabularyTokenizer, prompt: str | list[Message], raw: bool = False
) -> int:
    text = prompt_text(
        prompt,
        spec.chat_template,
        raw=raw,
        bos_token=tokenizer.bos_text,
        eos_token=tokenizer.eos_text,
    )
    return len(tokenizer.encode(text))


@pytest.mark.parametrize(
    "text",
    [
        "\u1780\u17d2\u1798\u17c2\u179a " * 300,  # Khmer: more tokens than half of its bytes
        "qxzjkvw" * 400,
        "0123456789" * 400,
        "The quick brown fox jumps over the lazy dog. " * 400,
        "caf\udce9 " * 400,
    ],
    ids=["a rare script", "no words", "digits", "English", "no UTF-8"],
)
@pytest.mark.parametrize("raw", [False, True])
def test_a_long_prompt_is_counted(
    spec: ModelSpec, tokenizer: VocabularyTokenizer, text: str, raw: bool
) -> None:
    assert most_prompt_tokens(spec, [text], raw=raw) == tokens_of(spec, tokenizer, text, raw)


@settings(max_examples=300)
@given(st.text(max_size=SHORT // 4))
def test_a_short_prompt_has_a_ceiling(
    spec: ModelSpec, tokenizer: VocabularyTokenizer, text: str
) -> None:
    most = most_prompt_tokens(spec, [text])
    assert tokens_of(spec, tokenizer, text) <= most <= len(text.encode()) + 64


def test_messages_count_with_their_format_and_the_longest_prompt_decides(
    spec: ModelSpec, tokenizer: VocabularyTokenizer
) -> None:
    talk: list[Message] = [
        {"role": "system", "content": "Be brief. " * 60},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    alone = tokens_of(spec, tokenizer, talk)
    assert most_prompt_tokens(spec, [talk]) == alone
    assert most_prompt_tokens(spec, ["Hello.", talk, "word " * 150]) == max(
        alone, tokens_of(spec, tokenizer, "word " * 150)
    )
    assert most_prompt_tokens(spec, []) == 64
