"""What one call of `llama_decode` computes, over arrays that are filled by slices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.library import set_params

Embed: TypeAlias = Callable[[Sequence[int]], NDArray[np.float32]]  # n tokens to [n, width]


class Batch:
    """A llama_batch over numpy arrays, so that filling it is a slice assignment.

    With an `embed`, tokens are fed as its embeddings [n, width] instead of their ids; with `rows`
    [capacity, width], a row is fed with each token, or in its place without `has_ids`. Rows may
    have positions in several `sections`, which come one after the other.
    """

    def __init__(
        self,
        lib: ModuleType,
        capacity: int,
        max_sequences: int,
        embed: Embed | None,
        width: int,
        rows: NDArray[np.float32] | None = None,
        has_ids: bool = True,
        sections: int = 1,
    ) -> None:
        self._tokens = np.zeros(capacity, np.int32)
        self._embed = embed
        fed = rows is not None or embed is not None
        none = np.zeros((capacity if embed else 0, width), np.float32)
        self.rows = none if rows is None else rows
        self.positions = np.zeros(capacity * sections, np.int32)
        self.num_ids = np.ones(capacity, np.int32)
        self.ids = np.zeros((capacity, max_sequences), np.int32)
        self.outputs = np.ones(capacity, np.int8)
        self._id_rows = (self.ids.ctypes.data + np.arange(capacity) * self.ids.strides[0]).astype(
            np.uintp
        )
        numbers = ctypes.POINTER(ctypes.c_int32)
        self.struct = lib.llama_batch()
        set_params(
            self.struct,
            n_tokens=0,
            token=None if embed or not has_ids else self._tokens.ctypes.data_as(numbers),
            embd=self.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if fed else None,
            pos=self.positions.ctypes.data_as(numbers),
            n_seq_id=self.num_ids.ctypes.data_as(numbers),
            seq_id=self._id_rows.ctypes.data_as(ctypes.POINTER(numbers)),
            logits=self.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def put_chain(self, tokens: Sequence[int], position: int) -> None:
        """Let the first places hold `tokens`, one after the other, from a position on."""
        count = len(tokens)
        if count > 1 or self._embed is not None:
            self.put(0, tokens)
            self.positions[:count] = np.arange(position, position + count)
        else:  # which a slice takes several times as long for
            self._tokens[0] = tokens[0]
            self.positions[0] = position

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """Let the places from `start` on hold `tokens`."""
        if self._embed is None:
            self._tokens[start : start + len(tokens)] = tokens
        elif tokens:
            self.rows[start : start + len(tokens)] = self._embed(tokens)
