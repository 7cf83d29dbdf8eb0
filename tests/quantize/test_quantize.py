"""Quantizing: all types, importance matrices, overrides, and what is left when it fails."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_gguf import F32, VOCABULARY, WIDTH, write_model

from edgespec.backends.llama.library import library
from edgespec.errors import (
    DoesNotFitError,
    EdgespecError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedError,
)
from edgespec.models.gguf.reader import read_gguf
from edgespec.quantize import convert as convert_module
from edgespec.quantize import imatrix
from edgespec.quantize.convert import FILE_TYPES, Recipe, convert, file_type_named, predict
from edgespec.quantize.imatrix import compute_imatrix, read_imatrix


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("source") / "random.gguf", "llama", F32)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(VOCABULARY - 1, size=64).tolist() for _ in range(2)]


@pytest.fixture(scope="module")
def matrix(source: Path, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matrix") / "imatrix.gguf"
    compute_imatrix(source, texts, path, threads=1, dataset="random")
    return path


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
    convert(source, target, name, threads=2)
    assert target.read_bytes() == direct(source, tmp_path / "theirs.gguf", number)


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


# ------------------------------------------------------------------------- importance matrices


def test_a_computed_matrix_holds_mean_squares(
    source: Path, texts: list[list[int]], matrix: Path
) -> None:
    """The first block's inputs are normalised embeddings: their mean square is worked out here."""
    found = read_imatrix(matrix)
    model = read_gguf(source)
    data = source.read_bytes()

    def tensor(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        info = next(t for t in model.tensors if t.name == name)
        raw = np.frombuffer(data[info.offset : info.offset + info.data_bytes], np.float32)
        return raw.reshape(info.dims[::-1])

    rows = tensor("token_embd.weight")[np.concatenate(texts)]
    rows = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-6)
    expected = ((rows * tensor("blk.0.attn_norm.weight")) ** 2).mean(axis=0)
    np.testing.assert_allclose(found.values["blk.0.attn_q.weight"], expected, rtol=1e-4)
    assert {"blk.3.ffn_down.weight", "output.weight"} <= set(found.values)
    assert found.dataset == "random" and len(found.values["blk.0.attn_q.weight"]) == WIDTH


def legacy(entries: dict[str, tuple[int, list[float]]]) -> bytes:
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack(f"<ii{len(values)}f", calls, len(values), *values)
    return data + struct.pack("<ii4s", 7, 4, b"data")


def test_the_old_format_is_divided_by_its_calls(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(legacy({"a": (4, [2.0, 8.0]), "b": (0, [3.0])}))
    found = read_imatrix(path)
    assert found.values["a"].tolist() == [0.5, 2.0] and found.values["b"].tolist() == [3.0]
    assert (found.dataset, found.num_chunks) == ("data", 7)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"\x01\0\0\0",
        legacy({"a": (1, [1.0])})[:14],
        struct.pack("<ii", 1, 1 << 30),
        legacy({"a": (1, [float("nan")])}),
        b"hello, this is text",
    ],
)
def test_files_that_are_no_matrix(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "matrix"
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match="no importance matrix"):
        read_imatrix(path)


def test_a_matrix_of_another_model(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(legacy({"blk.0.attn_q.weight": (1, [1.0, 2.0])}))
    with pytest.raises(UnsupportedError, match="does not belong"):
        convert(source, tmp_path / "target.gguf", Recipe("Q4_0", imatrix=path))


# ------------------------------------------------------------------------------------ failures


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
    dead, alive = (tmp_path / f".target.gguf.{n}.partial" for n in (2**31 - 2, os.getppid()))
    (tmp_path / f".target.gguf.{2**31 - 3}.partial").mkdir()
    dead.write_bytes(b"half")
    alive.write_bytes(b"half")
    convert(source, target, "Q4_0")
    assert sorted(os.listdir(tmp_path)) == [alive.name, "target.gguf"]


def test_a_folder_that_may_not_be_written_to(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UnsupportedError, match="may not be written to"):
        convert(source, tmp_path / "target.gguf", "Q4_0")
    assert os.listdir(tmp_path) == []


def test_an_interrupt_within_a_callback_is_not_lost(
    source: Path, texts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while llama.cpp shows a node; C would drop what is raised there."""
    shown: list[int] = []

    def hear(*_: object) -> bool:
        if not shown:
            signal.raise_signal(signal.SIGINT)
        shown.append(1)
        return False

    monkeypatch.setattr(imatrix._Sums, "hear", hear)
    signal.signal(signal.SIGINT, before := signal.default_int_handler)  # some shells ignore it
    with pytest.raises(KeyboardInterrupt):
        compute_imatrix(source, texts, tmp_path / "matrix.gguf", threads=1, dataset="random")
    assert shown and os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_what_others_print_is_no_part_of_what_the_quantizer_says() -> None:
    """A library writes to the file descriptor, whatever Python's own stdout is."""
    program = (
        "import os\n"
        "from edgespec.quantize import worker\n"
        "def quantize(job, say):\n"
        "    os.write(1, b'welcome\\n')\n"
        "    return {'status': 0, 'problem': job['name']}\n"
        "worker._quantize = quantize\n"
        "worker.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input='{"name": "\\u00fc"}',
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == {"status": 0, "problem": "\u00fc"}
    assert done.stderr == "welcome\n"


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
    assert (
        (left == []) if kill == signal.SIGINT else all(name.endswith(".partial") for name in left)
    )
    deadline = time.monotonic() + 10
    convert(source, target, "Q4_0")
    while os.listdir(tmp_path) != ["target.gguf"] and time.monotonic() < deadline:
        time.sleep(0.05)
        convert(source, target, "Q4_0")
    assert os.listdir(tmp_path) == ["target.gguf"]
