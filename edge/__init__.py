"""edgespec: quantized language models at the speed a small device allows.

    >>> import edgespec
    >>> with edgespec.load("model.gguf") as engine:          # doctest: +SKIP
    ...     print(engine.generate("Why is the sky blue?").text)

Names are resolved on first use, so that importing `edgespec.errors` alone stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.decode.engine import Engine
    from edgespec.decode.generation import Chunk, Counters, Result, Span, Stream, ToolCall
    from edgespec.decode.options import GenerationOptions
    from edgespec.decode.session import Session, Turn
    from edgespec.errors import (
        BackendError,
        ContextFullError,
        DoesNotFitError,
        DownloadError,
        EdgespecError,
        MissingDependencyError,
        ModelFileError,
        ModelNotFoundError,
        SessionFileError,
        UnsupportedError,
    )
    from edgespec.memory.plan.options import LoadOptions
    from edgespec.memory.plan.plan import Plan
    from edgespec.models.chat import ChatMessage
    from edgespec.sampling.chain import TokenLogprob
    from edgespec.sampling.params import SamplingParams
    from edgespec.serve.server import Server
    from edgespec.setup.embedding import Embedder, embed
    from edgespec.setup.loading import load, plan
    from edgespec.switching.planning import SwitchPolicy

__all__ = [
    "BackendError",
    "ChatMessage",
    "Chunk",
    "ContextFullError",
    "Counters",
    "DoesNotFitError",
    "DownloadError",
    "DraftModelWarning",
    "EdgespecError",
    "EdgespecWarning",
    "Embedder",
    "Engine",
    "GenerationOptions",
    "LoadOptions",
    "MissingDependencyError",
    "ModelFileError",
    "ModelNotFoundError",
    "Plan",
    "Result",
    "SamplingParams",
    "Server",
    "Session",
    "SessionFileError",
    "Span",
    "Stream",
    "SwitchPolicy",
    "TokenLogprob",
    "ToolCall",
    "Turn",
    "UnsupportedError",
    "embed",
    "load",
    "plan",
]

_MODULES = {
    "ChatMessage": "models.chat",
    "Chunk": "decode.generation",
    "Counters": "decode.generation",
    "Embedder": "setup.embedding",
    "Engine": "decode.engine",
    "GenerationOptions": "decode.options",
    "LoadOptions": "memory.plan.options",
    "Result": "decode.generation",
    "Stream": "decode.generation",
    "Plan": "memory.plan.plan",
    "SamplingParams": "sampling.params",
    "Server": "serve.server",
    "Session": "decode.session",
    "Span": "decode.generation",
    "SwitchPolicy": "switching.planning",
    "TokenLogprob": "sampling.chain",
    "ToolCall": "decode.generation",
    "Turn": "decode.session",
    "embed": "setup.embedding",
    "load": "setup.loading",
    "plan": "setup.loading",
}


def __dir__() -> list[str]:
    # Without what is imported here for itself.
    return sorted({*__all__, "__version__", *(one for one in globals() if one.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("edgespec")
    if name not in __all__:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"edgespec.{_MODULES.get(name, 'errors')}"), name)
    if name in ("Engine", "Session", "load"):
        import_module("edgespec.decode.engine").Engine.with_tools = _with_tools
    return found


def _with_tools(*arguments: Any) -> Any:
    """A prompt with tools, by what reads those of requests; read when it is needed."""
    from importlib import import_module

    return import_module("edgespec.serve.tool_calls").conversation(*arguments)
