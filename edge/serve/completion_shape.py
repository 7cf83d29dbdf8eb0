"""`/v1/completions`: what its answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.decode.generation import Chunk
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.asked import Output
from edgespec.serve.shapes import (
    Choice,
    Delta,
    fingerprint,
    new_id,
    now_s,
    sources,
    timings,
    usage,
)
from edgespec.serve.told_tokens import TextPlace, ToldTokens


class CompletionShape:
    """Answers to one request.

    Args:
        tokens: tells logprobs, where there are any.
        echoes: by answer, the text of the prompt that is sent before it; "" for none.
    """

    def __init__(
        self, model: str, output: Output, tokens: ToldTokens, echoes: Sequence[str]
    ) -> None:
        self._output, self._tokens, self._echoes = output, tokens, echoes
        self._places = [TextPlace() for _ in echoes]
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": now_s(),
            "model": model,
            "system_fingerprint": fingerprint(),
        }

    def begin(self, index: int) -> list[dict[str, Any]]:
        """The prompt, where it was asked for."""
        echo = self._echoes[index]
        return [self._chunk(index, echo)] if echo else []

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """One event."""
        more = {"sources": sources(chunks)} if self._output.sources else {}
        told = self._told(index, [one for chunk in chunks for one in chunk.logprobs])
        if not (delta.content or more or told):
            return []
        return [{**self._chunk(index, delta.content, logprobs=told), **more}]

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
            _choice(
                one.index,
                self._echoes[one.index] + one.content,
                one.reason,
                self._told(one.index, one.result.logprobs),
            )
            for one in choices
        ]
        return {
            **self._head,
            "choices": answers,
            "usage": usage(choices, self._output.choices),
            "timings": timings(choices),
        }

    def _chunk(
        self, index: int, text: str, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = _choice(index, text, reason, logprobs)
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._output.usage else chunk

    def _told(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._tokens.columns(logprobs, self._places[index]) if logprobs else None


def _choice(index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
