"""The head in a model's own file: a block that predicts one token more than the model (MTP).

A second context of the same model runs that block alone. For each token it is fed the token and the
row that the model's last block gave for the token before; what it gives is a row of logits, and a
row to go on with. So it follows what its model reads, and then writes ahead on rows of its own, as
llama.cpp's own server drives it (`llama.cpp: common/speculative.cpp`). Prompts are read with the
model. What that writes waits until something is drafted; where nothing was for many tokens, the
head begins anew with the last ones, so that one which does not pay costs nothing meanwhile.

    model   reads   a b c d         its rows          ra rb rc rd
    head    reads   (a, 0) (b, ra) (c, rb) (d, rc)    drafts from (e, rd), e being the next token
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext, LlamaSettings
from edgespec.backends.llama.library import LOG
from edgespec.backends.llama.recurrent import RecurrentBackend
from edgespec.backends.llama.tokenizer import LlamaTokenizer
from edgespec.backends.tree import DraftTree
from edgespec.errors import BackendError
from edgespec.memory.bytes.footprint import HEAD_NODES, HEAD_UNREAD

Rows = NDArray[np.float32]
_MTP = 1  # value of llama_context_type
_MOST_UNREAD = HEAD_UNREAD - 1  # tokens that are fed together before anything is drafted


class _HeadContext(LlamaContext):
    """A context for the last block of a model that another context has loaded."""

    def open_beside(self, model: LlamaContext) -> None:
        """Raises BackendError."""
        LOG.clear()
        self._model, self.tokenizer = model._model, model.tokenizer
        self.capabilities = Capabilities(True, False, True)
        self._make_context(self._adjust)
        self._look(rows=1)

    def _adjust(self, params: Any) -> None:
        params.ctx_type = _MTP
        params.n_outputs_max = 1
        params.n_seq_max = 1

    def close(self) -> None:
        """Free the context; the model is another one's."""
        if self.handle:
            self.lib.llama_free(self.handle)
        self.handle = self._model = None


class Head:
    """What drafts beside a model that follows it: `follow` what that reads, then draft.

    Raises BackendError and UnsupportedError where llama.cpp cannot make its context.
    """

    pending, max_nodes = 0, HEAD_NODES
    capabilities = Capabilities(True, False, True)

    def __init__(self, model: LlamaContext) -> None:
        settings = replace(model.settings, max_nodes=self.max_nodes, max_leaves=1)
        self._context = _HeadContext(settings)
        try:
            self._context.open_beside(model)
            self._hidden = _HiddenRows(self._context, model.width)
            self._models = _HiddenRows(model, model.width)
        except BaseException:
            self.close()
            raise
        self._table = np.zeros((self.batch_size + self.max_nodes, model.width), np.float32)
        self._batch = Batch(
            self._context.lib, len(self._table), 1, None, model.width, rows=self._table
        )
        self.length = 0  # tokens of the text that it has read
        self._unread: list[int] = []  # and those behind them that it has not,
        self._missed = 0  # tokens between these that it will never read
        self._unread_rows = np.zeros((_MOST_UNREAD + 1, model.width), np.float32)  # with their rows
        self._last = np.zeros(model.width, np.float32)  # of the model, for the last token
        self._drafted = 0  # cells behind the text

    @property
    def tokenizer(self) -> LlamaTokenizer:
        """The model's."""
        return self._context.tokenizer

    @property
    def batch_size(self) -> int:
        """Tokens of the model's prompts that it reads at once."""
        return self._context.settings.batch_size

    @property
    def context_size(self) -> int:
        """Tokens there is room for."""
        return self._context.settings.context_size

    # -- following the model ---------------------------------------------------------------

    def follow(self, tokens: Sequence[int], *, reads: bool) -> None:
        """The model has read `tokens`, the first ones of its last step.

        They are read as well where it `reads` along, else by what is drafted next, if that comes
        before too many others.
        """
        rows = self._models.rows(len(tokens))
        before = np.concatenate([self._last[None], rows[:-1]])
        self._last = rows[-1].copy()
        for start in range(0, len(tokens), _MOST_UNREAD):
            part = list(tokens[start : start + _MOST_UNREAD])
            too_many = len(self._unread) + len(part) - _MOST_UNREAD
            if too_many > 0 and reads:
                self._read()
            elif too_many > 0:
                self._leave(too_many)
            at = len(self._unread)
            self._unread_rows[at : at + len(part)] = before[start : start + len(part)]
            self._unread += part

    def _leave(self, count: int) -> None:
        """Never read the first `count` unread tokens, nor what stands before them."""
        self._missed += count
        kept = len(self._unread) - count
        self._unread_rows[:kept] = self._unread_rows[count : count + kept].copy()
        del self._unread[:count]

    @property
    def followed(self) -> int:
        """Tokens of the text that it knows of."""
        return self.length + self._missed + len(self._unread)

    def truncate(self, length: int) -> int:
        """Go back to the first `length` tokens of the text.

        The row of the last one is gone then, so what is drafted next is drafted without it.
        """
        if length < self.followed:
            self._last = np.zeros_like(self._last)
        self._unread = self._unread[: max(0, length - self.length - self._missed)]
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
        return len(self._unread)

    def _read(self) -> None:
        """Feed what is unread; nobody asks for what comes next."""
        if self._unread:
            self._prepare()
            self._feed(self._unread, self._unread_rows[: len(self._unread)], wanted=False)
            self.length += len(self._unread)
            self._unread = []

    # -- drafting --------------------------------------------------------------------------

    def begin(self, token: int) -> Logits:
        """Logits of what comes after `token`, which follows the text and is not in it yet, [V]."""
        self._prepare()
        tokens, count = [*self._unread, token], len(self._unread)
        self._unread_rows[count] = self._last
        logits = self._feed(tokens, self._unread_rows[: count + 1], wanted=True)
        self.length += count
        self._unread, self._drafted = [], 1
        return logits

    def go_on(self, token: int) -> Logits:
        """Logits of what comes after one token more, [V]."""
        logits = self._feed([token], self._next, wanted=True)
        self._drafted += 1
        return logits

    def _feed(self, tokens: Sequence[int], rows: Rows, *, wanted: bool) -> Logits:
        batch, count, at = self._batch, len(tokens), self.length + self._drafted
        batch.put(0, tokens)
        self._table[:count] = rows
        batch.positions[:count] = np.arange(at, at + count)
        batch.outputs[:count] = 0
        batch.outputs[count - 1] = int(wanted)
        self._context.decode(batch, count)
        if not wanted:
            return np.empty(0, np.float32)
        self._next = self._hidden.rows(count)[-1:].copy()
        logits: Logits = self._context.rows(1)[0]
        return logits

    def _prepare(self) -> None:
        """Stand behind what was read; behind a gap begin anew, since cells come without gaps."""
        if self._missed:
            lib, memory = self._context.lib, self._context.memory
            lib.llama_memory_seq_rm(memory, 0, 0, -1)
            self.length, self._missed = self.length + self._missed, 0
        self._take_back()

    def _take_back(self) -> None:
        """Forget what was only drafted, or cut off."""
        lib, memory = self._context.lib, self._context.memory
        lib.llama_memory_seq_rm(memory, 0, self.length, -1)
        self._drafted = 0

    # -- as a backend whose steps are timed --------------------------------------------------

    @property
    def crowding(self) -> float:
        """As of a backend."""
        return self._context.crowding

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Read tokens with rows of zeros: for the clock alone."""
        logits = self._feed(
            tokens, np.zeros((len(tokens), len(self._last)), np.float32), wanted=True
        )
        self.length += len(tokens)
        return logits

    def verify(self, tree: DraftTree) -> Logits:
        """A step over the nodes of a chain, with rows of zeros: for the clock alone."""
        rows = np.zeros((len(tree), len(self._last)), np.float32)
        return self._feed(list(tree.tokens), rows, wanted=True)[None]

    def commit(self, path: Sequence[int]) -> None:
        """Nothing of such a step is kept."""
        self._take_back()

    @property
    def tokens(self) -> Sequence[int]:
        """None that a prompt could begin with: it follows its model."""
        return ()

    def memory_bytes(self) -> dict[str, int]:
        """What llama.cpp says it allocated for the head's context."""
        logits = self._context.logits.nbytes
        return {**self._context.buffer_bytes, "logits": logits, "rows": self._hidden.nbytes}

    def close(self) -> None:
        """Free the context; safe to call twice."""
        self._context.close()


class _HiddenRows:
    """The rows that a context's last block has given for the tokens of a step, [n, width]."""

    def __init__(self, context: LlamaContext, width: int) -> None:
        from llama_cpp import llama_cpp_ext

        self._get = llama_cpp_ext.llama_get_embeddings_nextn
        self._handle, self._width = context.handle, width
        settings = context.settings
        self.nbytes = 4 * width * (settings.batch_size + settings.max_nodes)
        llama_cpp_ext.llama_set_embeddings_nextn(context.handle, True, False)

    def rows(self, count: int) -> Rows:
        """Those of the first `count` tokens: a view that the next step overwrites."""
        pointer = self._get(self._handle)
        if not pointer:
            raise BackendError("llama.cpp gives no rows for this model's head")
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (count, self._width))


class Followed(LlamaBackend):
    """A model whose head follows what it reads. Chains only, so rows lie in the text's order."""

    head: Head | None = None

    def open_head(self) -> Head:
        """The head, from now on beside the model. Raises as `Head`."""
        self.head = Head(self._context)
        return self.head

    def prefill(self, tokens: Sequence[int]) -> Logits:
        logits = super().prefill(tokens)
        if self.head is not None:
            self.head.follow(tokens, reads=True)
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

    def load_cache(self, path: str, tokens: Sequence[int]) -> None:
        super().load_cache(path, tokens)
        if self.head is not None:  # which has not read them; the text begins where it does
            self.head.skip(len(tokens))

    def close(self) -> None:
        if self.head is not None:
            self.head.close()
        super().close()


class FollowedBackend(Followed):
    """A model with attention in all layers, and its head. Raises as LlamaBackend."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: LlamaSettings,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(path, replace(settings, max_leaves=1, head=True), progress=progress)


class FollowedRecurrentBackend(Followed, RecurrentBackend):
    """A model with recurrent layers, and its head. Raises as RecurrentBackend."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: LlamaSettings,
        *,
        snapshots: int,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        settings = replace(settings, head=True)
        RecurrentBackend.__init__(self, path, settings, snapshots=snapshots, progress=progress)
