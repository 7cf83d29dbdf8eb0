"""The `split` graphs against the `gqa` one and against themselves: trees, fixed shapes, two parts.

Float32 weights (`plain`) leave only float rounding between ways to compute the same; packed ones
quantize activations, where a rounding that flips is seen in every logit of so small a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_times import let_drafts_pay
from random_gguf import LAYERS, Q8_0, VOCABULARY, write_model

import edgespec
from edgespec.backends.base import DraftTree, Logits
from edgespec.backends.ort import providers as ort_providers
from edgespec.backends.ort.cache import converted
from edgespec.backends.ort.providers import CPU_PROVIDER, OnnxDevice
from edgespec.backends.ort.split import Step, attention_bias
from edgespec.errors import ContextFullError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.embedded import embedded_model
from edgespec.models.onnx.facts import SPLIT, GraphOptions, read_facts
from edgespec.models.onnx.folder import GRAPH_FILE
from edgespec.models.onnx.graph import bucket_graphs
from edgespec.models.spec import ModelSpec, read_model_spec

pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("onnx", reason="the onnx extra is not installed")

from edgespec.backends.ort.backend import OrtBackend

pytestmark = pytest.mark.model

PACKED = GraphOptions(SPLIT)
PLAIN = GraphOptions(SPLIT, plain=True)
# 13 nodes with 3 branchings: at the root, at 1 and at 2.
TREE = (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 10)
CONTEXT = 640  # the cache grows twice on the way there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def spec(request: pytest.FixtureRequest, folder: Path) -> ModelSpec:
    return read_model_spec(write_model(folder / f"{request.param}.gguf", request.param, Q8_0))


@pytest.fixture(scope="module")
def one(folder: Path) -> ModelSpec:
    """Where a second kind shows no more."""
    return read_model_spec(write_model(folder / "one.gguf", "llama", Q8_0))


def opened(
    spec: ModelSpec, folder: Path, graphs: Mapping[str, GraphOptions] | None = None
) -> OrtBackend:
    place = converted(spec, folder, "cpu", graphs=graphs)
    settings = RunConfig(CONTEXT, batch_size=32, max_nodes=16)
    return OrtBackend(spec, read_facts(spec), place, settings)


@pytest.fixture
def plain(spec: ModelSpec, folder: Path) -> Iterator[OrtBackend]:
    backend = opened(spec, folder, {GRAPH_FILE: PLAIN})
    yield backend
    backend.close()


def tokens(count: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCABULARY - 1, count)]


def prompt(backend: OrtBackend, text: list[int]) -> Logits:
    for start in range(0, len(text), backend.batch_size):
        row = backend.prefill(text[start : start + backend.batch_size])
    kept: Logits = row.copy()
    return kept


def step(backend: OrtBackend, token: int) -> Logits:
    row: Logits = backend.verify(DraftTree.chain((token,)))[0].copy()
    backend.commit([0])
    return row


def decoded(backend: OrtBackend, text: list[int], read: int = 100) -> Logits:
    """Logits after `read` tokens of prompt, a tree, and each further token of a text, [.., V]."""
    backend.truncate(0)
    rows = [prompt(backend, text[:read])]
    rows += list(backend.verify(DraftTree(tokens(len(TREE), seed=2), TREE)).copy())
    backend.commit([0, 2, 6])
    return np.array(rows + [step(backend, token) for token in text[read:]])


def divergences(p_logits: Logits, q_logits: Logits) -> Logits:
    """Kullback-Leibler divergence of each row."""
    p, q = (rows - rows.max(axis=-1, keepdims=True) for rows in (p_logits, q_logits))
    p, q = (rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True)) for rows in (p, q))
    found: Logits = (np.exp(p) * (p - q)).sum(axis=-1)
    return found


def test_logits_are_those_of_the_fused_graph(spec: ModelSpec, folder: Path) -> None:
    """A prompt past the sliding window, a tree with a branch committed, and 40 tokens more."""
    rows = []
    for graphs in (None, {GRAPH_FILE: PACKED}):
        backend = opened(spec, folder, graphs)
        rows.append(decoded(backend, tokens(140)))
        backend.close()
    apart = divergences(*rows)
    assert np.mean(apart) < 0.015 and np.max(apart) < 0.1, apart


def test_a_cache_that_grew_and_shrank_holds_the_same(plain: OrtBackend) -> None:
    text = tokens(600)
    expected = prompt(plain, text)
    for length in (599, 300, 200):
        plain.truncate(length)
        np.testing.assert_allclose(prompt(plain, text[length:]), expected, atol=1e-4)
    with pytest.raises(ContextFullError):
        prompt(plain, tokens(64))


def test_fixed_shapes_compute_the_same(spec: ModelSpec, folder: Path, plain: OrtBackend) -> None:
    """Steps of 1 and of 13 in a bucket of 16, prompts in batches of 16, padded at their end."""
    backend = opened(spec, folder, bucket_graphs((1, 16), CONTEXT, PLAIN))
    assert backend.batch_size == 16 and backend.max_nodes == 16
    expected = decoded(plain, tokens(140))
    np.testing.assert_allclose(decoded(backend, tokens(140)), expected, atol=1e-4)
    backend.close()


def test_rows_that_fill_up_a_fixed_shape_see_themselves_alone() -> None:
    """Those that see nothing are no numbers on a device that masks by what overflows."""
    bias = attention_bias(Step(1, np.arange(1, 3)), 0, -1e4, past=2, nodes=4)
    seen = [np.flatnonzero(row == 0).tolist() for row in bias[0, 0]]
    assert seen == [[0, 2], [0, 2, 3], [4], [5]]


def test_more_tokens_than_a_fixed_cache_holds_are_refused(one: ModelSpec, folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="hold 512 tokens, not 640") as caught:
        opened(one, folder, bucket_graphs((1, 16), 512, PLAIN))
    assert "--ctx 512" in caught.value.hint


def test_fixed_shapes_are_those_that_were_asked_for(one: ModelSpec, folder: Path) -> None:
    import onnxruntime

    options = replace(PLAIN, step=8, capacity=64)
    place = converted(one, folder, "cpu", graphs={"step-8.onnx": options})
    session: Any = onnxruntime.InferenceSession(str(place / "step-8.onnx"))
    shapes = {info.name: info.shape for info in session.get_inputs()}
    assert shapes["embeddings"][:2] == [1, 8] and shapes["past_key.2"] == [1, 1, 64, 32]
    assert shapes["attention_bias"] == [1, 1, 8, 72] and "rows" not in shapes
    outputs = [info.name for info in session.get_outputs()]
    assert outputs[:3] == ["logits", "new_key.0", "new_value.0"] and len(outputs) == 1 + 2 * LAYERS


@pytest.mark.parametrize(
    "embedded", [False, pytest.param(True, marks=pytest.mark.long)], ids=["random", "embedded"]
)
def test_a_device_with_fixed_shapes_runs_the_whole_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: bool
) -> None:
    """The processor's kernels stand in for an NPU: same graphs, same buckets, same loop."""
    random_model = write_model(tmp_path / "random.gguf", "llama", Q8_0, reads_bytes=True)
    model = None if embedded else random_model
    prompt = "Write a JSON list of six fruits with the keys name and colour."
    options: dict[str, Any] = {"context_size": 256, "draft_max": 7, "threads": 1}
    monkeypatch.setattr(ort_providers, "STEPS", (1, 8))
    monkeypatch.setattr(ort_providers, "choose", lambda kind: OnnxDevice(CPU_PROVIDER, kind))
    with edgespec.load(model, device="npu", **options) as engine:
        assert engine.backend.max_nodes == engine.backend.batch_size == 8
        assert engine.backend.capabilities.place.startswith("CPUExecutionProvider on the NPU")
        let_drafts_pay(engine)
        plain = engine.generate(prompt, max_tokens=60, speculate=False)
        drafted = engine.generate(prompt, max_tokens=60)
    assert drafted.counters.rounds < plain.counters.rounds, "drafts were accepted"


def test_exact_is_refused_where_a_token_is_summed_apart_from_the_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a cell is past or new decides in which order attention adds it up."""
    path = write_model(tmp_path / "random.gguf", "llama", Q8_0, reads_bytes=True)
    monkeypatch.setattr(ort_providers, "STEPS", (8,))
    monkeypatch.setattr(ort_providers, "choose", lambda kind: OnnxDevice(CPU_PROVIDER, kind))
    with pytest.raises(UnsupportedError, match="exact is not possible"):
        edgespec.load(path, device="npu", exact=True, context_size=256, draft_max=3, threads=1)


@pytest.mark.long
def test_the_embedded_model_writes_the_same_40_tokens(tmp_path: Path) -> None:
    spec = read_model_spec(embedded_model())
    outputs = []
    for graphs in (None, {GRAPH_FILE: PACKED}):
        backend = opened(spec, tmp_path, graphs)
        text = backend.tokenizer.encode("The three largest harbours of Denmark are")
        output = [int(prompt(backend, text).argmax())]
        for _ in range(40):
            output.append(int(step(backend, output[-1]).argmax()))
        outputs.append(output)
        backend.close()
    assert outputs[0] == outputs[1]
