"""`/v1/completions`: what its answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.decode.generation import Chunk
from edgespec.serve.asked import Output
from edgespec.serve.shapes import Choice, Delta, new_id, now_s, sources, timings, usage


class CompletionShape:
    """Answers to one request.

    Args:
        echoes: by answer, the text of the prompt that is sent before it; "" for none.
    """

    def __init__(self, model: str, output: Output, echoes: Sequence[str]) -> None:
        self._output, self._echoes = output, echoes
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": now_s(),
            "model": model,
        }

    def begin(self, index: int) -> list[dict[str, Any]]:
        """The prompt, where it was asked for."""
        echo = self._echoes[index]
        return [self._chunk(index, echo)] if echo else []

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """One event."""
        more = {"sources": sources(chunks)} if self._output.sources else {}
        return [{**self._chunk(index, delta.content), **more}] if delta.content or more else []

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """The reason, with the timings of this answer."""
        last = self._chunk(choice.index, "", choice.reason)
        return [{**last, "timings": timings([choice])}]

    def close(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The usage, where it was asked for."""
        if not self._output.usage:
            return []
        head = {**self._head, "choices": []}
        return [
            {**head, "usage": usage(choices, self._output.choices), "timings": timings(choices)}
        ]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """All answers."""
        answers = [
            _choice(one.index, self._echoes[one.index] + one.content, one.reason) for one in choices
        ]
        return {
            **self._head,
            "choices": answers,
            "usage": usage(choices, self._output.choices),
            "timings": timings(choices),
        }

    def _chunk(self, index: int, text: str, reason: str | None = None) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": [_choice(index, text, reason)]}
        return {**chunk, "usage": None} if self._output.usage else chunk


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
