"""edgespec: quantized language models at the speed a small device allows.

    >>> import edgespec
    >>> with edgespec.load("model.gguf") as engine:          # doctest: +SKIP
    ...     print(engine.generate("Why is the sky blue?").text)

Names are resolved on first use, so that importing `edgespec.errors` alone stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.engine import Chunk, Engine, Result, Stream
    from edgespec.errors import (
        BackendError,
        ContextFullError,
        DoesNotFitError,
        EdgespecError,
        MissingDependencyError,
        ModelFileError,
        ModelNotFoundError,
        UnsupportedError,
    )
    from edgespec.loading import load
    from edgespec.sampling import SamplingParams

__all__ = [
    "BackendError",
    "Chunk",
    "ContextFullError",
    "DoesNotFitError",
    "EdgespecError",
    "Engine",
    "MissingDependencyError",
    "ModelFileError",
    "ModelNotFoundError",
    "Result",
    "SamplingParams",
    "Stream",
    "UnsupportedError",
    "load",
]

_MODULES = {
    "Chunk": "engine",
    "Engine": "engine",
    "Result": "engine",
    "Stream": "engine",
    "SamplingParams": "sampling",
    "load": "loading",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edgespec.{_MODULES.get(name, 'errors')}"), name)
