"""A model and a context of it in llama.cpp: loaded, computed with, and freed.

What is in the context's cache is the business of the backend.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from edgespec.backends.base import Capabilities, Logits
from edgespec.backends.llama.adapters import Adapters
from edgespec.backends.llama.huge_pages import HugePages
from edgespec.backends.llama.kernels import kernels, model_params
from edgespec.backends.llama.library import LIBRARY_LOG, interrupts_kept, library, set_params
from edgespec.backends.llama.packed_weights import PackedWeights
from edgespec.backends.llama.team import TEAMS
from edgespec.backends.llama.tokenizer import LlamaTokenizer
from edgespec.backends.llama.workers import Placed
from edgespec.errors import BackendError, DoesNotFitError, EdgespecError, no_memory_hint
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.llama_binary import PACKAGE, function_of
from edgespec.memory.device.track import give_back_memory, limit_freed_memory
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.gguf.reader import Gguf, read_gguf
from edgespec.models.gguf.shards import read_gguf_shards

if TYPE_CHECKING:
    from edgespec.backends.llama.batch import Batch
    from edgespec.backends.llama.block_outputs import BlockOutputs
    from edgespec.backends.llama.vision import Vision

_FLASH_ATTENTION_ON = 1
_MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
_LOAD_COPIED, _LOAD_MAPPED = 0, 1  # values of llama_load_mode
# What llama.cpp says of any device that is full ("unable to", "failed to"), and what C++ does.
_NO_MEMORY = (" to allocate", "bad_alloc")


class LlamaContext:
    """Nothing, until a model is opened. `handle` and `memory` are llama.cpp's own."""

    handle: Any = None
    buffer_bytes: dict[str, int]  # that llama.cpp says it allocated
    contention = 1.0  # how many times more threads the settings have than the last step had
    num_steps = 0  # so far
    vision: Vision | None = None  # where it has a projector
    spare: int | None = None  # a sequence id for parts of a cache, where it can be split
    outputs: BlockOutputs | None = None  # of the layers that its head reads
    packed: PackedWeights | None = None  # where a file is to keep them
    adapters: Adapters | None = None
    _model: Any = None
    _parts: Sequence[Path] = ()  # of a split model, wherever they lie
    _tokenizer: LlamaTokenizer | None = None
    _is_simulated = False  # so that weights have no memory

    def __init__(self, settings: RunConfig) -> None:
        self.lib: ModuleType = library()
        self.settings = settings
        self._placed = Placed(settings.devices, settings.gpu_layers, settings.overrides)

    def open(
        self,
        path: str,
        progress: Callable[[float], None] | None,
        adjust: Callable[[Any], None],
    ) -> None:
        """Load a file and make a context; `adjust` may change the context's parameters.

        Raises:
            BackendError: llama.cpp cannot load it, with llama.cpp's own words.
            DoesNotFitError: a device has less memory than there was when this was planned.
        """
        LIBRARY_LOG.clear()
        self._load(path, progress)
        self.tokenizer = self._tokenizer = LlamaTokenizer(self.lib, self._model)
        if self.lib.llama_model_chat_template(self._model, None):
            self.tokenizer.find_control_texts()
        self.capabilities = self._find_capabilities()
        if self.settings.lora:
            self.adapters = Adapters(self.lib, self._model, self.settings.lora)
        self._make_context(adjust)
        self._look(self.settings.max_nodes)
        if self.settings.lora:  # with which buffers are larger
            self.look_again()
        if self.settings.projector is not None:
            from edgespec.backends.llama.vision import Vision

            self.vision = Vision(
                self.settings.projector,
                self._model,
                self.tokenizer.vocabulary,
                threads=self.settings.threads,
                on_gpu=self.settings.gpu_layers != 0,
                max_tokens=self.settings.image_tokens,
            )

    def renew(self, adjust: Callable[[Any], None]) -> None:
        """Make the context again, empty and adjusted anew; the model stays. Raises BackendError."""
        self.lib.llama_free(self.handle)
        self.handle = None
        LIBRARY_LOG.clear()
        self._make_context(adjust)
        self.contention = 1.0
        self.buffer_bytes = self.buffer_bytes | LIBRARY_LOG.buffer_bytes(self._placed.labels)

    def _look(self, rows: int) -> None:
        """At what was made: its buffers, and up to so many rows of logits."""
        self._placed.check()
        self.buffer_bytes = LIBRARY_LOG.buffer_bytes(self._placed.labels)
        self.logits = _LogitsView(self.lib, rows, self.tokenizer.vocab_size)

    def _load(self, path: str, progress: Callable[[float], None] | None) -> None:
        params = model_params()
        self._placed.apply(params)
        set_params(
            params,
            load_mtp=self.settings.head,
            lazy_mode=self.lib.LLAMA_LAZY_MODE_ON,  # for tables that are looked up by row
            load_mode=_LOAD_MAPPED if self.settings.mapped else _LOAD_COPIED,
            no_alloc=self._is_simulated,
        )
        pages, problems, files = HugePages(), list[BaseException](), tuple[Gguf, ...]()
        with suppress(EdgespecError):  # of one that cannot be read llama.cpp says what it is
            files = tuple(map(read_gguf, self._parts)) or read_gguf_shards(path)
        spare = max((one.data_bytes for file in files for one in file.tensors), default=None)

        def report(fraction: float, _data: Any) -> bool:
            try:
                if fraction == 0.0:  # the weights have their place and are not read yet
                    pages.ask()
                    if spare is not None:
                        pages.fill(spare)
                if progress is not None:
                    progress(fraction)
            except BaseException as problem:  # C cannot pass it on
                problems.append(problem)
            return not (interrupted or problems)

        callback = self.lib.llama_progress_callback(report)
        set_params(params, progress_callback=callback)
        settings = self.settings
        tied = settings.tied and not settings.devices  # whose last one has the head
        limit_freed_memory()  # tensors are read into a buffer of their size before they are packed
        with ExitStack() as opened:
            file, is_new = -1, False
            if settings.kernels and settings.packed_file and files:
                self.packed = PackedWeights(files, settings)
                file, is_new = opened.enter_context(self.packed.offered())
            interrupted = opened.enter_context(interrupts_kept())
            opened.enter_context(
                kernels(
                    settings.kernels,
                    tied=tied,
                    threads=settings.threads,
                    packed_file=file,
                    is_new=is_new,
                    writes_out=settings.expert_bytes > 0,
                )
            )
            opened.enter_context(closing(pages))
            if self._parts:
                names = (ctypes.c_char_p * len(self._parts))(*map(os.fsencode, self._parts))
                self._model = self.lib.llama_model_load_from_splits(names, len(names), params)
            else:
                self._model = self.lib.llama_model_load_from_file(os.fsencode(path), params)
        give_back_memory()  # the header and its texts
        if problems:
            raise problems[0]
        if interrupted:  # and whoever was told of it raised nothing
            raise KeyboardInterrupt
        self._placed.check()
        if not self._model:
            raise _failure(
                f"llama.cpp cannot load {os.path.basename(path)}",
                hint=f"the file may be of a newer architecture than {PACKAGE} knows",
            )
        if self.packed is not None:
            self.packed.read(progress or (lambda _part: None))

    def _find_capabilities(self) -> Capabilities:
        if self.lib.llama_model_is_recurrent(self._model):
            return Capabilities(False, False, False, "a recurrent state cannot be rolled back")
        if self.lib.llama_model_is_hybrid(self._model):
            return Capabilities(False, False, False, "the recurrent layers cannot be rolled back")
        if self.lib.llama_model_n_swa(self._model) > 0 and not self.settings.whole:
            return Capabilities(
                True, False, False, "sliding-window layers recycle cells: chains only"
            )
        if self.settings.max_leaves == 1 or (self.settings.exact and self.settings.users > 1):
            return Capabilities(True, False, True, "it was loaded for chains only")
        return Capabilities(True, True, True)

    def _make_context(self, adjust: Callable[[Any], None]) -> None:
        settings = self.settings
        params = self.lib.llama_context_default_params()
        # The last ids are for branches of trees, of whichever user. With one more than there are,
        # llama.cpp begins with rows of logits for the largest step: others would lie beside them.
        has_one_place = not settings.exact or settings.users == 1  # for cells of all sequences
        splits = settings.disk_cache_bytes > 0 and self.capabilities.truncate and has_one_place
        branches = max(settings.max_leaves * self.capabilities.tree, settings.drafts_itself, splits)
        sequences = min(settings.users + branches, _MOST_SEQUENCES)
        self.spare = sequences - 1 if splits and sequences == settings.users + branches else None
        set_params(
            params,
            n_ctx=settings.cache_cells,
            swa_full=settings.whole,  # else only as many cells as a sliding window can see
            n_batch=settings.batch_size + settings.max_nodes,  # pending tokens come first
            n_ubatch=settings.batch_size,
            n_seq_max=sequences,
            n_outputs_max=max(settings.max_nodes, sequences),
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            flash_attn_type=_FLASH_ATTENTION_ON,
            kv_unified=has_one_place,
            type_k=GGML_NUMBERS[settings.kv_type_k.upper()],
            type_v=GGML_NUMBERS[settings.kv_type_v.upper()],
            no_perf=True,
            op_offload=False,  # as `Placed` says
        )
        adjust(params)
        if settings.captured_layers:
            from edgespec.backends.llama.block_outputs import BlockOutputs

            room = settings.batch_size + settings.max_nodes
            self.outputs = BlockOutputs(settings.captured_layers, self.width, room)
            self.outputs.join(params)
        pages = HugePages()
        LIBRARY_LOG.on_cache = pages.ask
        try:
            with interrupts_kept():
                self.handle = self.lib.llama_init_from_model(self._model, params)
        finally:
            LIBRARY_LOG.on_cache = None
        self._placed.check()
        if not self.handle:
            raise _failure(
                f"llama.cpp cannot make a context of {settings.context_size} tokens",
                hint="try a smaller --ctx",
            )
        self.memory = self.lib.llama_get_memory(self.handle)
        if self.adapters is not None:
            self.adapters.set(self.handle, self.adapters.scales)
        pages.ask(written=True)  # a recurrent state's, which is cleared before it is told of

    @property
    def width(self) -> int:
        """Values of a token's embedding."""
        return int(self.lib.llama_model_n_embd(self._model))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let sequence `target` see the cells of `source` at these positions; -1, -1: at all."""
        self.lib.llama_memory_seq_cp(self.memory, source, target, start, end)

    def remove(self, sequence: int, start: int) -> None:
        """Take the cells from position `start` on from a sequence; others may still see them."""
        self.lib.llama_memory_seq_rm(self.memory, sequence, start, -1)

    @property
    def sliding_window(self) -> int:
        """Tokens that sliding layers see; 0 where none slides."""
        return int(self.lib.llama_model_n_swa(self._model))

    def look_again(self) -> None:
        """At the buffers, which the next step makes anew: one over any token, in an empty cache."""
        from edgespec.backends.llama.batch import Batch  # simulations do without numpy

        LIBRARY_LOG.clear()
        batch = Batch(self.lib, 1, 1, None, 0)
        batch.put_chain([0], 0)
        self.decode(batch, 1)
        self.lib.llama_memory_clear(self.memory, False)
        self.buffer_bytes |= LIBRARY_LOG.buffer_bytes(self._placed.labels)

    def decode(self, batch: Batch, count: int, *, encodes: bool = False) -> None:
        """Compute the first `count` places of a batch. Raises BackendError.

        One `encodes` by the part of a model that reads all of a batch at once.
        """
        function = self.lib.llama_encode if encodes else self.lib.llama_decode
        batch.struct.n_tokens = count
        if self._placed.has_workers:
            self._placed.check()
        try:
            threads = TEAMS.enter(self.settings.threads)
            contention = self.settings.threads / threads
            if contention != self.contention:
                self.lib.llama_set_n_threads(self.handle, threads, threads)
                self.contention = contention
            if self.outputs is not None:
                self.outputs.begin()
            self.num_steps += 1
            status = function(self.handle, batch.struct)
        finally:
            TEAMS.leave()
        if status != 0:
            raise BackendError(
                f"{function.__name__} failed with {status}: {LIBRARY_LOG.problem() or 'no reason'}"
            )
        if self.packed is not None:
            self.packed.check()

    def rows(self, count: int) -> Logits:
        """The first logits of the last step, [count, V]: a view that the next step overwrites."""
        rows = self.logits.rows(self.handle, count)  # waits for other devices
        if self._placed.has_workers:
            self._placed.check()
        return rows

    def close(self) -> None:
        """Free everything; safe to call twice."""
        if self._tokenizer is not None:
            self._tokenizer.close()
        if self.vision is not None:
            self.vision.close()
        if self.handle:
            self.lib.llama_free(self.handle)
        if self._model:
            self.lib.llama_model_free(self._model)
            give_back_memory()
        self.handle = self._model = None
        if self.packed is not None:
            self.packed.close()


class RowsView:
    """llama.cpp's own rows [count, width], which it nearly always has at the same place."""

    def __init__(self, count: int, width: int) -> None:
        self._shape = count, width
        self._address = 0

    def at(self, address: int | None) -> Logits:
        """Those at a place. Raises BackendError where there are none."""
        if address != self._address:
            if not address:
                raise BackendError("llama.cpp gives no rows for this model")
            import numpy as np  # simulations do without

            found = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            self._rows: Logits = np.ctypeslib.as_array(found, self._shape)
            self._address = address
        return self._rows


class _LogitsView(RowsView):
    """llama.cpp's buffer of logits, [rows, V]."""

    def __init__(self, lib: ModuleType, max_rows: int, vocab_size: int) -> None:
        super().__init__(max_rows, vocab_size)
        # By another signature: an address is cheaper than a pointer object per step.
        self._get = function_of(lib._lib, "llama_get_logits", ctypes.c_void_p, ctypes.c_void_p)
        self.most_rows = 1  # so far: the buffer grows with demand

    def rows(self, context: Any, count: int) -> Logits:
        if count > self.most_rows:
            self.most_rows = count
        return self.at(self._get(context))[:count]

    @property
    def nbytes(self) -> int:
        """Of the rows that were needed so far."""
        return 4 * self.most_rows * self._shape[1]


def _failure(what: str, hint: str) -> EdgespecError:
    """The error for a model or a context that was not made, with llama.cpp's own words."""
    problem = LIBRARY_LOG.problem() or "no reason given"
    if any(one in problem for one in _NO_MEMORY):
        return DoesNotFitError(
            f"{what}: {problem}",
            hint=no_memory_hint(
                "somebody else took memory of this device, or its driver needs more than planned: "
                "start it again, or with a smaller --ctx or fewer --gpu-layers"
            ),
        )
    return BackendError(f"{what}: {problem}", hint=hint)
