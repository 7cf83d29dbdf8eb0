"""Changing the type of a model file with llama.cpp's quantizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.base import Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.backends.llama.library import library
from edgespec.errors import EdgespecError, ModelFileError, ModelNotFoundError, UnsupportedError
from edgespec.memory.plan.request import Request
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.quantize.convert import FILE_TYPES, convert
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def q4_0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("convert") / "smollm2-q4_0.gguf"
    convert(embedded_model(), target, "Q4_0", threads=2)
    return target


@pytest.fixture(scope="module")
def specs(q4_0: Path) -> tuple[ModelSpec, ModelSpec]:
    return read_model_spec(embedded_model()), read_model_spec(q4_0)


def test_the_file_type_changes_and_nothing_else(specs: tuple[ModelSpec, ModelSpec]) -> None:
    """Q4_0 stores 18 bytes for 32 weights, Q4_1 20."""
    source, converted = specs
    assert (source.file_type, converted.file_type) == ("Q4_1", "Q4_0")
    blocks = dict(source.type_bytes)["Q4_1"] // 20
    assert dict(converted.type_bytes)["Q4_0"] == pytest.approx(18 * blocks, rel=0.02)
    assert converted.weight_bytes < source.weight_bytes
    for name in ("arch", "num_layers", "vocab_size", "context_length", "tokenizer_hash"):
        assert getattr(converted, name) == getattr(source, name), name
    assert converted.chat_template == source.chat_template
    assert converted.num_kv_heads == source.num_kv_heads


def test_only_the_target_is_left(q4_0: Path) -> None:
    assert [file.name for file in q4_0.parent.iterdir()] == [q4_0.name]


def next_logits(path: Path, text: str) -> Logits:
    backend = LlamaBackend(path, LlamaSettings(256))
    row: Logits = backend.prefill(backend.tokenizer.encode(text)).copy()
    backend.close()
    return row


def test_the_converted_model_still_says_the_same(q4_0: Path) -> None:
    """The logits of a text correlate by 0.96, those of two texts by less than 0.6."""
    source = next_logits(embedded_model(), "The cat sat on the mat and the dog sat on the")
    converted = next_logits(q4_0, "The cat sat on the mat and the dog sat on the")
    other = next_logits(q4_0, "import numpy as np\nfrom scipy.stats import")
    assert np.corrcoef(source, converted)[0, 1] > 0.93
    assert np.corrcoef(source, other)[0, 1] < 0.6


def test_the_plan_of_a_repacked_file_is_a_ceiling(specs: tuple[ModelSpec, ModelSpec]) -> None:
    """Q4_0 weights that the CPU backend rewrites are read, not mapped: they are there once."""
    plan = make_run_plan(specs[1], Request(context_size=512, drafter="none"))
    with load_plan(specs[1], plan) as engine:
        found = engine.backend.memory_bytes()
    planned = plan.component_bytes
    for name in ("weights", "weights_repacked"):
        assert found.get(name, 0) <= planned.get(name, 0) + (1 << 14)
    assert plan.mapped == ("weights_repacked" not in found)


def test_a_library_with_amx_kernels_keeps_weights_as_they_are(
    q4_0: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library(), "llama_print_system_info", lambda: b"AVX2 = 1 | AMX_INT8 = 1 |")
    backend = LlamaBackend(q4_0, LlamaSettings(256))
    assert "weights_repacked" not in backend.memory_bytes()
    backend.close()


def test_an_existing_target_is_replaced_whole(specs: tuple[ModelSpec, ModelSpec]) -> None:
    target = specs[1].path.with_name("again.gguf")
    target.write_bytes(b"old")
    convert(specs[1].path, target, "Q8_0", threads=2)
    file_type = read_model_spec(target).file_type
    target.unlink()
    assert file_type == "Q8_0"


# ---------------------------------------------------------------------------------- failures


def fails(source: Path, target: Path, file_type: str = "Q4_0") -> EdgespecError:
    """Converting raises, and what was in the target's folder before is all that is there after."""
    before = {file: file.read_bytes() for file in target.parent.glob("*") if file.is_file()}
    with pytest.raises(EdgespecError) as caught:
        convert(source, target, file_type)
    assert {f: f.read_bytes() for f in target.parent.glob("*") if f.is_file()} == before
    assert len(str(caught.value)) > 10 and "\n" not in str(caught.value)
    return caught.value


def test_a_missing_source(tmp_path: Path) -> None:
    error = fails(tmp_path / "nothing.gguf", tmp_path / "target.gguf")
    assert isinstance(error, ModelNotFoundError) and "nothing.gguf" in str(error)


@pytest.mark.parametrize("file_type", ["Q9_9", "", "F64"])
def test_an_unknown_type_names_the_known_ones(tmp_path: Path, file_type: str) -> None:
    error = fails(embedded_model(), tmp_path / "target.gguf", file_type)
    assert isinstance(error, UnsupportedError) and repr(file_type) in str(error)
    assert all(name in error.hint for name in FILE_TYPES)


def test_a_broken_source_leaves_the_old_target(tmp_path: Path) -> None:
    source, target = tmp_path / "broken.gguf", tmp_path / "target.gguf"
    source.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(range(256)) * 64)
    target.write_bytes(b"precious")
    assert isinstance(fails(source, target), ModelFileError)


def test_a_source_that_ends_too_early(tmp_path: Path) -> None:
    source = tmp_path / "cut.gguf"
    with embedded_model().open("rb") as whole:
        source.write_bytes(whole.read(30 << 20))
    assert isinstance(fails(source, tmp_path / "target.gguf"), ModelFileError)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    error = fails(embedded_model(), tmp_path / "no folder" / "target.gguf")
    assert not (tmp_path / "no folder").exists()
    assert isinstance(error, UnsupportedError)


def test_a_folder_in_the_way(tmp_path: Path, specs: tuple[ModelSpec, ModelSpec]) -> None:
    """The target cannot be replaced: the error is one of ours, and no partial file stays."""
    target = tmp_path / "target.gguf"
    target.mkdir()
    fails(specs[1].path, target, "Q8_0")
    assert target.is_dir()
