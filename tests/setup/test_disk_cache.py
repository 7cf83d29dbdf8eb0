"""What `--disk-cache` keeps: engines that are loaded again go on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hybrid_gguf import HYBRIDS, Shape, write_hybrid
from random_gguf import F32, write_model

import edgespec
from edgespec.errors import EdgespecWarning
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import read_model_spec
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model
BUDGET = 64 << 20
TEXT = list(b"You are of use to whoever asks, and call tools by their names. " * 8)


def loaded(path: Path, **changes: Any) -> edgespec.Engine:
    how: dict[str, Any] = {"context_size": 1024, "drafter": "none", "disk_cache_bytes": BUDGET}
    return edgespec.load(path, **{**how, **changes})


def model_of(folder: Path, arch: str) -> Path:
    if arch in HYBRIDS:
        return write_hybrid(folder / "a.gguf", Shape(arch), F32)
    return write_model(folder / "a.gguf", arch, F32, reads_bytes=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("llama", {"users": 2, "kv_type": "q8_0"}),
        ("gemma3", {}),
        (HYBRIDS[0], {}),
    ],
)
def test_an_engine_that_is_loaded_again_writes_what_it_would_have(
    cache_folder: Path, tmp_path: Path, arch: str, changes: dict[str, Any]
) -> None:
    path = model_of(tmp_path, arch)
    with loaded(path, **changes) as engine:
        first = engine.generate(TEXT, max_tokens=8, reuse=True)
        longer = [*TEXT, *first.token_ids, *b" And then?"]
        expected = engine.generate(longer, max_tokens=8, reuse=True)
        assert expected.counters.reused_tokens > len(TEXT)
    for one in cache_folder.glob("prefixes/*/*"):
        one.unlink()
    with loaded(path, **changes) as engine:
        engine.generate(TEXT, max_tokens=8, reuse=True)
    with loaded(path, **changes) as engine:
        again = engine.generate(longer, max_tokens=8, reuse=True)
        assert again.token_ids == expected.token_ids
        assert again.counters.reused_tokens == expected.counters.reused_tokens
    with loaded(path, disk_cache_bytes=None, **changes) as engine:
        assert engine.generate(longer, max_tokens=8, reuse=True).counters.reused_tokens == 0


def test_a_plan_counts_what_a_piece_takes(tmp_path: Path, cache_folder: Path) -> None:
    spec = read_model_spec(model_of(tmp_path, "llama"))
    plans = {
        size: make_run_plan(spec, Request(context_size=1024, disk_cache_bytes=size))
        for size in (None, 0, BUDGET)
    }
    assert "disk cache" not in plans[None].component_bytes
    assert plans[None].component_bytes == plans[0].component_bytes
    assert plans[BUDGET].component_bytes["disk cache"] >= 3 << 20
    assert plans[BUDGET].disk_cache_bytes == BUDGET


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, cache_folder: Path) -> None:
    cache_folder.mkdir(exist_ok=True)
    (cache_folder / "prefixes").write_text("a file")
    with pytest.warns(EdgespecWarning, match="no prefixes are kept, .*prefixes cannot be written"):
        loaded(model_of(tmp_path, "llama")).close()
