"""Loading a draft model that fails at any of its steps leaves nothing open."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend
from loading_cases import (
    CURVE,
    SPEC,
    VOCAB,
    Opened,
    assert_nothing_stays_open,
    quiet,
)
from random_gguf import Q8_0, write_model
from tiny_folder import write_folder

import edgespec
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.drafting.combined import CombinedDrafter, _Source
from edgespec.drafting.translated import TranslatingDrafter
from edgespec.memory.plan import plan as plans
from edgespec.memory.plan.options import LoadOptions
from edgespec.memory.plan.plan import Plan
from edgespec.memory.store import packed
from edgespec.models.embedded import embedded_model
from edgespec.models.gguf import reader
from edgespec.setup import loading


def test_a_draft_model(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(loading, "open_draft_model", lambda *_, **__: Opened(opened))
    monkeypatch.setattr(loading, "measure_curve", lambda *_, **__: CURVE)
    monkeypatch.setattr(loading, "read_exit", lambda _spec: None)
    for module in (loading, plans):
        monkeypatch.setattr(module, "is_translated", lambda *_: False)
    target = FakeBackend(lambda _context: [0.0] * VOCAB, VOCAB)
    load = loading.load_draft_model
    functions = [value for value in vars(loading).values() if hasattr(value, "__code__")]
    steps = assert_nothing_stays_open(
        lambda: load(target, SPEC, plan, quiet)[0], [load, *functions], opened
    )
    assert steps > 10


@pytest.mark.model
@pytest.mark.usefixtures("exact_engine")  # which has measured what exact settings are
def test_a_model_of_another_vocabulary_drafts(
    tmp_path: Path, measured_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that knows bytes alone, and nothing of the text: all stays as it is without it.

    It is asked in every round, whatever that costs.
    """
    monkeypatch.setenv("EDGESPEC_CACHE", str(measured_cache))
    monkeypatch.setattr("edgespec.measure.noise._NUM_TOKENS", 16)
    monkeypatch.setattr(_Source, "limit", lambda _source, context, _ms: context.max_nodes)
    monkeypatch.setattr(_Source, "is_worth_asking", lambda *_: True)
    draft = write_model(tmp_path / "bytes.gguf", "llama", Q8_0, reads_bytes=True)
    options = LoadOptions(
        draft_model=draft, drafter="model", context_size=256, threads=1, exact=True
    )
    with edgespec.load(embedded_model(), options) as engine:
        assert isinstance(engine.drafter, CombinedDrafter)
        model = engine.drafter.member("model")
        assert isinstance(model, TranslatingDrafter)
        prompt = "Écris «un» 👍 <|im_end|>."
        drafted = engine.generate(prompt, max_tokens=16)
        plain = engine.generate(prompt, max_tokens=16, speculate=False)
        assert drafted.token_ids == plain.token_ids
        read = bytes(one for one in model._text.backend.tokens if one < 256)
        assert prompt in read.decode(errors="replace"), "what it was told"


def test_a_second_start_packs_and_times_nothing_and_reads_each_header_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := refusal_of_kernels():
        pytest.skip(f"edgespec has no kernels here: {reason}")
    target, draft = (
        write_model(tmp_path / f"{name}.gguf", "llama", Q8_0, reads_bytes=True, seed=seed)
        for seed, name in enumerate(("target", "draft"))
    )
    options = LoadOptions(
        draft_model=draft, drafter="suffix,model", context_size=256, threads=1, packed_file="on"
    )
    edgespec.load(target, options).close()
    assert sorted(name for name, _ in packed.kept()) == ["draft.gguf", "target.gguf"]
    read: list[Path] = []

    def count(path: Path, _read: Any = reader._read) -> Any:
        read.append(path)
        return _read(path)

    monkeypatch.setattr(reader, "_read", count)
    monkeypatch.setattr(reader, "_RECENT_S", 0.0)  # the files are as old as others are
    reader._read_before.cache_clear()
    monkeypatch.setattr(packed.PackedFile, "begin", lambda *_, **__: pytest.fail("it packs"))
    for name in ("contention_now", "measure_curve"):
        monkeypatch.setattr(loading, name, lambda *_, **__: pytest.fail("it times steps"))
    edgespec.load(target, options).close()
    assert sorted(one for one in read if one in (target, draft)) == [draft, target]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    "vocabulary", [pytest.param("its own", marks=pytest.mark.long), "the model's"]
)
def test_a_draft_model_drafts_for_several_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: str
) -> None:
    """In a sequence of one cache for each: texts stay as they are, and what is right is shared."""
    monkeypatch.setattr(_Source, "limit", lambda _source, context, _ms: context.max_nodes)
    monkeypatch.setattr(_Source, "is_worth_asking", lambda *_: True)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    draft = write_model(tmp_path / "bytes.gguf", "llama", Q8_0, reads_bytes=True, template=template)
    model = embedded_model() if vocabulary == "its own" else draft
    options = LoadOptions(
        draft_model=draft, drafter="model", context_size=256, threads=1, exact=True, users=3
    )
    plan = edgespec.plan(model, options)
    prompts = ["Say a word.", "Name a river.", "Écris «un» 👍 <|im_end|>.", "Count to ten."]
    with edgespec.load(model, options) as engine, ThreadPoolExecutor(4) as pool:
        made: list[Any] = [engine.drafter_of(number) for number in range(3)]
        texts = [one.member("model")._text.backend for one in made]
        asked = partial(engine.generate, max_tokens=16, speculate=False)
        expected = [asked(one).token_ids for one in prompts]
        for _ in range(50):  # quick answers may not meet
            drafted = list(pool.map(partial(engine.generate, max_tokens=16), prompts))
            assert [one.token_ids for one in drafted] == expected
            if all(one.tokens for one in texts):
                break
        assert [text.number for text in texts] == [0, 1, 2] and all(one.tokens for one in texts)
        places = [one.member("model")._places for one in made]
        assert len({id(one._tries) for one in places}) == 1 and sum(places[0]._tries) > 0
        allocated = engine.memory_bytes()["draft_kv_cache"]  # with two decimals of a MiB
        assert abs(allocated - plan.component_bytes["draft_kv_cache"]) < 0.006 * 2**20


@pytest.mark.model
def test_a_draft_model_whose_layers_slide_goes_back(tmp_path: Path) -> None:
    """Its window is so short that they keep all cells: what was only a draft is taken back."""
    draft = write_model(tmp_path / "slides.gguf", "gemma3", Q8_0, reads_bytes=True)
    options = LoadOptions(draft_model=draft, drafter="model", context_size=256, threads=1)
    with edgespec.load(embedded_model(), options) as engine:
        assert isinstance(engine.drafter, CombinedDrafter)
        model = engine.drafter.member("model")
        assert isinstance(model, TranslatingDrafter)
        backend = model._text.backend
        backend.truncate(0)
        text = list(b"to be or not to be that is the question whether it is nobler" * 2)
        rows = [backend.prefill([token])[:256].copy() for token in text]
        assert backend.truncate(30) == 30
        again = [backend.prefill([token])[:256].copy() for token in text[30:40]]
        np.testing.assert_allclose(again, rows[30:40], atol=1e-3)


def test_an_onnx_folder_has_a_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are not comparable with a GGUF file's, but its text is carried over."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(_Source, "limit", lambda _source, context, _ms: context.max_nodes)
    monkeypatch.setattr(_Source, "is_worth_asking", lambda *_: True)
    draft = write_model(tmp_path / "bytes.gguf", "llama", Q8_0, reads_bytes=True)
    options = LoadOptions(draft_model=draft, drafter="model", context_size=128, threads=1)
    with edgespec.load(write_folder(tmp_path / "folder"), options) as engine:
        drafted = engine.generate("hello", max_tokens=20, raw=True)
        plain = engine.generate("hello", max_tokens=20, raw=True, speculate=False)
        assert drafted.token_ids == plain.token_ids
        assert isinstance(engine.drafter, CombinedDrafter)
        model = engine.drafter.member("model")
        assert isinstance(model, TranslatingDrafter)
        assert bytes(model._text.backend.tokens[:5]) == b"hello"
