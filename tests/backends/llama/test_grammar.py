"""llama.cpp's grammars: what may come next, and what reading one takes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import edgespec
from edgespec.backends.llama.grammar import LlamaGrammar, json_grammar
from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.footprint import SAMPLING_TOKEN_BYTES
from edgespec.models.embedded import embedded_model
from edgespec.sampling.constrained import ConstrainedSampler
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler


def grammar_of(engine: edgespec.Engine, text: str) -> LlamaGrammar:
    tokenizer = engine.backend.tokenizer
    return LlamaGrammar(tokenizer, text)  # type: ignore[arg-type]


@pytest.mark.model
def test_what_may_come_next(exact_engine: edgespec.Engine) -> None:
    tokenizer = exact_engine.backend.tokenizer
    grammar = grammar_of(exact_engine, 'root ::= "yes, it is" | "yes, it was"')
    assert grammar.forced_bytes(64) == b"yes, it "
    assert grammar.forced_bytes(3) == b"yes"
    row = np.zeros(tokenizer.vocab_size, np.float32)
    pieces = {
        tokenizer.token_bytes(int(token)) for token in np.flatnonzero(grammar.masked(row) == 0.0)
    }
    assert pieces == {p for p in pieces if b"yes, it ".startswith(p) and p}
    assert grammar.best(row) == int(grammar.masked(row).argmax())
    for token in tokenizer.encode("yes, it is", add_special=False):
        assert grammar.allows(token)
        grammar.accept(token)
    ends = np.flatnonzero(grammar.masked(row) == 0.0)
    assert len(ends) and all(tokenizer.is_end(int(token)) for token in ends)
    grammar.close()
    grammar.close()


@pytest.mark.model
def test_strings_have_no_raw_control_characters(exact_engine: edgespec.Engine) -> None:
    grammar = grammar_of(exact_engine, json_grammar('{"type": "string"}'))
    tokenizer = exact_engine.backend.tokenizer
    for token in tokenizer.encode('"a', add_special=False):
        grammar.accept(token)
    assert not any(grammar.allows(t) for t in tokenizer.encode("\n", add_special=False))


@pytest.mark.model
@pytest.mark.parametrize(
    "options",
    [
        {"grammar": "root ::= ("},
        {"grammar": "other ::= 'x'"},
        {"grammar": ""},
        {"json_schema": "{"},
        {"json_schema": '{"type": "nothing"}'},
        {"json_schema": '{"$ref": "http://localhost/x"}'},
        {"json_schema": "{}", "grammar": 'root ::= "x"'},
    ],
    ids=str,
)
def test_unreadable_grammars_are_refused(
    exact_engine: edgespec.Engine, options: dict[str, str]
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        exact_engine.generate("x", max_tokens=3, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert exact_engine.generate("x", max_tokens=3).token_ids


@pytest.mark.model
def test_a_plan_has_room_for_what_a_grammar_asks_of_the_vocabulary() -> None:
    with open_tokenizer(embedded_model()) as tokenizer:
        size = tokenizer.vocab_size
        row = np.random.default_rng(1).normal(size=size).astype(np.float32)
        tracemalloc.start()
        try:
            grammar = LlamaGrammar(tokenizer, json_grammar('{"type": "string"}'))
            params = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
            sampler = ConstrainedSampler(Sampler(params, size, [1]), grammar)
            for _ in range(3):
                grammar.forced_bytes(64)
                sampler.pick(row)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            grammar.close()
    assert peak <= SAMPLING_TOKEN_BYTES * size
