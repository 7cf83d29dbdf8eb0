"""Tools in Python: functions or OpenAI's definitions, asked for as a request of the server asks."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgespec.decode.engine import AnyPrompt, Engine
from edgespec.decode.options import GenerationOptions
from edgespec.errors import UnsupportedError
from edgespec.models.chat import plain_message
from edgespec.models.images import images_of
from edgespec.serve.chat import Conversation, conversation_of, read_chat
from edgespec.serve.parsing import ApiError, Defaults, Fields, Limits, ServedModel
from edgespec.serve.service import Prompts

_NAME = "edgespec"  # of the model, which nobody is told
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def conversation(engine: Engine, prompt: AnyPrompt, options: GenerationOptions) -> Conversation:
    """The prompt of a chat with tools, how it is continued, and what finds calls in the answer.

    Raises UnsupportedError for tools or messages that are none, and for a prompt without messages.
    """
    if isinstance(prompt, str):
        marks = "".join(image.mark for image in options.shown)
        prompt = [{"role": "user", "content": marks + prompt}]
    messages = [one for one in prompt if isinstance(one, Mapping)]
    if options.raw or len(messages) < len(prompt):
        raise UnsupportedError("tools need messages, or a text in the model's chat format")
    choice: Any = options.tool_choice
    if isinstance(choice, str) and choice not in ("auto", "required", "none"):
        choice = {"type": "function", "function": {"name": choice}}
    body = {
        "messages": [plain_message(one) for one in messages],
        "tools": [definition(one) for one in options.tools],
        "tool_choice": dict(choice) if isinstance(choice, Mapping) else choice,
    }
    size = engine.backend.context_size
    try:
        asked = read_chat(Fields(body), ServedModel((_NAME,), size, Defaults(), Limits()))
        prompts = Prompts(engine)
        template = prompts.template(with_tools=bool(asked.tools.offered)) or ""
        found = conversation_of(replace(asked, options=options), prompts, template)
    except ApiError as problem:
        raise UnsupportedError(str(problem)) from None
    images = (*options.shown, *images_of(messages))
    return replace(found, options=replace(found.options, images=images))


def definition(tool: Mapping[str, Any] | Callable[..., Any]) -> dict[str, Any]:
    """OpenAI's definition of a tool; of a function by its name, its docstring and its annotations.

    Raises UnsupportedError for a function whose parameters cannot be told.
    """
    if isinstance(tool, Mapping):
        return dict(tool)
    name = getattr(tool, "__name__", type(tool).__name__)
    try:
        parameters = inspect.signature(tool).parameters.values()
        hints = typing.get_type_hints(tool)
    except (NameError, TypeError, ValueError) as problem:
        raise UnsupportedError(f"the parameters of {name} cannot be told: {problem}") from None
    if any(one.kind in (one.VAR_POSITIONAL, one.POSITIONAL_ONLY) for one in parameters):
        raise UnsupportedError(f"{name} takes arguments without names, which no model can give")
    named = [one for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
    schema = {
        "type": "object",
        "properties": {one.name: _schema(hints.get(one.name, Any)) for one in named},
        "required": [one.name for one in named if one.default is one.empty],
    }
    about = (inspect.getdoc(tool) or "").strip()
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


def _schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of an annotation; anything where it is none that JSON has."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in _TYPES:
        return {"type": _TYPES[origin]}
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(one) for one in parts]}
    if origin is typing.Annotated:
        about = [one for one in parts[1:] if isinstance(one, str)]
        return {**_schema(parts[0]), **({"description": about[0]} if about else {})}
    if origin in (list, tuple, set, Sequence):
        return {"type": "array", **({"items": _schema(parts[0])} if parts else {})}
    if origin in (dict, Mapping):
        return {"type": "object"}
    if hasattr(hint, "model_json_schema"):
        return dict(hint.model_json_schema())
    return {}
