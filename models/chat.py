"""Chat templates: the Jinja text a model file carries, rendered in a sandbox.

A template comes from a downloaded file. It runs without access to attributes, modules or files,
with a bound on its steps and on what it writes, and one that fails is an error with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from edgespec.errors import ModelFileError, UnsupportedError

# `role` and `content` as OpenAI's interface has them; content is text or a list of text parts.
Message = Mapping[str, Any]
_MAX_TEMPLATE_CHARS = 200_000
_LONGEST_REFUSAL = 2000  # characters


def prompt_text(
    prompt: str | Sequence[Message],
    template: str | None,
    *,
    bos_token: str = "",
    eos_token: str = "",
    raw: bool = False,
) -> str:
    """The text that is sent for a prompt: in the chat format of `template` unless it is `raw`.

    Text is one user message; without a template it is sent as it is.

    Raises UnsupportedError for messages where there is no template, and as `render_chat`.
    """
    if isinstance(prompt, str) and (raw or template is None):
        return prompt
    if template is None or raw:
        raise UnsupportedError("this model has no chat template", hint="pass the prompt as text")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return render_chat(template, messages, bos_token=bos_token, eos_token=eos_token)


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation.

    Args:
        template: Jinja source (`tokenizer.chat_template`).
        messages: `{"role": ..., "content": ...}` in order; content is text or a list of
            `{"type": "text", "text": ...}`.
        variables: what else the template may use by name, such as `tools`.

    Raises:
        UnsupportedError: the template refuses these messages (with its own words), or they are
            no messages of text.
        ModelFileError: the template is not valid or misbehaves.
    """
    from edgespec.models.template_sandbox import render  # which loads jinja2

    plain = [plain_message(message) for message in messages]
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ModelFileError(
            f"the chat template has {len(template)} characters; that is no template"
        )
    known = {
        **_defaults(variables or {}),
        **(variables or {}),
        "messages": plain,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        return render(template, known, {"raise_exception": _refuse, "strftime_now": _now})
    except _Refused as error:
        raise UnsupportedError(f"the model's chat template refuses: {error}") from error
    except Exception as error:  # Jinja's, and whatever Python raises of a stranger's expressions
        raise ModelFileError(
            f"the model's chat template fails: {error}",
            hint="use --raw to send the prompt as it is",
        ) from error


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """What templates ask for, as transformers and llama.cpp's server give it."""
    now = datetime.now()
    return {
        "tools": None,
        "documents": None,
        "enable_thinking": True,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y %H:%M:%S GMT"),
    }


def plain_message(message: Message) -> dict[str, Any]:
    """The message with its content as one string. Raises UnsupportedError for anything else."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UnsupportedError(
            f"a message needs a role, got {str(message)[:80]!r}",
            hint='a message is {"role": "user", "content": "text"}',
        )
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    parts = content if isinstance(content, Sequence) and not isinstance(content, bytes) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if len(texts) != len(parts) or not texts or not all(isinstance(text, str) for text in texts):
        raise UnsupportedError(
            f"the content of a message must be text, got {str(content)[:80]!r}",
            hint='a string, or a list of {"type": "text", "text": "..."}; images are not supported',
        )
    return {**message, "content": "".join(str(text) for text in texts)}


class _Refused(Exception):
    """The template called raise_exception."""


def _refuse(message: Any = "") -> NoReturn:
    raise _Refused(str(message)[:_LONGEST_REFUSAL])


def _now(format_: str) -> str:
    if len(format_) > _LONGEST_REFUSAL:
        raise ValueError("it asks for a very long date")
    return datetime.now().strftime(format_)
