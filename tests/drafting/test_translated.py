"""A draft model of another vocabulary: what is carried over, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from all_dice import Row, outcomes
from decoding_cases import flat
from draft_model_cases import context_of, quick
from hypothesis import given
from hypothesis import strategies as st
from lossless_cases import plain
from tokenizer_cases import (
    TEXTS,
    TOKENIZERS,
    LongestMatch,
    loaded,
    recites,
    scatters,
    translating,
)

from edgespec.backends.base import DraftTree
from edgespec.decode.engine import Engine
from edgespec.decode.step import accept
from edgespec.drafting.proposal import VerifyResult, build_tree
from edgespec.drafting.translated import Translation
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

pytestmark = pytest.mark.usefixtures("frozen_clock")
PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS]


@pytest.mark.parametrize(
    ("target", "draft", "text"),
    [
        # Each text with a quarter of the pairs.
        pytest.param(*pair, text, marks=() if (place + number) % 4 == 0 else pytest.mark.long)
        for place, pair in enumerate(PAIRS)
        for number, text in enumerate(TEXTS)
    ],
)
def test_a_draft_model_that_knows_the_text_drafts_it(target: str, draft: str, text: str) -> None:
    """Nearly all of it, in all scripts and to the end; what is written is what the target says."""
    tokenizer, theirs = TOKENIZERS[target], TOKENIZERS[draft]
    model = recites(tokenizer, TEXTS[text])
    drafter = translating(tokenizer, loaded(recites(theirs, TEXTS[text]), theirs))
    engine = Engine(loaded(model, tokenizer), curve=flat(), drafter=drafter)
    prompt = tokenizer.encode("Say it:\n")
    expected = plain(model, prompt, 200, end=tokenizer.end, vocab_size=tokenizer.vocab_size)
    result = engine.generate(prompt, max_tokens=200)
    assert list(result.token_ids) == expected and expected[-1] == tokenizer.end
    assert result.text == TEXTS[text]
    counters = result.counters
    # A round is lost where a piece of the draft model's text ends within a token of the target's.
    assert counters.accepted_tokens >= 0.33 * len(expected)


@quick
@given(
    pair=st.sampled_from(PAIRS),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    text=st.text(min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_nothing_that_is_proposed_changes_a_token(
    pair: tuple[str, str], seeds: tuple[int, int], text: str, temperature: float
) -> None:
    """Two models of random rows and strange texts: greedy and drawn, by the same seed."""
    tokenizer, theirs = (TOKENIZERS[name] for name in pair)
    model = scatters(tokenizer, seeds[0])
    drafter = translating(tokenizer, loaded(scatters(theirs, seeds[1]), theirs))
    engine = Engine(loaded(model, tokenizer), curve=flat(), drafter=drafter)
    params = SamplingParams(temperature=temperature, seed=7)
    prompt = tokenizer.encode(tokenizer.control_texts.mark(text))
    size = tokenizer.vocab_size
    expected = plain(model, prompt, 24, params, end=tokenizer.end, vocab_size=size)
    result = engine.generate(prompt, max_tokens=24, sampling=params)
    assert list(result.token_ids) == expected


TINY = LongestMatch((), ("<end>",))


def test_the_law_of_what_is_drawn_is_the_targets() -> None:
    """Every draw is followed: the chances of all texts of three tokens, to 1e-12."""
    few = [ord(one) for one in "aun "]
    tokenizer = TOKENIZERS["syllables"]
    ids = [*few, tokenizer.encode("un")[0], tokenizer.encode(" un")[0]]
    rows = np.random.default_rng(2).normal(0.0, 1.0, (tokenizer.vocab_size, len(ids)))

    def target(context: tuple[int, ...]) -> Sequence[float]:
        row = np.full(tokenizer.vocab_size, -np.inf)
        row[ids] = rows[context[-1]]
        return list(row)

    def draft(context: tuple[int, ...]) -> Sequence[float]:
        row = np.full(TINY.vocab_size, -30.0)
        row[few] = rows[context[-1], : len(few)]
        return list(row)

    def chances(row: Any) -> Row:
        weights: Row = np.exp(row.astype(np.float64) - row.max())
        weights /= weights.sum()
        return weights

    def experiment(dice: Sampler) -> tuple[int, ...]:
        backend = loaded(target, tokenizer)
        drafter = translating(tokenizer, loaded(draft, TINY))
        text = [few[0], few[1]]
        backend.prefill(text[:-1])
        drafter.begin(text)
        while len(text) < 5:
            context = context_of(max_nodes=4 - len(text)) if len(text) < 4 else None
            tree = DraftTree.chain(text[-1:])
            if context is not None:
                proposal = drafter.propose(context)
                tree = build_tree(text[-1], proposal, len(proposal))
            drafted.append(len(tree) - 1)
            logits = backend.verify(tree)
            path, emitted = accept(tree, logits, lambda row: dice.draw(chances(row)), None)
            backend.commit(path)
            drafter.observe(VerifyResult(tree, path, emitted, context_of()))
            text += emitted
        return tuple(text[2:])

    drafted: list[int] = []
    law: dict[tuple[int, ...], float] = {}
    for chance, found in outcomes(experiment):
        law[found] = law.get(found, 0.0) + chance
    assert max(drafted) == 2 and len(law) == len(ids) ** 3
    for found, chance in law.items():
        text: tuple[int, ...] = (few[0], few[1])
        expected = 1.0
        for token in found:
            expected *= chances(np.asarray(target(text), np.float32))[token]
            text = (*text, token)
        assert abs(chance - expected) < 1e-12


# ------------------------------------------------------------------------------ what is told


def test_only_what_changed_is_fed() -> None:
    """The last word and what came behind it; drafts that were right are in the cache already."""
    words, parts = TOKENIZERS["words"], TOKENIZERS["syllables"]
    draft = loaded(recites(parts, TEXTS["english"]), parts)
    engine = Engine(
        loaded(recites(words, TEXTS["english"]), words),
        curve=flat(),
        drafter=translating(words, draft),
    )
    engine.generate(words.encode("Say it:\n"), max_tokens=60)
    first, *later = (len(tree) for tree in draft.trees)
    assert first >= len(parts.encode("Say it:\n"))
    assert max(later) <= 6  # tokens of the last word drafted, and of one that the target wrote


QWEN = (
    "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)


def test_a_prompt_is_told_in_the_draft_models_own_format() -> None:
    """Messages, not what stands around them; words that look like a control token stay words."""
    target = LongestMatch((), ("<|s|>", "<|e|>"))
    draft = LongestMatch((), ("</s>",))
    translation = Translation(target, draft, QWEN, MISTRAL)
    said = target.control_texts.mark("Say </s> or <|e|>!")
    prompt = "<|s|>system\nBe kind.<|e|>\n<|s|>user\nHi<|e|>\n<|s|>assistant\nYes<|e|>\n"
    prompt += f"<|s|>user\n{said}<|e|>\n<|s|>assistant\n"
    ids, _ = translation.prompt(target.encode(prompt))
    assert ids.count(draft.end) == 1, "the end of the answer alone"
    told = b"".join(draft.token_bytes(one) or b"#" for one in ids).decode()
    assert told == "[INST] Be kind. [/INST][INST] Hi [/INST] Yes#[INST] Say </s> or <|e|>! [/INST]"
    assert translation.end == target.end


def test_without_a_format_the_text_is_told() -> None:
    """And control tokens that both have by the same name; others are left out."""
    target = LongestMatch((), ("<a>", "<b>"))
    translation = Translation(target, LongestMatch((), ("<b>",)))
    ids, _ = translation.prompt(target.encode("<a>one<b>two"))
    assert bytes(one if one < 256 else ord("#") for one in ids) == b"one#two"


def always(row: Sequence[float], _context: tuple[int, ...]) -> Sequence[float]:
    return row


def test_a_control_token_is_never_proposed() -> None:
    """The end of a turn becomes the target's; what else has no text ends a chain."""
    draft = LongestMatch((), ("<x>", "<end>"))
    for token, expected in ((draft.end, [TINY.end]), (draft.end - 1, [])):
        row = list(np.eye(draft.vocab_size)[token] * 20.0)
        drafter = translating(TINY, loaded(partial(always, row), draft))
        drafter.begin(TINY.encode("Go on"))
        assert list(drafter.propose(context_of()).tokens) == expected


def test_a_long_text_is_a_window() -> None:
    """Its first tokens and its last ones, as much of them as there is room for."""
    draft = loaded(recites(TINY, "x" * 3000), TINY, context_size=400)
    drafter = translating(TINY, draft)
    drafter.begin(TINY.encode("ab" * 1000))
    for _ in range(600):
        drafter.propose(context_of(max_nodes=3))
        assert draft.length <= 400
        drafter.observe(VerifyResult(DraftTree.chain((0,)), (0,), [ord("x")], context_of()))
    assert bytes(draft.tokens[:64]) == b"ab" * 32
    assert bytes(draft.tokens[-50:]) == b"x" * 50


def test_several_tokens_for_one_are_as_many_chances_and_steps() -> None:
    """Bytes for words: what a round is expected to bring, before it is asked."""
    words, letters = TOKENIZERS["words"], TOKENIZERS["bytes"]
    text = "until until until until"
    drafters = [
        translating(words, loaded(scatters(theirs, 1), theirs)) for theirs in (words, letters)
    ]
    for drafter in drafters:
        drafter.begin([*words.encode(text), 0])
    alike, several = (drafter.estimate(context_of()) for drafter in drafters)
    times = (len(letters.encode(text)) + 4) / (len(words.encode(text)) + 4)
    assert times > 2 and several.node_ms == pytest.approx(times * alike.node_ms)
    expected = [chance**times for chance in alike.probabilities]
    assert several.probabilities == pytest.approx(expected)
