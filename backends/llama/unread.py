"""What a head has not read: the last tokens that its model has, each with the row before it.

A ring: of a head that rests, a token goes as one comes, and no other row moves.
"""

from __future__ import annotations

import numpy as np

from edgespec.backends.llama.hidden_rows import Rows


class Unread:
    """At most `most` tokens, and rows of `width` for them and for one token more."""

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
