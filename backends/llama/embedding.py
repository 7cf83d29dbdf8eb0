"""A model in llama.cpp whose context makes vectors or scores of texts, many in one step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from edgespec.backends.base import Capabilities
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.library import set_params
from edgespec.backends.llama.team import end_team
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.llama_binary import function_of

_F32 = 4


class EmbeddingContext(LlamaContext):
    """A context that gives a row for each of at most `texts` texts of a step.

    Args:
        parameters: of llama.cpp's context, by their names.

    Raises as `LlamaContext.open`.
    """

    def __init__(
        self,
        path: str,
        settings: RunConfig,
        parameters: Sequence[tuple[str, int]],
        *,
        ranks: bool,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(settings)
        try:
            self.open(path, progress, lambda params: set_params(params, **dict(parameters)))
            lib, model = self.lib, self._model
            # Values of a row: a score for each label, or a vector.
            self.size = int(
                lib.llama_model_n_cls_out(model) if ranks else lib.llama_model_n_embd_out(model)
            )
            self._batch = Batch(lib, settings.batch_size, 1, None, 0)
            types = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
            self._get = function_of(lib._lib, "llama_get_embeddings_seq", *types)
        except BaseException:
            self.close()
            raise

    def _find_capabilities(self) -> Capabilities:
        return Capabilities(False, False, False, "it writes no text")

    def read(self, texts: Sequence[Sequence[int]], into: Sequence[int]) -> None:
        """Compute some texts in one step, and write the row of each to its address in `into`.

        Raises BackendError.
        """
        self._forget()
        self._step(texts, [0] * len(texts))
        for sequence, address in enumerate(into):
            self._copy(sequence, address)

    def read_long(self, text: Sequence[int], part: int, into: int) -> None:
        """Compute one text in parts: the row of its last token. Raises BackendError."""
        self._forget()
        for start in range(0, len(text), part):
            self._step([text[start : start + part]], [start])
        self._copy(0, into)

    def _forget(self) -> None:
        if self.memory:  # an encoder has none
            self.lib.llama_memory_clear(self.memory, False)

    def _step(self, texts: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        batch, end = self._batch, 0
        for sequence, (text, start) in enumerate(zip(texts, starts, strict=True)):
            place = slice(end, end + len(text))
            batch.put(end, text)
            batch.positions[place] = np.arange(start, start + len(text))
            batch.ids[place, 0] = sequence
            end += len(text)
        self.decode(batch, end)  # llama.cpp encodes where there is no cache

    def _copy(self, sequence: int, address: int) -> None:
        found = self._get(self.handle, sequence)
        if not found:
            raise BackendError("llama.cpp gives no embedding of a text")
        ctypes.memmove(address, found, self.size * _F32)

    def release_threads(self) -> None:
        end_team()

    # -- texts of pairs --------------------------------------------------------------------

    def pair(self, query: str, document: str) -> list[int]:
        """Ids of a query and a document as rerankers read them, with what stands between them."""
        lib, tokenizer = self.lib, self.tokenizer
        mark = tokenizer.control_texts.mark
        texts = [tokenizer.encode(mark(one), add_special=False) for one in (query, document)]
        with tokenizer.vocabulary() as vocab:
            bos, eos, sep = (
                getattr(lib, f"llama_vocab_{name}")(vocab) for name in ("bos", "eos", "sep")
            )
            adds_bos, adds_eos, adds_sep = (
                getattr(lib, f"llama_vocab_get_add_{name}")(vocab) for name in ("bos", "eos", "sep")
            )
        end = [one for one in (eos, sep) if one >= 0][:1] if adds_eos else []
        between = [*end, *([sep] if adds_sep and sep >= 0 else [])]
        first = [bos] if adds_bos and bos >= 0 else []
        # A BERT ends both texts with its separator.
        last = end or ([sep] if adds_sep and sep >= 0 else [])
        return [*first, *texts[0], *between, *texts[1], *last]
