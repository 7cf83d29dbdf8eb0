"""Heads: small drafters that read the rows of a model which they follow.

For each token a head is fed the token and what its model has computed for the token before; it
gives a row of logits, and a row to go on with. So it follows what its model reads, and then writes
ahead on rows of its own, as llama.cpp's own server drives it (`llama.cpp: common/speculative.cpp`).

    model   reads   a b c d         its rows          ra rb rc rd
    head    reads   (a, 0) (b, ra) (c, rb) (d, rc)    drafts from (e, rd), e being the next token

`MtpHead` is the model's last block, in its file or in one of its own, and reads the rows of the
block before it. Other heads in files of their own are in `eagle_head`, `cache_head`
and `block_head`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from edgespec.backends.base import Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.following import DraftHead
from edgespec.backends.llama.head_context import HeadContext
from edgespec.backends.llama.hidden_rows import ModelRows, NextRows, Rows
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.backends.tree import DraftTree
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.head_footprint import HEAD_UNREAD
from edgespec.models.spec import ModelSpec

_MTP = 1  # value of llama_context_type


class Head(DraftHead):
    """One that writes token by token, from rows `of_model` and on with rows of its `own`.

    Its steps have `most` tokens.
    """

    shows_all = False  # whether steps show rows of logits for each of their tokens, or the last one

    def __init__(
        self, context: LlamaContext, of_model: ModelRows, own: NextRows, most: int
    ) -> None:
        super().__init__(context, of_model)
        self._own = own
        self._batch = Batch(
            context.lib, most, 1, None, own.width, rows=np.zeros((most, own.width), np.float32)
        )
        self._next: Rows = np.empty((0, own.width), np.float32)  # its own, for what was fed last

    # -- drafting --------------------------------------------------------------------------

    def begin(self, token: int) -> Logits:
        """Logits of what comes after `token`, which follows the text and is not in it yet, [V]."""
        self._prepare()
        tokens, count = [*self._unread.tokens, token], self.num_unread
        self._unread.places(1)[0][0] = self._last[0]
        logits = self._read_in_steps(tokens, self._unread.rows(count + 1), wanted=True)
        self._has_read(count)
        self._drafted, self._ahead = 1, token
        return logits

    def go_on(self, token: int) -> Logits:
        """Logits of what comes after one token more, [V]."""
        logits = self._step([token], self._next, self._position, wanted=True)
        self._drafted += 1
        return logits

    def _feed(self, tokens: Sequence[int], rows: Rows) -> None:
        self._read_in_steps(tokens, rows, wanted=False)

    def _read_in_steps(self, tokens: Sequence[int], rows: Rows, *, wanted: bool) -> Logits:
        """Read tokens, each with its row of the model; logits of what comes next, [V]."""
        most, logits = len(self._batch.positions), np.empty(0, np.float32)
        for start in range(0, len(tokens), most):
            part = tokens[start : start + most]
            at = self._position + start
            is_last = start + len(part) == len(tokens)
            fused = self._fused(rows[start : start + len(part)], at)
            logits = self._step(part, fused, at, wanted=wanted and is_last)
        return logits

    def _fused(self, rows: Rows, at: int) -> Rows:
        """Rows of the model, of tokens from position `at` on, as its blocks take them in."""
        return rows

    def _step(self, tokens: Sequence[int], rows: Rows, at: int, *, wanted: bool) -> Logits:
        batch, count = self._batch, len(tokens)
        shown = count if self.shows_all else 1
        batch.put(0, tokens)
        batch.rows[:count] = rows
        batch.positions[:count] = np.arange(at, at + count)
        batch.outputs[:count] = 0
        batch.outputs[count - shown : count] = int(wanted)
        self._context.decode(batch, count)
        if not wanted:
            return np.empty(0, np.float32)
        self._next = self._own.rows(count)[-1:].copy()
        return self._drafted_from(self._context.rows(shown)[shown - 1])

    # -- as a backend whose steps are timed --------------------------------------------------

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Read tokens with rows of zeros: for the clock alone."""
        logits = self._read_in_steps(tokens, self._zeros(len(tokens)), wanted=True)
        self.length = max(self.headless, self.length) + len(tokens)
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        """A step over the nodes of a chain, with rows of zeros: for the clock alone.

        One token is fed as those that are drafted, several as those that its model has read.
        """
        rows = self._zeros(len(tree))
        if len(tree) == 1:
            next_rows = np.zeros((1, self._own.width), np.float32)
            return self._step(tree.tokens, next_rows, self._position, wanted=True)[None]
        return self._read_in_steps(list(tree.tokens), rows, wanted=True)[None]

    def memory_bytes(self) -> dict[str, int]:
        """What llama.cpp says it allocated for the head, its logits and rows that are handed on."""
        kept = self._models.nbytes + self._own.nbytes
        fed = self._batch.rows.nbytes + self._unread.nbytes
        logits = self._context.logits.nbytes
        return {**self._context.buffer_bytes, "logits": logits, "rows": kept + fed}


class MtpHead(Head):
    """The block that predicts one token more than the model of another context.

    In that model's file, or in the one of `spec`: then with `settings` of its own, but the sizes of
    their steps. Raises as `LlamaContext.open`.
    """

    batch_tokens: int | None = None  # that it reads at once; None for as many as its model

    def __init__(
        self,
        model: LlamaContext,
        spec: ModelSpec | None = None,
        settings: RunConfig | None = None,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        settings = replace(
            settings or model.settings,
            batch_size=self.batch_tokens or model.settings.batch_size,
            max_nodes=self.batch_tokens or self.max_nodes,
            max_leaves=1,
            head=True,
        )
        context = HeadContext(settings)
        try:
            path = None if spec is None else spec.path
            context.open_beside(model, path, progress, ctx_type=_MTP, n_outputs_max=1, n_seq_max=1)
            of_model, own = (NextRows(one, model.width) for one in (model, context))
            most = self.batch_tokens or min(settings.batch_size + settings.max_nodes, HEAD_UNREAD)
            super().__init__(context, of_model, own, most)
        except BaseException:
            context.close()
            raise


class BackendWithHead(LlamaBackend):
    """A model whose head follows what it reads. Chains only, so rows lie in the text's order."""

    head: DraftHead | None = None

    def open_head(self, make: Callable[[LlamaContext], DraftHead] = MtpHead) -> DraftHead:
        """A head, from now on beside the model, whose cache is empty. Raises as what makes it."""
        self.head = make(self._context)
        return self.head

    def prefill(self, tokens: Sequence[int]) -> Logits:
        logits = super().prefill(tokens)
        if self.head is not None:
            self.head.follow(tokens, reads=self.head.reads_prompts)
        return logits

    def commit(self, path: Sequence[int]) -> None:
        tree = self._tree
        super().commit(path)
        if self.head is not None and tree is not None:
            self.head.follow([tree.tokens[node] for node in path], reads=False)

    def truncate(self, length: int) -> int:
        kept = super().truncate(length)
        if self.head is not None:
            self.head.truncate(kept)
        return kept

    def load_cache(
        self,
        path: str,
        tokens: Sequence[int],
        images: Sequence[Sequence[int]] = (),
        start: int = 0,
    ) -> None:
        super().load_cache(path, tokens, images, start)
        if self.head is not None:  # which has not read them; the text begins where it does
            self.head.skip(self.length)

    def close(self) -> None:
        if self.head is not None:
            self.head.close()
        super().close()


class RecurrentBackendWithHead(BackendWithHead, RecurrentBackend):
    """As `BackendWithHead` with recurrent layers. Raises as RecurrentBackend."""

    def keep_snapshots(self, count: int) -> None:
        """As in RecurrentBackend; a head followed the context that there was."""
        if self.head is not None:
            self.head.close()
            self.head = None
        super().keep_snapshots(count)
