"""Chat templates: the Jinja text a model file carries, rendered in a sandbox.

A template comes from a downloaded file. It runs without access to attributes, modules or files,
with a bound on its steps and on what it writes, and one that fails is an error with a sentence.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from edgespec.errors import ModelFileError, UnsupportedError

# `role` and `content` as OpenAI's interface has them; content is text or a list of text parts.
Message = Mapping[str, Any]
_MAX_TEMPLATE_CHARS = 200_000
_MAX_PROMPT_CHARS = 32_000_000
_MAX_STEPS = 1_000_000  # turns of loops and calls; a message takes about ten


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
    from jinja2 import TemplateError

    plain = [plain_message(message) for message in messages]
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ModelFileError(
            f"the chat template has {len(template)} characters; that is no template"
        )

    try:
        pieces = (
            _environment()
            .from_string(template)
            .generate(
                {
                    **(variables or {}),
                    "messages": plain,
                    "add_generation_prompt": add_generation_prompt,
                    "bos_token": bos_token,
                    "eos_token": eos_token,
                }
            )
        )
        return _joined(pieces)
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


def _environment() -> Any:
    """What templates are rendered in, with the functions that they expect."""

    def refuse(message: str) -> NoReturn:
        raise _Refused(message)

    environment = _environment_class()(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment


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


def _joined(pieces: Iterable[str]) -> str:
    texts: list[str] = []
    size = 0
    for text in pieces:
        texts.append(text)
        size += len(text)
        if size > _MAX_PROMPT_CHARS:
            raise ValueError(f"it writes more than {_MAX_PROMPT_CHARS} characters")
    return "".join(texts)


@functools.cache
def _environment_class() -> Any:
    """Jinja's sandbox with a bound on the steps of a template; Jinja is imported on first use."""
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """Counts calls. Every loop is given one call a turn, so that loops are counted, too."""

        intercepted_binops = frozenset(("*", "**"))
        steps = 0

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            for loop in tree.find_all(nodes.For):
                tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
                loop.body.insert(0, nodes.ExprStmt(tick))
            return tree

        def tick(self) -> None:
            """Nothing: the call is what is counted."""

        def call(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            if self.steps > _MAX_STEPS:
                raise ValueError(f"it takes more than {_MAX_STEPS} steps")
            return super().call(*args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for value, factor in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(factor, int):
                    if len(value) * factor > _MAX_PROMPT_CHARS:
                        raise ValueError("it makes a huge text")
            if operator == "**" and isinstance(right, int) and abs(right) > 1000:
                raise ValueError("it computes a huge number")
            return super().call_binop(context, operator, left, right)

    return Bounded


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
