"""Grammars: answers fit, are distributed as by masking first, and drafts change nothing."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding_cases import END, VOCAB
from fake_backend import FakeBackend
from frozen_times import INF, free_drafts
from serving_cases import letters

import edgespec
from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.drafting.combined import GrammarDrafter
from edgespec.drafting.proposal import Calibration, StepContext, VerifyResult
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.times import CostCurve
from edgespec.sampling.chain import logprob_of
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import ConstrainedSampler, Sampler

V = 8


class Even:
    """Allows even tokens; forces a text where it is given one."""

    def __init__(self, text: bytes = b"", num_sure: int = 0) -> None:
        self.text, self.num_sure = text, num_sure
        self.accepted: list[int] = []

    def allows(self, token: int) -> bool:
        return token % 2 == 0

    def masked(self, logits_row: Logits) -> Logits:
        row: Logits = logits_row.copy()
        row[1::2] = -INF
        return row

    def accept(self, token: int) -> None:
        assert self.allows(token)
        self.accepted.append(token)

    def forced(self) -> tuple[list[int], int]:
        return list(self.text), self.num_sure


ROW: Logits = np.array([0.3, 2.0, 1.1, -0.5, 0.9, 1.7, -1.0, 0.0], np.float32)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.3, min_p=0.4),
    ],
    ids=str,
)
def test_the_law_is_that_of_masking_first(params: SamplingParams) -> None:
    """20,000 draws; a right sampler fails this once in about 10^8 runs (5.7 sigma a token)."""
    count = 20_000
    fixed = dataclasses.replace(params, seed=1, penalty_last_n=0)
    sampler = ConstrainedSampler(Sampler(fixed, V), Even())
    drawn = Counter(sampler.pick(ROW) for _ in range(count))
    ids, probabilities = Sampler(fixed, V).distribution(Even().masked(ROW))
    assert set(drawn) <= set(map(int, ids))
    for token, p in zip(ids, probabilities, strict=True):
        assert abs(drawn[int(token)] - count * p) <= 5.7 * math.sqrt(count * p * (1 - p)) + 1


def test_greedy_takes_the_best_allowed_token_and_the_grammar_hears_each() -> None:
    grammar = Even()
    sampler = ConstrainedSampler(Sampler(SamplingParams(), V), grammar)
    assert [sampler.pick(ROW), sampler.pick(-ROW)] == [2, 6]
    assert grammar.accepted == [2, 6]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_biases_that_leave_nothing_of_what_the_grammar_allows_are_told(params: Any) -> None:
    """A setting is wrong then; where the model's own logits are, the model is."""
    even = tuple((token, -INF) for token in range(0, V, 2))
    sampler = ConstrainedSampler(Sampler(SamplingParams(logit_bias=even, **params), V), Even())
    with pytest.raises(UnsupportedError, match="every one is forbidden"):
        sampler.pick(ROW)
    with pytest.raises(BackendError):
        sampler.pick(np.full(V, np.nan, np.float32))
    every = SamplingParams(logit_bias=tuple((token, -INF) for token in range(V)), **params)
    with pytest.raises(UnsupportedError, match="every one is forbidden"):
        Sampler(every, V).pick(ROW)


def context_of(max_nodes: int) -> StepContext:
    return StepContext(max_nodes, 0.0, CostCurve([float("inf"), 1.0]), depth=0)


def test_forced_text_is_drafted_and_how_it_is_cut_is_counted() -> None:
    grammar, counts = Even(b"name", num_sure=3), Calibration(1, [0], [0], [0.6])
    drafter = GrammarDrafter(grammar, SuffixDrafter(), counts)
    drafter.begin([1, 2, 3])
    before = drafter.propose(context_of(8))
    assert bytes(before.tokens) == b"name"
    assert list(before.probabilities) == sorted(before.probabilities, reverse=True)
    tree = DraftTree.chain([3, *b"name"])
    outcome = VerifyResult(tree, range(5), [*b"name", 7], context_of(8))
    for _ in range(30):
        drafter.propose(context_of(8))
        drafter.observe(outcome)
    assert drafter.propose(context_of(8)).probabilities[-1] > before.probabilities[-1]
    assert len(drafter.propose(context_of(2))) == 2
    grammar.text = b""
    assert bytes(drafter.propose(context_of(8)).tokens[:1]) == b"n"  # the other drafter's


def test_a_text_that_is_cut_off_says_nothing_about_how_texts_end() -> None:
    """The last token that there is room for is not the last one of what is forced."""
    counts = Calibration(1, [0], [0], [0.6])
    drafter = GrammarDrafter(Even(b"name", num_sure=3), SuffixDrafter(), counts)
    drafter.begin([1, 2, 3])
    before = counts.probability(0)
    assert drafter.propose(context_of(2)).probabilities == [1.0, 1.0]
    drafter.observe(VerifyResult(DraftTree.chain([3, *b"na"]), range(3), [*b"nam"], context_of(2)))
    assert counts.probability(0) == before
    whole = drafter.propose(context_of(4))
    assert whole.probabilities == [1.0, 1.0, 1.0, before]
    drafter.observe(
        VerifyResult(DraftTree.chain([3, *b"name"]), range(5), [*b"name."], context_of(4))
    )
    assert counts.probability(0) > before


# ------------------------------------------------------------------------------ the real thing

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "favourite_colour": {"enum": ["red", "green"]},
            "married": {"type": "boolean"},
        },
        "required": ["name", "favourite_colour", "married"],
    }
)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_documents_fit_the_schema_and_drafts_change_nothing(
    exact_engine: edgespec.Engine, temperature: float
) -> None:
    for seed in range(3):
        sampling = edgespec.SamplingParams(temperature=temperature, seed=seed)
        results = [
            exact_engine.generate(
                f"Invent person {seed}, as JSON.",
                json_schema=SCHEMA,
                sampling=sampling,
                speculate=speculate,
                max_tokens=90,
            )
            for speculate in (True, False)
        ]
        assert results[0].token_ids == results[1].token_ids
        assert results[0].finish_reason == "stop"
        found = json.loads(results[0].text)
        assert list(found) == ["name", "favourite_colour", "married"]
        assert found["favourite_colour"] in ("red", "green") and len(found["name"]) <= 12
        assert json.dumps(found, ensure_ascii=False) == results[0].text or temperature


@pytest.mark.model
@pytest.mark.usefixtures("exact_engine")  # which has measured what exact settings are
def test_documents_with_several_drafters_and_small_drafts(
    measured_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branches leave tokens to be fed again, and the next round is forced."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(measured_cache))
    options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 60}
    with edgespec.load(
        context_size=256, threads=1, exact=True, drafter="suffix,recycling", draft_max=2
    ) as engine:
        engine.curve = free_drafts(3)
        for seed, temperature in enumerate((0.0, 1.5)):
            options["sampling"] = edgespec.SamplingParams(temperature=temperature, seed=seed)
            prompt = f"Invent person {seed}, as JSON."
            found = engine.generate(prompt, **options)
            assert found.token_ids == engine.generate(prompt, speculate=False, **options).token_ids
            assert found.counters.drafted_tokens > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_known_tokens_have_the_logprobs_that_the_model_gives_them(drafts: bool) -> None:
    """Whether they are verified several at a time, which they are where drafts are made."""
    text = list(b"abcdefghijklmnopqrstuvwxyzabc")
    backend = FakeBackend(letters, VOCAB, end=END, context_size=512)
    drafter = SuffixDrafter() if drafts else None
    curve = free_drafts(31) if drafts else None
    with Engine(backend, drafter=drafter, curve=curve) as engine:
        made = engine.generate(text[:1], max_tokens=40, logprobs=0, begun=text[1:])
    assert list(made.token_ids[: len(text) - 1]) == text[1:]
    assert len(made.token_ids) == 40
    for place, told in enumerate(made.logprobs[: len(text) - 1], 1):
        row = np.array(letters(tuple(text[:place])), np.float32)
        assert told.logprob == pytest.approx(logprob_of(row, text[place], 0).logprob)
    assert made.counters.rounds < 30 if drafts else made.counters.rounds == 39
