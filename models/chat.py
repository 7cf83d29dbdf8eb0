"""Chat templates: the Jinja text a model file carries, and the prompts that it makes of messages.

A template comes from a downloaded file. It is rendered in a process of its own (`template_guest`),
without attributes, modules or files, and one that fails is an error with a sentence.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

from edgespec.errors import BackendError, ModelFileError, UnsupportedError
from edgespec.models.control_texts import NO_CONTROLS, ControlTexts
from edgespec.models.images import with_marks
from edgespec.models.processes import Guest, GuestEndedError, GuestLimits
from edgespec.models.template_guest import CALLS

# `role` and `content` as OpenAI's interface has them; content is text or a list of text parts.
Message = Mapping[str, Any]
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
_ROLES = get_args(Role)


class _Said(TypedDict):
    role: Role


class ChatMessage(_Said, total=False):
    """A message of a conversation, as type checkers know it: OpenAI's fields."""

    content: Any  # a text, or a list of parts
    tool_calls: Sequence[Mapping[str, Any]]
    tool_call_id: str
    name: str
    reasoning_content: str


_M = TypeVar("_M", bound=Message)
_MAX_TEMPLATE_CHARS = 200_000
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_END = "\ufdd1"  # of a message that is continued; no character of Unicode
_RAW = "use --raw to send the prompt as it is"
_MODULE = "edgespec.models.template_guest"
# The process has 12 MiB of its own, and 33 while it compiles a template of 50 KB. A conversation of
# 4 MiB with a letter of four bytes in each message takes 66 more (`benchmarks/guests.py held`). Of
# 70 templates of models none took 0.1 s to compile and render.
TEMPLATE_LIMITS = GuestLimits(36 << 20, seconds=2.0, patience_s=10.0, bytes_per_byte=20)
_LEAST_S = 0.1  # which none of these 70 took


def prompt_text(
    prompt: str | Sequence[Message],
    template: str | None,
    *,
    bos_token: str = "",
    eos_token: str = "",
    control_texts: ControlTexts = NO_CONTROLS,
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
    return render_chat(
        template,
        messages,
        bos_token=bos_token,
        eos_token=eos_token,
        control_texts=control_texts,
    )


def check_roles(messages: Sequence[object], template: str) -> None:
    """Raise UnsupportedError for a role that is neither usual nor named by the template."""
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if (
            isinstance(role, str)
            and role not in _ROLES
            and not re.search(rf"""(['"]){re.escape(role)}\1""", template)
        ):
            raise UnsupportedError(
                f"there is no role {role[:80]!r}", hint=f"use {', '.join(_ROLES)}"
            )


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    control_texts: ControlTexts = NO_CONTROLS,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation.

    An assistant's message at the end is continued, unless it calls tools: the text ends with it.

    Args:
        template: Jinja source (`tokenizer.chat_template`).
        messages: `{"role": ..., "content": ...}` in order; content is text or a list of
            `{"type": "text", "text": ...}`.
        control_texts: marked where they are somebody's words, see `models.control_texts`.
        variables: what else the template may use by name, such as `tools`.

    Raises:
        UnsupportedError: the template refuses these messages (with its own words), or they are
            no messages of text.
        ModelFileError: the template is not valid or misbehaves.
    """
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise ModelFileError(
            f"the chat template has {len(template)} characters; that is no template"
        )
    given = control_texts.mark(dict(variables or {}))
    known = {**_defaults(given), **given, "bos_token": bos_token, "eos_token": eos_token}
    plain = in_call_order([control_texts.mark(plain_message(one)) for one in messages])

    def written(said: Sequence[dict[str, Any]], opens: bool) -> str:
        values = {**known, "messages": said, "add_generation_prompt": opens}
        return _rendered(template, values, control_texts)

    if not add_generation_prompt or not continues(plain):
        return written(plain, add_generation_prompt)
    *before, last = plain
    field = (
        "content" if last["content"] or not last.get("reasoning_content") else "reasoning_content"
    )
    marked = {**last, field: last[field] + _END}
    text, found, _ = written([*before, marked], opens=False).rpartition(_END)
    return text if found else written(before, opens=True) + str(last["content"])


def continues(messages: Sequence[Message]) -> bool:
    """Whether the answer is the rest of a message that was begun."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get(CALLS)


def in_call_order(messages: Sequence[_M]) -> list[_M]:
    """Messages with the results of tools in the order of the calls, which they name by id.

    Clients send the results of parallel calls as they arrive. Most templates write them without
    ids, so a model takes the first result for that of the first call.
    """
    made, order, places = list(messages), dict[str, int](), list[int]()
    turns: list[Message] = [*messages, {"role": "assistant"}]
    for place, message in enumerate(turns):
        if message["role"] == "tool" and str(message.get("tool_call_id")) in order:
            places.append(place)
        elif message["role"] == "assistant":
            if places:  # calls of earlier turns are answered
                sources = sorted(places, key=lambda one: order[str(made[one]["tool_call_id"])])
                for to, one in zip(places, [made[one] for one in sources], strict=True):
                    made[to] = one
                order, places = {}, []
            calls = message.get(CALLS)
            for call in calls if isinstance(calls, list | tuple) else ():
                if isinstance(call, Mapping):
                    order.setdefault(str(call.get("id")), len(order))
    return made


def _rendered(template: str, values: Mapping[str, Any], controls: ControlTexts) -> str:
    """What the guest makes of a template."""
    question: dict[str, Any] = {"template": template, "values": values, "controls": []}
    if "replace" in template:  # the only thing that a template does with them
        question["controls"] = sorted(controls.texts)
    seconds = _seconds.pop(template, TEMPLATE_LIMITS.seconds)
    try:
        told = _guest.ask(question, seconds)
        seconds *= 2
    except GuestEndedError as error:
        seconds = max(seconds / 2, _LEAST_S)
        raise ModelFileError(f"the model's chat template fails: {error}", hint=_RAW) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(f"a message or a variable has what JSON has not: {error}") from error
    finally:
        if seconds < TEMPLATE_LIMITS.seconds:
            _seconds[template] = seconds
        while len(_seconds) > _MOST_HURRIED:
            _seconds.pop(next(iter(_seconds)), None)
    if "raised" in told:
        raise UnsupportedError(f"the model's chat template refuses: {told['raised']}")
    if "failure" in told:
        raise ModelFileError(f"the model's chat template fails: {told['failure']}", hint=_RAW)
    return str(told["text"])


_guest = Guest(_MODULE, TEMPLATE_LIMITS)
# Templates that ended the guest have half as long after each time, and twice as long after one that
# went well: nobody waits for them long. The latest are last.
_seconds: dict[str, float] = {}
_MOST_HURRIED = 16


def prepare_template(template: str) -> None:
    """Start the guest and let it compile a template, which the first prompt finds done then.

    Returns at once; what fails is told with the first prompt.
    """

    def prepare() -> None:
        with suppress(GuestEndedError, BackendError):
            _guest.ask({"template": template})

    threading.Thread(target=prepare, name="edgespec-template", daemon=True).start()


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """What templates ask for, as transformers and llama.cpp's server give it."""
    now, tools = datetime.now(), given.get("tools")
    return {
        "tools": None,
        "documents": None,
        "functions": json.dumps(tools, ensure_ascii=False, indent=2) if tools else "",
        "enable_thinking": True,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y %H:%M:%S GMT"),
    }


def plain_message(message: Message) -> dict[str, Any]:
    """The message with its content as one string, in which images are marks.

    Raises UnsupportedError for anything else.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UnsupportedError(
            f"a message needs a role, got {str(message)[:80]!r}",
            hint='a message is {"role": "user", "content": "text"}',
        )
    message = {name: value for name, value in message.items() if name != "images"}
    content = message.get("content")
    has_more = any(message.get(name) for name in (CALLS, *_THOUGHTS))
    if content is None and message["role"] == "assistant" and has_more:
        content = ""
    thought = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if thought is not None:  # as gpt-oss's template reads it, and as others do
        message = {"thinking": thought, **message, "reasoning_content": thought}
    if isinstance(content, str):
        return {**message, "content": content}
    parts = content if isinstance(content, Sequence) and not isinstance(content, bytes) else ()
    text = with_marks(parts) if parts else None
    if text is None:
        raise UnsupportedError(
            f"the content of a message must be text and images, got {str(content)[:80]!r}",
            hint='a string, or a list of {"type": "text", "text": "..."} and '
            '{"type": "image", "image": "photo.jpg"}',
        )
    return {**message, "content": text}
