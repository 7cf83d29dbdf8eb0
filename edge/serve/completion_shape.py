"""`/v1/completions`: what its answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple

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


class Echo(NamedTuple):
    """What is sent before an answer: its prompt, or nothing.

    Where the prompt is scored, `text` is that of its `first` token, and the answer begins with the
    `scored` ones.
    """

    text: str = ""
    scored: Sequence[int] = ()
    first: int = -1


class CompletionShape:
    """Answers to one request.

    Args:
        tokens: tells logprobs, where there are any.
        echoes: by answer.
        writes: whether more than the prompts is told.
    """

    def __init__(
        self,
        model: str,
        output: Output,
        tokens: ToldTokens,
        echoes: Sequence[Echo],
        *,
        writes: bool = True,
    ) -> None:
        self._output, self._tokens, self._echoes = output, tokens, echoes
        self._writes = writes
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
        echo = self._echoes[index].text
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
        told = usage(choices, self._output.choices)
        for echo in self._echoes:  # of scored prompts, whose tokens were those of answers
            told["prompt_tokens"] += len(echo.scored)
            told["completion_tokens"] -= len(echo.scored)
        if not self._writes:
            told["completion_tokens"] = 0
        told["total_tokens"] = told["prompt_tokens"] + told["completion_tokens"]
        return {
            **self._head,
            "choices": [self._whole(one) for one in choices],
            "usage": told,
            "timings": timings(choices),
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        echo, content, logprobs = self._echoes[choice.index], choice.content, choice.result.logprobs
        if not self._writes:
            content = self._tokens.text_of(echo.scored) if echo.first >= 0 else ""
            logprobs = logprobs[: len(echo.scored)]
        told = self._told(choice.index, logprobs)
        if echo.first >= 0:
            told = self._tokens.columns(
                [TokenLogprob(echo.first, nan), *logprobs], TextPlace(), with_end=True
            )
        return _choice(choice.index, echo.text + content, choice.reason, told)

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
