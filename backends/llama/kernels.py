"""edgespec's matrix kernels in llama.cpp: a buffer type of its CPU backend packs weights for them.

They are made known to it once per process, by the first load (`model_params` sees to that), and
used by those models that are loaded `with kernels(True)`. Other users of the library may be
decoding then: nothing that they read is moved. Whatever does not fit leaves plain llama.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgespec.backends.llama.library import ggml_function, library
from edgespec.errors import BackendError
from edgespec.memory.device import host
from edgespec.memory.device.kernels import (
    kernel_function,
    kernels_key,
    missing_kernels,
    packed_bytes,
    refuse_kernels,
)
from edgespec.memory.store import cache
from edgespec.models.gguf.ggml_types import GGML_NUMBERS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_NAMES = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS TQ2_0 MXFP4 NVFP4 "
    "F32 F16 BF16"
)
KERNEL_TYPES = tuple(GGML_NUMBERS[name] for name in _NAMES.split())
_CHECKED_ROWS, _CHECKED_COLUMNS, _CHECKED_TOKENS = 32, 512, 3
# Both sides round activations to 8 bits, in blocks of other sizes: 0.3% to 0.9% is usual.
_MOST_DIFFERENCE = 0.02
_KIND = "kernels"  # of what is stored
_P = ctypes.c_void_p
_first_use = threading.Lock()
_attached_reason: list[str] = []  # why the kernels stay out, once that is known


def refusal_of_kernels(*, compare: bool = True) -> str:
    """Why edgespec's kernels stay out, or "" where llama.cpp has them, which it gets here.

    They are used only after products of every type agree with ggml's own; a process that computes
    nothing does without that.
    """
    with _first_use:  # a second thread would put them into llama.cpp's list once more
        if not _attached_reason:
            reason = missing_kernels()
            if not reason:
                is_alone, lib = "llama_cpp" not in sys.modules, library()
                attach = kernel_function(
                    "edgespec_kernels_attach", ctypes.c_char_p, _P, ctypes.c_int
                )
                reason = (attach(lib._lib._handle, is_alone) or b"").decode()
                if reason := reason or (_check() if compare else ""):
                    refuse_kernels(reason)
            _attached_reason.append(reason)
        return _attached_reason[0]


def model_params() -> Any:
    """What models are loaded with: the library's defaults, where they are safe.

    Whoever asks is about to load a model, so the kernels are made known first, and llama.cpp's own
    for AMX are left out of what models are offered.
    """
    refusal_of_kernels()
    with _first_use:
        _leave_out_amx()
    return library().llama_model_default_params()


@functools.cache
def _leave_out_amx() -> None:
    """Models that are loaded from now on do without llama.cpp's kernels for AMX.

    Some compilers (GCC 12 for one) drop most of what these are configured with, and the first step
    ends in a segmentation fault: https://github.com/ggml-org/llama.cpp/issues/20824. Its one switch
    for them also turns off ours and the weights that it rearranges.
    """
    if b"AMX_INT8 = 1" not in library().llama_print_system_info():
        return
    registry = ggml_function("ggml_backend_cpu_reg", _P)()
    device_of = ggml_function("ggml_backend_reg_dev_get", _P, _P, ctypes.c_size_t)
    address = ggml_function("ggml_backend_reg_get_proc_address", _P, _P, ctypes.c_char_p)(
        registry, b"ggml_backend_dev_get_extra_bufts"
    )
    # What llama.cpp offers a model's weights to, in order; a null ends them.
    offered = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(device_of(registry, 0))
    leave_out(offered, "AMX")


def leave_out(types: Any, name: str) -> None:
    """Take the buffer types of a name out of a list that ends with a null, in its own memory."""
    name_of = ggml_function("ggml_backend_buft_name", ctypes.c_char_p, _P)
    at = 0
    while types[at] is not None:
        if name_of(types[at]) != name.encode():
            at += 1
            continue
        for place in itertools.count(at):
            types[place] = types[place + 1]
            if types[place] is None:
                break


@contextmanager
def kernels(
    use: bool,
    *,
    tied: bool = False,
    threads: int = 1,
    packed_file: int = -1,
    is_new: bool = False,
    writes_out: bool = False,
) -> Iterator[None]:
    """Models that this thread loads in the body use them, or do not; `threads` pack weights.

    Of a `tied` model, whose embedding table is its head, too, the table is kept once. What a
    `packed_file` has, by its handle, is mapped, and the model's file is not read for it. If it
    `is_new`, weights are packed into it, and if it `writes_out`, leave memory as they are.
    """
    if refusal_of_kernels():
        yield
        return
    enable = kernel_function("edgespec_kernels_enable", None, *6 * [ctypes.c_int])
    enable(use, tied, threads, packed_file, is_new, writes_out)
    try:
        yield
    finally:
        enable(False, False, 1, -1, False, False)


def spread_logits() -> None:
    """A head's few logits are spread over its model's vocabulary by the kernels, from now on."""
    if not refusal_of_kernels():
        kernel_function("edgespec_kernels_spread", None)()


def packed_type() -> int:
    """ggml's handle of the buffer type; only where `refusal_of_kernels` is empty."""
    return int(kernel_function("edgespec_kernels_buffer_type", _P)())


def _check() -> str:
    """Why the kernels stay out: a product of theirs is not ggml's.

    What is computed follows from their code, ggml's and the processor, so that it is kept for these
    that all products agreed.
    """
    key = f"{kernels_key()} | {host.llama_build()} | {host.cpu_name()}"
    if cache.load(_KIND, key) is not None:
        return ""
    weights = _numbers(_CHECKED_ROWS, _CHECKED_COLUMNS)
    x = _numbers(_CHECKED_TOKENS, _CHECKED_COLUMNS)
    for kind in KERNEL_TYPES:
        if packed_bytes(kind, _CHECKED_ROWS, _CHECKED_COLUMNS) == 0:
            continue
        if difference(kind, weights, x) > _MOST_DIFFERENCE:
            return "a product differs from ggml's own"
    cache.store(_KIND, key, {})
    return ""


def _numbers(rows: int, columns: int) -> NDArray[np.float32]:
    """Numbers between -1 and 1 without a pattern that matters; numpy.random takes 8 MiB."""
    import numpy as np

    values: NDArray[np.float32] = np.sin(np.arange(rows * columns, dtype=np.float64) ** 1.7)
    return values.astype(np.float32).reshape(rows, columns)


def difference(kind: int, weights: NDArray[np.float32], x: NDArray[np.float32]) -> float:
    """How far a product is from ggml's own: root mean square, over that of ggml's."""
    import numpy as np

    from edgespec.backends.llama.ggml_products import MatrixProduct, quantized

    data, shape = quantized(kind, weights), weights.shape[::-1]
    results = []
    for buffer_type in (None, packed_type()):
        try:
            with MatrixProduct(
                kind, data, shape, tokens=len(x), threads=2, buffer_type=buffer_type
            ) as product:
                results.append(product(x))
        except BackendError:
            return float("inf")
    theirs, ours = results
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))
