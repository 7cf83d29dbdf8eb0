"""Structures of llama.cpp and ggml that edgespec reads or fills in memory, as 0.3.36 has them.

All that is declared of them in Python is here, by the names of their headers: a test compiles
those and compares every offset. What C++ reads is in `backends/kernels/ggml_structures.h`.
"""

from __future__ import annotations

import ctypes

_P, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class DeviceCapabilities(ctypes.Structure):
    """struct ggml_backend_dev_caps"""

    _fields_ = tuple(
        (name, ctypes.c_bool)
        for name in ("async", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support")
    )


class DeviceProperties(ctypes.Structure):
    """struct ggml_backend_dev_props"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", _SIZE),
        ("memory_total", _SIZE),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", DeviceCapabilities),
    )


class BufferBytes(ctypes.Structure):
    """struct EdgespecBufferBytes of `backends/kernels/llama_memory.cpp`"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("model", _SIZE),
        ("context", _SIZE),
        ("compute", _SIZE),
    )


class LoadedWeights(ctypes.Structure):
    """struct edgespec::Loaded of `backends/kernels/ggml_plugin.cpp`"""

    _fields_ = (
        ("begin", _P),
        ("size", _SIZE),
        ("layout", ctypes.c_uint64),
        ("is_mapped", ctypes.c_int),
    )


class ExpertCounts(ctypes.Structure):
    """struct edgespec::ExpertCounts of `backends/kernels/expert_cache.h`"""

    _fields_ = (
        ("read_bytes", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("waited_ns", ctypes.c_uint64),
        ("problem", ctypes.c_int),
        ("again", ctypes.c_uint32 * 128),
        ("first", ctypes.c_uint32 * 128),
    )


# llm_graph_result (`llama.cpp: src/llama-graph.h`): the word of the graph, whose number of nodes is
# in the next one.
RESULT_GRAPH = 32
MOST_BLOCKS = 8


class BlockRows(ctypes.Structure):
    """struct edgespec::Taken of `backends/kernels/ggml_outputs.cpp`"""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("blocks", ctypes.c_int32 * MOST_BLOCKS),
        ("width", ctypes.c_int64),
        ("room", ctypes.c_int64),
        ("used", ctypes.c_int64 * MOST_BLOCKS),
        ("rows", _P),
    )


class ClipContextParams(ctypes.Structure):
    """struct clip_context_params of llama.cpp's tools/mtmd/clip.h, which no wheel has."""

    _fields_ = (
        ("use_gpu", ctypes.c_bool),
        ("device", _P),
        ("flash_attn_type", ctypes.c_int),
        ("image_min_tokens", ctypes.c_int),
        ("image_max_tokens", ctypes.c_int),
        ("warmup", ctypes.c_bool),
        ("cb_eval", _P * 2),
        ("no_alloc", ctypes.c_bool),
        ("progress", _P * 2),
    )


class ClipInitResult(ctypes.Structure):
    """struct clip_init_result of the same: what sees, what hears, and what speaks."""

    _fields_ = (("contexts", _P * 3),)


class GraphPlan(ctypes.Structure):
    """struct ggml_cplan"""

    _fields_ = (
        ("work_size", _SIZE),
        ("work_data", _P),
        ("n_threads", ctypes.c_int),
        ("threadpool", _P),
        ("abort_callback", _P),
        ("abort_callback_data", _P),
        ("use_ref", ctypes.c_bool),
    )


class InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


TO_FLOAT = ctypes.CFUNCTYPE(None, _P, _P, ctypes.c_int64)


class TypeTraits(ctypes.Structure):
    """struct ggml_type_traits"""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", _SIZE),
        ("is_quantized", ctypes.c_bool),
        ("to_float", TO_FLOAT),
        ("from_float_ref", _P),
    )


class Tensor(ctypes.Structure):
    """struct ggml_tensor"""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", _P),
    ("ne", ctypes.c_int64 * 4),
    ("nb", _SIZE * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", _P),
    ("view_offs", _SIZE),
    ("data", _P),
    ("name", ctypes.c_char * 64),
    ("extra", _P),
    ("padding", ctypes.c_char * 8),
]
