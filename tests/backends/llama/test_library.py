"""llama.cpp's log: what it says becomes error sentences and byte counts, never terminal output."""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from random_gguf import Q8_0, write_model

from edgespec.backends.llama import library as llama_library
from edgespec.backends.llama.library import (
    LibraryLog,
    _initialised,
    interrupts_kept,
    library,
    loading_hint,
    missing_instructions,
    set_params,
)
from edgespec.errors import BackendError, MissingDependencyError
from edgespec.memory.device import host, llama_binary

NONE, DEBUG, INFO, WARN, ERROR, CONTINUATION = range(6)  # ggml_log_level
MEBIBYTE = 2**20


def log_of(*pieces: tuple[int, str]) -> LibraryLog:
    log = LibraryLog()
    for level, text in pieces:
        log.write(level, text.encode())
    return log


# ---------------------------------------------------------------------------------- problems


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([], ""),
        ([(NONE, "print_info: a\n"), (DEBUG, "b\n"), (WARN, "load: d\n"), (INFO, "e\n")], "d"),
        ([(ERROR, "a: 1\n"), (WARN, "b: 2\n"), (INFO, "no\n"), (ERROR, "c: 3: x\n")], "2; 3: x"),
        ([(ERROR, "a: same\n"), (ERROR, "b: same\n")], "same"),
        ([(ERROR, "load: missing "), (ERROR, "tensor "), (ERROR, "'x'\n")], "missing tensor 'x'"),
        ([(ERROR, "load: half")], ""),  # a line counts when it ends
        ([(ERROR, "load: bad "), (CONTINUATION, "value "), (CONTINUATION, "7\n")], "bad value 7"),
        ([(INFO, "load: dots "), (CONTINUATION, "...."), (CONTINUATION, ".\n")], ""),
        ([(ERROR, "load: real\n"), (ERROR, "\n"), (WARN, "   \n"), (ERROR, "")], "real"),
    ],
    ids=str,
)
def test_the_last_two_warnings_and_errors_make_a_sentence(
    pieces: list[tuple[int, str]], problem: str
) -> None:
    assert log_of(*pieces).problem() == problem


def test_bytes_that_are_no_text_are_replaced() -> None:
    log = LibraryLog()
    log.write(ERROR, None)
    log.write(ERROR, b"load: \xff name\n")
    assert log.problem() == "\ufffd name"


def test_clear_forgets_problems_and_buffers() -> None:
    log = log_of((ERROR, "a: b\n"), (INFO, "x: CPU model buffer size = 1.00 MiB\n"))
    assert (log.problem(), log.buffer_bytes()) == ("b", {"weights": MEBIBYTE})
    log.clear()
    assert (log.problem(), log.buffer_bytes()) == ("", {})


def test_a_chatty_library_costs_no_memory() -> None:
    log = log_of(*((WARN, f"load: number {i}\n") for i in range(1000)))
    assert log.problem() == "number 998; number 999"
    assert len(log._problems) <= 8


def test_threads_hear_of_their_own_calls() -> None:
    """Two models that load at once: neither's error text nor its sizes are the other's."""
    log = log_of((ERROR, "load: bad"))

    def other() -> tuple[str, dict[str, int]]:
        log.clear()
        log.write(INFO, b"x: CPU model buffer size = 1.00 MiB\n")
        return log.problem(), log.buffer_bytes()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result(30) == ("", {"weights": MEBIBYTE})
    log.write(CONTINUATION, b" tensor\n")
    assert (log.problem(), log.buffer_bytes()) == ("bad tensor", {})


def test_the_first_use_in_two_threads_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener that C was given last must be the one that is kept."""
    listeners, module = list[Any](), ModuleType("llama_cpp.llama_cpp")
    second = threading.Event()

    def listen(callback: Any, _data: None) -> None:
        listeners.append(callback)
        second.wait(0.2)  # a second thread comes in between, where it can

    vars(module).update(
        llama_log_callback=lambda function: [function],
        llama_log_set=listen,
        llama_backend_init=lambda: None,
        llama_print_system_info=lambda: b"",
    )
    package = ModuleType("llama_cpp")
    vars(package).update(llama_cpp=module)
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", module)
    fresh = functools.cache(_initialised.__wrapped__)
    monkeypatch.setattr(llama_library, "_initialised", fresh)
    monkeypatch.setattr(llama_library, "_warn_of_another_build", lambda: None)
    with ThreadPoolExecutor(2) as pool:
        found = [one.result(30) for one in [pool.submit(library) for _ in range(2)]]
    assert found == [module, module]
    assert listeners == [module.edgespec_log_callback]


# ----------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize(
    ("lines", "mebibytes"),
    [
        (
            ["CPU_Mapped model buffer size = 4.00", "CPU model buffer size = 8.50"],
            {"weights": 12.5},
        ),
        (["CPU_REPACK model buffer size = 12.50"], {"weights_repacked": 12.5}),
        (["CUDA0 model buffer size = 2", "CUDA1 model buffer size = 1"], {"gpu_weights": 3}),
        (["MTL0_Mapped model buffer size = 12.50"], {"gpu_weights": 12.5}),
        (["CUDA_Host model buffer size = 12.50"], {"weights": 12.5}),
        (["CPU KV buffer size = 1.50", "CPU RS buffer size = 2.25"], {"kv_cache": 3.75}),
        (["CUDA0 KV buffer size = 12.50"], {"gpu_kv_cache": 12.5}),
        (["CPU compute buffer size = 1", "CUDA_Host compute buffer size = 2"], {"compute": 3}),
        (["Vulkan0 compute buffer size = 12.50"], {"gpu_compute": 12.5}),
        (
            [
                "RPC0[127.0.0.1:4711] model buffer size = 2",
                "RPC1[127.0.0.1:4711] KV buffer size = 4",
            ],
            {"worker1_weights": 2, "worker2_kv_cache": 4},
        ),
        (["common: buffer size = 12.50", "size = 1.50 MiB (256 cells, 2 layers)"], {}),
        (["CPU compute buffer size of 12.50 MiB, does not match expectation of 1.0"], {}),
        (["CPU model buffer size = many", "CPU  output buffer size = 12.50"], {}),
    ],
    ids=str,
)
def test_buffers_by_component(lines: list[str], mebibytes: dict[str, float]) -> None:
    """A sliding-window model has two caches, a split file several mappings, a machine two GPUs."""
    log = log_of(*((INFO, f"load_tensors: {line} MiB\n") for line in lines))
    labels = {"RPC0[127.0.0.1:4711]": "worker1", "RPC1[127.0.0.1:4711]": "worker2"}
    expected = {name: int(size * MEBIBYTE) for name, size in mebibytes.items()}
    assert log.buffer_bytes(labels) == expected


def test_a_size_in_pieces_is_read_when_its_line_ends() -> None:
    log = log_of((INFO, "load_tensors: CPU KV buffer "), (CONTINUATION, "size = 2.25 MiB\n"))
    assert log.buffer_bytes() == {"kv_cache": int(2.25 * MEBIBYTE)}


# ---------------------------------------------------------------------------- the library itself


def test_a_missing_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingDependencyError, match="llama-cpp-python cannot be imported") as info:
        _initialised.__wrapped__()
    assert "pip install 'llama-cpp-python==" in info.value.hint


@pytest.mark.model
def test_the_library_is_initialised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = library()

    def again() -> None:
        raise AssertionError("initialised twice")

    monkeypatch.setattr(lib, "llama_backend_init", again)
    assert library() is lib


CHATTER = """
import edgespec
with edgespec.load("{model}", context_size=256, drafter="none", threads=1) as engine:
    engine.generate("Hi", max_tokens=2)
try:
    edgespec.load("{garbage}")
except edgespec.EdgespecError:
    pass
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.memory.bytes.config import RunConfig
try:
    LlamaBackend("{garbage}", RunConfig(64))
except edgespec.BackendError as error:
    assert str(error)
"""


@pytest.mark.model
def test_nothing_is_printed(tmp_path: Path) -> None:
    """Loading, generating, failing and closing leave stdout and stderr to the program."""
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + bytes(range(256)) * 16)
    model = write_model(tmp_path / "model.gguf", "llama", Q8_0, reads_bytes=True)
    done = subprocess.run(
        [sys.executable, "-c", CHATTER.format(garbage=garbage, model=model)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ------------------------------------------------------------------------------- interruptions


@pytest.fixture
def told() -> Iterator[list[int]]:
    """A handler of signals that raises nothing, as that of `edgespec run`; what it was told."""
    before, numbers = signal.getsignal(signal.SIGINT), list[int]()
    signal.signal(signal.SIGINT, lambda number, _frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def usual_interrupts() -> Iterator[None]:
    """A shell lets what it runs in the background ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_takes_effect_at_the_end() -> None:
    before, steps = signal.getsignal(signal.SIGINT), list[str]()
    with pytest.raises(KeyboardInterrupt), interrupts_kept() as came:
        steps.append(f"{len(came)} came")
        interrupt()
        steps.append(f"{len(came)} came")
    assert steps == ["0 came", "1 came"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_not_lost_where_the_call_fails_too() -> None:
    """As when the callback that it came in makes llama.cpp give up."""
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_kept():
        interrupt()
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_within_another_one_an_interrupt_waits_for_the_outer_end() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupts_kept() as outer:
        with interrupts_kept() as inner:
            interrupt()
        steps.append((len(outer), len(inner)))
        with pytest.raises(ZeroDivisionError), interrupts_kept():
            interrupt()
            raise ZeroDivisionError
        steps.append((len(outer), len(inner)))
    assert steps == [(1, 1), (2, 1)]


def test_a_handler_that_raises_nothing_is_told_of_each(told: list[int]) -> None:
    with interrupts_kept():
        interrupt()
        interrupt()
        assert not told
    assert told == [signal.SIGINT] * 2
    with pytest.raises(ZeroDivisionError), interrupts_kept():
        interrupt()
        raise ZeroDivisionError
    assert len(told) == 3


def test_interrupts_that_a_process_ignores_stay_ignored() -> None:
    """A command in the background of a script ignores them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_kept() as came:
            interrupt()
        assert not came
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_alone(told: list[int]) -> None:
    """Only the main thread may set one, and is alone in being interrupted."""
    entered, left, problems = threading.Event(), threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            with interrupts_kept():
                entered.set()
                assert left.wait(30)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert entered.wait(30)
    interrupt()
    assert told == [signal.SIGINT]
    left.set()
    thread.join(30)
    assert not thread.is_alive() and not problems


def test_a_library_of_another_processor_is_found_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 0 | AVX512 = 1 | AVX512_VBMI = 1 | LLAMAFILE = 1 | "
    for flags, missing in (
        ({"avx", "avx2"}, ["AVX512", "AVX512_VBMI"]),
        ({"avx", "avx512f", "avx512vbmi"}, []),
        (set[str](), []),  # a system that does not tell
    ):
        monkeypatch.setattr(host, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert missing_instructions(info) == missing


def test_what_it_says_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "edgespec.llama")
    log_of((DEBUG, "a\n"), (INFO, "b"), (CONTINUATION, "c\n"), (WARN, "\n"), (ERROR, "d\n"))
    said = [(one.levelno, one.getMessage()) for one in caplog.records]
    assert said == [(logging.DEBUG, "a"), (logging.INFO, "bc"), (logging.INFO, "d")]


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("libcuda.so.1: cannot open shared object file: No such file or directory", "driver"),
        ("libcudart.so.13: cannot open shared object file: No such file", "LD_LIBRARY_PATH"),
        ("libcublas.so.13: cannot open shared object file: No such file", "LD_LIBRARY_PATH"),
        ("libllama.so: file too short", "pip install --force-reinstall --no-deps llama-cpp-python"),
    ],
)
def test_a_library_that_does_not_load_is_told_with_what_to_do(
    problem: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    assert words in loading_hint(problem)


def test_a_library_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    """In a process of its own, as the library is loaded once."""
    script = (
        "from edgespec.backends.llama.library import library\n"
        "from edgespec.errors import BackendError\n"
        "try:\n    library()\nexcept BackendError as problem:\n"
        "    print(problem, problem.hint, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(tmp_path)},
    )
    told, hint = done.stdout.splitlines()
    assert told.startswith("llama.cpp's library cannot be loaded: ")
    assert hint.startswith(f"LLAMA_CPP_LIB_PATH is {tmp_path}: ")


# ------------------------------------------------------------------------------- structures


ANOTHER = """
from edgespec.memory.device import llama_binary
llama_binary.COMMIT = "1234567"
from edgespec.backends.llama.library import library
library(), library()
"""


def test_another_build_is_told_once() -> None:
    """As with LLAMA_CPP_LIB_PATH: its structures may differ, and nobody else compares them."""
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("was not tested with this llama.cpp: ggml 0.25.3 of commit") == 1


def test_the_build_is_that_of_the_kernels() -> None:
    source = Path(__file__).parents[3] / "backends" / "kernels" / "ggml_structures.h"
    text = source.read_text(encoding="utf-8")
    assert f'kVersion = "{llama_binary.GGML_VERSION}"' in text
    assert f'kCommit = "{llama_binary.COMMIT}"' in text


def renamed(name: str) -> Any:
    """The parameters of a context as a newer llama.cpp might have them."""
    params = library().llama_context_default_params()

    class Newer(ctypes.Structure):
        _fields_ = tuple(
            (f"{field[0]}_" if field[0] == name else field[0], *field[1:])
            for field in type(params)._fields_
        )

    return Newer.from_buffer_copy(params)


def test_a_field_of_another_name_is_refused() -> None:
    """ctypes would take it for an attribute, and llama.cpp its default."""
    params = renamed("kv_unified")
    with pytest.raises(BackendError, match=r"Newer of this llama\.cpp has no kv_unified$"):
        set_params(params, n_ctx=77, kv_unified=True)
    assert params.n_ctx != 77 and not hasattr(params, "kv_unified")
    set_params(renamed("n_ctx"), kv_unified=True)


def test_fields_are_set_in_no_other_way() -> None:
    """Else a field of another name is lost without a word, as `kv_unified` was."""
    from llama_cpp import llama_cpp, mtmd_cpp

    names = {
        field[0]
        for module in (llama_cpp, mtmd_cpp)
        for one in vars(module).values()
        if getattr(one, "__name__", "").endswith("_params") and hasattr(one, "_fields_")
        for field in one._fields_
    }
    found = []
    for place in ("backends.llama", "quantize", "memory.device"):
        for path in Path(importlib.import_module(f"edgespec.{place}").__path__[0]).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
                    continue
                if node.attr in names and not ast.unparse(node).startswith("self."):
                    found.append(f"{path.name}: {ast.unparse(node)}")
    assert not found
