"""Converted models: processes that convert, folders that are shared, and what is removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from random_gguf import Q8_0, write_model

from edgespec.backends.ort import cache as ort_cache
from edgespec.errors import BackendError, UnsupportedError
from edgespec.models import processes
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.models.writing import making


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_model_spec(write_model(tmp_path / "model.gguf", "llama", Q8_0))


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Let the process that converts run `body`, in which `say` sends a message."""
    script = folder / "stand_in.py"
    script.write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from edgespec.models.processes import messages_out\n"
        "work = Path(json.load(sys.stdin)['work']) / 'packed'\n"
        "out = messages_out()\n"
        "def say(**said):\n"
        "    out.write(json.dumps(said).encode() + b'\\n')\n"
        "    out.flush()\n" + body
    )

    def start(_module: str, *, environment: None, **streams: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, **streams)

    monkeypatch.setattr(processes, "start_module", start)
    monkeypatch.setattr(ort_cache, "_runtime_version", lambda: "1.0")


_WHOLE = "(work / 'model.onnx').write_text('graph')\n(work / 'weights.bin').write_text('weights')\n"


def test_a_model_is_converted_once_for_each_content_and_device(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, _WHOLE)
    same = read_model_spec(shutil.copy(spec.path, tmp_path / "copy.gguf"))
    other = read_model_spec(write_model(tmp_path / "other.gguf", "llama", Q8_0, seed=6))
    root = tmp_path / "cache"
    first = ort_cache.converted(spec, root, "cpu")
    made = (first / "model.onnx").stat().st_mtime_ns
    assert ort_cache.converted(same, root, "cpu") == first
    assert (first / "model.onnx").stat().st_mtime_ns == made
    folders = {first, ort_cache.converted(other, root, "cpu")}
    folders.add(ort_cache.converted(spec, root, "another"))
    assert len(folders) == 3 == len([one for one in root.iterdir() if one.is_dir()])


def test_a_conversion_may_print_more_than_a_pipe_holds(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings of megabytes and lines on stdout, from Python and from below it."""
    body = (
        "say(part=0.25)\n"
        "sys.stderr.write('warning\\n' * 200_000)\n"
        "print('0.5', 'a library says hello', flush=True)\n"
        "os.write(1, b'0.75\\n' * 50_000)\n"
        "say(part=0.5)\n" + _WHOLE
    )
    stand_in(monkeypatch, tmp_path, body)
    seen: list[float] = []
    folder = ort_cache.converted(spec, tmp_path / "cache", "cpu", seen.append)
    assert seen == [0.25, 0.5, 1.0]
    assert sorted(os.listdir(folder)) == ["model.onnx", "weights.bin"]


@pytest.mark.parametrize(
    ("body", "kind", "sentence"),
    [
        ("say(problem='too new', hint='h', kind='UnsupportedError')\nsys.exit(1)", UnsupportedError,
         "the model cannot be converted: too new"),
        ("say(problem='No space left on device', errno=28)\nsys.exit(1)", UnsupportedError,
         "cannot write the converted model: No space left on device"),
        ("sys.stderr.write('x' * 300_000)\nraise ValueError('a shape \\udcff')", BackendError,
         r"the model cannot be converted: ValueError: a shape .*"),
        ("os.write(2, b'\\xff\\xfe broken\\n\\n')\nos._exit(3)", BackendError,
         "the model cannot be converted: .* broken"),
        ("os._exit(3)", BackendError, "the model cannot be converted: status 3"),
    ],
)  # fmt: skip
def test_a_conversion_that_fails_says_why_and_leaves_nothing(
    body: str,
    kind: type[Exception],
    sentence: str,
    spec: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, tmp_path, body)
    with pytest.raises(kind, match=f"^{sentence}$"):
        ort_cache.converted(spec, tmp_path / "cache", "cpu")
    assert os.listdir(tmp_path / "cache") == ["lock"]


def test_weights_that_were_packed_wrongly_are_no_model(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(_spec: object, _facts: object, folder: Path, _config: object) -> Any:
        return Mock(prefill=lambda _tokens: np.full(4, folder.name == "packed"))

    for name in ("read_facts", "write_graphs", "_pack"):
        monkeypatch.setattr(ort_cache, name, Mock())
    monkeypatch.setattr(ort_cache, "OrtBackend", opened)
    graphs = {name: asdict(one) for name, one in ort_cache._CPU_GRAPHS.items()}
    job = {"path": str(spec.path), "work": str(tmp_path), "graphs": graphs}
    with pytest.raises(BackendError, match="packed the weights wrongly"):
        ort_cache._convert(job, Mock())


def test_whoever_converts_last_takes_the_folder_of_the_one_that_was_faster(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = _WHOLE + (
        "place = work.parent.parent / work.parent.name[1:].rsplit('.', 2)[0]\n"
        "place.mkdir()\n"
        "(place / 'model.onnx').write_text('theirs')\n"
        "(place / 'weights.bin').write_text('theirs')\n"
    )
    stand_in(monkeypatch, tmp_path, body)
    folder = ort_cache.converted(spec, tmp_path / "cache", "cpu")
    assert (folder / "model.onnx").read_text() == "theirs"
    assert set((tmp_path / "cache").iterdir()) == {folder, tmp_path / "cache" / "lock"}


def test_a_folder_of_which_something_is_missing_is_made_again(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, _WHOLE)
    folder = ort_cache.converted(spec, tmp_path / "cache", "cpu")
    (folder / "weights.bin").unlink()
    assert ort_cache.converted(spec, tmp_path / "cache", "cpu") == folder
    assert (folder / "weights.bin").read_text() == "weights"
    assert set((tmp_path / "cache").iterdir()) == {folder, tmp_path / "cache" / "lock"}


def test_a_rename_that_fails_is_an_error_and_no_model(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, _WHOLE)

    def denied(*_paths: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(UnsupportedError, match=r"cannot write .*: Permission denied"):
        ort_cache.converted(spec, tmp_path / "cache", "cpu")
    assert os.listdir(tmp_path / "cache") == ["lock"]


def test_who_comes_while_another_one_converts_waits_and_takes_its_folder(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = "open(work.parents[2] / 'runs', 'a').write('x')\ntime.sleep(0.3)\n"
    stand_in(monkeypatch, tmp_path, f"import time\n{counted}{_WHOLE}")
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(ort_cache.converted, spec, tmp_path / "cache", "cpu") for _ in range(2)]
    assert made[0].result() == made[1].result()
    assert (tmp_path / "runs").read_text() == "x"


def test_what_a_killed_conversion_left_is_removed_by_the_next_one(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever model it was of; what a living process makes stays, and is no converted model."""
    stand_in(monkeypatch, tmp_path, _WHOLE)
    dead = tmp_path / "cache" / ".another-model.123-0.partial"
    dead.mkdir(parents=True)
    monkeypatch.setattr(ort_cache, "_KEPT_BYTES", 1)
    with making(tmp_path / "cache" / "another-model") as alive:
        (alive / "packed").mkdir(parents=True)
        (alive / "packed" / "weights.bin").write_bytes(bytes(100))
        made = ort_cache.converted(spec, tmp_path / "cache", "cpu")
        assert made.is_dir() and alive.is_dir() and not dead.exists()


def test_the_least_recently_used_models_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [
        read_model_spec(write_model(tmp_path / f"{seed}.gguf", "llama", Q8_0, seed=seed))
        for seed in range(3)
    ]
    stand_in(monkeypatch, tmp_path, _WHOLE)
    root = tmp_path / "cache"
    old, older = (ort_cache.converted(spec, root, "cpu") for spec in specs[:2])
    os.utime(old, (2_000, 2_000))
    os.utime(older, (1_000, 1_000))
    size = sum(file.stat().st_size for file in old.iterdir())
    monkeypatch.setattr(ort_cache, "_KEPT_BYTES", int(2.5 * size))
    new = ort_cache.converted(specs[2], root, "cpu")
    assert {one for one in root.iterdir() if one.is_dir()} == {old, new}
