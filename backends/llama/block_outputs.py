"""What blocks of a model give, where its graph in llama.cpp does not hand out what heads read.

llama.cpp names what each block gives, and asks a callback about every value of a step by its name.
That one is part of the kernels: in Python it would take a millisecond of each step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.backends.llama.library import set_params
from edgespec.errors import BackendError
from edgespec.memory.device.kernels import open_library
from edgespec.memory.device.structures import MOST_BLOCKS, BlockRows


class BlockOutputs:
    """Rows that some layers take in, which is what the layers before them give.

    Args:
        layers: their numbers, from 1 on.
        width: values of a row.
        room: rows of the largest step.

    Raises BackendError where the kernels are not there.
    """

    def __init__(self, layers: Sequence[int], width: int, room: int) -> None:
        if reason := refusal_of_kernels():
            raise BackendError(f"this model's states are read by edgespec's kernels: {reason}")
        if not 0 < len(layers) <= MOST_BLOCKS or min(layers) < 1:
            raise BackendError(f"inputs of layers {list(layers)} cannot be read")
        self.layers = list(layers)
        self._rows = np.empty((len(layers), room, width), np.float32)
        blocks = (ctypes.c_int32 * MOST_BLOCKS)(*(layer - 1 for layer in layers))
        self._taken = BlockRows(len(layers), blocks, width, room, rows=self._rows.ctypes.data)
        self._used = ctypes.addressof(self._taken) + BlockRows.used.offset

    def join(self, params: Any) -> None:
        """Let a context that is made with these parameters fill the rows in each step."""
        function = open_library()["edgespec_take_output"]
        set_params(
            params,
            cb_eval=ctypes.cast(function, type(params.cb_eval)),
            cb_eval_user_data=ctypes.addressof(self._taken),
        )

    def begin(self) -> None:
        """A step begins, whose rows replace those of the last one."""
        ctypes.memset(self._used, 0, BlockRows.used.size)

    def of(self, layer: int, start: int, end: int) -> NDArray[np.float32]:
        """Rows [start, end) of the last step. Raises BackendError where they are not there."""
        place = self.layers.index(layer)
        if not end <= self._taken.used[place] <= self._taken.room:
            raise BackendError(f"llama.cpp does not tell what layer {layer} takes in")
        return self._rows[place, start:end]
