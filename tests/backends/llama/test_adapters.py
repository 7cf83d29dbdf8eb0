"""LoRA adapters: what they add is what merging would, is planned, and is nobody else's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_gguf import write_adapter, write_merged
from random_gguf import F32, Q8_0, write_model

import edgespec
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.tree import DraftTree
from edgespec.errors import UnsupportedError

pytestmark = pytest.mark.model
TEXT = [5, 9, 40, 3, 77, 12, 9, 40, 3]
ASKED: Any = {"context_size": 256, "threads": 1}
Made = dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("lora")
    found = {
        name: write_model(folder / f"{name}.gguf", "llama", kind)
        for name, kind in (("f32", F32), ("q8_0", Q8_0))
    }
    for seed, name in enumerate(("first", "second")):
        found[name] = write_adapter(folder / f"{name}.gguf", found["f32"], seed)
    return found


def load(path: Path, *lora: object, **options: Any) -> edgespec.Engine:
    return edgespec.load(path, lora=[str(one) for one in lora], **ASKED, **options)


def rows_of(engine: edgespec.Engine, *scales: float) -> Any:
    """Logits behind a prompt, and of a chain of three."""
    backend: Any = engine.backend
    if scales:
        backend.adapt(scales)
    backend.truncate(0)
    first = backend.prefill(TEXT[:-3]).copy()
    rows = backend.verify(DraftTree.chain(TEXT[-3:])).copy()
    backend.commit([0])
    return np.vstack([first[None], rows])


def test_logits_are_those_of_merged_weights(made: Made, tmp_path: Path) -> None:
    cases = ((0.0, 0.0), (1.0, 0.0), (0.5, -2.0))
    with load(made["f32"], made["first"], f"{made['second']}=0.5") as engine:
        plain, *others = (rows_of(engine, *scales) for scales in cases)
    for (one, other), rows in zip(cases, (plain, *others), strict=True):
        merged = write_merged(tmp_path / "merged.gguf", made["f32"], made["first"], one)
        both = write_merged(tmp_path / "both.gguf", merged, made["second"], other)
        with load(both) as engine:
            # Of logits up to 25, and a cache of f16.
            assert np.abs(rows - rows_of(engine)).max() < 0.03
    assert all(np.abs(rows - plain).max() > 0.5 for rows in others)


def test_packed_weights_are_added_to(made: Made) -> None:
    """Beside llama.cpp's own products, as near with an adapter as without."""
    found = {}
    for kernels in ("on", "off"):
        with load(made["q8_0"], made["first"], kernels=kernels) as engine:
            assert engine.backend.settings.kernels == (kernels == "on")  # type: ignore[attr-defined]
            found[kernels] = [rows_of(engine, scale) for scale in (0.0, 1.0)]
    plain, adapted = (np.abs(one - other).max() for one, other in zip(*found.values(), strict=True))
    assert adapted < 3 * plain + 0.2 < np.abs(found["on"][1] - found["on"][0]).max()


def test_bytes_are_planned(made: Made) -> None:
    asked = [str(made["first"])]
    planned = edgespec.plan(made["q8_0"], lora=asked, **ASKED).component_bytes
    without = edgespec.plan(made["q8_0"], **ASKED).component_bytes
    assert planned["adapters"] > 0 == without.get("adapters", 0)
    with load(made["q8_0"], *asked) as engine:
        for lora in (None, {0: 0.25}):
            engine.generate(TEXT, max_tokens=20, lora=lora)
        held = engine.memory_bytes()
    for name in ("adapters", "kv_cache"):
        assert held[name] == pytest.approx(planned[name], abs=1 << 14)
    assert held["compute"] <= planned["compute"] + (1 << 14)
    assert planned["compute"] >= without["compute"]


def test_each_request_has_its_own_scales(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six at once, of which no two kinds share a step; answers and cached prefixes are apart."""
    scales: list[Any] = [None, {0: 0.0}, {0: 1.0}]
    seen, compute = set(), LlamaContext._compute

    def noted(context: LlamaContext, function: Any, batch: Any) -> None:
        assert context.adapters is not None
        seen.add(tuple(context.adapters.scales))
        compute(context, function, batch)

    with load(made["f32"], f"{made['first']}=0.5", users=3) as engine:
        ask = partial(engine.generate, TEXT, max_tokens=24, reuse=True)
        alone = [ask(lora=one).token_ids for one in scales]
        assert len({*map(tuple, alone)}) == 3
        again = ask(lora={0: 0.5})
        assert again.token_ids == alone[0] and again.counters.reused_tokens > 0
        assert ask(lora={0: 0.25}).counters.reused_tokens == 0
        monkeypatch.setattr(LlamaContext, "_compute", noted)
        with ThreadPoolExecutor(6) as threads:
            assert [*threads.map(lambda one: ask(lora=one).token_ids, 2 * scales)] == 2 * alone
        assert seen == {(0.0,), (0.5,), (1.0,)}
        with pytest.raises(UnsupportedError, match="there is no adapter 1"):
            ask(lora={1: 1.0})
