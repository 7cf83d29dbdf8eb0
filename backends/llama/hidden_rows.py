"""Rows that a context gives besides logits: what blocks take in, and what the last one gives.

Heads draft from them. The functions are none of llama.cpp's stable ones (`llama.cpp:
src/llama-ext.h`), and found by their C++ names: as addresses, since making a pointer of each takes
longer than most other work of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from edgespec.backends.llama.context import LlamaContext, RowsView
from edgespec.errors import BackendError
from edgespec.memory.device.llama_binary import PACKAGE, function_of, import_functions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Rows: TypeAlias = "NDArray[np.float32]"
_SET_LAYER_INPUT = (
    "llama_set_embeddings_layer_inp",
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
)
_GET_LAYER_INPUT = (
    "llama_get_embeddings_layer_inp",
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
)
_GET_NEXT = (
    "llama_get_embeddings_nextn",
    "_Z26llama_get_embeddings_nextnP13llama_context",
    "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
)


class NextRows:
    """The rows that a context's last block has given for the tokens of a step.

    For all of them, or where it is `masked` for those whose logits were asked for.
    """

    def __init__(self, context: LlamaContext, width: int, *, masked: bool = False) -> None:
        self._get = _function(context.lib, _GET_NEXT, ctypes.c_void_p, ctypes.c_void_p)
        self._handle, self.width = context.handle, width
        settings = context.settings
        kept = settings.max_nodes if masked else settings.batch_size + settings.max_nodes
        self.nbytes = 4 * width * kept
        self._view = RowsView(kept, width)
        extension = import_functions("llama_cpp_ext")
        extension.llama_set_embeddings_nextn(context.handle, True, masked)

    def rows(self, count: int) -> Rows:
        """Those of the first `count` tokens: a view that the next step overwrites."""
        return self._view.at(self._get(self._handle))[:count]

    def copy(self, start: int, into: Rows) -> None:
        """Fill `into` with the rows of the tokens from `start` on."""
        into[:] = self.rows(start + len(into))[start:]


class LayerRows:
    """What some layers of a model have taken in for the tokens of a step, side by side.

    Where llama.cpp hands it out, its steps need more memory from now on, which the context looks up
    anew; its cache is empty.
    """

    def __init__(self, context: LlamaContext, layers: Sequence[int]) -> None:
        part = context.width
        kept = context.settings.batch_size + context.settings.max_nodes
        self.width = len(layers) * part
        self.nbytes = 4 * self.width * kept
        self._rows = [_rows_of(context, layer, kept) for layer in layers]
        self._places = [slice(place * part, (place + 1) * part) for place in range(len(layers))]
        if context.outputs is None:
            context.look_again()

    def copy(self, start: int, into: Rows) -> None:
        """Fill `into` with the rows of the tokens from `start` on."""
        for rows, place in zip(self._rows, self._places, strict=True):
            into[:, place] = rows(start, start + len(into))


ModelRows: TypeAlias = NextRows | LayerRows  # of each token of a model's last step


def _rows_of(context: LlamaContext, layer: int, kept: int) -> Callable[[int, int], Rows]:
    """What gives rows [start, end) that a layer took in, of steps from the next one on."""
    if context.outputs is not None:
        return partial(context.outputs.of, layer)
    types = ctypes.c_void_p, ctypes.c_uint32
    get = _function(context.lib, _GET_LAYER_INPUT, ctypes.c_void_p, *types)
    keep_layer_input(context, layer)
    view = RowsView(kept, context.width)
    return lambda start, end: view.at(get(context.handle, layer))[start:end]


def keep_layer_input(context: LlamaContext, layer: int) -> None:
    """Let a context's steps keep what a layer takes in, from the next one on."""
    types = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool
    _function(context.lib, _SET_LAYER_INPUT, None, *types)(context.handle, layer, True)


def missing_rows(lib: ModuleType) -> bool:
    """Whether this llama.cpp hides what heads read: then they cannot draft."""
    try:
        for names in (_SET_LAYER_INPUT, _GET_LAYER_INPUT, _GET_NEXT):
            _function(lib, names, None)
    except BackendError:
        return True
    return False


def _function(lib: ModuleType, names: Sequence[str], result: Any, *arguments: Any) -> Any:
    """A function of llama.cpp's by the name that its compiler gave it. Raises BackendError."""
    for name in names:
        with suppress(AttributeError):
            return function_of(lib._lib, name, result, *arguments)
    raise BackendError(
        f"this llama.cpp has no {names[0]}",
        hint=f"pip install {PACKAGE}, or leave out --draft-model",
    )
