"""Parts that a model thinks before it answers: what stands between think tags."""

from __future__ import annotations

from edgespec.serve.answer_text import Reader
from edgespec.serve.shapes import Delta
from edgespec.serve.tool_reader import settled

OPENING, CLOSING = "<think>", "</think>"


class ReasoningReader:
    """Splits an answer that begins with a thought; what comes after it is another reader's.

    Args:
        then: reads the answer itself.
        within: the prompt ended with the opening tag.
    """

    def __init__(self, then: Reader, *, within: bool) -> None:
        self._then = then
        self._held = ""
        self._is_thinking, self._is_over = within, False
        self._has_thought = False
        self._trims = False  # white space between a thought and the answer

    def push(self, text: str) -> Delta:
        """What more text added."""
        if self._is_over:
            return self._answer(text)
        self._held += text
        if not self._is_thinking and not self._begins():
            return Delta() if self._may_begin() else self._end()
        return self._thought()

    def finish(self) -> Delta:
        """What is left."""
        if self._is_thinking:
            return self._reasoning(self._held)
        rest = Delta() if self._is_over else self._end()
        last = self._then.finish()
        return Delta(rest.content + last.content, calls=rest.calls + last.calls)

    def _begins(self) -> bool:
        start = self._held.lstrip()
        if not start.startswith(OPENING):
            return False
        self._held, self._is_thinking = start.removeprefix(OPENING), True
        return True

    def _may_begin(self) -> bool:
        return OPENING.startswith(self._held.lstrip()[: len(OPENING)])

    def _thought(self) -> Delta:
        thought, tag, rest = self._held.partition(CLOSING)
        if tag:
            self._held, self._is_thinking, self._trims = rest, False, True
            last, after = self._reasoning(thought.rstrip()), self._end()
            return Delta(after.content, last.reasoning, after.calls)
        shown = self._held[: settled(self._held, CLOSING)]
        self._held = self._held[len(shown) :]
        return self._reasoning(shown)

    def _reasoning(self, text: str) -> Delta:
        text = text if self._has_thought else text.lstrip()
        self._has_thought = self._has_thought or bool(text)
        return Delta(reasoning=text)

    def _end(self) -> Delta:
        """From here on all of it is the answer."""
        self._is_over = True
        held, self._held = self._held, ""
        return self._answer(held)

    def _answer(self, text: str) -> Delta:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return self._then.push(text)
