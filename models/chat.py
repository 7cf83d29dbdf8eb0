"""Chat templates: the Jinja text a model file carries, rendered in a sandbox.

A template comes from a downloaded file. It runs without access to attributes, modules or files,
and one that fails is an error with a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from edgespec.errors import ModelFileError, UnsupportedError

Message = Mapping[str, str]
_MAX_TEMPLATE_CHARS = 200_000


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a conversation.

    Args:
        template: Jinja source (`tokenizer.chat_template`).
        messages: `{"role": ..., "content": ...}` in order.

    Raises:
        UnsupportedError: the template refuses these messages (with its own words).
        ModelFileError: the template is not valid or misbehaves.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ModelFileError(
            f"the chat template has {len(template)} characters; that is no template"
        )

    def refuse(message: str) -> NoReturn:
        raise _Refused(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
        )
    except _Refused as error:
        raise UnsupportedError(f"the model's chat template refuses: {error}") from error
    except (
        TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ModelFileError(
            f"the model's chat template fails: {error}",
            hint="use --raw to send the prompt as it is",
        ) from error


class _Refused(Exception):
    """The template called raise_exception."""


def _now(format_: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format_)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers' chat templates: jinja's own escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
