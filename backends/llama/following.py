"""What heads of all kinds have in common: they follow what their model reads.

The model's rows are kept for them until they read. Prompts are read with the model, where that is
worth it. What the model writes waits until something is drafted; where nothing was for many tokens,
a head begins anew with a few of the last ones, so that one which does not pay costs next to nothing
meanwhile, and is cheap to try again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, DraftTree, Logits
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.hidden_rows import ModelRows, Rows
from edgespec.backends.llama.kernels import spread_logits
from edgespec.backends.llama.library import LIBRARY_LOG, set_params
from edgespec.memory.bytes.head_footprint import HEAD_ANEW, HEAD_NODES, HEAD_UNREAD
from edgespec.models.gguf.reader import read_ids
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.heads import DRAFTED


class PendingTokens:
    """What a head has not read: the last tokens that its model has, each with the row before it.

    A ring: in a head's cooldown a token goes as one comes, and no other row moves.

    It has at most `most` tokens, and rows of `width` for them and for one token more.
    """

    def __init__(self, most: int, width: int) -> None:
        self.tokens: list[int] = []
        self._rows = np.zeros((most + 1, width), np.float32)
        self._start = 0  # place of the first token's row

    def places(self, count: int) -> list[Rows]:
        """Where the rows of the next `count` tokens go: views [<= count, width], one or two."""
        return self._views(self._start + len(self.tokens), count)

    def rows(self, count: int) -> Rows:
        """The first `count` rows, [count, width]."""
        views = self._views(self._start, count)
        return views[0] if len(views) == 1 else np.concatenate(views)

    def _views(self, start: int, count: int) -> list[Rows]:
        start %= len(self._rows)
        view = self._rows[start : start + count]
        return [view] if len(view) == count else [view, self._rows[: count - len(view)]]

    def leave(self, count: int) -> None:
        """Drop the first ones."""
        del self.tokens[:count]
        self._start = (self._start + count) % len(self._rows)

    def cut(self, length: int) -> None:
        """Keep the first ones."""
        del self.tokens[length:]

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes


_MOST_UNREAD = HEAD_UNREAD - 1  # tokens that are fed together before anything is drafted


class DraftHead(ABC):
    """What drafts beside a model that it follows: `follow` what that reads, then draft.

    It is computed in `context`, from rows `of_model`. The first `headless` tokens of a text have no
    row to be read with. Closes its context.
    """

    pending, max_nodes = 0, HEAD_NODES
    tokens: Sequence[int] = ()  # none that a prompt could begin with: it follows its model
    capabilities = Capabilities(True, False, True)
    block = 0  # tokens that one step drafts; 0: one by one
    lag = 1  # of the row that a token is read with: that of the token before, or 0 for its own
    headless = 0
    reads_prompts = True  # with its model; else it begins with the last tokens, once it drafts

    def __init__(self, context: HeadContext, of_model: ModelRows) -> None:
        self._context, self._models = context, of_model
        self.tokenizer, settings = context.tokenizer, context.settings
        self.batch_size, self.context_size = settings.batch_size, settings.context_size
        # That its rows of logits stand for; None: all.
        self.token_ids: NDArray[np.int64] | None = context.drafted
        self.length = 0  # tokens of the text that it has read
        self._unread = PendingTokens(
            _MOST_UNREAD, of_model.width
        )  # and those behind them that it has not
        self._missed = 0  # tokens between these that it will never read
        self._last = np.zeros((1, of_model.width), np.float32)  # of the model, for the last token
        self._row_bytes = of_model.nbytes + self._unread.nbytes
        self._drafted = 0  # cells behind the text, of which the first
        self._ahead: int | None = None  # is this token's, read as the text will have it

    # -- following the model ---------------------------------------------------------------

    def follow(self, tokens: Sequence[int], *, reads: bool) -> None:
        """The model has read `tokens`, the first ones of its last step.

        They are read as well where it `reads` along, else by what is drafted next, if that comes
        before too many others.
        """
        start = 0
        if self.followed < self.headless:
            start = self.length = self.headless
        elif tokens[0] == self._ahead:
            self.length += 1  # its cell stays
            self._drafted -= 1
            start = 1
        self._ahead = None
        while start < len(tokens):
            end = min(start + _MOST_UNREAD, len(tokens))
            too_many = len(self._unread.tokens) + end - start - _MOST_UNREAD
            if too_many > 0 and reads:
                self._read()
            elif too_many > 0:
                self._unread.leave(too_many)
                self._missed += too_many
            self._take_rows(start - self.lag, end - start)
            self._unread.tokens += tokens[start:end]
            start = end
        self._models.copy(len(tokens) - 1, self._last)

    def _take_rows(self, at: int, count: int) -> None:
        """Keep rows of the model's last step from `at` on; -1 is that of the step before."""
        for rows in self._unread.places(count):
            if at < 0:
                rows[0], rows, at = self._last[0], rows[1:], 0
            if len(rows):
                self._models.copy(at, rows)
            at += len(rows)

    @property
    def followed(self) -> int:
        """Tokens of the text that it knows of."""
        return self.length + self._missed + len(self._unread.tokens)

    def truncate(self, length: int) -> int:
        """Go back to the first `length` tokens of the text.

        The row of the last one is gone then, so what is drafted next is drafted without it.
        """
        if length < self.followed:
            self._last[:] = 0.0
        self._unread.cut(max(0, length - self.length - self._missed))
        self._missed = min(self._missed, max(0, length - self.length))
        self.length = min(self.length, length)
        self._take_back()
        return length

    def skip(self, length: int) -> None:
        """The text begins with `length` tokens that it will never read."""
        self.truncate(0)
        self.length = length

    @property
    def num_unread(self) -> int:
        """Tokens of the text that are fed before anything is drafted."""
        count = len(self._unread.tokens)
        return min(count, HEAD_ANEW) if self._missed else count

    def _read(self) -> None:
        """Feed what is unread; nobody asks for what comes next."""
        count = self.num_unread
        if count:
            self._prepare()
            self._feed(self._unread.tokens, self._unread.rows(count))
            self._has_read(count)

    @abstractmethod
    def _feed(self, tokens: Sequence[int], rows: Rows) -> None:
        """Read tokens, each with its row of the model."""

    def _drafted_from(self, row: Logits) -> Logits:
        """Logits of the tokens that it may draft, of a row of logits [V]."""
        return row if self.token_ids is None else row[self.token_ids]

    def _has_read(self, count: int) -> None:
        self.length += count
        self._unread.leave(count)

    # -- drafting --------------------------------------------------------------------------

    @abstractmethod
    def begin(self, token: int) -> Logits:
        """Logits of what comes after `token`, which follows the text and is not in it yet, [V]."""

    @abstractmethod
    def go_on(self, token: int) -> Logits:
        """Logits of what comes after one token more, [V]."""

    @property
    def _position(self) -> int:
        """Of the next token in its cache."""
        return max(0, self.length - self.headless) + self._drafted

    def _prepare(self) -> None:
        """Stand behind what was read; behind a gap begin anew, since cells come without gaps."""
        if self._missed:
            too_many = len(self._unread.tokens) - self.num_unread
            self._unread.leave(too_many)
            self._missed += too_many
            lib, memory = self._context.lib, self._context.memory
            lib.llama_memory_seq_rm(memory, 0, 0, -1)
            self.length, self._missed = self.length + self._missed, 0
        self._take_back()

    def _take_back(self) -> None:
        """Forget what was only drafted, or cut off."""
        lib, memory = self._context.lib, self._context.memory
        self._drafted, self._ahead = 0, None
        lib.llama_memory_seq_rm(memory, 0, self._position, -1)

    # -- as a backend whose steps are timed --------------------------------------------------

    @property
    def contention(self) -> float:
        return self._context.contention

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Read tokens with rows of zeros: for the clock alone."""

    @abstractmethod
    def verify(self, tree: DraftTree) -> Logits:
        """A step over the nodes of a chain, with rows of zeros: for the clock alone.

        One token is fed as those that are drafted, several as those that its model has read.
        """

    def _zeros(self, count: int) -> Rows:
        return np.zeros((count, self._last.shape[1]), np.float32)

    def commit(self, path: Sequence[int]) -> None:
        """Nothing of such a step is kept."""
        self._take_back()

    def memory_bytes(self) -> dict[str, int]:
        """What llama.cpp says it allocated for the head, its logits and rows that are handed on."""
        logits = self._context.logits.nbytes
        return {**self._context.buffer_bytes, "logits": logits, "rows": self._row_bytes}

    def _batch_of_rows(self, most: int, width: int, *, has_ids: bool) -> Batch:
        """A batch to which at most so many rows are fed."""
        rows = np.zeros((most, width), np.float32)
        self._row_bytes += rows.nbytes
        return Batch(self._context.lib, most, 1, None, width, rows=rows, has_ids=has_ids)

    def close(self) -> None:
        """Free the context; safe to call twice."""
        self._context.close()


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
        changes: Mapping[str, int],
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
        self._make_context(lambda params: set_params(params, ctx_other=model.handle, **changes))
        self._look(rows=changes["n_outputs_max"])

    def close(self) -> None:
        """Free the context, and the model unless it is another one's."""
        if self._owns_model:
            super().close()
        elif self.handle:
            self.lib.llama_free(self.handle)
        self.handle = self._model = None
