"""What an unloaded model's cache held is found by its next load, and by nobody else."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from random_gguf import F32, write_model
from vision_cases import open_engine, shown

import edgespec
from edgespec.decode.engine import Engine
from edgespec.memory.store.cache import cache_directory
from edgespec.serve import model_file
from edgespec.serve.model_file import KeptPrefixes

SLOW_S = 0.1  # a token: any disk is faster
TEXTS = ["abcdefgh" * 20, "hgfedcba" * 12, "short"]

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files without a name"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", "llama", F32, reads_bytes=True)


@pytest.fixture
def kept() -> KeptPrefixes:
    return KeptPrefixes()


def loaded(model: Path, users: int = 3) -> Engine:
    return edgespec.load(
        model, context_size=256, users=users, drafter="none", kernels="off", threads=1
    )


def answers(engine: Engine) -> list[tuple[list[int], int]]:
    """The tokens of each answer, and how many of its prompt were in the cache."""
    found = [engine.generate(text, raw=True, max_tokens=8, reuse=True) for text in TEXTS]
    return [(list(one.token_ids), one.counters.reused_tokens) for one in found]


@pytest.mark.parametrize("users", [1, 3])
def test_prefixes_come_back_and_change_no_token(
    model: Path, kept: KeptPrefixes, users: int
) -> None:
    with closing(loaded(model, users)) as engine:
        first = answers(engine)
        assert [reused for _, reused in first] == [0, 0, 0]
        num_kept = kept.keep(engine, SLOW_S)
    there = [160 + 7, 96 + 7] if users == 3 else []
    assert num_kept == sum(there), "the short one is read again; of one user the last is it"
    files = list(cache_directory().rglob("*"))
    assert not [one for one in files if one.is_file() and one.stat().st_size > 50_000]
    with closing(loaded(model, users)) as engine:
        assert kept.restore(engine) == num_kept
        second = answers(engine)
        assert kept.restore(engine) == 0, "they are there once"
    assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
    if users == 3:
        assert [reused for _, reused in second] == [159, 95, 0]


def test_what_is_as_fast_to_compute_is_not_kept(model: Path, kept: KeptPrefixes) -> None:
    with closing(loaded(model)) as engine:
        answers(engine)
        assert kept.keep(engine, 0.0) == 0
        assert kept.keep(engine, 1e-9) == 0
        assert kept.keep(engine, SLOW_S) > 0


def test_a_full_disk_loses_nothing_but_time(
    model: Path, kept: KeptPrefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(loaded(model)) as engine:
        answers(engine)
        monkeypatch.setattr(model_file, "_MOST_BYTES", 1000)
        assert kept.keep(engine, SLOW_S) == 0
        monkeypatch.undo()

        def full(**_options: object) -> None:
            raise OSError(28, "no space left")

        monkeypatch.setattr("tempfile.TemporaryFile", full)
        assert kept.keep(engine, SLOW_S) == 0
        assert answers(engine)[0][1] > 0


def test_cells_of_other_settings_are_not_taken(model: Path, kept: KeptPrefixes) -> None:
    with closing(loaded(model)) as engine:
        answers(engine)
        assert kept.keep(engine, SLOW_S) > 0
    with closing(edgespec.load(model, context_size=128, drafter="none", kernels="off")) as other:
        assert kept.restore(other) == 0


@pytest.mark.parametrize("name", ["qwen3vl", "llava"])
def test_images_come_back_in_their_places(
    vision_folder: Path, kept: KeptPrefixes, name: str
) -> None:
    """With M-RoPE the text behind an image stands at other positions than cells."""
    (image,), question = shown(1), "What is this? " * 8
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    prompt = [{"role": "user", "content": content}]
    with open_engine(vision_folder, name) as engine:
        engine.cache_key = "tiny"
        first = engine.generate(prompt, max_tokens=8, reuse=True)
        assert kept.keep(engine, SLOW_S) > first.counters.prompt_tokens
    with open_engine(vision_folder, name) as engine:
        engine.cache_key = "tiny"
        assert kept.restore(engine) > 0
        again = engine.generate(prompt, max_tokens=8, reuse=True)
    assert again.token_ids == first.token_ids
    assert again.counters.reused_tokens == first.counters.prompt_tokens - 1
