"""edgespec's own matrix kernels: whether this installation and this processor have them.

Planning asks how many bytes they take, and imports no inference library for that.
`backends/llama/kernels.py` hands them to llama.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.memory.device.llama_binary import function_of

_missing: list[str] = []
_SCALAR = "scalar"  # the reference: for processors without any other


def kernel_library() -> Path | None:
    """The compiled library; None where pip found no C++ compiler."""
    package = find_spec("edgespec.backends.kernels")  # located, and not imported
    folders = package.submodule_search_locations if package is not None else None
    for folder in map(Path, folders or ()):
        for suffix in EXTENSION_SUFFIXES:
            if (file := folder / f"_kernels{suffix}").exists():
                return file
    return None


def missing_kernels() -> str:
    """Why there are no kernels here, in words that follow a "because"; empty where there are.

    Nothing else may decide it: what kernels pack and attend to follows from this answer.
    """
    return _missing[0] if _missing else _unusable()


@functools.cache
def _unusable() -> str:
    if kernel_library() is None:
        return "they were not compiled when edgespec was installed"
    try:
        instructions = instruction_set()
    except OSError as error:
        return f"their library does not load: {error}"
    return "there are none for this processor" if instructions == _SCALAR else ""


def refuse_kernels(reason: str) -> None:
    """From now on plans of this process know that llama.cpp did not take them, and why."""
    _missing.append(reason)


def instruction_set() -> str:
    """What they are written for that this processor has: "avx512_vnni" and so on."""
    name: bytes = kernel_function("edgespec_kernels_instructions", ctypes.c_char_p)()
    return name.decode()


def packed_bytes(ggml_type: int, rows: int, columns: int) -> int:
    """Bytes of a matrix as the kernels read it; 0 for one that they leave to llama.cpp.

    It is 0 from the moment they are refused, so a size may be kept and what is missing may not.
    """
    return 0 if missing_kernels() else _packed_bytes(ggml_type, rows, columns)


@functools.cache
def _packed_bytes(ggml_type: int, rows: int, columns: int) -> int:
    arguments = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function = kernel_function("edgespec_kernels_packed_bytes", ctypes.c_size_t, *arguments)
    return int(function(ggml_type, rows, columns))


def attends(key_length: int, value_length: int) -> bool:
    """Whether attention over f16 keys and values of these lengths is the kernels' own."""
    types = ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    if missing_kernels():
        return False
    return bool(kernel_function("edgespec_kernels_attends", *types)(key_length, value_length))


@functools.cache
def kernels_key() -> str:
    """What step times with the kernels depend on: their code and the instruction set."""
    file = kernel_library()
    if file is None:
        return "no kernels"
    code = hashlib.blake2b(file.read_bytes(), digest_size=6).hexdigest()
    return f"kernels {code} {instruction_set()}"


def open_library() -> ctypes.CDLL:
    """The library, opened once per process. Raises OSError where there is none that loads."""
    file = kernel_library()
    if file is None:
        raise FileNotFoundError("edgespec's kernels were not compiled when it was installed")
    return _open(str(file))


@functools.cache
def _open(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def kernel_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the library by its signature. Raises as `open_library`."""
    return function_of(open_library(), name, result, *arguments)
