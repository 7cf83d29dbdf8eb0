"""LoRA adapters: what they add is what merging would, is planned, and is nobody else's.

What is no adapter of a model is refused by name; requests say how much of each they want.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from random_gguf import F32, Q8_0, finish, write_model
from serving_cases import HELLO, TEMPLATE

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.errors import ModelFileError, ModelNotFoundError, UnsupportedError
from edgespec.models.adapter import adapters_of
from edgespec.models.spec import read_model_spec

pytestmark = pytest.mark.model
TEXT = [5, 9, 40, 3, 77, 12, 9, 40, 3]
ASKED: Any = {"context_size": 256, "threads": 1}
RANK, ALPHA = 4, 8.0
CHANGED = ("attn_q.weight", "attn_output.weight", "ffn_down.weight")
Made = dict[str, Path]


def write_adapter(path: Path, model: Path, seed: int = 3, **changes: Any) -> Path:
    """Random matrices of some of each block.

    With `changes`: the `arch` and `kind` that it says, tensors to `leave` out by the ends of their
    names, a `row` more in those of a name.
    """
    spec, source = read_model_spec(model), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, changes.get("arch", spec.arch))
    writer.add_type("adapter")
    writer.add_string("adapter.type", changes.get("kind", "lora"))
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name in filter(lambda one: one.endswith(CHANGED), spec.tensors):
        columns, rows = spec.tensors[name].dims
        rows += name == changes.get("row")
        for end, shape in ((".lora_a", (RANK, columns)), (".lora_b", (rows, RANK))):
            if not (name + end).endswith(changes.get("leave", "nothing")):
                writer.add_tensor(name + end, source.normal(0.0, 0.15, shape).astype(np.float32))
    finish(writer)
    return path


def write_merged(path: Path, model: Path, adapter: Path, scale: float) -> Path:
    """The model, in F32, with what the adapter adds in its weights."""
    shutil.copy(model, path)
    parts = {one.name: one.data for one in gguf.GGUFReader(adapter).tensors}
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if (a := parts.get(f"{tensor.name}.lora_a")) is not None:
            tensor.data[...] += scale * ALPHA / RANK * (parts[f"{tensor.name}.lora_b"] @ a)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, found = tmp_path_factory.mktemp("lora"), dict[str, Path]()
    for name, kind in (("f32", F32), ("q8_0", Q8_0)):
        path = folder / f"{name}.gguf"
        found[name] = write_model(path, "llama", kind, reads_bytes=True, template=TEMPLATE)
    for seed, name in enumerate(("first", "second")):
        found[name] = write_adapter(folder / f"{name}.gguf", found["f32"], seed)
    return found


def load(path: Path, *lora: object, **options: Any) -> edgespec.Engine:
    return edgespec.load(path, lora=[str(one) for one in lora], **ASKED, **options)


def rows_of(engine: edgespec.Engine, *scales: float) -> Any:
    """Logits of a chain of three behind a prompt."""
    backend: Any = engine.backend
    if scales:
        backend.adapt(scales)
    backend.truncate(0)
    backend.prefill(TEXT[:-3])
    rows = backend.verify(DraftTree.chain(TEXT[-3:])).copy()
    backend.commit([0])
    return rows


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


def test_each_request_has_its_own_scales(made: Made) -> None:
    """Six at once, of which no two kinds share a step; answers and cached prefixes are apart."""
    scales: list[Any] = [None, {0: 0.0}, {0: 1.0}]
    with load(made["f32"], f"{made['first']}=0.5", users=3) as engine:
        ask = partial(engine.generate, TEXT, max_tokens=24, reuse=True)
        alone = [ask(lora=one).token_ids for one in scales]
        assert len({*map(tuple, alone)}) == 3
        again = ask(lora={0: 0.5})
        assert again.token_ids == alone[0] and again.counters.reused_tokens > 0
        assert ask(lora={0: 0.25}).counters.reused_tokens == 0
        with ThreadPoolExecutor(6) as threads:
            assert [*threads.map(lambda one: ask(lora=one).token_ids, 2 * scales)] == 2 * alone
        with pytest.raises(UnsupportedError, match="there is no adapter 1"):
            ask(lora={1: 1.0})


def test_a_server_takes_scales_by_request_and_for_all_others(made: Made) -> None:
    named = made["first"], made["second"]
    both: Any = [{"id": id_, "path": one.name, "scale": 1.0} for id_, one in enumerate(named)]
    plan = edgespec.plan(made["f32"], lora=[str(one) for one in named], **ASKED)
    with (
        load(made["f32"], *named) as engine,
        edgespec.Server(engine, plan=plan) as server,
        httpx.Client(base_url=server.start()) as client,
    ):

        def answer(path: str, lora: Any = None) -> str:
            body = {"prompt": "abc", "messages": HELLO, "max_tokens": 12, "temperature": 0}
            told = client.post(path, json={**body, "lora": lora}).json()
            return str(told["content"] if "content" in told else told["choices"])

        for path in ("/completion", "/v1/chat/completions"):
            asked: Any = (None, both, [], [{"id": 0, "scale": 0.5}])
            usual, same, *others = (answer(path, one) for one in asked)
            assert usual == same and len({usual, *others}) == 3
        assert client.get("/lora-adapters").json() == both
        wanted = [{"id": 1, "scale": 0.25}]
        assert client.post("/lora-adapters", json=wanted).json() == {"success": True}
        assert [one["scale"] for one in client.get("/lora-adapters").json()] == [0.0, 0.25]
        assert answer(path) == answer(path, wanted) != answer(path, [])
        told = client.post("/lora-adapters", json=[{"id": 2}])
        assert told.status_code == 400 and "there is no adapter 2 of 2" in told.text


def test_names_may_have_scales(made: Made, tmp_path: Path) -> None:
    path, plain = write_adapter(tmp_path / "a=b.gguf", made["f32"]), made["first"]
    named = [str(path), f"{path}=0.5", f"{path}=-1", str(plain)]
    found = adapters_of(named, read_model_spec(made["f32"]))
    assert found == ((path, 1.0), (path, 0.5), (path, -1.0), (plain, 1.0))


@pytest.mark.parametrize(
    ("changes", "asked", "kind", "problem"),
    [
        ({}, {"lora": "mine.gguf=nan"}, UnsupportedError, "the scale of mine.gguf must be -1000 "),
        ({}, {"lora": "nothing.gguf"}, ModelNotFoundError, "nothing.gguf"),
        ({}, {"lora": "f32.gguf"}, ModelFileError, "f32.gguf is no LoRA adapter"),
        ({"kind": "control_vector"}, {}, ModelFileError, "mine.gguf is no LoRA adapter"),
        ({"arch": "qwen2"}, {}, ModelFileError, "mine.gguf is an adapter of qwen2 models, and f3"),
        ({"leave": "blk.2.ffn_down.weight.lora_b"}, {}, ModelFileError, "one matrix of two for"),
        ({"row": "blk.1.attn_q.weight"}, {}, ModelFileError, "for blk.1.attn_q.weight of 64 x 64"),
        ({"leave": ("lora_a", "lora_b")}, {}, ModelFileError, "mine.gguf changes nothing"),
        ({}, {"exact": True}, UnsupportedError, "exact is not possible with lora"),
        ({}, {"backend": "onnx"}, UnsupportedError, "lora is not possible: ONNX Runtime"),
    ],
)
def test_what_does_not_fit_is_refused(
    made: Made, tmp_path: Path, changes: dict[str, Any], asked: Any, kind: Any, problem: str
) -> None:
    """Each with a hint, but for a scale."""
    write_adapter(tmp_path / "mine.gguf", model := made["f32"], **changes)
    named = model if asked.get("lora") == model.name else tmp_path / asked.get("lora", "mine.gguf")
    with pytest.raises(kind) as caught:
        edgespec.plan(model, **{**asked, "lora": [str(named)]})
    assert problem in str(caught.value) and (caught.value.hint or "scale" in problem)
