"""The guest that renders chat templates: a process with limits, for whatever a file's author wrote.

A conversation is one question, and the answer is the prompt's text. A template may want messages in
another form than they have; the forms are tried here, so that all of it is one answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from edgespec.models.control_texts import ControlTexts
from edgespec.models.processes import answer_questions

CALLS = "tool_calls"
_LOOKS_AT_PARTS = re.compile(r"\bin \w+(\.content|\[.content.\])")
_MANY_LETTERS = 100_000  # of a text: to look at each takes 0.1 s
_LONGEST_REASON = 2000  # characters


def _answer(question: dict[str, Any]) -> dict[str, str]:
    """The text of a conversation, or why there is none; nothing is rendered without values.

    `raised` is the template's own error, `failure` what Jinja or Python says.
    """
    from edgespec.models.template_sandbox import TemplateRaisedError, compiled

    template, values = question["template"], question.get("values")
    try:
        if values is None:
            compiled(template)
            return {}
        return {"text": _in_some_form(template, values, ControlTexts(question["controls"]))}
    except MemoryError:
        raise
    except TemplateRaisedError as error:
        return {"raised": str(error)[:_LONGEST_REASON]}
    except Exception as error:  # Jinja's, and whatever Python raises of a stranger's expressions
        return {"failure": str(error)[:_LONGEST_REASON] or type(error).__name__}


def _in_some_form(template: str, values: Mapping[str, Any], controls: ControlTexts) -> str:
    """The text of messages as they are, or in another form that the template takes.

    Some refuse system messages, some want the arguments of calls as text, and some want parts
    where others want texts, and leave out what is none.
    """
    from edgespec.models.template_sandbox import render

    said = values["messages"]
    if _LOOKS_AT_PARTS.search(template) and any(len(m["content"]) > _MANY_LETTERS for m in said):
        with suppress(Exception):  # a text would be looked at letter by letter
            text = render(template, {**values, "messages": _with_parts(said)}, controls)
            if _has_content(text, said):
                return text
    first: str | Exception
    try:
        first = render(template, values, controls)
        if _has_content(first, said):
            return first
    except Exception as error:
        first = error
    for form in _FORMS:
        changed = form(said)
        if changed == said:
            continue
        with suppress(Exception):
            text = render(template, {**values, "messages": changed}, controls)
            if isinstance(first, Exception) or _has_content(text, said):
                return text
    if isinstance(first, Exception):
        raise first
    return first


def _has_content(text: str, messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a prompt has all words of the user, images included."""
    return all(one["content"].strip() in text for one in messages if one["role"] == "user")


def _with_calls(
    messages: Sequence[dict[str, Any]], changed: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages whose calls of tools are changed, each by itself."""
    return [
        {**one, CALLS: [changed(call) for call in one[CALLS]]} if one.get(CALLS) else one
        for one in messages
    ]


def _with_arguments(
    messages: Sequence[dict[str, Any]], changed: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    def with_changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", {})
        made = changed(given := function.get("arguments"))
        return call if made is given else {**call, "function": {**function, "arguments": made}}

    return _with_calls(messages, with_changed)


def _with_text_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return _with_arguments(
        messages, lambda one: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
    )


def _with_object_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that goes through arguments: a text that is no object is one of them."""
    return _with_arguments(
        messages, lambda one: {"arguments": one} if isinstance(one, str) else one
    )


def _with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For Mistral's templates, which want nine letters and digits."""

    def short(value: Any) -> str:
        return sha256(str(value).encode(errors="replace")).hexdigest()[:9]

    made = [
        {**one, "tool_call_id": short(one["tool_call_id"])} if "tool_call_id" in one else one
        for one in messages
    ]
    return _with_calls(made, lambda call: {**call, "id": short(call.get("id"))})


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


_FORMS = (
    _with_object_arguments,
    _with_short_ids,
    _with_text_arguments,
    _with_parts,
    _with_system_first,
    _without_system,
)

if __name__ == "__main__":
    import edgespec.models.template_sandbox  # noqa: F401 - it takes 0.1 s, before anybody asks

    answer_questions(_answer)
