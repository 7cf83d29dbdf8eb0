"""A GGUF model in llama.cpp for looking at it: whole texts in, the logits of every token out.

Unlike the backend that generates, this one keeps nothing between texts and drafts nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.kernels import model_params
from edgespec.backends.llama.library import LOG, interrupts_kept, library
from edgespec.errors import BackendError
from edgespec.memory.device.llama_binary import PACKAGE

Observe = Callable[[int, bool, Any], bool]
_FLASH_ATTENTION_ON = 1
_OTHER_FILES = 128
_KV_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}  # values of ggml_type


class EvalContext:
    """A model and a context of `sequences` separate texts of `context_size` tokens each.

    A list of paths is a split model whose parts may lie anywhere. `observe` is called around
    every node of the graph (`llama_context_params.cb_eval`); weights stay in host memory then.
    """

    def __init__(
        self,
        path: Path | Sequence[Path],
        *,
        context_size: int,
        batch_size: int,
        threads: int,
        sequences: int = 1,
        kv_type: str = "f16",
        observe: Observe | None = None,
    ) -> None:
        self._lib = lib = library()
        self._model: Any = None
        self._context: Any = None
        self._memory: Any = None
        self._batch: Any = None
        self._batch_size = batch_size
        LOG.clear()
        params = model_params()
        params.n_gpu_layers = 0 if observe else -1
        parts = [path] if isinstance(path, Path) else path
        _allow_open_files(len(parts))
        names = (ctypes.c_char_p * len(parts))(*(os.fsencode(part) for part in parts))
        try:
            with interrupts_kept():
                self._model = (
                    lib.llama_model_load_from_file(names[0], params)
                    if len(parts) == 1
                    else lib.llama_model_load_from_splits(names, len(parts), params)
                )
            if not self._model:
                raise BackendError(
                    f"llama.cpp cannot load {parts[0].name}: {LOG.problem() or 'no reason'}",
                    hint=f"the file may be of a newer architecture than {PACKAGE} knows",
                )
            self._make_context(context_size, threads, sequences, kv_type, observe)
            vocabulary = lib.llama_model_get_vocab(self._model)
            self.vocab_size = int(lib.llama_vocab_n_tokens(vocabulary))
            self._batch = lib.llama_batch_init(max(batch_size, sequences), 0, 1)
        except BaseException:
            self.close()
            raise

    def _make_context(
        self, size: int, threads: int, sequences: int, kv_type: str, observe: Observe | None
    ) -> None:
        lib = self._lib
        params = lib.llama_context_default_params()
        # A context is rounded up to 256 cells, and sequences that share none divide it.
        params.n_ctx = sequences * (-(-size // 256) * 256)
        params.n_batch = params.n_ubatch = max(self._batch_size, sequences)
        params.n_seq_max = sequences
        params.n_outputs_max = params.n_batch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.type_k = params.type_v = _KV_TYPES[kv_type]
        params.no_perf = True
        if observe is not None:
            self._observe = type(params.cb_eval)(observe)  # C keeps the pointer
            params.cb_eval = self._observe
            params.op_offload = False
        with interrupts_kept():
            self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise BackendError(f"llama.cpp cannot make a context: {LOG.problem() or 'no reason'}")
        self._memory = lib.llama_get_memory(self._context)

    def __enter__(self) -> EvalContext:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back."""
        if self._context:
            self._lib.llama_free(self._context)
        if self._batch is not None:
            self._lib.llama_batch_free(self._batch)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._batch = self._model = None

    def score(
        self, text: Sequence[int] | NDArray[np.int32]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Read one text from an empty cache: first token and logits [n, V] of each batch.

        The logits are a view that the next batch overwrites.
        """
        self.clear()
        for start in range(0, len(text), self._batch_size):
            tokens = text[start : start + self._batch_size]
            self.step(tokens, range(start, start + len(tokens)))
            yield start, self.logits(len(tokens))

    def clear(self) -> None:
        """Empty the cache."""
        self._lib.llama_memory_clear(self._memory, False)

    def forget(self, sequence: int) -> None:
        """Empty the cache of one sequence."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def trim(self, length: int) -> bool:
        """Keep the first tokens of the first sequence; recurrent models cannot, and say so."""
        return bool(self._lib.llama_memory_seq_rm(self._memory, 0, length, -1))

    def step(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: Sequence[int],
        sequences: Sequence[int] | None = None,
        *,
        outputs: bool = True,
    ) -> None:
        """Decode some tokens, each at its position of its sequence (all of the first: None).

        Without outputs there are no logits, and the head is not computed.
        """
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        _array(batch.token, count)[:] = tokens
        _array(batch.pos, count)[:] = positions
        _array(batch.n_seq_id, count)[:] = 1
        for place in range(count):
            batch.seq_id[place][0] = sequences[place] if sequences is not None else 0
        _array(batch.logits, count)[:] = outputs
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise BackendError(f"llama_decode failed with {status}: {LOG.problem() or 'no reason'}")
        self._lib.llama_synchronize(self._context)  # a GPU may still be at it

    def logits(self, count: int) -> NDArray[np.float32]:
        """Logits [count, V] of the last step: a view that the next step overwrites."""
        pointer = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (count, self.vocab_size))


def _allow_open_files(count: int) -> None:
    """Let this process have so many files open; some systems begin with 256."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _array(pointer: Any, count: int) -> NDArray[Any]:
    return np.ctypeslib.as_array(pointer, (count,))
