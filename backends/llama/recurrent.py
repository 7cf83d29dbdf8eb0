"""A model with recurrent layers in llama.cpp: its state goes back as far as snapshots were kept.

Attention keeps a cell for each token and forgets any of them; a recurrent state is one sum over all
tokens. So llama.cpp can keep, besides the state, those behind each of the last tokens of a step:
`snapshots` of them, in the architectures of `edgespec.models.layers.SNAPSHOTS`. A step of at most
1 + `snapshots` nodes can then be cut behind any node. Only chains: branches would share a state.

Going back is put off until the next step, because llama.cpp goes back once between two steps: until
then every snapshot of the last one can still be reached, also by `truncate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from edgespec.backends.base import Capabilities, DraftTree, Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.batch import Batch, Embed
from edgespec.backends.llama.library import set_params
from edgespec.backends.llama.states import say_lost
from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig


class RecurrentBackend(LlamaBackend):
    """Raises as LlamaBackend, and UnsupportedError where the library keeps no such snapshots.

    Its `snapshots` count tokens that can be taken back after a step, at least the drafts of one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: RunConfig,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._snapshots = settings.snapshots
        self._cells = 0  # tokens in the state, committed ones and those of the last step
        self._back = 0  # of them, the last ones that can be taken back
        super().__init__(path, settings, progress=progress)

    def _adjust(self, params: Any) -> None:
        set_params(params, n_rs_seq=self._snapshots)

    def _begin(self, embed: Embed | None) -> None:
        super()._begin(embed)
        kept = int(self._context.lib.llama_n_rs_seq(self._context.handle))
        if kept < max(self._snapshots, self.settings.max_nodes - 1):
            raise UnsupportedError(
                f"llama.cpp keeps {kept} snapshots of this model's recurrent state, not "
                f"{max(self._snapshots, self.settings.max_nodes - 1)}",
                hint="leave out --drafter",
            )
        reason = "recurrent layers: chains only, and no further back than the last step"
        self.capabilities = Capabilities(True, False, False, reason, snapshots=kept)

    def keep_snapshots(self, count: int) -> None:
        """Keep so many, at most those it was opened for; the cache is empty then."""
        self._snapshots = count
        self._context.renew(self._adjust)
        self._clear()

    def verify(self, tree: DraftTree) -> Logits:
        """As in LlamaBackend, for chains."""
        if not tree.is_chain:
            raise UnsupportedError(f"no branches with this model: {self.capabilities.reason}")
        return super().verify(tree)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the first nodes of the last step's chain; the next step takes back the others."""
        tree, self._tree = self._tree, None
        assert tree is not None and path[0] == 0, "commit follows verify and keeps the root"
        self.tokens += [tree.tokens[node] for node in path]
        self._length += len(path)

    def truncate(self, length: int) -> int:
        """Keep at most the first `length` tokens; return how many could be kept.

        As many as a snapshot of the last step is of, or else a state that was kept.
        """
        length = self._whole_images(min(length, self._length))
        kept = self.reach(length)
        self._tree = None
        if kept < self._cells - self._back:
            say_lost(length, kept)
            self._go_back(kept, self)
            self._cells, self._back = kept, 0
        self._length = kept
        del self.tokens[kept:]
        self.images = [one for one in self.images if one[0] < kept]
        return kept

    def reach(self, length: int, *, shared: bool = False) -> int:
        """As of `KeepsStates`: any of the last step's nodes, too."""
        length = self._whole_images(min(length, self._length))
        if length >= self._cells - self._back:
            return length
        return self._shared.states.reach(self.number, length)

    def _has_window(self, length: int) -> bool:
        return False

    def save_cache(self, path: str, start: int = 0, end: int | None = None) -> int:
        """Write the state behind the committed tokens, and the cells of the other layers."""
        self._take_back()
        return super().save_cache(path, start, end)

    def _has_loaded(self) -> None:
        self._cells, self._back = self._length, 0  # snapshots are not in the file

    def _decoder(self) -> Callable[[Batch, int], None]:
        return self._decode

    def _decode(self, batch: Batch, count: int) -> None:
        self._take_back()
        try:
            self._context.decode(batch, count)
        except BaseException:
            self._clear()  # what is in the state now, nobody knows
            raise
        self._cells = self._length + count
        self._back = min(count, self._snapshots + 1) - 1

    def _drop_uncommitted(self) -> None:
        """Put off, as everything that goes back."""
        self._tree = None

    def _take_back(self) -> None:
        """Let the state be that behind the committed tokens."""
        too_many = self._cells - self._length
        if not too_many:
            return
        lib, memory = self._context.lib, self._context.memory
        if too_many > self._back or not lib.llama_memory_seq_rm(memory, 0, self._position, -1):
            self._clear()
            raise BackendError("the recurrent state before the last step is gone")
        self._cells, self._back = self._length, 0  # llama.cpp goes back once

    def _clear(self) -> None:
        self._empty()
        self._tree, self.tokens, self.images = None, [], []
        self._length = self._cells = self._back = 0
