"""What `--remember` keeps: bounded, by model, and gone when told to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_gguf import Q8_0, write_model

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.drafting import make_drafter
from edgespec.drafting.proposal import StepContext, VerifyResult
from edgespec.errors import EdgespecWarning
from edgespec.memory.store import texts
from edgespec.memory.times import CostCurve
from edgespec.models.spec import read_model_spec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    return tmp_path


def test_texts_are_kept_by_model_oldest_first() -> None:
    texts.add_texts("one", "one.gguf", [("", [1, 2, 3]), ("", [4])])  # a token says nothing
    texts.add_texts("one", "one.gguf", [("key", [5, 6])])
    texts.add_texts("two", "two.gguf", [("", [7, 8])])
    assert texts.remembered_texts("one") == [("", [1, 2, 3]), ("key", [5, 6])]
    assert texts.remembered_texts("two") == [("", [7, 8])]
    kept = {entry.model: (entry.texts, entry.tokens) for entry in texts.remembered()}
    assert kept == {"one.gguf": (2, 5), "two.gguf": (1, 2)}
    assert texts.forget() == 2
    assert texts.remembered() == [] and texts.remembered_texts("one") == []


def test_what_cannot_be_kept_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for it would wait for drafts that never come."""
    texts.add_texts("one", "one.gguf", [("", [1, 2])])

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(EdgespecWarning, match=f"{folder}.*No space left on device"):
        texts.add_texts("one", "one.gguf", [("", [3, 4])])
    assert texts.remembered_texts("one") == [("", [1, 2])]


def test_of_a_long_text_its_newest_tokens_are_kept() -> None:
    texts.add_texts("one", "one.gguf", [("", list(range(40_000)))])
    ((_, found),) = texts.remembered_texts("one")
    assert found == list(range(40_000 - 32_768, 40_000))


def test_the_same_text_is_kept_once_and_as_the_newest() -> None:
    texts.add_texts("one", "one.gguf", [("", [1, 2]), ("key", [3, 4])])
    texts.add_texts("one", "one.gguf", [("", [5, 6]), ("", [1, 2]), ("", [3, 4])])
    found = texts.remembered_texts("one")
    assert found == [("key", [3, 4]), ("", [5, 6]), ("", [1, 2]), ("", [3, 4])]


def test_answers_that_an_earlier_version_kept_are_read(folder: Path) -> None:
    texts.add_texts("one", "one.gguf", [("", [1, 2])])
    (path,) = (folder / "texts").glob("*.json")
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "texts": [[7, 8], *document["texts"]]}))
    assert texts.remembered_texts("one") == [("", [7, 8]), ("", [1, 2])]


@pytest.mark.skipif(os.name == "nt", reason="permissions are other ones there")
def test_only_its_owner_can_read_what_is_kept(folder: Path) -> None:
    texts.add_texts("one", "one.gguf", [("", [1, 2])])
    (path,) = (folder / "texts").glob("*.json")
    assert path.stat().st_mode & 0o077 == 0


@settings(max_examples=30)
@given(st.lists(st.integers(2, 9000), max_size=12))
def test_the_newest_tokens_stay(lengths: list[int]) -> None:
    texts.forget()
    written = [[number] * length for number, length in enumerate(lengths)]
    for text in written:
        texts.add_texts("one", "one.gguf", [("", text)])
    everything = [token for text in written for token in text]
    kept = [token for _, text in texts.remembered_texts("one") for token in text]
    assert kept == everything[-(1 << 15) :]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"texts": 3}',
        '{"texts": [[1, -2], ["x"], 5, {"history": 1, "tokens": [1, 2]}, {"tokens": [1]}]}',
        '{"texts": [{"history": "", "tokens": 3}, {"history": "", "tokens": [true, 1]}, null]}',
    ],
)
def test_a_damaged_file_is_nothing(folder: Path, content: str) -> None:
    texts.add_texts("one", "one.gguf", [("", [1, 2])])
    (path,) = (folder / "texts").glob("*.json")
    document = json.loads(path.read_text())
    damaged = json.loads(content) if content.startswith("{") else None
    path.write_text(json.dumps({**document, **damaged}) if damaged else content)
    assert texts.remembered_texts("one") == []
    assert all(entry.tokens == 0 for entry in texts.remembered())


@pytest.mark.parametrize("names", ["suffix", "recycling", "suffix,recycling"])
def test_a_recalled_text_is_drafted(names: str) -> None:
    drafter = make_drafter(names)
    assert drafter is not None
    drafter.recall([("mine", [1, 2, 3, 4, 5, 6])])
    drafter.history = "mine"
    drafter.begin([9, 2, 3])
    context = StepContext(3, 0.001, CostCurve([float("inf"), 1.0, 1.0, 1.0, 1.0]), depth=3)
    proposal = drafter.propose(context)
    assert proposal.tokens[0] == 4
    drafter.observe(VerifyResult(DraftTree.chain((3,)), (0,), (4,), context))
    drafter.history = "another's"
    drafter.begin([9, 2, 3])
    assert len(drafter.propose(context)) == 0


@pytest.mark.parametrize("token", [258, 10**12])
def test_tokens_that_the_model_does_not_have_are_not_drafted(folder: Path, token: int) -> None:
    """Of a damaged file: the model could not be asked about them, and the tables not hold them."""
    path = write_model(folder / "model.gguf", "llama", Q8_0)
    spec = read_model_spec(path)
    options: dict[str, Any] = {"context_size": 128, "threads": 1, "backend": "llamacpp"}
    with edgespec.load(path, drafter="none", **options) as engine:
        assert engine.vocab_size == 258
        plain = engine.generate([50, 51], max_tokens=20).token_ids
    kept = [("", [50, 51, plain[0], token]), ("", [*plain, token])]
    texts.add_texts(spec.fingerprint, "model.gguf", kept)
    with edgespec.load(path, drafter="suffix,recycling", remember=True, **options) as engine:
        engine.curve = CostCurve([float("inf"), *[1.0] * 4])
        assert engine.generate([50, 51], max_tokens=20).token_ids == plain


@pytest.mark.parametrize("drafter", ["none", "recycling"])
def test_where_nothing_is_remembered_it_is_said(folder: Path, drafter: str) -> None:
    path = write_model(folder / "model.gguf", "llama", Q8_0)
    options: dict[str, Any] = {"context_size": 128, "threads": 1, "backend": "llamacpp"}
    with (
        pytest.warns(EdgespecWarning, match="nothing is remembered"),
        edgespec.load(path, drafter=drafter, remember=True, **options) as engine,
    ):
        engine.generate([50, 51], max_tokens=5)
    assert texts.remembered() == []


def test_all_users_texts_are_remembered_with_their_history(folder: Path) -> None:
    path = write_model(folder / "model.gguf", "llama", Q8_0)
    options: dict[str, Any] = {"context_size": 128, "threads": 1, "backend": "llamacpp"}
    written = []
    with edgespec.load(path, drafter="suffix", remember=True, users=2, **options) as engine:
        for number in range(3):
            prompt = [50 + number] * 20
            result = engine.generate(prompt, max_tokens=9, history=f"key {number}")
            written.append((f"key {number}", [*prompt, *result.token_ids]))
    assert texts.remembered_texts(read_model_spec(path).fingerprint) == written


def test_the_next_load_drafts_what_is_remembered(folder: Path) -> None:
    path = write_model(folder / "model.gguf", "llama", Q8_0)
    options: dict[str, Any] = {"context_size": 128, "threads": 1, "backend": "llamacpp"}
    accepted = []
    for remember in (False, True, True):
        with edgespec.load(path, drafter="suffix", remember=remember, **options) as engine:
            engine.curve = CostCurve([float("inf"), *[1.0] * 4])
            counters = engine.generate([50, 51], max_tokens=20).counters
            accepted.append(counters.accepted_tokens)
    assert accepted[0] == accepted[1] < accepted[2]
