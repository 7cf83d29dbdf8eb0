"""The GPUs llama.cpp sees, with their memory.

Asks ggml's device registry (`ggml/include/ggml-backend.h`) through ctypes. Loading the libraries
takes a moment, so they are loaded only where llama.cpp was built for a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.memory import device

_GPU, _INTEGRATED_GPU = 1, 2  # values of ggml_backend_dev_type


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU; `shares_memory` means that its memory is the processor's."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    shares_memory: bool


def accelerators() -> tuple[Accelerator, ...]:
    """All GPUs llama.cpp can use now; empty without one, or when its libraries do not load."""
    if not device.llama_accelerators():
        return ()
    library = _ggml()
    if library is None:
        return ()
    found = (_describe(library, number) for number in range(library.ggml_backend_dev_count()))
    return tuple(one for one in found if one is not None)


def _describe(library: Any, number: int) -> Accelerator | None:
    handle = library.ggml_backend_dev_get(number)
    kind = library.ggml_backend_dev_type(handle)
    if kind not in (_GPU, _INTEGRATED_GPU):
        return None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    return Accelerator(
        name=library.ggml_backend_dev_name(handle).decode(errors="replace"),
        description=library.ggml_backend_dev_description(handle).decode(errors="replace"),
        total_bytes=total.value,
        free_bytes=free.value,
        shares_memory=kind == _INTEGRATED_GPU or device.has_unified_memory(),
    )


@functools.cache
def _ggml() -> Any:
    """llama.cpp's device registry, or None."""
    spec = importlib.util.find_spec("llama_cpp")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for name in ("libggml.so", "libggml.dylib", "ggml.dll"):
            path = Path(folder) / "lib" / name
            if path.exists():
                try:
                    return _with_types(ctypes.CDLL(str(path)))
                except (OSError, AttributeError):
                    return None
    return None


def _with_types(library: Any) -> Any:
    """Tell ctypes the signatures. Raises AttributeError for a library without a registry."""
    size_pointer = ctypes.POINTER(ctypes.c_size_t)
    for name, result, arguments in (
        ("dev_count", ctypes.c_size_t, []),
        ("dev_get", ctypes.c_void_p, [ctypes.c_size_t]),
        ("dev_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("dev_description", ctypes.c_char_p, [ctypes.c_void_p]),
        ("dev_type", ctypes.c_int, [ctypes.c_void_p]),
        ("dev_memory", None, [ctypes.c_void_p, size_pointer, size_pointer]),
    ):
        function = getattr(library, f"ggml_backend_{name}")
        function.restype, function.argtypes = result, arguments
    return library
