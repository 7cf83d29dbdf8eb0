"""The context of a head in a file of its own, beside that of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec.backends.base import Capabilities
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.library import LOG


class HeadContext(LlamaContext):
    """A head's file, and a context that may look into its model's.

    It takes in `batch_size` tokens at once, and shows logits of `max_nodes`.
    """

    def open_beside(
        self, path: str, model: LlamaContext, progress: Callable[[float], None] | None
    ) -> None:
        """Raises as `LlamaContext.open`."""
        LOG.clear()
        self._load(path, progress)
        self.tokenizer = model.tokenizer
        self.capabilities = Capabilities(True, False, True)

        def adjust(params: Any) -> None:
            params.n_batch = params.n_ubatch = self.settings.batch_size
            params.n_outputs_max = self.settings.max_nodes
            params.ctx_other = model.handle

        self._make_context(adjust)
        self._look(rows=self.settings.max_nodes)
