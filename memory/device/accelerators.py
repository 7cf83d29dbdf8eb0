"""The GPUs llama.cpp sees, with their memory.

Asks ggml's device registry (`ggml/include/ggml-backend.h`), which alone knows them: a GPU may be
built in under any file name, come as a plug-in, or be another machine's. Opening the libraries
takes 8 ms without a GPU, and 6 MiB, nearly all of it pages of their files; a run needs them anyway.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from edgespec.errors import UnsupportedError
from edgespec.memory.device import host
from edgespec.memory.device.llama_binary import ggml_function, kernel_files
from edgespec.memory.device.structures import DeviceProperties

CPU, GPU, INTEGRATED_GPU = 0, 1, 2  # values of ggml_backend_dev_type
_RPC = "RPC"
_NO_GPUS = ("BLAS", "CPU", _RPC)  # what else registers itself
_VULKAN = "vulkan"  # which registers itself only where its driver starts
_VISIBLE = {_VULKAN: "GGML_VK_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_first_use = threading.Lock()
# Name, result and arguments.
_FUNCTIONS: tuple[tuple[Any, ...], ...] = (
    ("ggml_backend_reg_count", ctypes.c_size_t),
    ("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t),
    ("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p),
    ("ggml_backend_dev_count", ctypes.c_size_t),
    ("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t),
    ("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p),
    ("ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.c_void_p),
    ("ggml_log_get", None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p)),
    ("ggml_log_set", None, ctypes.c_void_p, ctypes.c_void_p),
)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU, or a worker's device.

    `shares_memory`: its memory is the processor's. `maps_files`: it computes with pages of a mapped
    file; others have copies of their own, also where the memory is shared.
    """

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    shares_memory: bool
    worker: str = ""  # HOST:PORT of the worker it belongs to
    number: int = 0  # among that worker's devices
    bytes_per_s: float = 0.0  # of its memory; 0 where nobody measured it
    latency_s: float = 0.0  # of a trip there and back
    maps_files: bool = False


def accelerators() -> tuple[Accelerator, ...]:
    """All GPUs llama.cpp can use now; empty without one, or when its libraries do not load.

    As llama.cpp chooses (`llama.cpp: src/llama.cpp`, `llama_prepare_model_devices`): a GPU that two
    libraries drive counts once, and one that is part of the processor only where there is no other.
    """
    ids, gpus = set(), []  # with memory of their own, each once
    integrated: dict[int | None, list[Accelerator]] = {}  # by the kind of library that drives them
    for handle, told in registered_devices():
        if told.type not in (GPU, INTEGRATED_GPU):
            continue
        is_integrated = told.type == INTEGRATED_GPU
        gpu = Accelerator(
            name=told.name.decode(errors="replace"),
            description=told.description.decode(errors="replace"),
            total_bytes=told.memory_total,
            free_bytes=told.memory_free,
            shares_memory=is_integrated or host.has_unified_memory(),
            maps_files=told.caps.buffer_from_host_ptr,
        )
        if is_integrated:
            registry = _ggml().ggml_backend_dev_backend_reg(handle)
            integrated.setdefault(registry, []).append(gpu)
        elif told.device_id is None or told.device_id not in ids:  # its slot, where that is told
            ids.add(told.device_id)
            gpus.append(gpu)
    return tuple(gpus or next(iter(integrated.values()), ()))


def registered_devices() -> list[tuple[int, DeviceProperties]]:
    """ggml's handles of all devices, and what it says of each now; none where it does not load."""
    library, found = _ggml(), list[tuple[int, DeviceProperties]]()
    for number in range(0 if library is None else library.ggml_backend_dev_count()):
        handle, told = library.ggml_backend_dev_get(number), DeviceProperties()
        library.ggml_backend_dev_get_props(handle, ctypes.byref(told))
        found.append((handle, told))
    return found


def gpu_kinds() -> tuple[str, ...]:
    """Kinds of GPU llama.cpp was built for: "cuda", "metal", ...; whether there is one or not."""
    kinds = {name.lower() for name in _registered() if name not in _NO_GPUS}
    if any(f"ggml-{_VULKAN}" in file.name for file in kernel_files()):
        kinds.add(_VULKAN)
    return tuple(sorted(kinds))


def missing_gpu() -> str:
    """Why llama.cpp uses no GPU, in one clause; "" where it sees one."""
    if accelerators():
        return ""
    kinds = gpu_kinds()
    if not kinds:
        return "llama.cpp was built without GPU support"
    names = (_VISIBLE[kind] for kind in kinds if kind in _VISIBLE)
    narrowed = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    reason = f"llama.cpp was built for {', '.join(kinds)} but sees no GPU"
    return f"{reason} with {' and '.join(narrowed)}" if narrowed else reason


def has_rpc() -> bool:
    """Whether llama.cpp was built with what workers need."""
    return _RPC in _registered()


def require_rpc() -> None:
    """Raises UnsupportedError where llama.cpp was built without what workers need."""
    if not has_rpc():
        raise UnsupportedError(
            "this llama.cpp cannot use workers: it was built without RPC",
            hint="make clean install; or see docs/workers.md",
        )


def _registered() -> list[str]:
    """Names of the parts that llama.cpp has for devices."""
    library = _ggml()
    if library is None:
        return []
    handles = map(library.ggml_backend_reg_get, range(library.ggml_backend_reg_count()))
    return [library.ggml_backend_reg_name(handle).decode() for handle in handles]


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
