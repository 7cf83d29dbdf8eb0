"""An EAGLE-3 head (arXiv 2503.01840): a block in a file of its own, fed what three blocks read.

Its encoder makes one row of what three blocks of the model have taken in for a token, and its
decoder reads it with the next token, as llama.cpp's server drives both (`llama.cpp:
src/models/eagle3.cpp`). So the first token of a text has no row to be read with. Embeddings and the
last product may be the model's own; a smaller vocabulary is spread over the model's by llama.cpp.

    model   reads   a b c d         three blocks' inputs make ga gb gc gd
    head    reads   (b, ga) (c, gb) (d, gc)           drafts from (e, gd), e being the next token

Its graph computes logits for every token of a step. Steps are short, so that these take little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.head import Head
from edgespec.backends.llama.head_context import HeadContext
from edgespec.backends.llama.hidden_rows import LayerRows, NextRows, Rows
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.head_footprint import EAGLE_TOKENS
from edgespec.models.spec import ModelSpec


class EagleHead(Head):
    """The head in the file of `spec`, for the model of another context.

    `settings` are its own; their sizes of steps do not count. Raises as `LlamaContext.open`.
    """

    headless = 1
    shows_all = True  # llama.cpp takes the first rows for those that were asked for

    def __init__(
        self,
        model: LlamaContext,
        spec: ModelSpec,
        settings: RunConfig,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        assert spec.reads is not None, "a head"
        settings = replace(settings, batch_size=EAGLE_TOKENS, max_nodes=EAGLE_TOKENS)
        context = HeadContext(settings)
        try:
            sizes = {
                "n_batch": EAGLE_TOKENS,
                "n_ubatch": EAGLE_TOKENS,
                "n_outputs_max": EAGLE_TOKENS,
            }
            context.open_beside(model, spec.path, progress, **sizes)
            own = NextRows(context, spec.embedding_size, masked=True)
            of_model = LayerRows(model, spec.reads.layers)
            super().__init__(context, of_model, own, EAGLE_TOKENS)
            self.token_ids = context.drafted
            context.logits.most_rows = EAGLE_TOKENS  # its encoder has one for each token, too
        except BaseException:
            context.close()
            raise
        rows = np.zeros((EAGLE_TOKENS, of_model.width), np.float32)
        self._read_by_model = Batch(
            context.lib, EAGLE_TOKENS, 1, None, of_model.width, rows=rows, has_ids=False
        )

    def _fused(self, rows: Rows, at: int) -> Rows:
        batch, count = self._read_by_model, len(rows)
        batch.rows[:count] = rows
        batch.positions[:count] = np.arange(
            at, at + count
        )  # it looks at none, but they are checked
        self._context.encode(batch, count)
        return self._own.rows(count)

    def memory_bytes(self) -> dict[str, int]:
        """As of any head; rows that its encoder is fed with are among them."""
        found = super().memory_bytes()
        return {**found, "rows": found["rows"] + self._read_by_model.rows.nbytes}
