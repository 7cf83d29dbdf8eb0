"""The GPUs llama.cpp sees, with their memory.

Asks ggml's device registry (`ggml/include/ggml-backend.h`), which alone knows them: a GPU may be
built in under any file name, come as a plug-in, or be another machine's. Opening the libraries
takes 8 ms without a GPU, and 6 MiB, nearly all of it pages of their files; a run needs them anyway.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from edgespec.errors import UnsupportedError
from edgespec.memory.device import host
from edgespec.memory.device.llama_binary import ggml_function

_GPU, _INTEGRATED_GPU = 1, 2  # values of ggml_backend_dev_type
_RPC = "RPC"
_NO_GPUS = ("BLAS", "CPU", _RPC)  # what else registers itself
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_first_use = threading.Lock()
_SIZES = ctypes.POINTER(ctypes.c_size_t)
# Name, result and arguments.
_FUNCTIONS: tuple[tuple[Any, ...], ...] = (
    ("ggml_backend_reg_count", ctypes.c_size_t),
    ("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t),
    ("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p),
    ("ggml_backend_dev_count", ctypes.c_size_t),
    ("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t),
    ("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p),
    ("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p),
    ("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p),
    ("ggml_backend_dev_memory", None, ctypes.c_void_p, _SIZES, _SIZES),
    ("ggml_log_get", None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p)),
    ("ggml_log_set", None, ctypes.c_void_p, ctypes.c_void_p),
)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU, or a worker's device; `shares_memory`: its memory is the processor's."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    shares_memory: bool
    worker: str = ""  # HOST:PORT of the worker it belongs to
    number: int = 0  # among that worker's devices
    bytes_per_s: float = 0.0  # of its memory; 0 where nobody measured it
    latency_s: float = 0.0  # of a trip there and back


def accelerators() -> tuple[Accelerator, ...]:
    """All GPUs llama.cpp can use now; empty without one, or when its libraries do not load."""
    library = _ggml()
    if library is None:
        return ()
    found = (_describe(library, number) for number in range(library.ggml_backend_dev_count()))
    return tuple(one for one in found if one is not None)


def gpu_kinds() -> tuple[str, ...]:
    """Kinds of GPU llama.cpp was built for: "cuda", "metal", ...; whether there is one or not."""
    return tuple(sorted(name.lower() for name in _registered() if name not in _NO_GPUS))


def has_rpc() -> bool:
    """Whether llama.cpp was built with what workers need."""
    return _RPC in _registered()


def require_rpc() -> None:
    """Raises UnsupportedError where llama.cpp was built without what workers need."""
    if not has_rpc():
        raise UnsupportedError(
            "this llama.cpp cannot use workers: it was built without RPC",
            hint="make install RPC=1; or see docs/workers.md",
        )


def _registered() -> list[str]:
    """Names of the parts that llama.cpp has for devices."""
    library = _ggml()
    if library is None:
        return []
    handles = map(library.ggml_backend_reg_get, range(library.ggml_backend_reg_count()))
    return [library.ggml_backend_reg_name(handle).decode() for handle in handles]


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
        shares_memory=kind == _INTEGRATED_GPU or host.has_unified_memory(),
    )


def _ggml() -> Any:
    """llama.cpp's device registry, or None."""
    with _first_use:  # two threads would each give the log back to the other's deaf listener
        return _asked_once()


@functools.cache
def _asked_once() -> Any:
    """The registry, its GPUs' drivers initialised without a word in the terminal."""
    try:
        functions = {name: ggml_function(name, *rest) for name, *rest in _FUNCTIONS}
    except (OSError, RuntimeError, AttributeError, ImportError):
        return None
    library = SimpleNamespace(**functions)
    listener, data = ctypes.c_void_p(), ctypes.c_void_p()
    library.ggml_log_get(ctypes.byref(listener), ctypes.byref(data))
    deaf = _LISTENER(lambda _level, _text, _data: None)
    library.ggml_log_set(deaf, None)
    library.ggml_backend_dev_count()
    library.ggml_log_set(listener, data)
    return library
