"""Mixtures that memory has no room for: what a plan keeps of experts, and that answers stay."""

from __future__ import annotations

import math
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hybrid_gguf import Shape, write_hybrid

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.errors import BackendError, DoesNotFitError
from edgespec.memory.bytes.experts import (
    EVEN,
    USUAL,
    Experts,
    counted,
    experts_of,
    power_law,
)
from edgespec.memory.plan import placing
from edgespec.memory.plan.placing import ExpertReads
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve, SpeedModel
from edgespec.models.spec import read_model_spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="experts are read on Linux alone")
ANSWER: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "seed": 3}
OPTIONS: dict[str, Any] = {"context_size": 512, "drafter": "none", "threads": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 4 layers with 64 experts of 36 KiB: 9 MiB."""
    shape = Shape("qwen3moe", interval=1, width=128, hidden=256, vocabulary=272, experts=64)
    path = tmp_path_factory.mktemp("mixture") / "model.gguf"
    return write_hybrid(path, shape, gguf.GGMLQuantizationType.Q4_0)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := refusal_of_kernels():
        pytest.skip(f"edgespec has no kernels here: {reason}")
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))


def test_experts_are_counted_as_they_are_packed(path: Path) -> None:
    found = experts_of(read_model_spec(path))
    layer = 64 * 3 * 3 * 4096  # 128 x 128 values are 9 KiB
    assert found == Experts(4 * layer, layer, 4 * layer * 2 // 64)


def test_reads_follow_what_is_kept() -> None:
    """A token halfway through the layers has 30 bytes of its own experts there, or 8."""
    some = Experts(1000, 100, 80)
    assert some.read_bytes(250, power_law(EVEN)) == pytest.approx(80 * (1 - 0.22))
    assert some.read_bytes(250, power_law(USUAL)) == pytest.approx(80 * (1 - 0.8063), rel=1e-3)
    assert some.read_bytes(1000, power_law(USUAL)) == 0


def test_tokens_of_a_step_share_experts() -> None:
    some, even, usual = Experts(1000, 100, 80), power_law(EVEN), power_law(USUAL)
    for kept, at_once in ((0, 0), (250, 220)):
        once = some.read_bytes(kept, even)
        assert some.read_bytes(kept, even, 2) == pytest.approx(once * (1 + 0.92))
        assert some.read_bytes(kept, even, 1000) == pytest.approx(1000 - at_once)
    # Experts that are used rarely are hardly ever shared, and favourites by all.
    assert some.read_bytes(250, usual, 4) > 3.7 * some.read_bytes(250, usual)
    assert some.read_bytes(0, usual, 4) < 2.0 * some.read_bytes(0, usual)


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.35])
def test_a_count_of_one_text_tells_what_memory_of_any_size_lacks(skew: float) -> None:
    """Of routers with lognormal weights: what the next tokens read, of what was used last."""
    layers, experts, used, tokens = 12, 64, 4, 2400
    rng = np.random.default_rng(5)
    picks = []
    for _ in range(layers):
        weights = np.exp(skew * rng.standard_normal(experts))
        logits = weights * rng.standard_normal((tokens, experts))
        picks.append(np.argpartition(logits, -used)[:, -used:].tolist())
    again, first = [0] * 128, [0] * 128
    for layer in picks:
        last: dict[int, int] = {}
        for now, row in enumerate(layer[:1000]):
            for one in row:
                if since := now - last.get(one, 0):
                    (again if one in last else first)[int(8 * math.log2(since))] += 1
                last[one] = now
    part_of = counted(again, first, used / experts)
    for part in (0.25, 0.4, 0.7):
        most, read = int(part * layers * experts), 0
        kept: dict[tuple[int, int], None] = {}  # what was used last is the last one
        for now in range(tokens):
            for layer, rows in enumerate(picks):
                wanted = [(layer, one) for one in rows[now]]
                read += sum(one not in kept for one in wanted) if now >= 1000 else 0
                for one in wanted:
                    kept.pop(one, None)
                    kept[one] = None
                while len(kept) > most:
                    del kept[next(iter(kept))]
        found = read / (tokens - 1000)
        sizes = Experts(layers * experts, experts, layers * used)
        said = sizes.read_bytes(most, part_of)
        assert said == pytest.approx(found, rel=0.05, abs=0.05 * layers * used / 50)


def test_drafts_are_priced_by_the_experts_that_they_wake() -> None:
    """Of a step that takes 10 ms over up to four tokens, which read 62, 120, 173 and 221 bytes."""
    speed = SpeedModel(CostCurve([float("inf"), 10.0, 10.0, 10.0, 10.0]), True)
    missing = power_law(USUAL), power_law(EVEN), power_law(EVEN)
    reads = ExpertReads(Experts(1000, 100, 80), 250, missing, 6000.0, "")
    slower = reads.added_to(speed)
    assert slower.curve.base[1:] == pytest.approx([20.4, 29.97, 38.77, 46.87], abs=0.01)
    assert slower.tokens_per_s(0, 0) == pytest.approx(1000 / 20.4)
    gain = speed.tokens_per_s(3, 0) / speed.tokens_per_s(0, 0)
    assert slower.tokens_per_s(3, 0) / slower.tokens_per_s(0, 0) < gain
    least, most = slower.range_of(0, 0)
    assert least < 50.0 < most and most > speed.range_of(0, 0)[1] / 2


def test_what_does_not_fit_is_read_and_answers_the_same(path: Path) -> None:
    """The plan stays in its budget, and the next one knows what was counted."""
    spec = read_model_spec(path)
    whole = edgespec.plan(path, **OPTIONS)
    assert whole.expert_bytes == 0
    budget = whole.predicted_peak_bytes - (7 << 20)
    with edgespec.load(path, packed_file="off", **OPTIONS) as engine:
        wanted = engine.generate("to be or not", **ANSWER).token_ids
    plan = edgespec.plan(path, budget_bytes=budget, **OPTIONS)
    assert 0 < plan.expert_bytes < 9 << 20 and plan.predicted_peak_bytes <= budget
    (said,) = (one for one in plan.choices if one.name == "experts")
    assert "a token are read" in said.reason
    with edgespec.load(path, budget_bytes=budget, **OPTIONS) as engine:
        assert engine.generate("to be or not", **ANSWER).token_ids == wanted
        assert isinstance(engine.backend, LlamaBackend)
        assert engine.backend.expert_counts.read_bytes > 0
    stored = cache.load("experts", spec.fingerprint)
    assert stored is not None and sum(stored["again"]) > 4 * 2 * 100
    assert sum(stored["again"] + stored["first"]) < 4 * 2 * 230  # of the answer, of no timed steps
    plan = edgespec.plan(path, budget_bytes=budget, **OPTIONS)
    assert any(one.reason.endswith("as counted") for one in plan.choices)


def test_steps_are_timed_with_tokens_that_wake_other_experts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock stands while they are read; a later load reads those of one token, for all nodes."""
    asked, verify = list[tuple[int, ...]](), LlamaBackend.verify

    def asking(backend: LlamaBackend, tree: DraftTree) -> Any:
        asked.append(tuple(tree.tokens))
        return verify(backend, tree)

    monkeypatch.setattr(LlamaBackend, "verify", asking)
    options: dict[str, Any] = OPTIONS | {"drafter": "suffix", "draft_max": 3}
    budget = edgespec.plan(path, **options).predicted_peak_bytes - (7 << 20)
    for timed in (4, 1):
        with edgespec.load(path, budget_bytes=budget, **options) as engine:
            assert isinstance(engine.backend, LlamaBackend)
            single = {one for one in asked if len(one) == 1}
            assert len(single) == timed if timed > 1 else len(single) <= 1
            read = engine.backend.expert_counts.read_bytes
        asked.clear()
    assert read == 4 * 2 * 3 * 3 * 4096


def test_a_disk_error_ends_an_answer_and_the_next_one_is_whole(path: Path, tmp_path: Path) -> None:
    budget = edgespec.plan(path, **OPTIONS).predicted_peak_bytes - (7 << 20)
    for attempt in range(2):  # of which the first one writes the file
        with edgespec.load(path, budget_bytes=budget, **OPTIONS) as engine:
            wanted = engine.generate("to be or not", **ANSWER).token_ids
            if attempt == 0:
                continue
            (kept,) = tmp_path.glob("packed/*.weights")
            links = {one.name: one for one in Path("/proc/self/fd").iterdir()}
            (handle,) = (
                int(name)
                for name, link in links.items()
                if link.exists() and os.readlink(link) == str(kept)
            )
            working, broken = os.dup(handle), os.open(tmp_path, os.O_RDONLY)
            try:
                os.dup2(broken, handle)  # a folder, which nothing can be read from
                with pytest.raises(BackendError, match="cannot be read: Is a directory"):
                    engine.generate("to be or not", **ANSWER)
                os.dup2(working, handle)
                assert engine.generate("to be or not", **ANSWER).token_ids == wanted
            finally:
                os.close(working)
                os.close(broken)


def test_what_would_take_too_long_is_to_be_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = edgespec.plan(path, **OPTIONS).predicted_peak_bytes - (7 << 20)
    monkeypatch.setattr(placing, "disk_bandwidth", lambda *_: 1e3)
    with pytest.raises(DoesNotFitError, match="tokens/s at best"):
        edgespec.plan(path, budget_bytes=budget, **OPTIONS)
    assert edgespec.plan(path, budget_bytes=budget, packed_file="on", **OPTIONS).expert_bytes
    with pytest.raises(DoesNotFitError):
        edgespec.plan(path, budget_bytes=budget, packed_file="off", **OPTIONS)
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)  # which are not given back one expert at a time
    with pytest.raises(DoesNotFitError):
        edgespec.plan(path, budget_bytes=budget, packed_file="on", **OPTIONS)
