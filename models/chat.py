"""Chat templates: the Jinja text a model file carries, rendered in a sandbox.

A template comes from a downloaded file. It runs without access to attributes, modules or files,
with a bound on its steps and on what it writes, and one that fails is an error with a sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, NoReturn, TypeVar

from edgespec.errors import EdgespecError, ModelFileError, UnsupportedError
from edgespec.models.control_texts import NO_CONTROLS, ControlTexts
from edgespec.models.images import with_marks

# `role` and `content` as OpenAI's interface has them; content is text or a list of text parts.
Message = Mapping[str, Any]
_M = TypeVar("_M", bound=Message)
_MAX_TEMPLATE_CHARS = 200_000
_LOOKS_AT_PARTS = re.compile(r"\bin \w+(\.content|\[.content.\])")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_CALLS = "tool_calls"
_END = "\ufdd1"  # of a message that is continued; no character of Unicode
_LONGEST_REFUSAL = 2000  # characters


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
        return _rendered_somehow(template, values, control_texts)

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
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get(_CALLS)


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
            calls = message.get(_CALLS)
            for call in calls if isinstance(calls, list | tuple) else ():
                if isinstance(call, Mapping):
                    order.setdefault(str(call.get("id")), len(order))
    return made


def _rendered_somehow(template: str, values: Mapping[str, Any], controls: ControlTexts) -> str:
    """The text of messages as they are, or in another form that the template takes.

    Some refuse system messages, some want the arguments of calls as text, and some want parts
    where others want texts, and leave out what is none.
    """
    problem: EdgespecError | None = None
    changes = [
        _with_object_arguments,
        _with_short_ids,
        _with_text_arguments,
        _with_parts,
        _with_system_first,
        _without_system,
    ]
    try:
        text = _rendered(template, values, controls)
        if _has_content(text, values["messages"]):
            return text
    except (UnsupportedError, ModelFileError) as error:
        if isinstance(error.__cause__, _exhausted()):
            if not _LOOKS_AT_PARTS.search(template):
                raise
            changes = [_with_parts]  # a text would be looked at letter by letter
        problem, text = error, ""
    for change in changes:
        changed = change(values["messages"])
        if changed == values["messages"]:
            continue
        try:
            other = _rendered(template, {**values, "messages": changed}, controls)
        except (UnsupportedError, ModelFileError):
            continue
        if problem is not None or _has_content(other, values["messages"]):
            return other
    if problem is not None:
        raise problem
    return text


def _has_content(text: str, messages: Sequence[Message]) -> bool:
    """Whether a prompt has all words of the user, images included."""
    return all(one["content"].strip() in text for one in messages if one["role"] == "user")


def _with_text_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**one, _CALLS: _text_calls(one[_CALLS])} if one.get(_CALLS) else one for one in messages
    ]


def _text_calls(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    functions = [dict(call.get("function", {})) for call in calls]
    for function in functions:
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
    return [{**call, "function": one} for call, one in zip(calls, functions, strict=True)]


def _with_object_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that goes through arguments: a text that is no object is one of them."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function", {}))
        if isinstance(function.get("arguments"), str):
            function["arguments"] = {"arguments": function["arguments"]}
        return {**call, "function": function}

    return [
        {**one, _CALLS: [changed(call) for call in one[_CALLS]]} if one.get(_CALLS) else one
        for one in messages
    ]


def _with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For Mistral's templates, which want nine letters and digits."""

    def short(value: Any) -> str:
        return sha256(str(value).encode(errors="replace")).hexdigest()[:9]

    made = [
        {**one, "tool_call_id": short(one["tool_call_id"])} if "tool_call_id" in one else one
        for one in messages
    ]
    return [
        {**one, _CALLS: [{**call, "id": short(call.get("id"))} for call in one[_CALLS]]}
        if one.get(_CALLS)
        else one
        for one in made
    ]


def _with_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]


def _with_system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that take a system message at the beginning alone."""
    return [*messages[:1], *_without_system(messages[1:])]


def _without_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Words of system messages become those of the user's message after them, or before."""
    if not any(one["role"] == "user" for one in messages):
        return list(messages)
    made: list[dict[str, Any]] = []
    is_open = False  # the last one was a system message
    for one in messages:
        is_system = one["role"] == "system"
        said = {**one, "role": "user"} if is_system else one
        if made and (is_open or is_system) and made[-1]["role"] == said["role"] == "user":
            said = {**said, "content": f"{made.pop()['content']}\n\n{one['content']}"}
        made.append(said)
        is_open = is_system
    return made


def _rendered(template: str, values: Mapping[str, Any], controls: ControlTexts) -> str:
    from edgespec.models.template_sandbox import render  # which loads jinja2

    functions = {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return render(template, values, functions, controls)
    except _Refused as error:
        raise UnsupportedError(f"the model's chat template refuses: {error}") from error
    except Exception as error:  # Jinja's, and whatever Python raises of a stranger's expressions
        raise ModelFileError(
            f"the model's chat template fails: {error}",
            hint="use --raw to send the prompt as it is",
        ) from error


def _exhausted() -> type[Exception]:
    from edgespec.models.template_sandbox import ExhaustedError

    return ExhaustedError


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
    if content is None and message["role"] == "assistant" and _has_more(message):
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


class _Refused(Exception):
    """The template called raise_exception."""


def _has_more(message: Message) -> bool:
    return any(message.get(name) for name in (_CALLS, *_THOUGHTS))


def _refuse(message: Any = "") -> NoReturn:
    raise _Refused(str(message)[:_LONGEST_REFUSAL])


def _now(format_: str) -> str:
    if len(format_) > _LONGEST_REFUSAL:
        raise ValueError("it asks for a very long date")
    return datetime.now().strftime(format_)
