"""A process that asks llama.cpp what models would allocate, and allocates nothing.

It is one of its own because llama.cpp may end the process over an odd header: a guest of
`edgespec.memory.bytes.simulation`, which writes its questions.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.backends.base import Capabilities
from edgespec.backends.llama.adapters import Adapters
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.hidden_rows import keep_layer_input
from edgespec.backends.llama.kernels import kernels, refusal_of_kernels
from edgespec.backends.llama.library import (
    LIBRARY_LOG,
    REPACKED,
    ggml_function,
    is_on_host,
    set_params,
)
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import GPU, HOST, Device, RunConfig
from edgespec.memory.bytes.simulation import MOST_BYTES, DeviceBytes
from edgespec.memory.device.kernels import kernel_function
from edgespec.memory.device.llama_binary import function_of
from edgespec.memory.device.structures import (
    RESULT_GRAPH,
    BufferBytes,
    ClipContextParams,
    ClipInitResult,
    GraphPlan,
)
from edgespec.models.processes import answer_questions, limit_memory

_LAY_OUT = "_ZN13llama_context13sched_reserveEv"  # llama_context::sched_reserve()
# llama_context::get_gf_res_reserve() const, an llm_graph_result, and what that says of itself with
# llm_graph_result::get_max_nodes() const.
_RESULT = "_ZNK13llama_context18get_gf_res_reserveEv"
_MOST_NODES = "_ZNK16llm_graph_result13get_max_nodesEv"
# clip_init() and clip_free() of libmtmd, and its own choice of attention.
_INIT, _FREE, _AUTO = "_Z9clip_initPKc19clip_context_params", "_Z9clip_freeP8clip_ctx", -1
_UNKNOWN_WORK = 1 << 20  # of a thread: tiles of products and of attention
_ROUNDED = 0.005  # MiB that a number of the log may be too small by
_NO_MEMORY = "bad_alloc"  # in llama.cpp's words
_TOO_MUCH = f"llama.cpp's tables for this model take more than {MOST_BYTES >> 30} GiB"
_NOTHING = DeviceBytes(0, 0, 0, 0)
_Loaded = tuple[Any, Adapters | None, dict[str, int]]  # a model, adapters, bytes by label
_MOST_TYPES = 64  # kinds of memory that llama.cpp tells of


def _answer(request: dict[str, Any]) -> Any:
    try:
        return _buffers(**request) if "projector" in request else _allocations(**request)
    except Exception as problem:
        no_memory = isinstance(problem, MemoryError) or _NO_MEMORY in f"{problem}"
        return {"error": _TOO_MUCH if no_memory else f"{problem}"}


def _buffers(projector: str, most_tokens: int, on_gpu: bool, weight_bytes: int) -> dict[str, int]:
    """What libmtmd would compute in, for an image of which side. Raises BackendError.

    Memory for weights is asked for, and not written to. C++ names are others on Windows.
    """
    from edgespec.backends.llama.vision import mtmd

    limit_memory(MOST_BYTES + 2 * weight_bytes)
    library = mtmd()._libmtmd
    init = function_of(library, _INIT, ClipInitResult, ctypes.c_char_p, ClipContextParams)
    free = function_of(library, _FREE, None, ctypes.c_void_p)
    LIBRARY_LOG.clear()
    params = ClipContextParams()
    set_params(params, use_gpu=on_gpu, flash_attn_type=_AUTO, warmup=True, no_alloc=True)
    set_params(params, image_max_tokens=most_tokens or -1)
    opened = init(os.fsencode(projector), params)
    found = {
        "compute_bytes": sum(LIBRARY_LOG.buffer_bytes().values()),
        "side": LIBRARY_LOG.warmup_side,
    }
    for one in opened.contexts:
        free(one)
    if not any(opened.contexts):
        raise BackendError(f"llama.cpp cannot load {Path(projector).name}: {LIBRARY_LOG.problem()}")
    return found


_MODELS: dict[str, _Loaded] = {}  # so far, without their weights


def _allocations(folder: str, contexts: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes by device of each context; later ones may refer to earlier ones by `beside`."""
    made: list[SimulatedContext] = []
    with ExitStack() as opened:
        for one in contexts:
            given = one["config"]
            given["devices"] = tuple(Device(**each) for each in given["devices"])
            given["overrides"] = tuple(map(tuple, given["overrides"]))
            given["lora"] = tuple((Path(path), scale) for path, scale in given["lora"])
            config = RunConfig(**given)
            context = SimulatedContext(config, one["tied_bytes"])
            where = config.gpu_layers, config.devices, config.overrides
            loading = where, config.kernels, config.head, one["adapters"]
            key = repr((one["skeleton"], one["tied_bytes"], loading))
            if key not in _MODELS:
                _MODELS[key] = context.loaded(f"{folder}/{one['skeleton']}.gguf")
            beside = None if one["beside"] is None else made[one["beside"]]
            opened.callback(context.close)
            context.make(_MODELS[key], one["changes"], beside)
            made.append(context)
        return {"contexts": [context.allocated_bytes() for context in made]}


class SimulatedContext(LlamaContext):
    """A context that allocates nothing, as a model that is loaded so would have it.

    `tied_bytes` are those of an embedding table that is the head, too.
    """

    _is_simulated = True

    def __init__(self, config: RunConfig, tied_bytes: int) -> None:
        self._captured_layers, self._tied_bytes = config.captured_layers, tied_bytes
        super().__init__(replace(config, mapped=False, tied=tied_bytes > 0, captured_layers=()))
        self.capabilities = Capabilities(True, config.max_leaves > 1, True)

    def loaded(self, path: str) -> _Loaded:
        """A model without its weights, and its adapters as they are, which stay loaded.

        Raises BackendError.
        """
        refusal_of_kernels(compare=False)
        LIBRARY_LOG.clear()
        self._load(path, None)
        if not self.settings.lora:
            return self._model, None, {}
        LIBRARY_LOG.clear()
        adapters = Adapters(self.lib, self._model, self.settings.lora)
        log_bytes = LIBRARY_LOG.buffer_bytes(self._placed.labels)
        labels = [HOST, *self._placed.labels.values()]
        names = {label: "adapters" if label == HOST else f"{label}_adapters" for label in labels}
        found = {label: log_bytes[name] for label, name in names.items() if name in log_bytes}
        return self._model, adapters, found

    def make(self, loaded: _Loaded, changes: dict[str, int], beside: LlamaContext | None) -> None:
        """Make the context. Raises BackendError."""
        self._model, self.adapters, self._adapter_bytes = loaded

        def adjust(params: Any) -> None:
            set_params(params, n_rs_seq=self.settings.snapshots, **changes)
            if beside is not None:
                set_params(params, ctx_other=beside.handle)

        LIBRARY_LOG.clear()
        # Weights that lie nowhere ask again; a head asks about the packed table of its model.
        with kernels(self.settings.kernels, tied=True):
            self._make_context(adjust)
            self._cache_bytes = sum((one + _ROUNDED) * 2**20 for one in LIBRARY_LOG.cache_mebibytes)
            for layer in self._captured_layers:
                keep_layer_input(self, layer)
            if self._captured_layers or self.adapters:
                # Before its next step llama.cpp would do so itself, but no step can be made here.
                function_of(self.lib._lib, _LAY_OUT, None, ctypes.c_void_p)(self.handle)

    def allocated_bytes(self) -> dict[str, DeviceBytes]:
        """Bytes by label of the device: exact, or as the log rounds them."""
        try:
            found = allocated(self)
        except OSError:
            found = _with_work(self, self._bytes_in_log())
        for label, size_bytes in self._adapter_bytes.items():
            found[label] = found.get(label, _NOTHING)._replace(adapters=size_bytes)
        return found

    def _bytes_in_log(self) -> dict[str, DeviceBytes]:
        """As much as the log tells: buffers and caches, rounded up to hundredths of a MiB.

        All weights count as rewritten, a tied table twice. Weights and caches are shared among the
        devices by their layers.
        """
        log_bytes = LIBRARY_LOG.buffer_bytes(self._placed.labels)
        layers = {one.label: one.layers for one in self.settings.devices}
        everything = int(self.lib.llama_model_n_layer(self._model)) + 1
        layers[HOST] = max(0, everything - sum(layers.values()))
        weights = int(self.lib.llama_model_size(self._model)) + self._tied_bytes
        found = {}
        for label, count in layers.items():
            prefix = "" if label == HOST else f"{label}_"
            part = count / everything
            compute = log_bytes.get(f"{prefix}compute", 0)
            found[label] = DeviceBytes(
                0, round(part * weights), round(part * self._cache_bytes), compute
            )
        return found

    def close(self) -> None:
        """Free the context; the model stays loaded."""
        if self.handle:
            self.lib.llama_free(self.handle)
        self.handle = self._model = None


def allocated(context: LlamaContext) -> dict[str, DeviceBytes]:
    """Bytes of a context and its model, by label of the device.

    Raises OSError where edgespec's library, which reads llama.cpp's answer, was not compiled.
    """
    filled = (BufferBytes * _MOST_TYPES)()
    types = *3 * [ctypes.c_void_p], ctypes.c_int
    function = kernel_function("edgespec_memory_breakdown", ctypes.c_int, *types)
    count = function(context.lib._lib._handle, context.handle, filled, _MOST_TYPES)
    if count < 0:
        raise OSError("this llama.cpp does not tell what it allocates")
    found: dict[str, list[int]] = {}
    for one in filled[:count]:
        name = one.name.decode()
        label = HOST if is_on_host(name) else context._placed.labels.get(name, GPU)
        there = found.setdefault(label, [0, 0, 0, 0])
        there[name in REPACKED] += one.model
        there[2] += one.context
        there[3] += one.compute
    return _with_work(context, {label: DeviceBytes(*sizes) for label, sizes in found.items()})


def _with_work(context: LlamaContext, found: dict[str, DeviceBytes]) -> dict[str, DeviceBytes]:
    """With what ggml asks for to compute the largest graph.

    Where that is not found: a batch's activations, which are in the buffer for results, and scratch
    of each thread.
    """
    here, threads = found.get(HOST, DeviceBytes(0, 0, 0, 0)), context.settings.threads
    work = here.compute + threads * _UNKNOWN_WORK
    with suppress(AttributeError):  # C++ names are others on Windows, and kernels may be plug-ins
        arguments = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        plan = ggml_function("ggml_graph_plan", GraphPlan, *arguments)
        if graph := _graph(context):
            work = plan(graph, threads, None).work_size
    return {**found, HOST: here._replace(work=work)}


def _graph(context: LlamaContext) -> int | None:
    """The address of the graph that the context's buffers were laid out for last.

    Raises AttributeError where llama.cpp does not tell.
    """
    library = context.lib._lib
    nodes_of = function_of(library, _MOST_NODES, ctypes.c_int64, ctypes.c_void_p)
    result = function_of(library, _RESULT, ctypes.c_void_p, ctypes.c_void_p)(context.handle)
    graph, most_nodes = (ctypes.c_uint64 * (RESULT_GRAPH + 2)).from_address(result)[RESULT_GRAPH:]
    return graph if most_nodes == nodes_of(result) else None


if __name__ == "__main__":
    answer_questions(_answer)
