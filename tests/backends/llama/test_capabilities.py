"""What models of other architectures can: windows that slide take chains, a state nothing back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hybrid_gguf import Shape, write_hybrid
from llama_cases import THREADS, assert_ceiling, feed, flat, recording, settings
from random_gguf import F32, VOCABULARY, write_model

import edgespec
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.decode.engine import Engine
from edgespec.decode.options import GenerationOptions
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError
from edgespec.measure.noise import find_divergence, measure_batch_noise
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

WORDS = "to be or not to be that is the question to be or not to be that is the answer "
BYTES = list(WORDS.encode())
ENDLESS = GenerationOptions(
    max_tokens=160, sampling=SamplingParams(logit_bias={VOCABULARY - 1: -1e3})
)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers alternate between global ones and those that slide over 48 tokens."""
    return write_model(
        tmp_path_factory.mktemp("gemma3") / "model.gguf", "gemma3", F32, reads_bytes=True
    )


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mamba") / "model.gguf"
    return write_hybrid(path, Shape("mamba"), F32)


@pytest.mark.parametrize(
    ("name", "expected", "why"),
    [("gemma3", (True, False, False), "sliding"), ("mamba", (False, False, False), "recurrent")],
)
def test_a_model_says_what_it_cannot(
    request: pytest.FixtureRequest, name: str, expected: tuple[bool, ...], why: str
) -> None:
    """`tests/backends/test_contract.py` shows that no more is done, and that this much works."""
    backend = LlamaBackend(request.getfixturevalue(name), settings())
    can = backend.capabilities
    assert (can.rollback, can.tree, can.truncate) == expected
    assert why in can.reason and (backend.max_nodes == 1) is (name == "mamba")
    backend.close()


def test_a_sliding_window_is_cut_where_its_cells_are_there_and_else_emptied(gemma3: Path) -> None:
    """They are overwritten only when the window has left them."""
    backend = LlamaBackend(gemma3, settings())
    first = feed(backend, BYTES)
    assert backend.truncate(len(BYTES)) == len(BYTES)
    assert backend.truncate(len(BYTES) - 1) == len(BYTES) - 1 == backend.length
    assert np.abs(feed(backend, BYTES[-1:]) - first).max() < 0.05
    for _ in range(2):
        feed(backend, BYTES * 2)
    assert backend.truncate(len(BYTES)) == 0 == backend.length
    assert np.array_equal(feed(backend, BYTES), first)
    backend.close()


def test_a_sliding_window_is_lossless(gemma3: Path) -> None:
    """Prompt and output are longer than the window of 48 tokens.

    F32 weights are not batch-invariant: outputs may part where the target itself is undecided.
    """
    backend = recording(gemma3, settings())
    noise = measure_batch_noise(backend, depths=(40, 200))
    assert noise < 0.4
    engine = Engine(backend, curve=flat(), drafter=SuffixDrafter())
    accepted = compared = 0
    for prompt in (BYTES * 2, list(b"abcdefg " * 20), BYTES[20:60] * 3):
        assert len(prompt) > 64
        plain = engine.generate(prompt, ENDLESS, speculate=False).token_ids
        result = engine.generate(prompt, ENDLESS)
        assert len(plain) == len(result.token_ids) == 160
        found = find_divergence(backend, prompt, plain, result.token_ids)
        assert found is None or found.gap <= noise, f"{found}, noise {noise}"
        compared += len(plain) if found is None else found.position
        accepted += result.counters.accepted_tokens
    assert accepted > 50 and compared > 240
    assert {leaves for _, leaves, _ in backend.seen} == {1}
    backend.close()


def test_a_plan_is_a_ceiling_for_sliding_caches(gemma3: Path) -> None:
    spec = read_model_spec(gemma3)
    plan = make_run_plan(spec, Request(context_size=2048, draft_max=31))
    with load_plan(spec, plan) as engine:
        found = engine.backend.memory_bytes()
    assert_ceiling(found, plan)
    assert found["kv_cache"] < 2048 * spec.kv_values_per_token * 2, "layers that slide keep less"


def test_a_recurrent_model_decodes_plainly(mamba: Path) -> None:
    """Also right after a longer text, whose state must not be seen."""
    with edgespec.load(mamba, context_size=512, threads=THREADS) as engine:
        assert engine.drafter is None
        first = engine.generate(BYTES, max_tokens=40)
        engine.generate(list(b"something else entirely" * 5), max_tokens=20)
        again = engine.generate(BYTES, max_tokens=40)
        text = list(BYTES)
        for _ in range(40):  # the slow way: everything again for every token
            engine.backend.truncate(0)
            rows = [
                engine.backend.prefill(text[i : i + engine.backend.batch_size])
                for i in range(0, len(text), engine.backend.batch_size)
            ]
            text.append(int(rows[-1].argmax()))
        assert first.token_ids == again.token_ids == tuple(text[len(BYTES) :])
    counters = first.counters
    assert (counters.drafted_tokens, counters.rounds, counters.generated_tokens) == (0, 39, 40)
    assert first.finish_reason == "length"
    assert len(set(first.token_ids)) > 1


def test_a_recurrent_model_refuses_a_drafter(mamba: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot take back") as caught:
        edgespec.load(mamba, context_size=512, drafter="suffix")
    assert "drafter" in caught.value.hint
