"""Finds calls of tools in the text of an answer, as it comes.

What does not turn out to be a call of a tool that was offered is given back as text, so nothing a
model writes is lost. Only calls beyond those that may be made are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from edgespec.serve.shapes import Delta, ToolCall
from edgespec.serve.tool_formats import ToolFormat

_ARGUMENTS = ("arguments", "parameters")
_FENCE, _FENCE_END = "```json", "```"


class ToolReader:
    """Reads an answer with calls.

    An answer that begins with JSON is looked at when it is complete: calls alone, or a text. So is
    one that is a block of code with JSON, as Qwen2.5 Coder writes its calls.

    Args:
        how: the way calls are written.
        names: of the tools that were offered.
        most: calls that are taken; further ones are left out.
    """

    def __init__(self, how: ToolFormat, names: Collection[str], *, most: int) -> None:
        self._how, self._names, self._most = how, names, most
        self._held = ""  # that may be, or is, a part of a call
        self._is_calling = self._is_bare = False
        self._has_begun = False  # with text that is no call
        self._found = 0  # calls, those left out as well

    def push(self, text: str) -> Delta:
        """What more text added."""
        self._held += text
        content, calls = "", list[ToolCall]()
        while (part := self._call() if self._is_calling else self._text()) is not None:
            content += part.content
            calls += part.calls
        return Delta(content, calls=tuple(calls))

    def finish(self) -> Delta:
        """What is left: calls without an end, or text."""
        held, self._held = self._held, ""
        if self._found and not held.strip():
            return Delta()
        calls = self._parsed(held) if self._is_calling or self._is_bare else None
        if calls is not None:
            return Delta(calls=calls)
        if not self._is_calling:
            return Delta(held)
        # A call that was cut off is no text either, where it would have been left out.
        return Delta() if self._found >= self._most else Delta(self._how.opening + held)

    def _text(self) -> Delta | None:
        """Text before a call; None where more has to come first."""
        start = self._held.lstrip()
        begins_with_json = start[:1] in ("{", "[") or start.startswith(_FENCE)
        may_begin = not self._has_begun and not self._is_marked()
        self._is_bare = self._is_bare or (begins_with_json and may_begin)
        if self._is_bare or (start and may_begin and _FENCE.startswith(start)):
            return None
        place = self._held.find(self._how.opening)
        if place >= 0:
            shown, self._held = self._held[:place], self._held[place + len(self._how.opening) :]
            self._is_calling = True
            return Delta(shown.rstrip())
        shown = self._held[: settled(self._held, self._how.opening)]
        if not shown:
            return None  # a call may follow
        self._held = self._held[len(shown) :]
        self._has_begun = True
        return Delta(shown)

    def _is_marked(self) -> bool:
        start = self._held.lstrip()
        return start.startswith(self._how.opening) or self._how.opening.startswith(start)

    def _call(self) -> Delta | None:
        """A call that has its end; None where more has to come first."""
        end = self._held.find(self._how.closing) if self._how.closing else -1
        if end < 0:
            return None
        inner, self._held = self._held[:end], self._held[end + len(self._how.closing) :]
        self._is_calling = False
        calls = self._parsed(inner)
        if calls is not None:
            return Delta(calls=calls)
        return Delta(f"{self._how.opening}{inner}{self._how.closing}")

    def _parsed(self, text: str) -> tuple[ToolCall, ...] | None:
        """The calls to be made in a text that has calls alone; None where it is not that."""
        documents = _documents(_unfenced(text))
        calls = [call for one in documents if (call := self._tool_call(one)) is not None]
        if not calls or len(calls) < len(documents):
            return None
        taken = calls[: max(0, self._most - self._found)]
        self._found += len(calls)
        return tuple(taken)

    def _tool_call(self, document: Any) -> ToolCall | None:
        if not isinstance(document, dict):
            return None
        inner = document.get("function", document)
        inner = inner if isinstance(inner, dict) else document
        name = inner.get("name")
        arguments: Any = next((inner[one] for one in _ARGUMENTS if one in inner), {})
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(name, str) or not isinstance(arguments, str):
            return None
        if name not in self._names:
            return None
        return ToolCall(name, arguments)


def _unfenced(text: str) -> str:
    """What is in a block of code; all of a text that is none."""
    inner = text.strip()
    if not inner.startswith(_FENCE) or not inner.endswith(_FENCE_END):
        return text
    return inner.removeprefix(_FENCE).removesuffix(_FENCE_END)


def _documents(text: str) -> list[Any]:
    """JSON documents in a row, in a list or with ";" between; none where there is more."""
    decode: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().raw_decode
    found: list[Any] = []
    place = 0
    while place < len(text):
        if text[place] in " \t\r\n;":
            place += 1
            continue
        try:
            document, place = decode(text, place)
        except (ValueError, RecursionError):
            return []
        found += document if isinstance(document, list) else [document]
    return found


def settled(text: str, marker: str) -> int:
    """How much of `text` is neither the beginning of `marker` nor white space before one."""
    most = min(len(text), len(marker) - 1)
    kept = next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)
    return len(text[: len(text) - kept].rstrip())
