"""llama.cpp's shared library: imported on first use, its log kept out of the terminal.

The low-level module of llama-cpp-python is used throughout: its high-level class allocates logits
for the whole context and hides the sequence functions.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from warnings import warn

from edgespec.errors import BackendError, EdgespecWarning, MissingDependencyError
from edgespec.memory.device import host, llama_binary
from edgespec.memory.device.llama_binary import PACKAGE

_LOGGER = logging.getLogger("edgespec.llama")
_INFO, _WARN, _ERROR, _CONTINUATION = 2, 3, 4, 5  # values of ggml_log_level
_BUFFER_LINE = re.compile(r"(\S+) +(model|KV|RS|compute|LoRA) buffer size = +([\d.]+) MiB")
_CACHE_LINE = re.compile(r": size = +([\d.]+) MiB")  # of keys and values, or of states
_WARMUP_LINE = re.compile(r"warmup with image size = (\d+) x")
REPACKED = ("CPU_REPACK", "CPU_EDGESPEC")  # buffer types of weights that kernels read
# Linux's names of what llama.cpp's kernels may be built with on x86-64.
_FLAGS = {
    **{name: name.lower() for name in ("AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX_VNNI")},
    **{name: name.lower() for name in ("AVX512_VNNI", "AVX512_BF16")},
    **{"AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi"},
}
_COMPONENT = {"model": "weights", "KV": "kv_cache", "RS": "kv_cache", "LoRA": "adapters"}


class LibraryLog(threading.local):
    """What llama.cpp said lately: error text for exceptions, buffer sizes for reports.

    All of it goes to the log. It says things in the thread that called it, and each thread hears of
    its own calls alone.
    """

    def __init__(self) -> None:
        self._level = 0
        self._line = ""
        self._problems: deque[str] = deque(maxlen=8)
        self._buffers: list[tuple[str, str, int]] = []  # device, component, bytes
        self.cache_mebibytes: list[float] = []  # of each cache, since `clear`
        # Called when one has its memory, which llama.cpp clears next.
        self.on_cache: Callable[[], object] | None = None
        self.warmup_side = 0  # pixels of the image that a projector's buffers were made for

    def write(self, level: int, text: bytes | None) -> None:
        """Take one piece of log output; pieces of a line arrive one by one."""
        self._level = self._level if level == _CONTINUATION else level
        self._line += (text or b"").decode("utf-8", errors="replace")
        if self._line.endswith("\n"):
            self._end_line(self._line.strip())
            self._line = ""

    def _end_line(self, line: str) -> None:
        if line:
            _LOGGER.log(logging.INFO if self._level >= _INFO else logging.DEBUG, "%s", line)
        if self._level in (_WARN, _ERROR) and line:
            self._problems.append(line)
        elif "size = " not in line:  # as of nearly all of the 2,000 lines of a load
            return
        elif match := _BUFFER_LINE.search(line):
            device, kind, mebibytes = match.groups()
            size_bytes = round(float(mebibytes) * 2**20)
            self._buffers.append((device, _COMPONENT.get(kind, kind), size_bytes))
            if kind == "KV" and self.on_cache is not None:
                self.on_cache()
        elif match := _CACHE_LINE.search(line):
            self.cache_mebibytes.append(float(match[1]))
        elif match := _WARMUP_LINE.search(line):
            self.warmup_side = int(match[1])

    def clear(self) -> None:
        """Forget everything; called before a model or a context is made."""
        self._problems.clear()
        self._buffers.clear()
        self.cache_mebibytes.clear()
        self.warmup_side = 0

    def problem(self) -> str:
        """The last error or warning lines in one sentence, or ``""``."""
        texts = [line.split(": ", 1)[-1] for line in self._problems]
        return "; ".join(dict.fromkeys(texts[-2:]))

    def buffer_bytes(self, labels: Mapping[str, str] | None = None) -> dict[str, int]:
        """Bytes llama.cpp allocated or mapped since `clear`, by component.

        Those on another device begin with its label, which is "gpu" unless `labels` has another.
        """
        total: dict[str, int] = {}
        for device, component, size_bytes in self._buffers:
            name = "weights_repacked" if device.upper() in REPACKED else component
            if not is_on_host(device):
                name = f"{(labels or {}).get(device, 'gpu')}_{name}"
            total[name] = total.get(name, 0) + size_bytes
        return total


LIBRARY_LOG = LibraryLog()


def is_on_host(buffer_type: str) -> bool:
    """Whether llama.cpp's memory of a name lies on the host."""
    name = buffer_type.upper()
    return name.startswith("CPU") or "HOST" in name


def set_params(structure: Any, **values: Any) -> None:
    """Set fields of one of llama.cpp's structures by their names.

    ctypes takes any name, and what a newer llama.cpp calls differently would be lost without a
    word. Raises BackendError for a field that the structure does not have.
    """
    known = {field[0] for field in structure._fields_}
    if missing := sorted(values.keys() - known):
        raise BackendError(
            f"{type(structure).__name__} of this llama.cpp has no {', '.join(missing)}",
            hint=f"pip install --force-reinstall --no-deps '{PACKAGE}'",
        )
    for name, value in values.items():
        setattr(structure, name, value)


_first_use = threading.Lock()


def library() -> ModuleType:
    """The low-level module, initialised once per process.

    Raises:
        MissingDependencyError: llama-cpp-python is not installed.
        BackendError: its library is not there, or is not for this system.
    """
    with _first_use:  # a second initialisation would take the log from the first one's listener
        return _initialised()


@functools.cache
def _initialised() -> ModuleType:
    try:
        llama_cpp: Any = llama_binary.import_functions("llama_cpp")
    except ImportError as error:
        raise MissingDependencyError(
            f"llama-cpp-python cannot be imported: {error}",
            hint=f"pip install '{PACKAGE}' (builds from source with a C++ compiler)",
        ) from error
    except (OSError, RuntimeError) as error:
        raise BackendError(
            f"llama.cpp's library cannot be loaded: {error}", hint=loading_hint(str(error))
        ) from error

    def receive(level: int, text: bytes | None, _data: Any) -> None:
        LIBRARY_LOG.write(level, text)

    callback = llama_cpp.llama_log_callback(receive)
    llama_cpp.llama_log_set(callback, None)
    llama_cpp.edgespec_log_callback = callback  # C keeps the pointer: it must outlive this call
    llama_cpp.llama_backend_init()
    _warn_of_another_build()
    if missing := missing_instructions(llama_cpp.llama_print_system_info().decode()):
        raise BackendError(
            f"llama.cpp was built for another processor: this one has no {', '.join(missing)}",
            hint="build it here: pip install --force-reinstall --no-deps --no-cache-dir "
            f"--no-binary llama-cpp-python {PACKAGE}",
        )
    module: ModuleType = llama_cpp
    return module


def _warn_of_another_build() -> None:
    """Say so where this is not the llama.cpp of the wheel: structures are passed to it by value."""
    text = ctypes.c_char_p
    version, commit = (
        (llama_binary.ggml_function(name, text)() or b"").decode(errors="replace")
        for name in ("ggml_version", "ggml_commit")
    )
    is_known = commit.startswith(llama_binary.COMMIT) or commit == "unknown"
    if version != llama_binary.GGML_VERSION or not is_known:
        warn(
            f"edgespec was not tested with this llama.cpp: ggml {version} of commit {commit}, "
            f"not {llama_binary.GGML_VERSION} of {llama_binary.COMMIT}",
            EdgespecWarning,
            stacklevel=2,
        )


def loading_hint(problem: str) -> str:
    """What to do about a library that does not load, by the words of the loader."""
    if "libcuda." in problem or "nvcuda" in problem:
        return (
            "it was built for NVIDIA GPUs, and their driver is missing: install that, or build for "
            f"the processor: pip install --force-reinstall --no-deps --no-cache-dir --no-binary "
            f"llama-cpp-python {PACKAGE}"
        )
    if "libcudart" in problem or "libcublas" in problem:
        return "it was built with CUDA, whose libraries are missing: add them to LD_LIBRARY_PATH"
    if named := os.environ.get("LLAMA_CPP_LIB_PATH"):
        return f"LLAMA_CPP_LIB_PATH is {named}: name the folder of libllama, or unset it"
    return f"pip install --force-reinstall --no-deps {PACKAGE}"


def missing_instructions(system_info: str) -> list[str]:
    """What a library was built with and this processor lacks, by llama.cpp's names.

    Its first step would end the process. `system_info` is what `llama_print_system_info` returns.
    Empty where the system does not tell what the processor has.
    """
    flags = host.cpu_flags()
    built_with = re.findall(r"(\w+) = 1", system_info)
    return [name for name in built_with if flags and _FLAGS.get(name, "") not in {"", *flags}]


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml, which llama.cpp computes with, by its signature. Raises as `library`."""
    library()
    return llama_binary.ggml_function(name, result, *arguments)


def quick_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama.cpp that returns at once, for loops over a vocabulary.

    A call does not let other threads of Python go on, which takes longer than the call, and far
    longer where one does.
    """
    handle = library()._lib._handle
    return llama_binary.function_of(ctypes.PyDLL(None, handle=handle), name, result, *arguments)


@contextmanager
def interrupts_kept() -> Iterator[list[int]]:
    """A Ctrl-C that comes while llama.cpp calls back takes effect at the end.

    Python acts on it in the next bytecode that runs, which is one of the callback, maybe before its
    first statement, and C drops what a callback raises. Every call that logs calls back. At the
    end, also when the body raises, whoever handled signals before is told of each: Python's own
    handler raises KeyboardInterrupt, a surrounding `interrupts_kept` keeps it on. Other threads are
    never interrupted, nor is a process in which no handler of Python's would run.
    Yields a list that is empty until one comes.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
        for number in came:
            before(number, None)
