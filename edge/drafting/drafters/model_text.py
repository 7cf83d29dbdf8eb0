"""The text before a draft model: what of it is in the model's cache, and what has to be fed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.backends.base import Backend, Logits
from edgespec.backends.tree import DraftTree
from edgespec.prefix import common_prefix_length


class HoldsBytes(Protocol):
    """An engine of some kind."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes it says it allocated, by component."""

    def close(self) -> None:
        """Free it; safe to call twice."""


class DraftText:
    """A text that grows, and an engine that reads it and writes ahead."""

    def __init__(self, backend: HoldsBytes) -> None:
        self.backend = backend
        self.tokens: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new one; nothing is computed."""
        self.tokens = list(tokens)

    def append(self, emitted: Sequence[int]) -> None:
        """Go on with more tokens."""
        self.tokens += emitted

    def forget(self) -> None:
        """Empty the cache."""

    @property
    def can_be_read(self) -> bool:
        """Whether there is room for it, and it has no tokens that cannot be read."""
        raise NotImplementedError

    @property
    def num_missing(self) -> int:
        """Tokens to be fed before anything can be drafted; the last one is fed in any case."""
        raise NotImplementedError

    def catch_up(self) -> Logits:
        """Feed what is missing; logits after the last token, [V]."""
        raise NotImplementedError

    def feed_draft(self, token: int) -> Logits:
        """Go on with a token that is not in the text yet; logits after it, [V]."""
        raise NotImplementedError


class ModelText(DraftText):
    """A text that grows, as far as `backend` has to see it.

    A text with a token from `readable` on cannot be read. With a `window` no more than so many
    tokens are read at once: the text begins with its last ones, and does so again where more of
    them were missed or where the context is full, `room` being kept for drafts.
    """

    backend: Backend

    def __init__(self, backend: Backend, readable: int, window: int | None, room: int) -> None:
        super().__init__(backend)
        self.cached: list[int] = []  # tokens in the backend's cache
        self.shared = 0  # of them, those the text begins with
        self._readable = readable
        self._window = window
        self._room = room
        self._is_readable = True  # every token so far

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new one; nothing is computed."""
        self.tokens = list(tokens[-self._window :] if self._window else tokens)
        self._is_readable = max(tokens, default=0) < self._readable
        self.shared = common_prefix_length(self.cached, self.tokens)

    def append(self, emitted: Sequence[int]) -> None:
        """Go on with more tokens; those that were drafted are in the cache already."""
        self.tokens += emitted
        self._is_readable = self._is_readable and max(emitted, default=0) < self._readable
        self.shared = common_prefix_length(self.cached, self.tokens, self.shared)
        self._leave_behind()

    def _leave_behind(self) -> None:
        """Begin anew with the last tokens where that is less to read, or all that fits."""
        window, length = self._window, len(self.tokens)
        if window and (length - self.shared > window or not self._fits):
            del self.tokens[:-window]
            self.shared = 0

    def forget(self) -> None:
        """Empty the cache."""
        self.backend.truncate(0)
        self.cached, self.shared = [], 0

    @property
    def _fits(self) -> bool:
        return len(self.tokens) + self._room <= self.backend.context_size

    @property
    def can_be_read(self) -> bool:
        """Whether the backend has room for it, and all of its tokens."""
        return self._is_readable and self._fits

    @property
    def num_missing(self) -> int:
        """Tokens to be fed before anything can be drafted; the last one is fed in any case."""
        return max(1, len(self.tokens) - self.shared)

    def catch_up(self) -> Logits:
        """Feed what the backend has not seen; logits after the last token, [V]."""
        backend = self.backend
        kept = backend.truncate(min(self.shared, len(self.tokens) - 1))
        self.cached, self.shared = self.tokens[:kept], kept  # should a step fail
        missing = self.tokens[kept:]
        while len(missing) > backend.max_nodes:
            size = min(backend.batch_size, len(missing) - 1)
            backend.prefill(missing[:size])
            missing = missing[size:]
        self.cached, self.shared = list(self.tokens), len(self.tokens)
        return self._feed(missing)

    def feed_draft(self, token: int) -> Logits:
        """Go on with a token that is not in the text yet; logits after it, [V]."""
        logits = self._feed([token])
        self.cached.append(token)
        return logits

    def _feed(self, tokens: Sequence[int]) -> Logits:
        logits = self.backend.verify(DraftTree.chain(tokens))
        self.backend.commit(range(len(tokens)))
        last: Logits = logits[-1]
        return last
