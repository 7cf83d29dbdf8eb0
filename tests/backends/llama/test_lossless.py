"""Speculative answers of the embedded model are its plain ones, greedy and drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from branching import Branching
from llama_cases import THREADS, RecordingBackend, flat, settings
from random_gguf import Q8_0, write_model

import edgespec
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Result
from edgespec.drafting.proposal import Drafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import ModelSpec
from edgespec.sampling.params import SamplingParams
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model

PROMPTS = [
    "Count from 1 to 20, then again.",
    "Repeat after me: the cat sat on the mat. The cat sat on the mat.",
    "Write a Python class with four getters.",
    'List three people as JSON: [{"name": "Ann", "age": 1},',
    "Why is the sky blue?",
]


def engine_on(backend: LlamaBackend, spec: ModelSpec, drafter: Drafter | None = None) -> Engine:
    return Engine(backend, curve=flat(), drafter=drafter, chat_template=spec.chat_template)


@pytest.fixture(scope="module")
def plain(loaded_reference: LlamaBackend, spec: ModelSpec) -> list[Result]:
    """Plain greedy answers to PROMPTS, from a backend that sees no drafts."""
    engine = engine_on(loaded_reference, spec)
    return [engine.generate(prompt, max_tokens=32) for prompt in PROMPTS]


def assert_lossless(plain: Sequence[Result], results: Sequence[Result]) -> None:
    """Speculative output equals plain output, and drafts were really used."""
    for expected, result in zip(plain, results, strict=True):
        assert expected.counters.drafted_tokens == 0
        assert result.token_ids == expected.token_ids
        assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
    drafted = sum(result.counters.drafted_tokens for result in results)
    accepted = sum(result.counters.accepted_tokens for result in results)
    assert 0 < accepted < drafted, "some drafts are right and some are wrong"


def test_chains_are_lossless(
    backend: RecordingBackend, spec: ModelSpec, plain: list[Result]
) -> None:
    engine = engine_on(backend, spec, SuffixDrafter())
    results = [engine.generate(prompt, max_tokens=32) for prompt in PROMPTS]
    assert_lossless(plain, results)
    assert {leaves for _, leaves, _ in backend.seen} == {1}
    assert len({result.token_ids for result in results}) == len(PROMPTS)


def test_trees_are_lossless(
    backend: RecordingBackend, spec: ModelSpec, plain: list[Result]
) -> None:
    engine = engine_on(backend, spec, Branching())
    assert_lossless(plain, [engine.generate(prompt, max_tokens=32) for prompt in PROMPTS])
    assert any(leaves > 1 for _, leaves, _ in backend.seen)
    assert any(pending > 0 for _, _, pending in backend.seen)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=7),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.95, min_p=0.05, seed=8),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.2),
    ],
    ids=["temperature", "filters", "penalties"],
)
def test_the_same_seed_gives_the_same_tokens(
    backend: RecordingBackend, reference: LlamaBackend, spec: ModelSpec, params: SamplingParams
) -> None:
    engine = engine_on(backend, spec, Branching())
    slow = engine_on(reference, spec)
    arguments: dict[str, Any] = {"max_tokens": 24, "sampling": params}
    results = [engine.generate(prompt, **arguments) for prompt in PROMPTS[:2]]
    assert_lossless([slow.generate(prompt, **arguments) for prompt in PROMPTS[:2]], results)


def test_another_seed_gives_other_tokens(reference: LlamaBackend, spec: ModelSpec) -> None:
    engine = engine_on(reference, spec)
    outputs = {
        engine.generate(
            PROMPTS[4], max_tokens=12, sampling=SamplingParams(temperature=1.0, seed=seed)
        ).token_ids
        for seed in (1, 2, 1)
    }
    assert len(outputs) == 2


def test_a_quantized_cache_is_lossless(model: Path, spec: ModelSpec) -> None:
    """At q8_0 no step takes the split path, so this holds with two threads at any depth."""
    backend = LlamaBackend(model, settings(threads=2, kv_type_k="q8_0", kv_type_v="q8_0"))
    engine = engine_on(backend, spec, SuffixDrafter())
    prompts = [PROMPTS[1], "the cat sat on the mat and the dog on the log; " * 22]
    assert len(engine.encode(prompts[1])) > 256
    assert_lossless(
        [engine.generate(prompt, max_tokens=40, speculate=False) for prompt in prompts],
        [engine.generate(prompt, max_tokens=40) for prompt in prompts],
    )
    backend.close()


def test_exact_settings_are_lossless_beyond_512_cells(model: Path, spec: ModelSpec) -> None:
    """530 tokens of prompt, two threads.

    Without `exact` the outputs part within 60 tokens where this was written.
    """
    days = ("Monday", "a rainy Tuesday", "the last Wednesday", "Thursday", "market day")
    ways = ("north", "far south", "east", "west")
    lines = (
        f"On {days[i % 5]} the harbour master counted {i * 7 % 12 + 2} ships from the "
        f"{ways[i % 4]}.\n"
        for i in range(32)
    )
    prompt = "".join(lines) + "Write a poem about this."
    plan = make_run_plan(spec, Request(context_size=1024, exact=True))
    used = {name: getattr(plan, name) for name in ("kv_type_k", "kv_type_v", "kernels")}
    used |= {"tied": spec.tied_embeddings, "threads": 2, "batch_size": 128}
    backend = LlamaBackend(model, settings(1024, **used))
    engine = engine_on(backend, spec, SuffixDrafter())
    assert 512 < len(engine.encode(prompt)) < 600
    plain = engine.generate(prompt, max_tokens=60, speculate=False)
    assert_lossless([plain], [engine.generate(prompt, max_tokens=60)])
    backend.close()


def test_exact_is_measured_before_it_is_promised(cache_folder: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "random.gguf", "llama", Q8_0, reads_bytes=True)
    load = partial(edgespec.load, path, backend="llamacpp")
    options: dict[str, Any] = {"context_size": 512, "draft_max": 3, "threads": THREADS}
    load(**options).close()
    assert not list(cache_folder.glob("invariance/*.json"))
    load(**{**options, "draft_max": 0}, exact=True).close()
    (measured,) = cache_folder.glob("invariance/*.json")
    assert "steps" not in json.loads(measured.read_text()), "single tokens say nothing about others"
    load(**options, exact=True).close()
    document = json.loads(measured.read_text())
    assert document["steps"] == [[4, 512, 4]]
    assert document["prefills"][-1][1:3] == [4, 512]
    for change in ({"draft_max": 5}, {"context_size": 1024}):  # larger steps, a deeper cache
        load(**{**options, **change}, exact=True).close()
        again = json.loads(measured.read_text())
        assert again["steps"] != document["steps"]
        document = again
    measured.write_text(json.dumps({**document, "steps": [[6, 1024, 1]]}))
    with pytest.raises(UnsupportedError, match="exact is not possible") as caught:
        load(**options, exact=True)
    assert "leave out exact" in caught.value.hint
