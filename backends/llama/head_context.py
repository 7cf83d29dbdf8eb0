"""The context of a head beside that of its model: of a file of its own, or of the model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.kernels import spread_logits
from edgespec.backends.llama.library import LIBRARY_LOG, set_params
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.gguf.values import read_ids
from edgespec.models.heads import DRAFTED


class HeadContext(LlamaContext):
    """A context of a head, which may look into its model's.

    `drafted` are the tokens that it may draft, ascending; None: all of the model's.
    """

    drafted: NDArray[np.int64] | None = None
    _owns_model = True

    def open_beside(
        self,
        model: LlamaContext,
        path: Path | None,
        progress: Callable[[float], None] | None,
        *,
        n_outputs_max: int,
        **changes: int,
    ) -> None:
        """Load the head's file, or take what `model` has loaded, and make a context.

        `changes` are parameters of llama.cpp's context. Raises as `LlamaContext.open`.
        """
        LIBRARY_LOG.clear()
        self._owns_model = path is not None
        if path is None:
            self._model = model._model
        else:
            self._load(str(path), progress)
            ids = read_ids(read_gguf_shards(path)[0], DRAFTED)
            self.drafted = None if ids is None else np.array(ids)
        self.tokenizer = model.tokenizer
        if self.drafted is not None and self.settings.kernels:
            spread_logits()
        self.capabilities = Capabilities(True, False, True)
        changes |= {"n_outputs_max": n_outputs_max}
        self._make_context(lambda params: set_params(params, ctx_other=model.handle, **changes))
        self._look(rows=n_outputs_max)

    def close(self) -> None:
        """Free the context, and the model unless it is another one's."""
        if self._owns_model:
            super().close()
        elif self.handle:
            self.lib.llama_free(self.handle)
        self.handle = self._model = None
