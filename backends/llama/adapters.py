"""LoRA adapters beside a model in llama.cpp: their products are computed at each step."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from edgespec.backends.llama.library import LIBRARY_LOG
from edgespec.errors import BackendError


class Adapters:
    """The adapters of a model, which are freed with it. Raises BackendError where one is not read.

    Packed weights stay as they are: what an adapter adds is multiplied beside them.
    """

    def __init__(self, lib: ModuleType, model: Any, lora: Sequence[tuple[Path, float]]) -> None:
        self._lib = lib
        self.scales = [scale for _, scale in lora]  # in the next step of the last context
        self._handles = list[Any]()
        for path, _ in lora:
            handle = lib.llama_adapter_lora_init(model, os.fsencode(path))
            if not handle:
                said = LIBRARY_LOG.problem() or "no reason"
                raise BackendError(f"llama.cpp cannot read the adapter {path.name}: {said}")
            self._handles.append(handle)

    def set(self, context: Any, scales: Sequence[float]) -> None:
        """How much of each the next steps of a context add; nothing is computed for a scale of 0.

        Raises BackendError.
        """
        used = [(one, scale) for one, scale in zip(self._handles, scales, strict=True) if scale]
        # llama.cpp reads both while it is called, and keeps no address of them.
        handles = (self._lib.llama_adapter_lora_p_ctypes * len(used))(*(one for one, _ in used))
        values = (ctypes.c_float * len(used))(*(scale for _, scale in used))
        if self._lib.llama_set_adapters_lora(context, handles, len(used), values):
            raise BackendError(
                f"llama.cpp does not take an adapter: {LIBRARY_LOG.problem() or 'no reason'}"
            )
        self.scales = list(scales)
