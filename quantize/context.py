"""A GGUF model in llama.cpp for looking at it: whole texts in, the logits of every token out.

Unlike the backend that generates, this one keeps nothing between texts and drafts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.library import set_params
from edgespec.memory.bytes.config import RunConfig, kv_pair, padded

Observe = Callable[[int, bool, Any], bool]
_OTHER_FILES = 128


class EvalContext(LlamaContext):
    """A model and a context of `sequences` separate texts of `context_size` tokens each.

    A list of paths is a split model whose parts may lie anywhere. `observe` is called around
    every node of the graph (`llama_context_params.cb_eval`); weights stay in host memory then.
    With `kernels` edgespec's own multiply, where they fit, and keep a `tied` table once. `kv_type`
    is as `kv_pair` reads it.
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
        kernels: bool = False,
        tied: bool = False,
        gpu_layers: int = -1,
    ) -> None:
        self._observe = observe
        size = max(batch_size, sequences)
        kv_type_k, kv_type_v = kv_pair(kv_type)
        settings = RunConfig(
            context_size=sequences * padded(context_size),
            batch_size=size,
            max_nodes=size,
            max_leaves=1,
            threads=threads,
            kv_type_k=kv_type_k,
            kv_type_v=kv_type_v,
            gpu_layers=0 if observe else gpu_layers,
            users=sequences,
            exact=True,
            mapped=not kernels,  # what is packed is read, and not used as it lies in the file
            kernels=kernels,
            tied=tied,
        )
        super().__init__(settings)
        if not isinstance(path, Path):
            self._parts, path = path, path[0]
            _allow_open_files(len(self._parts))
        try:
            self.open(str(path), None, self._adjust)
            self.vocab_size = self.tokenizer.vocab_size
            self._batch = Batch(self.lib, size, 1, None, 0)
        except BaseException:
            self.close()
            raise

    def _adjust(self, params: Any) -> None:
        set_params(params, n_batch=self.settings.batch_size)
        if self._observe is not None:
            self._called = type(params.cb_eval)(self._observe)  # C keeps the pointer
            set_params(params, cb_eval=self._called)

    def __enter__(self) -> EvalContext:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def score(
        self, text: Sequence[int] | NDArray[np.int32]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Read one text from an empty cache: first token and logits [n, V] of each batch.

        The logits are a view that the next batch overwrites.
        """
        self.clear()
        size = self.settings.batch_size
        for start in range(0, len(text), size):
            tokens = text[start : start + size]
            self.step(tokens, range(start, start + len(tokens)))
            yield start, self.rows(len(tokens))

    def clear(self) -> None:
        """Empty the cache."""
        self.lib.llama_memory_clear(self.memory, False)

    def trim(self, length: int) -> bool:
        """Keep the first tokens of the first sequence; recurrent models cannot, and say so."""
        return bool(self.lib.llama_memory_seq_rm(self.memory, 0, length, -1))

    def step(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: Sequence[int],
        sequences: Sequence[int] | int = 0,
        *,
        outputs: bool = True,
    ) -> None:
        """Decode some tokens, each at its position of its sequence.

        Without outputs there are no logits, and the head is not computed.
        """
        batch, count = self._batch, len(tokens)
        batch.put(0, np.asarray(tokens).tolist())
        batch.positions[:count] = positions
        batch.ids[:count, 0] = sequences
        batch.outputs[:count] = outputs
        self.decode(batch, count)
        self.lib.llama_synchronize(self.handle)  # a GPU may still be at it


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
