"""A draft model that fails ends its drafting, once and with a warning, and never the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend
from frozen_times import Frozen, free_drafts
from random_gguf import Q8_0, write_model
from word_laws import WORD_V, chi_square_p, distribution_of_words, twisted_model, words_model

from edgespec import DraftModelWarning
from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.model import ModelDrafter
from edgespec.drafting.proposal import Drafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import BackendError, ContextFullError, DoesNotFitError
from edgespec.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("frozen_clock")

INF = float("inf")
V = 12
PROMPT = [1, 2, 3, 4, 1, 2, 3]
_TABLE: list[list[float]] = np.random.default_rng(0).normal(0.0, 2.0, (V, V)).tolist()


def rows(context: tuple[int, ...]) -> Sequence[float]:
    return _TABLE[(context[-1] + 3 * len(context)) % V]


class Failing(FakeBackend):
    """A draft model that fails at its step number `at`, or where it is fed the token `on`."""

    def __init__(self, error: BaseException, at: int = -1, on: int = -1, **options: Any) -> None:
        super().__init__(options.pop("model", rows), options.pop("vocab_size", V), **options)
        self.error, self.at, self.on = error, at, on
        self.calls = 0

    def _step(self, tokens: Sequence[int]) -> None:
        self.calls += 1
        if self.calls - 1 == self.at or tokens[-1] == self.on:
            raise self.error

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self._step(tokens)
        return super().prefill(tokens)

    def verify(self, tree: DraftTree) -> Logits:
        self._step(tree.tokens)
        return super().verify(tree)


def flat() -> Frozen:
    return free_drafts(16)


def model_of(backend: FakeBackend) -> ModelDrafter:
    return ModelDrafter(backend, Frozen([INF, *[0.01] * 16]), backend.tokenizer.vocab_size)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 7, 30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_goes_on_without_it(temperature: float, at: int, alone: bool) -> None:
    """Greedy it is that of plain decoding; drafts are counted as they were verified."""
    draft = Failing(BackendError("llama_decode failed with -3"), at, batch_size=4, max_nodes=4)
    model = model_of(draft)
    drafter: Drafter = model if alone else CombinedDrafter([SuffixDrafter(), model])
    engine = Engine(FakeBackend(rows, V), curve=flat(), drafter=drafter)
    sampling = SamplingParams(temperature=temperature, seed=1)
    plain = engine.generate(PROMPT, max_tokens=60, speculate=False)
    with pytest.warns(DraftModelWarning) as said:
        for _ in range(2):
            result = engine.generate(PROMPT, max_tokens=60, sampling=sampling)
            counters = result.counters
            assert len(result.token_ids) == 60
            assert counters.accepted_tokens + counters.rounds == 59
            assert counters.accepted_tokens <= counters.drafted_tokens
            assert temperature or result.token_ids == plain.token_ids
    assert [str(one.message) for one in said] == [
        "the draft model failed and is left out: llama_decode failed with -3"
    ]
    assert engine.draft_failure == "llama_decode failed with -3"
    assert draft.calls == at + 1


@pytest.mark.parametrize(
    "error", [ContextFullError("full"), DoesNotFitError("much"), MemoryError(), OSError("gone")]
)
def test_what_a_backend_may_fail_with(error: Exception) -> None:
    engine = Engine(FakeBackend(rows, V), curve=flat(), drafter=model_of(Failing(error, 5)))
    with pytest.warns(DraftModelWarning):
        assert len(engine.generate(PROMPT, max_tokens=40).token_ids) == 40
    assert engine.draft_failure == (str(error) or "MemoryError")


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), AssertionError("bug"), TypeError("bug"), IndexError("bug")]
)
def test_mistakes_and_interrupts_come_through(error: BaseException, at: int) -> None:
    """And the engine is usable afterwards: the next answer is the right one, with drafts."""
    draft = Failing(error, at, batch_size=4, max_nodes=4)
    drafter = CombinedDrafter([SuffixDrafter(), model_of(draft)])
    engine = Engine(FakeBackend(rows, V), curve=flat(), drafter=drafter)
    plain = engine.generate(PROMPT, max_tokens=40, speculate=False)
    with pytest.raises(type(error)):
        engine.generate(PROMPT, max_tokens=40)
    assert engine.draft_failure is None
    result = engine.generate(PROMPT, max_tokens=40)
    assert result.token_ids == plain.token_ids
    assert result.counters.accepted_by["model"] > 10


def test_rounds_after_a_failure_are_not_held_against_it() -> None:
    """A later run may try the model again, so what it was worth is that of when it worked."""
    drafter = CombinedDrafter([SuffixDrafter(), model_of(Failing(BackendError("no"), 20))])
    engine = Engine(FakeBackend(rows, V), curve=flat(), drafter=drafter)
    with pytest.warns(DraftModelWarning):
        engine.generate(PROMPT, max_tokens=60)
    kept = drafter.state()["model"]
    engine.generate(PROMPT, max_tokens=60)
    assert drafter.state()["model"]["rounds"] == kept["rounds"] > 0


@pytest.mark.parametrize("num_words", [2_000, pytest.param(6_000, marks=pytest.mark.long)])
def test_what_was_drawn_before_a_failure_is_judged(num_words: int) -> None:
    """Words of three letters, each of an engine whose draft model cannot read a 0.

    That it fails depends on the drawn token: an answer that dropped it then would have too few of
    them. A right program fails once in a million seeds; the seeds are fixed.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    failed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DraftModelWarning)
        for seed in range(num_words):
            draft = Failing(BackendError("0"), on=0, model=twisted_model, vocab_size=WORD_V)
            backend = FakeBackend(words_model, WORD_V, max_nodes=7)
            engine = Engine(backend, curve=flat(), drafter=model_of(draft))
            params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)
            ids = engine.generate([0, 0, 0], max_tokens=9, sampling=params).token_ids
            counts[ids[:3]] += 1
            failed += engine.draft_failure is not None
    assert failed > num_words / 6
    assert chi_square_p(counts, distribution_of_words(0.8, 0.95)) > 1e-6


# ------------------------------------------------------------------------------ on the command line


FAILS = """
import sys
from edgespec.cli.main import main
from edgespec.drafting import combined
from edgespec.drafting.model import ModelText
from edgespec.errors import BackendError
from edgespec.measure import timing
from edgespec.setup import loading

timing._LOOK_SECONDS, loading._CURVE_SECONDS = 0.0, 0.1

def fails(self, tokens):
    raise BackendError("llama_decode failed with -3")

combined._Source.limit = lambda *_: 4
combined._Source.is_worth_asking = lambda *_: True
ModelText._feed = fails
main()
"""


@pytest.mark.model
def test_run_says_it_once_and_goes_on(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model.gguf", "llama", Q8_0, reads_bytes=True))
    options = ["--max-tokens", "12", "--ctx", "256", "--threads", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", FAILS, "run", model, "Say blue.", *options, "--draft-model", model],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "EDGESPEC_CACHE": str(tmp_path)},
    )
    said = "warning: the draft model failed and is left out: llama_decode failed with -3\n"
    assert (done.returncode, done.stderr) == (0, said)
    found = json.loads(done.stdout)
    assert found["draft_failure"] == "llama_decode failed with -3"
    assert found["drafted_by"].get("model", 0) == 0
    assert sum(found["drafted_by"].values()) == found["drafted_tokens"]
    assert found["accepted_tokens"] + found["rounds"] == found["generated_tokens"] - 1 == 11
