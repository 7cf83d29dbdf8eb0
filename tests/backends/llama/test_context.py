"""A context of llama.cpp: how loading ends, its limits, its bytes, and files that are none."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hybrid_gguf import Shape, write_hybrid
from llama_cases import (
    LOG_ROUNDING,
    MEBIBYTE,
    PROMPT,
    THREADS,
    RecordingBackend,
    assert_ceiling,
    feed,
    plain_rows,
    random_tokens,
    settings,
    step,
)
from random_gguf import Q4_1

import edgespec
from edgespec.backends.base import DraftTree
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.library import LIBRARY_LOG, library
from edgespec.errors import BackendError, ContextFullError, ModelNotFoundError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import Request
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec
from edgespec.quantize.context import EvalContext
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a type that no processor rewrites."""
    path = tmp_path_factory.mktemp("context") / "model.gguf"
    return write_hybrid(path, Shape("llama", interval=1), Q4_1)


def test_ctrl_c_ends_loading(model: Path) -> None:
    """It comes within a callback of C, which drops what is raised there."""
    heard: list[float] = []

    def report(fraction: float) -> None:
        if not heard:
            signal.raise_signal(signal.SIGINT)
        heard.append(fraction)

    with pytest.raises(KeyboardInterrupt):
        LlamaBackend(str(model), RunConfig(context_size=64), progress=report)
    assert heard[-1] < 1.0


def open_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is open of models and contexts that are made from now on."""
    lib, opened = library(), list[str]()
    for made, freed in (
        ("llama_model_load_from_file", "llama_model_free"),
        ("llama_init_from_model", "llama_free"),
    ):
        make, free = getattr(lib, made), getattr(lib, freed)

        def count(*arguments: Any, made: str = made, make: Any = make) -> Any:
            pointer = make(*arguments)
            if pointer:
                opened.append(made)
            return pointer

        def forget(pointer: Any, made: str = made, free: Any = free) -> None:
            opened.remove(made)
            free(pointer)

        monkeypatch.setattr(lib, made, count)
        monkeypatch.setattr(lib, freed, forget)
    return opened


def test_what_a_progress_callback_raises_ends_loading(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, heard = open_models(monkeypatch), list[float]()

    def report(fraction: float) -> None:
        heard.append(fraction)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        LlamaBackend(model, settings(256), progress=report)
    assert len(heard) == 1 and not opened


@pytest.mark.parametrize("line", ["llama_context: constructing", "load_tensors: loading"])
def test_ctrl_c_while_llama_cpp_logs_is_not_lost(
    model: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    opened, heard = open_models(monkeypatch), list[int]()

    def write(_level: int, text: bytes | None) -> None:
        if (text or b"").decode().startswith(line):
            heard.append(1)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LIBRARY_LOG, "write", write)
    with pytest.raises(KeyboardInterrupt):
        LlamaBackend(model, settings(256))
    with pytest.raises(KeyboardInterrupt):
        EvalContext(model, context_size=64, batch_size=64, threads=1)
    assert len(heard) == 2 and not opened


def test_a_full_context_is_refused_before_the_step(model: Path, reference: LlamaBackend) -> None:
    text = random_tokens(9, 64)
    backend = LlamaBackend(model, settings(64, max_nodes=8))
    feed(backend, text[:58])
    with pytest.raises(ContextFullError, match=r"^7 more tokens .* has 64 and 58 are used$"):
        backend.verify(DraftTree.chain(text[:7]))
    with pytest.raises(ContextFullError, match=r"^8 more") as caught:
        backend.prefill(text[:8])
    assert "--ctx" in caught.value.hint
    assert (backend.length, backend.pending) == (58, 0)
    rows = backend.verify(DraftTree.chain(text[58:])).copy()
    backend.commit(range(6))
    assert np.array_equal(rows, np.stack(plain_rows(reference, text, 58)))
    assert backend.length == 64 == backend.context_size
    with pytest.raises(ContextFullError):
        backend.verify(DraftTree.chain((1,)))
    assert backend.truncate(30) == 30
    assert np.array_equal(step(backend, 5), plain_rows(reference, [*text[:30], 5], 30)[0])
    backend.close()


def test_pending_tokens_count_as_used(model: Path, reference: LlamaBackend) -> None:
    backend = LlamaBackend(model, settings(64, max_nodes=8, max_leaves=2))
    text = random_tokens(9, 58)
    feed(backend, text)
    backend.verify(DraftTree((1, 2, 3, 4, 5, 6), (-1, 0, 0, 2, 3, 4)))
    backend.commit([0, 2, 3, 4, 5])
    assert (backend.length, backend.pending) == (63, 4)
    with pytest.raises(ContextFullError, match=r"^2 more tokens .* 63 are used$"):
        backend.verify(DraftTree.chain((7, 8)))
    expected = plain_rows(reference, [*text, 1, 3, 4, 5, 6, 7], 63)
    assert np.array_equal(step(backend, 7), expected[0])
    backend.close()


def test_too_many_nodes_or_leaves(backend: RecordingBackend, reference: LlamaBackend) -> None:
    feed(backend, PROMPT)
    with pytest.raises(UnsupportedError, match="32 nodes, not 33"):
        backend.verify(DraftTree.chain(range(33)))
    with pytest.raises(UnsupportedError, match=r"9 leaves .* at most 8"):
        backend.verify(DraftTree(range(10), (-1, *[0] * 9)))
    assert backend.length == len(PROMPT)
    assert np.array_equal(step(backend, 5), plain_rows(reference, [*PROMPT, 5], len(PROMPT))[0])
    rows = backend.verify(DraftTree.chain(random_tokens(1, 32)))
    assert rows.shape == (32, backend.tokenizer.vocab_size), "as many as promised do fit"


# ------------------------------------------------------------------------------------- memory


def test_memory_is_named(backend: RecordingBackend, model: Path, spec: ModelSpec) -> None:
    """To the byte they are those that a plan has: `tests/memory/bytes/test_simulation.py`."""
    found = backend.memory_bytes()
    assert set(found) == {"weights", "kv_cache", "compute", "logits"}
    assert found["weights"] == pytest.approx(spec.weight_bytes, rel=0.02)
    assert found["kv_cache"] == pytest.approx(512 * spec.kv_values_per_token * 2, abs=LOG_ROUNDING)
    assert 0 < found["compute"] < 16 * MEBIBYTE
    found.clear()
    assert backend.memory_bytes() != {}, "the caller's copy is its own"


def test_logits_take_as_many_rows_as_were_ever_needed(model: Path) -> None:
    """llama.cpp's buffer for them grows with demand: 258 numbers of 4 bytes a row."""
    backend = LlamaBackend(model, settings(256))
    row = 4 * 258
    assert backend.memory_bytes()["logits"] == row
    feed(backend, PROMPT)
    assert backend.memory_bytes()["logits"] == row, "only the last token's of a prompt"
    for count, most in ((5, 5), (2, 5), (32, 32)):
        backend.verify(DraftTree.chain(range(count)))
        backend.truncate(backend.length)
        assert backend.memory_bytes()["logits"] == most * row
    backend.close()


def test_llama_cpp_begins_with_rows_of_logits_for_the_largest_step(model: Path) -> None:
    """It has one for each sequence: others would be made beside those, and both be resident."""
    backend = LlamaBackend(model, settings(1024, max_nodes=65, max_leaves=64))
    sequences = backend._context.lib.llama_n_seq_max(backend._context.handle)
    backend.close()
    assert sequences == 65


def test_copied_weights_compute_what_mapped_ones_do(model: Path, spec: ModelSpec) -> None:
    rows = []
    for mapped in (True, False):
        backend = LlamaBackend(model, settings(256, mapped=mapped))
        rows.append(feed(backend, PROMPT))
        assert backend.memory_bytes()["weights"] == pytest.approx(spec.weight_bytes, rel=0.02)
        backend.close()
    assert np.array_equal(rows[0], rows[1])


COPIES = """
import sys, psutil
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.memory.bytes.config import RunConfig
for mapped in (False, True):
    backend = LlamaBackend(sys.argv[1], RunConfig(256, 32, 1, 1, mapped=mapped))
    backend.prefill(range(100, 120))
    print(any(".gguf" in one.path for one in psutil.Process().memory_maps()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_copied_weights_leave_no_pages_of_the_file(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COPIES, str(model)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "False\nTrue\n"


def test_a_plan_is_a_ceiling(spec: ModelSpec) -> None:
    plan = make_run_plan(spec, Request(context_size=1024, draft_max=31, threads=THREADS))
    with load_plan(spec, plan) as engine:
        engine.generate(PROMPT, max_tokens=8)
        engine.backend.verify(DraftTree.chain(PROMPT[:32]))
        found = engine.backend.memory_bytes()
    assert_ceiling(found, plan)
    assert found["logits"] == plan.component_bytes["logits"]
    assert found["compute"] == pytest.approx(plan.component_bytes["compute"], rel=0.02)


def test_closing_twice_frees_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib, freed = library(), []
    backend = LlamaBackend(model, settings(256))
    for name in ("llama_free", "llama_model_free"):
        original = getattr(lib, name)

        def count(pointer: Any, name: str = name, original: Any = original) -> None:
            freed.append(name)
            original(pointer)

        monkeypatch.setattr(lib, name, count)
    backend.close()
    backend.close()
    assert freed == ["llama_free", "llama_model_free"]


def test_a_failed_context_frees_the_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib, freed = library(), []
    original = lib.llama_model_free

    def free(pointer: Any) -> None:
        freed.append(pointer)
        original(pointer)

    monkeypatch.setattr(lib, "llama_model_free", free)
    monkeypatch.setattr(lib, "llama_init_from_model", lambda model, params: None)
    with pytest.raises(BackendError, match="cannot make a context of 256 tokens") as caught:
        LlamaBackend(model, settings(256))
    assert "--ctx" in caught.value.hint
    assert len(freed) == 1


# ------------------------------------------------------------------------------ damaged files

OPEN_ALL = """
import json, sys
import edgespec
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.memory.bytes.config import RunConfig
def outcome(open_file):
    try:
        open_file().close()
    except edgespec.EdgespecError as error:
        return [type(error).__name__, str(error), error.hint]
    return ["loaded", "", ""]
print(json.dumps([[
    outcome(lambda: edgespec.load(path, context_size=256, drafter="none")),
    outcome(lambda: LlamaBackend(path, RunConfig(256))),
] for path in sys.argv[1:]]))
"""


def test_damaged_files_are_errors_with_a_sentence(tmp_path: Path) -> None:
    """In a process of its own, since a crash of the library would take the tests along."""
    with embedded_model().open("rb") as file:
        head = file.read(4 * MEBIBYTE)
    noise = random.Random(0).randbytes(MEBIBYTE)
    contents = {
        "empty": b"",
        "four bytes": b"GGUF",
        "cut in the metadata": head[:5000],
        "cut in the vocabulary": head[:300_000],
        "cut in the weights": head,
        "noise": noise,
        "noise after the magic": b"GGUF\x03\x00\x00\x00" + noise,
        "noise in the metadata": head[:200] + noise + head[200 + MEBIBYTE :],
        "text": b"<!doctype html><title>404</title>" * 100,
    }
    paths = []
    for name, data in contents.items():
        paths.append(tmp_path / f"{name}.gguf")
        paths[-1].write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_ALL, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name, (loaded, direct) in zip(contents, json.loads(done.stdout), strict=True):
        assert loaded[0] == "ModelFileError", (name, loaded)
        assert direct[0] == "BackendError", (name, direct)
        for _, message, hint in (loaded, direct):
            assert len(message) > 20 and "\n" not in message, name
            assert hint, name


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nothing\.gguf"):
        edgespec.load(tmp_path / "nothing.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no such file: .*nothing\.gguf"):
        LlamaBackend(tmp_path / "nothing.gguf", settings(256))


def test_weights_that_are_no_numbers_are_noticed(model: Path, tmp_path: Path) -> None:
    """The metadata is whole, so the file loads; what it computes is not finite."""
    broken = tmp_path / "broken.gguf"
    data = bytearray(model.read_bytes())
    data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    broken.write_bytes(data)
    with (
        edgespec.load(broken, context_size=256, drafter="none", threads=THREADS) as engine,
        pytest.raises(BackendError),
    ):
        engine.generate("Hello", max_tokens=4)
