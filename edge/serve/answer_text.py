"""From the text that a model writes to the parts of an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from edgespec.decode.generation import Result
from edgespec.serve.shapes import Choice, Delta, ToolCall, joined


class Reader(Protocol):
    """Finds the parts of an answer in its text, as it comes."""

    def push(self, text: str) -> Delta:
        """What more text added."""

    def finish(self) -> Delta:
        """What is left, now that no more comes."""


class PlainReader:
    """All of it is content."""

    def push(self, text: str) -> Delta:
        """The text."""
        return Delta(text)

    def finish(self) -> Delta:
        """Nothing."""
        return Delta()


class AnswerText:
    """One answer as far as it is known."""

    def __init__(self, index: int, reader: Reader) -> None:
        self.index = index
        self._reader = reader
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> Delta:
        """What more text added."""
        return self._keep(self._reader.push(text))

    def finish(self) -> Delta:
        """What is left at the end."""
        return self._keep(self._reader.finish())

    def choice(self, result: Result) -> Choice:
        """The answer, which is complete."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        return Choice(self.index, content, reasoning, joined(self._calls), result)

    def _keep(self, delta: Delta) -> Delta:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        self._calls += delta.calls
        return replace(delta, calls=joined(delta.calls))
