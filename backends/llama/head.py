"""Heads: small drafters that read the rows of a model which they follow.

For each token a head is fed the token and what its model has computed for the token before; it
gives a row of logits, and a row to go on with. So it follows what its model reads, and then writes
ahead on rows of its own, as llama.cpp's own server drives it (`llama.cpp: common/speculative.cpp`).

    model   reads   a b c d         its rows          ra rb rc rd
    head    reads   (a, 0) (b, ra) (c, rb) (d, rc)    drafts from (e, rd), e being the next token

`MtpHead` is the model's last block, in its file or in one of its own, and reads the rows of the
block before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.backends.base import DraftTree, Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.following import DraftHead, HeadContext
from edgespec.backends.llama.hidden_rows import LayerRows, ModelRows, NextRows, Rows
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.bytes.head_footprint import (
    BLOCK_TOKENS,
    EAGLE_TOKENS,
    HEAD_UNREAD,
    head_settings,
)
from edgespec.models.spec import ASSISTANT, DFLASH, EAGLE, MTP, HeadSpec, ModelSpec


class Head(DraftHead):
    """One that writes token by token, from rows `of_model` and on with rows of its `own`.

    Its steps have `most` tokens.
    """

    shows_all = False  # whether steps show rows of logits for each of their tokens, or the last one

    def __init__(self, context: HeadContext, of_model: ModelRows, own: NextRows, most: int) -> None:
        super().__init__(context, of_model)
        self._own = own
        self._row_bytes += own.nbytes
        self._batch = self._batch_of_rows(most, own.width, has_ids=True)
        self._next: Rows = np.empty((0, own.width), np.float32)  # its own, for what was fed last

    # -- drafting --------------------------------------------------------------------------

    def begin(self, token: int) -> Logits:
        self._prepare()
        tokens, count = [*self._unread.tokens, token], self.num_unread
        self._unread.places(1)[0][0] = self._last[0]
        logits = self._read_in_steps(tokens, self._unread.rows(count + 1), wanted=True)
        self._has_read(count)
        self._drafted, self._ahead = 1, token
        return logits

    def go_on(self, token: int) -> Logits:
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
        logits = self._read_in_steps(tokens, self._zeros(len(tokens)), wanted=True)
        self.length = max(self.headless, self.length) + len(tokens)
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        rows = self._zeros(len(tree))
        if len(tree) == 1:
            next_rows = np.zeros((1, self._own.width), np.float32)
            return self._step(tree.tokens, next_rows, self._position, wanted=True)[None]
        return self._read_in_steps(list(tree.tokens), rows, wanted=True)[None]


class MtpHead(Head):
    """The block that predicts one token more than the model of another context."""

    most_tokens = HEAD_UNREAD  # of a step

    def __init__(self, context: HeadContext, model: LlamaContext, _reads: HeadSpec | None) -> None:
        of_model, own = (NextRows(one, model.width) for one in (model, context))
        settings = context.settings
        most = min(settings.batch_size + settings.max_nodes, self.most_tokens)
        super().__init__(context, of_model, own, most)


class BackendWithHead(LlamaBackend):
    """A model whose head follows what it reads. Chains only, so rows lie in the text's order."""

    head: DraftHead | None = None

    def open_head(self, make: Callable[[LlamaContext], DraftHead] | None = None) -> DraftHead:
        """A head, from now on beside the model, whose cache is empty; its own file's by default.

        Raises as `open_head_file`.
        """
        self.head = (
            open_head_file(None, None, self._context) if make is None else make(self._context)
        )
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

    def _has_loaded(self) -> None:
        super()._has_loaded()
        if self.head is not None:  # which has not read it; the text begins where it does
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


class CacheHead(MtpHead):
    """A head that looks into its model's cache and keeps none: the assistant of Gemma 4.

    It reads the row of the model's last token with the token behind it, at that one's position, and
    goes on there with rows of its own, as llama.cpp's server drives it (`llama.cpp:
    src/models/gemma4-assistant.cpp`, `common/speculative.cpp`). So all there is to follow is that
    row.

        model   reads   a b c d         its last row      rd
        head                            drafts from (e, rd), e being the next token; keeps its place

    The model's cache is empty when it is opened: llama.cpp empties that for it.
    """

    most_tokens = 1
    reads_prompts = False  # there is nothing of them to be read

    def follow(self, tokens: Sequence[int], *, reads: bool) -> None:
        """The model has read `tokens`, the first ones of its last step, into the cache of both."""
        self._models.copy(len(tokens) - 1, self._last)
        self.length += len(tokens)

    @property
    def _position(self) -> int:
        return self.length

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """A step: it reads no prompts, and what is in the cache is the model's business."""
        logits: Logits = self.verify(DraftTree.chain(tokens[:1]))[0]
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        """A step for each node, all at one position: for the clock alone."""
        row = np.zeros_like(self._last)
        steps = [self._step([token], row, self._position, wanted=True) for token in tree.tokens]
        logits: Logits = steps[-1][None]
        return logits


class EagleHead(Head):
    """An EAGLE-3 head (arXiv 2503.01840): a block in a file of its own, fed what three blocks read.

    Its encoder makes one row of what three blocks of the model have taken in for a token, and its
    decoder reads it with the next token, as llama.cpp's server drives both (`llama.cpp:
    src/models/eagle3.cpp`). So the first token of a text has no row to be read with. Embeddings and
    the last product may be the model's own; a smaller vocabulary is spread over the model's by
    llama.cpp.

        model   reads   a b c d         three blocks' inputs make ga gb gc gd
        head    reads   (b, ga) (c, gb) (d, gc)    drafts from (e, gd), e being the next token

    Its graph computes logits for every token of a step. Steps are short, so that these take little.
    """

    headless = 1
    shows_all = True  # llama.cpp takes the first rows for those that were asked for

    def __init__(self, context: HeadContext, model: LlamaContext, reads: HeadSpec) -> None:
        own = NextRows(context, context.width, masked=True)
        of_model = LayerRows(model, reads.layers)
        super().__init__(context, of_model, own, EAGLE_TOKENS)
        context.logits.most_rows = EAGLE_TOKENS  # its encoder has one for each token, too
        self._read_by_model = self._batch_of_rows(EAGLE_TOKENS, of_model.width, has_ids=False)

    def _fused(self, rows: Rows, at: int) -> Rows:
        batch, count = self._read_by_model, len(rows)
        batch.rows[:count] = rows
        batch.positions[:count] = np.arange(at, at + count)  # it looks at none; they are checked
        self._context.decode(batch, count, encodes=True)
        return self._own.rows(count)


class BlockHead(DraftHead):
    """A DFlash head (arXiv 2602.06036): a few blocks that draft several tokens in one step.

    What some blocks of its model have taken in for a token becomes keys and values in its cache, at
    that token's place. It drafts with a step over the next token and as many masks as it fills,
    which all see each other, as llama.cpp's server drives it (`llama.cpp: src/models/dflash.cpp`).
    Embeddings and the last product may be the model's own.

        model   reads   a b c d         some blocks' inputs make the head's cells a b c d
        head    reads   e _ _ _         e is the next token; each _ gives a row of what is there

    A row does not depend on what is drafted before it. So tokens that are drawn are drawn from the
    rows as they are, and verified by them.
    """

    lag = 0

    def __init__(self, context: HeadContext, model: LlamaContext, reads: HeadSpec) -> None:
        nodes = context.settings.max_nodes
        context.lib.llama_set_causal_attn(context.handle, reads.is_causal)
        of_model = LayerRows(model, reads.layers)
        super().__init__(context, of_model)
        context.logits.most_rows = nodes  # each step has all of them
        self.block = nodes - 1
        self._injected = self._batch_of_rows(BLOCK_TOKENS, of_model.width, has_ids=False)
        self._injected.outputs[:] = 0
        self._masks = Batch(context.lib, nodes, 1, None, 0)
        self._masks.put(0, [reads.mask_id] * nodes)

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


_KINDS: dict[str, Callable[..., DraftHead]] = {
    EAGLE: EagleHead,
    MTP: MtpHead,
    ASSISTANT: CacheHead,
    DFLASH: BlockHead,
}


def open_head_file(
    spec: ModelSpec | None,
    settings: RunConfig | None,
    model: LlamaContext,
    *,
    progress: Callable[[float], None] | None = None,
) -> DraftHead:
    """The head in the file of `spec`, or in its model's, for the model of another context.

    That one's cache is empty. `settings` are the head's own; their sizes of steps do not count.
    Raises as `LlamaContext.open`.
    """
    reads, path = (None, None) if spec is None else (spec.reads, spec.path)
    config, changes = head_settings(reads, model.settings, settings or model.settings)
    context = HeadContext(config)
    try:
        context.open_beside(model, path, progress, changes)
        return _KINDS[MTP if reads is None else reads.kind](context, model, reads)
    except BaseException:
        context.close()
        raise
