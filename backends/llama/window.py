"""The model drafting for itself behind a long text, over the first cells and a window of the last.

A step behind a long text spends most of its time on the cache. Drafts are written over a part of it
and verified over all of it (TriForce, arXiv 2404.11912). A sequence id of its own shares the cells
of that part while a chain is drafted: nothing is copied. Behind each chain it gives up all of them,
those that were drafted included, so that the next step finds the cache as plain decoding does.
"""

from __future__ import annotations

from edgespec.backends.base import Logits
from edgespec.backends.llama.backend import LlamaSequence
from edgespec.backends.llama.batch import Batch


class Window:
    """A head of the text in `sequence`: its own model, over `first` and `last` cells of its cache.

    All windows of a context have the same sequence id, the last one: they draft one after another.
    """

    block, token_ids = 0, None  # one by one, any token
    reads_prompts = False

    def __init__(self, sequence: LlamaSequence, first: int, last: int) -> None:
        self._sequence, self._context = sequence, sequence._context
        self.first, self.last = first, last
        self._position = 0  # of the next token
        self.context_size, settings = sequence.context_size, sequence.settings
        self._number = settings.users + max(1, settings.max_leaves) - 1
        self._batch = Batch(self._context.lib, settings.max_nodes, 1, None, 0)
        self._batch.ids[:] = self._number
        self._batch.outputs[:] = 0

    @property
    def num_unread(self) -> int:
        """Accepted tokens that the next step feeds, too."""
        return self._sequence.pending

    @property
    def num_cells(self) -> int:
        """Cells of the text."""
        return self._sequence.length

    def begin(self, token: int) -> Logits:
        """Logits of what comes after `token`, which the model has not read yet, [V]."""
        self.end()
        sequence, copy = self._sequence, self._context.copy
        self._position = start = sequence._position
        copy(sequence.number, self._number, 0, min(self.first, start))
        copy(sequence.number, self._number, max(self.first, start - self.last), start)
        return self._feed([*sequence._pending, token])

    def go_on(self, token: int) -> Logits:
        """Logits of what comes after one token more, [V]."""
        return self._feed([token])

    def _feed(self, tokens: list[int]) -> Logits:
        count, batch = len(tokens), self._batch
        batch.put_chain(tokens, self._position)
        batch.outputs[count - 1] = 1
        try:
            self._context.decode(batch, count)
        finally:
            batch.outputs[count - 1] = 0
        self._position += count
        logits: Logits = self._context.rows(1)[0]
        return logits

    def end(self) -> None:
        """Give up all cells."""
        self._context.remove(self._number, 0)

    def memory_bytes(self) -> dict[str, int]:
        """Nothing: its cells are the text's, or free again when drafts are verified."""
        return {}

    def close(self) -> None:
        """Nothing."""
