"""Changing the type of a model file with llama.cpp's quantizer."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantize_cases import write_matrix

from edgespec.backends.base import Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.library import library
from edgespec.errors import (
    DoesNotFitError,
    EdgespecError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedError,
)
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import Request
from edgespec.models.embedded import embedded_model
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.models.writing import making
from edgespec.quantize import convert as convert_module
from edgespec.quantize.convert import FILE_TYPES, Recipe, convert, file_type_named, predict
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan


@pytest.fixture(scope="module")
def q4_0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("convert") / "smollm2-q4_0.gguf"
    convert(embedded_model(), target, "Q4_0", threads=2)
    return target


@pytest.fixture(scope="module")
def specs(q4_0: Path) -> tuple[ModelSpec, ModelSpec]:
    return read_model_spec(embedded_model()), read_model_spec(q4_0)


@pytest.mark.long
@pytest.mark.model
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


@pytest.mark.long
@pytest.mark.model
def test_only_the_target_is_left(q4_0: Path) -> None:
    assert [file.name for file in q4_0.parent.iterdir()] == [q4_0.name]


def next_logits(path: Path, text: str) -> Logits:
    backend = LlamaBackend(path, RunConfig(256))
    row: Logits = backend.prefill(backend.tokenizer.encode(text)).copy()
    backend.close()
    return row


@pytest.mark.long
@pytest.mark.model
def test_the_converted_model_still_says_the_same(q4_0: Path) -> None:
    """The logits of a text correlate by 0.96, those of two texts by less than 0.6."""
    source = next_logits(embedded_model(), "The cat sat on the mat and the dog sat on the")
    converted = next_logits(q4_0, "The cat sat on the mat and the dog sat on the")
    other = next_logits(q4_0, "import numpy as np\nfrom scipy.stats import")
    assert np.corrcoef(source, converted)[0, 1] > 0.93
    assert np.corrcoef(source, other)[0, 1] < 0.6


@pytest.mark.long
@pytest.mark.model
def test_the_plan_of_a_repacked_file_is_a_ceiling(specs: tuple[ModelSpec, ModelSpec]) -> None:
    """Q4_0 weights that the CPU backend rewrites are read, not mapped: they are there once."""
    plan = make_run_plan(specs[1], Request(context_size=512, drafter="none"))
    with load_plan(specs[1], plan) as engine:
        found = engine.backend.memory_bytes()
    planned = plan.component_bytes
    for name in ("weights", "weights_repacked"):
        assert found.get(name, 0) <= planned.get(name, 0) + (1 << 14)
    assert plan.mapped == ("weights_repacked" not in found)


@pytest.mark.long
@pytest.mark.model
def test_an_existing_target_is_replaced_whole(specs: tuple[ModelSpec, ModelSpec]) -> None:
    target = specs[1].path.with_name("again.gguf")
    target.write_bytes(b"old")
    convert(specs[1].path, target, "Q8_0", threads=2)
    file_type = read_model_spec(target).file_type
    target.unlink()
    assert file_type == "Q8_0"


def fails(source: Path, target: Path, file_type: str = "Q4_0") -> EdgespecError:
    """Converting raises, and what was in the target's folder before is all that is there after."""
    before = {file: file.read_bytes() for file in target.parent.glob("*") if file.is_file()}
    with pytest.raises(EdgespecError) as caught:
        convert(source, target, file_type)
    assert {f: f.read_bytes() for f in target.parent.glob("*") if f.is_file()} == before
    assert len(str(caught.value)) > 10 and "\n" not in str(caught.value)
    return caught.value


@pytest.mark.model
def test_a_missing_source(tmp_path: Path) -> None:
    error = fails(tmp_path / "nothing.gguf", tmp_path / "target.gguf")
    assert isinstance(error, ModelNotFoundError) and "nothing.gguf" in str(error)


@pytest.mark.model
@pytest.mark.parametrize("file_type", ["Q9_9", "", "F64"])
def test_an_unknown_type_names_the_known_ones(tmp_path: Path, file_type: str) -> None:
    error = fails(embedded_model(), tmp_path / "target.gguf", file_type)
    assert isinstance(error, UnsupportedError) and repr(file_type) in str(error)
    assert all(name in error.hint for name in FILE_TYPES)


@pytest.mark.model
def test_a_broken_source_leaves_the_old_target(tmp_path: Path) -> None:
    source, target = tmp_path / "broken.gguf", tmp_path / "target.gguf"
    source.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(range(256)) * 64)
    target.write_bytes(b"precious")
    assert isinstance(fails(source, target), ModelFileError)


@pytest.mark.model
def test_a_source_that_ends_too_early(tmp_path: Path) -> None:
    source = tmp_path / "cut.gguf"
    with embedded_model().open("rb") as whole:
        source.write_bytes(whole.read(30 << 20))
    assert isinstance(fails(source, tmp_path / "target.gguf"), ModelFileError)


@pytest.mark.model
def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    error = fails(embedded_model(), tmp_path / "no folder" / "target.gguf")
    assert not (tmp_path / "no folder").exists()
    assert isinstance(error, UnsupportedError)


def test_a_folder_in_the_way(source: Path, tmp_path: Path) -> None:
    """The target cannot be replaced: the error is one of ours, and no partial file stays."""
    target = tmp_path / "target.gguf"
    target.mkdir()
    fails(source, target, "Q8_0")
    assert target.is_dir()


def direct(source: Path, target: Path, file_type: int) -> bytes:
    """What llama.cpp's quantizer writes when it is called without anything of ours."""
    lib = library()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = file_type, 1, True
    status = lib.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params))
    assert status == 0
    return target.read_bytes()


@pytest.mark.parametrize(("name", "number"), [("Q4_0", 2), ("Q6_K", 18), ("F16", 1)])
def test_bytes_are_those_of_llama_cpp(source: Path, tmp_path: Path, name: str, number: int) -> None:
    target = tmp_path / "ours.gguf"
    target.write_bytes(b"old")
    convert(source, target, name, threads=2)
    assert target.read_bytes() == direct(source, tmp_path / "theirs.gguf", number)


@pytest.mark.long
def test_every_file_type_is_known_to_llama_cpp(source: Path, matrix: Path, tmp_path: Path) -> None:
    """The types announced are those written, also where blocks do not fit."""
    for name in ("Q2_0", "IQ2_XXS", "IQ1_S", "MXFP4_MOE", "TQ1_0"):
        target = tmp_path / f"{name}.gguf"
        recipe = Recipe(name, imatrix=matrix)
        convert(source, target, recipe)
        written = read_gguf(target)
        assert {t.name: t.type for t in written.tensors} == predict(source, recipe).types
        assert 0 <= predict(source, recipe).file_bytes - target.stat().st_size < 8192
    assert len(set(FILE_TYPES)) == len(FILE_TYPES) == 35


def test_aliases_and_case() -> None:
    assert file_type_named("q4_k") == "Q4_K_M"
    with pytest.raises(UnsupportedError, match="'Q9'"):
        file_type_named("Q9")


def test_overrides_change_what_they_match(source: Path) -> None:
    types = predict(source, Recipe("Q4_0", (("ffn_down", "Q8_0"), (".", "Q5_1")))).types
    assert types["blk.2.ffn_down.weight"].name == "Q8_0"
    assert types["blk.2.ffn_up.weight"].name == "Q5_1"
    assert types["output_norm.weight"].name == "F32"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe("Q4_0", (("nothing", "Q8_0"),)), "matches 'nothing'"),
        (Recipe("Q4_0", (("(", "Q8_0"),)), "no regular expression"),
        (Recipe("Q4_0", (("ffn", "Q9"),)), "no tensor type 'Q9'"),
        (Recipe("F16", (("ffn", "Q8_0"),)), "takes no types of single tensors"),
    ],
)
def test_options_that_cannot_be_honoured(
    source: Path, tmp_path: Path, recipe: Recipe, said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        convert(source, tmp_path / "target.gguf", recipe)
    assert os.listdir(tmp_path) == []


def test_a_matrix_of_another_model(source: Path, tmp_path: Path) -> None:
    path = write_matrix(tmp_path / "other.gguf", {"blk.0.attn_q.weight": (1, [1.0, 2.0])})
    with pytest.raises(UnsupportedError, match="does not belong"):
        convert(source, tmp_path / "target.gguf", Recipe("Q4_0", imatrix=path))


def test_truncated_sources_are_told_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    data = source.read_bytes()
    for size in (0, 3, 100, 5000, len(data) - 1):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:size])
        with pytest.raises(ModelFileError):
            convert(cut, tmp_path / "target.gguf", "Q4_0")
        assert os.listdir(tmp_path) == ["cut.gguf"]
    with pytest.raises(ModelNotFoundError):
        convert(tmp_path / "none.gguf", tmp_path / "target.gguf", "Q4_0")


def test_a_damaged_header_is_one_sentence(source: Path, tmp_path: Path) -> None:
    """Whatever is damaged, there is a file or an error of ours, and nothing else."""
    data, random = bytearray(source.read_bytes()), np.random.default_rng(1)
    end = read_gguf(source).data_offset
    damaged, target = tmp_path / "damaged.gguf", tmp_path / "target.gguf"
    for _ in range(6):
        changed = bytearray(data)
        for place in random.integers(24, end, 3):
            changed[int(place)] = int(random.integers(256))
        damaged.write_bytes(changed)
        try:
            convert(damaged, target, "Q4_0")
        except EdgespecError as problem:
            assert "\n" not in str(problem) and not target.exists()
        target.unlink(missing_ok=True)
        assert os.listdir(tmp_path) == ["damaged.gguf"]


def test_what_dead_runs_left_is_removed_and_what_others_write_is_not(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target.gguf"
    (tmp_path / ".target.gguf.123.partial").mkdir()
    (tmp_path / ".target.gguf.124.partial").write_bytes(b"half")
    with making(target) as alive:
        alive.write_bytes(b"half")
        convert(source, target, "Q4_0")
        found = {alive.name, f"{alive.name}.lock", "target.gguf"}
        assert set(os.listdir(tmp_path)) == found


LIMITED = """
import resource, sys
from pathlib import Path
from edgespec.errors import DoesNotFitError
from edgespec.quantize.convert import convert
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    convert(Path(sys.argv[1]), Path(sys.argv[2]), "Q8_0")
except DoesNotFitError as problem:
    print(problem, problem.hint)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs limits of POSIX")
def test_a_limit_on_the_size_of_files_is_told(source: Path, tmp_path: Path) -> None:
    """It was told as a damaged source: the disk itself has room."""
    command = [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "target.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "took only a part" in done.stdout and "ulimit -f" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == []


def test_a_folder_that_may_not_be_written_to(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UnsupportedError, match="may not be written to"):
        convert(source, tmp_path / "target.gguf", "Q4_0")
    assert os.listdir(tmp_path) == []


def test_a_source_that_vanishes_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is an OSError too, and says nothing of the target."""
    run = convert_module._run

    def vanish(path: Path, recipe: Any, threads: int, target: Path | None) -> Any:
        if target is not None:
            raise ModelNotFoundError(f"there is no file {path}")
        return run(path, recipe, threads, target)

    monkeypatch.setattr(convert_module, "_run", vanish)
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        convert(source, tmp_path / "target.gguf", "Q4_0")


def test_a_full_disk_is_told_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(20_000, 10_000, 10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DoesNotFitError, match="MiB free") as caught:
        convert(source, tmp_path / "target.gguf", "Q4_0")
    assert caught.value.hint and os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send a child these signals")
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_no_target(
    source: Path, tmp_path: Path, kill: signal.Signals
) -> None:
    """It is stopped after the first tensor; the next run removes what SIGKILL left."""
    target = tmp_path / "target.gguf"
    code = (
        "import sys, time\n"
        "from edgespec.quantize.convert import convert\n"
        "def slow(what, part):\n    print(what, flush=True); time.sleep(30)\n"
        "convert(sys.argv[1], sys.argv[2], 'Q4_0', progress=slow)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None and process.stdout.readline().startswith(b"quantizing")
    process.send_signal(kill)
    process.wait(20)
    process.stdout.close()
    assert not target.exists()
    left = os.listdir(tmp_path)
    assert left == [] if kill == signal.SIGINT else all(".partial" in name for name in left)
    deadline = time.monotonic() + 10
    convert(source, target, "Q4_0")
    while os.listdir(tmp_path) != ["target.gguf"] and time.monotonic() < deadline:
        time.sleep(0.05)
        convert(source, target, "Q4_0")
    assert os.listdir(tmp_path) == ["target.gguf"]
