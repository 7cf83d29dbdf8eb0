"""ONNX model folders: read, planned, run and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from laid_out import machine_with, sizes_by_hand
from tiny_folder import END, HEADS, LENGTHS, POSITIONS, WINDOW, TinyModel, write_folder

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.errors import EdgespecError, ModelFileError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.footprint import footprint
from edgespec.memory.bytes.simulation import ContextRequest
from edgespec.memory.plan.plan import Request
from edgespec.models.onnx.folder import end_ids, read_folder_spec, read_model
from edgespec.models.spec import ONNX_FORMAT, ModelSpec
from edgespec.setup.planning import make_run_plan

pytest.importorskip("onnx", reason="the onnx extra is not installed")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("tokenizers", reason="the onnx extra is not installed")


from edgespec.backends.ort.backend import OrtBackend

# 13 nodes with 3 branchings: at the root, at 1 and at 2.
TREE = (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 10)
MACHINE = machine_with(free_bytes=8 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture
def backend(folder: Path) -> Iterator[OrtBackend]:
    spec = read_folder_spec(folder)
    opened = OrtBackend(spec, None, folder, RunConfig(400, batch_size=32, max_nodes=16))
    yield opened
    opened.close()


# ------------------------------------------------------------------------------------- running


def test_a_tree_equals_its_paths_and_the_cache_keeps_the_accepted_one(backend: OrtBackend) -> None:
    """Also beyond the window (12) and where the cache has grown (256)."""
    tiny, ids = TinyModel(), [(7 * number) % 251 for number in range(300)]
    for start in range(0, len(ids), 30):
        last = backend.prefill(ids[start : start + 30])
    np.testing.assert_allclose(last, tiny.logits(ids)[-1], atol=1e-5)
    tree = DraftTree(tuple(range(40, 40 + len(TREE))), TREE)
    rows = backend.verify(tree)
    for node in range(len(TREE)):
        text = ids + [tree.tokens[one] for one in tree.path(node)]
        np.testing.assert_allclose(rows[node], tiny.logits(text)[-1], atol=1e-5)
    path = tree.path(12)
    backend.commit(path)
    text = ids + [tree.tokens[one] for one in path] + [99]
    after = backend.verify(DraftTree.chain([99]))
    np.testing.assert_allclose(after[0], tiny.logits(text)[-1], atol=1e-5)


@pytest.mark.parametrize("speculate", [False, True])
def test_load_and_generate(folder: Path, speculate: bool) -> None:
    with edgespec.load(folder, context_size=300, draft_max=3) as engine:
        result = engine.generate("abcabcabc", max_tokens=40, raw=True, speculate=speculate)
        ids = [256, *(int(byte) for byte in engine.encode("abcabcabc", raw=True)[1:])]
    assert engine.backend.memory_bytes()["kv_cache"] == 0, "it was given back"
    tiny = TinyModel()
    for token in result.token_ids:
        assert token == int(tiny.logits(ids)[-1].argmax())
        ids.append(token)
    assert len(result.token_ids) == 40 or result.token_ids[-1] == END


def test_a_graph_that_differs_from_its_facts_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", key_length=[8, 8])
    spec = read_folder_spec(folder)
    with pytest.raises(ModelFileError, match=r"is not the one that edgespec\.json describes"):
        OrtBackend(spec, None, folder, RunConfig(64))


# --------------------------------------------------------------------------------------- facts


def test_facts(folder: Path) -> None:
    spec = read_model(folder)
    table, matrices = 4 * 258 * 16, (folder / "weights.bin").stat().st_size - 4 * 258 * 16
    assert spec.format == ONNX_FORMAT
    assert (spec.arch, spec.name, spec.file_type) == ("tiny", "tiny model", "INT8")
    assert (spec.num_layers, spec.vocab_size, spec.context_length) == (2, 258, POSITIONS)
    assert (spec.num_kv_heads, spec.key_length, spec.value_length) == (HEADS, LENGTHS, LENGTHS)
    assert (spec.sliding_window, spec.is_sliding) == (WINDOW, (False, True))
    assert (spec.weight_bytes, spec.table_bytes) == (matrices, table)
    assert spec.bytes_per_token == matrices
    assert (spec.bos_id, spec.eos_id) == (256, END)
    assert spec.kv_values_per_token == 2 * (8 + 8) + 2 * (4 + 4)
    assert spec.chat_template is None


def test_a_template_of_its_own_file_goes_before_the_settings(copy: Path) -> None:
    settings = copy / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "of settings"}), encoding="utf-8")
    assert read_model(copy).chat_template == "of settings"
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": "of the list"}]
    settings.write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert read_model(copy).chat_template == "of the list"
    (copy / "chat_template.jinja").write_text("of the file", encoding="utf-8")
    assert read_model(copy).chat_template == "of the file"


def test_a_template_for_tools_is_another_one(copy: Path) -> None:
    settings = copy / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "one for all"}), encoding="utf-8")
    assert read_model(copy).tool_template is None
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    settings.write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert read_model(copy).tool_template == "x"
    (copy / "additional_chat_templates").mkdir()
    (copy / "additional_chat_templates" / "tool_use.jinja").write_text("z", encoding="utf-8")
    assert read_model(copy).tool_template == "z"


def test_end_tokens_of_config_where_the_generation_has_none(copy: Path) -> None:
    assert end_ids(copy) == (END,)
    (copy / "generation_config.json").unlink()
    assert end_ids(copy) == (0,)


def test_fingerprint_follows_the_content(folder: Path, copy: Path) -> None:
    first = read_model(folder).fingerprint
    assert read_model(copy).fingerprint == first
    weights = bytearray((copy / "weights.bin").read_bytes())
    weights[: len(weights) // 2] = bytes(len(weights) // 2)
    (copy / "weights.bin").write_bytes(weights)
    assert read_model(copy).fingerprint != first


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def facts(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "edgespec.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(document | changes), encoding="utf-8")

    return change


def hugging_face(folder: Path) -> None:
    remove("edgespec.json")(folder)
    (folder / "model.safetensors").write_bytes(b"")


ERRORS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "another exporter's": (
        remove("edgespec.json"),
        "FOLDER was not exported by edgespec: its graph cannot verify drafts",
        "`edgespec models export` makes such a folder from the original model",
    ),
    "torch's format": (
        hugging_face,
        "FOLDER is a Hugging Face model in torch's format",
        "`edgespec models export FOLDER` makes an ONNX folder of it",
    ),
    "another version's": (
        facts(contract=2),
        "FOLDER was exported by another version of edgespec (contract 2, not 1)",
        "make it again with `edgespec models export`",
    ),
    "without weights": (
        remove("weights.bin"),
        "FOLDER has no weights.bin, so the export is not whole",
        "make it again with `edgespec models export`",
    ),
    "without tokenizer": (
        remove("tokenizer.json"),
        "FOLDER has no tokenizer.json",
        "copy it from the original model's folder",
    ),
    "odd facts": (
        facts(key_length=[8]),
        "FOLDER/edgespec.json gives no usable 'key_length'",
        "make it again with `edgespec models export`",
    ),
    "hostile facts": (
        facts(vocab_size=1 << 40),
        "FOLDER/edgespec.json gives no usable 'vocab_size'",
        "make it again with `edgespec models export`",
    ),
}


@pytest.mark.parametrize(("change", "message", "hint"), ERRORS.values(), ids=ERRORS.keys())
def test_what_is_no_such_folder_is_refused(
    copy: Path, change: Callable[[Path], None], message: str, hint: str
) -> None:
    change(copy)
    with pytest.raises(EdgespecError) as refused:
        read_model(copy)
    told = (str(refused.value), refused.value.hint)
    assert tuple(text.replace(str(copy), "FOLDER") for text in told) == (message, hint)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no model"):
        read_model(tmp_path)


# ------------------------------------------------------------------------------------ planning


@pytest.fixture(scope="module")
def spec(folder: Path) -> ModelSpec:
    return read_folder_spec(folder)


def test_a_plan_says_why_it_is_onnx_runtime(spec: ModelSpec) -> None:
    plan = make_run_plan(spec, Request(), MACHINE)
    assert plan.backend == "onnx"
    assert plan.choices[0].reason == "the model is an ONNX folder"
    assert plan.context_size == POSITIONS
    assert plan.predicted_peak_bytes < MACHINE.free_bytes


def test_llamacpp_cannot_run_a_folder(spec: ModelSpec) -> None:
    with pytest.raises(UnsupportedError, match=r"llama\.cpp runs GGUF files, and .* is an ONNX"):
        make_run_plan(spec, Request(backend="llamacpp"), MACHINE)


def test_exact_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(UnsupportedError, match="--exact is not possible with an ONNX model folder"):
        make_run_plan(spec, Request(exact=True), MACHINE)


def test_gguf_footprints_are_as_before(spec: ModelSpec) -> None:
    """A folder's arithmetic is reached through `onnx_footprint` alone."""
    run, gguf = RunConfig(512, 32, 4), replace(spec, format="gguf")
    (answer,) = sizes_by_hand([ContextRequest(gguf, run)])
    names = {part.name for part in footprint(gguf, run, answer)}
    assert "embeddings" not in names


# ----------------------------------------------------------------------------------- tokenizer
