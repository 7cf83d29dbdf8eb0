"""The context of a head in a file of its own, beside that of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.kernels import spread_logits
from edgespec.backends.llama.library import LOG, set_params
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.gguf.values import read_ids
from edgespec.models.heads import DRAFTED


class HeadContext(LlamaContext):
    """A head's file, and a context that may look into its model's.

    It takes in `batch_size` tokens at once, and shows logits of `max_nodes`. `drafted` are the
    tokens that it may draft, ascending; None: all of the model's.
    """

    drafted: NDArray[np.int64] | None = None

    def open_beside(
        self, path: str, model: LlamaContext, progress: Callable[[float], None] | None
    ) -> None:
        """Raises as `LlamaContext.open`."""
        LOG.clear()
        self._load(path, progress)
        self.tokenizer = model.tokenizer
        ids = read_ids(read_gguf_shards(path)[0], DRAFTED)
        self.drafted = None if ids is None else np.array(ids)
        if ids is not None and self.settings.kernels:
            spread_logits()
        self.capabilities = Capabilities(True, False, True)

        def adjust(params: Any) -> None:
            size = self.settings.batch_size
            set_params(params, n_batch=size, n_ubatch=size, ctx_other=model.handle)
            set_params(params, n_outputs_max=self.settings.max_nodes)

        self._make_context(adjust)
        self._look(rows=self.settings.max_nodes)
