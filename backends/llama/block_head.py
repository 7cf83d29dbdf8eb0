"""A DFlash head (arXiv 2602.06036): a few blocks that draft several tokens in one step.

What some blocks of its model have taken in for a token becomes keys and values in its cache, at
that token's place. It drafts with a step over the next token and as many masks as it fills, which
all see each other, as llama.cpp's server drives it (`llama.cpp: src/models/dflash.cpp`). Embeddings
and the last product may be the model's own.

    model   reads   a b c d         some blocks' inputs make the head's cells a b c d
    head    reads   e _ _ _         e being the next token; each _ gives a row of what stands there

A row does not depend on what is drafted before it. So tokens that are drawn are drawn from the rows
as they are, and verified by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from edgespec.backends.base import Logits
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.following import DraftHead
from edgespec.backends.llama.head_context import HeadContext
from edgespec.backends.llama.hidden_rows import LayerRows, Rows
from edgespec.backends.tree import DraftTree
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.head_footprint import BLOCK_TOKENS, block_nodes
from edgespec.models.spec import ModelSpec


class BlockHead(DraftHead):
    """The head in the file of `spec`, for the model of another context.

    `settings` are its own; their sizes of steps do not count. Raises as `LlamaContext.open`.
    """

    lag = 0

    def __init__(
        self,
        model: LlamaContext,
        spec: ModelSpec,
        settings: RunConfig,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        assert spec.reads is not None, "a head"
        nodes = block_nodes(spec.reads)
        context = HeadContext(replace(settings, batch_size=BLOCK_TOKENS, max_nodes=nodes))
        try:
            sizes = {"n_batch": BLOCK_TOKENS, "n_ubatch": BLOCK_TOKENS, "n_outputs_max": nodes}
            context.open_beside(model, spec.path, progress, **sizes)
            context.lib.llama_set_causal_attn(context.handle, spec.reads.is_causal)
            of_model = LayerRows(model, spec.reads.layers)
            super().__init__(context, of_model)
            context.logits.most_rows = nodes  # each step has all of them
        except BaseException:
            context.close()
            raise
        self.block, self.token_ids = nodes - 1, context.drafted
        rows = np.zeros((BLOCK_TOKENS, of_model.width), np.float32)
        self._injected = Batch(
            context.lib, BLOCK_TOKENS, 1, None, of_model.width, rows=rows, has_ids=False
        )
        self._injected.outputs[:] = 0
        self._masks = Batch(context.lib, nodes, 1, None, 0)
        self._masks.put(0, [spec.reads.mask_id] * nodes)

    # -- drafting --------------------------------------------------------------------------

    def _feed(self, tokens: Sequence[int], rows: Rows) -> None:
        batch, most = self._injected, BLOCK_TOKENS
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            count, at = len(part), self._position + start
            batch.rows[:count] = part
            batch.positions[:count] = np.arange(at, at + count)
            self._context.decode(batch, count)

    def begin(self, token: int) -> Logits:
        self._prepare()
        self._read()
        return self._block_behind(token)

    def _block_behind(self, token: int) -> Logits:
        batch, nodes, at = self._masks, self.block + 1, self._position
        batch.put(0, [token])
        batch.positions[:] = np.arange(at, at + nodes)
        self._context.decode(batch, nodes)
        self._drafted = 1
        return self._row()

    def go_on(self, token: int) -> Logits:
        """The next row of the block, whatever `token` was drafted; there are `block` of them."""
        self._drafted += 1
        return self._row()

    def _row(self) -> Logits:
        return self._drafted_from(self._context.rows(self.block + 1)[self._drafted])

    # -- as a backend whose steps are timed --------------------------------------------------

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self._take_back()
        self._feed(tokens, self._zeros(len(tokens)))
        self.length += len(tokens)
        return self._block_behind(tokens[-1])

    def verify(self, tree: DraftTree) -> Logits:
        """The last token is what a block is drafted behind; those before, what its model read."""
        self._take_back()
        before = list(tree.tokens[:-1])
        self._feed(before, self._zeros(len(before)))
        length, self.length = self.length, self.length + len(before)
        row = self._block_behind(tree.tokens[-1])[None]
        self.length = length
        return row

    def memory_bytes(self) -> dict[str, int]:
        fed = self._injected.rows.nbytes + self._unread.nbytes
        logits = self._context.logits.nbytes
        rows = self._models.nbytes + fed
        return {**self._context.buffer_bytes, "logits": logits, "rows": rows}
