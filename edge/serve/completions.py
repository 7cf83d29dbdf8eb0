"""`/v1/completions`: from the fields of a request to what it wants, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple

from edgespec.decode.generation import Chunk
from edgespec.decode.options import GenerationOptions
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.asked import CompletionAsked, Setup, take_model, take_output
from edgespec.serve.chat import NO_EFFECT, NOT_THERE, take_prediction
from edgespec.serve.parsing import (
    Fields,
    Limits,
    shown,
    take_format,
    take_max_tokens,
    take_sampling,
    take_stops,
)
from edgespec.serve.shapes import (
    Choice,
    Delta,
    OpenAIShape,
    Output,
    TextPlace,
    ToldTokens,
    timings,
    unwritten,
)

_MAX_TOKENS = 16  # OpenAI's


def read_completion(body: Any, setup: Setup) -> CompletionAsked:
    """What a request wants. Raises ApiError for a field that is wrong or not supported."""
    fields = Fields(body)
    take_model(fields, setup)
    prompts = take_prompts(fields, setup.limits)
    output = take_output(fields, setup.limits)
    if output.choices * len(prompts) > setup.limits.choices:
        fields.refuse("n", f"asks for more than {setup.limits.choices} answers, prompts counted")
    usual = setup.defaults.max_tokens or _MAX_TOKENS
    most = take_max_tokens(fields, usual, setup.context_size, "max_tokens")
    options = GenerationOptions(
        max_tokens=max(1, most),
        sampling=take_sampling(fields, setup.defaults.sampling, setup.limits),
        stop=take_stops(fields, setup.limits),
        raw=True,
        reuse=True,
        logprobs=_logprobs(fields, setup.limits),
        prediction=take_prediction(fields),
        **take_format(fields, setup.limits),
    )
    echo = fields.flag("echo")
    if echo and options.logprobs is not None:
        _check_scored(fields, options, output)
    suffix = fields.text("suffix", "")
    if suffix and (echo or not all(isinstance(prompt, str) for prompt in prompts)):
        fields.refuse("suffix", "needs prompts that are texts, without echo")
    fields.ignore(*NO_EFFECT)
    fields.only("best_of", 0, 1, output.choices)
    fields.refuse_set(NOT_THERE)
    fields.end()
    return CompletionAsked(prompts, options, output, echo, suffix, most > 0)


def _check_scored(fields: Fields, options: GenerationOptions, output: Output) -> None:
    """Refuse what makes no sense beside logprobs of a prompt."""
    if output.streams or output.choices > 1 or options.stop or options.answer_format:
        fields.refuse(
            "logprobs",
            "of a prompt are told alone: leave out stream, n, stop and the form of the answer",
            code="unsupported_value",
        )


def _logprobs(fields: Fields, limits: Limits) -> int | None:
    """Best tokens to be told at each place; None for no logprobs at all."""
    if "logprobs" not in fields:
        return None
    if fields.only_false("logprobs"):
        return None
    return fields.whole("logprobs", 0, 0, limits.logprobs)


def take_prompts(fields: Fields, limits: Limits) -> list[str | list[int]]:
    """The field `prompt`: a text, several, token ids, or several lists of them. Raises ApiError."""
    value = fields.any("prompt")
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(o, str) or _is_ids(o) for o in value):
        if len(value) > limits.choices:
            fields.refuse("prompt", f"has {len(value)} prompts, and {limits.choices} are the limit")
        return value
    fields.refuse("prompt", f"must be text or token ids, or a list of them, not {shown(value)}")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


class Echo(NamedTuple):
    """What is sent before an answer: its prompt, or nothing.

    Where the prompt is scored, `text` is that of its `first` token, and the answer begins with the
    `scored` ones.
    """

    text: str = ""
    scored: Sequence[int] = ()
    first: int = -1


class CompletionShape(OpenAIShape):
    """Answers to one request.

    Args:
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
        super().__init__("cmpl-", ("text_completion",) * 2, model, output, tokens)
        self._echoes, self._writes = echoes, writes
        self._places = [TextPlace() for _ in echoes]

    def begin(self, index: int) -> list[dict[str, Any]]:
        """The prompt, where it was asked for."""
        echo = self._echoes[index].text
        return [self._event(_choice(index, echo))] if echo else []

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """One event."""
        if not self._writes:
            return []
        more = self._more(chunks)
        told = self._told(index, [one for chunk in chunks for one in chunk.logprobs])
        if not (delta.content or more or told):
            return []
        return [self._event(_choice(index, delta.content, None, told), **more)]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """The reason, with the timings of this answer."""
        last = _choice(choice.index, "", choice.reason)
        return [self._event(last, timings=timings(self._counted([choice])))]

    def close(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The usage, where it was asked for."""
        return super().close(self._counted(choices))

    def _counted(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        return choices if self._writes else list(map(unwritten, choices))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """All answers."""
        told_choices = [self._whole(one) for one in choices]
        document = self._document(self._kinds[1], told_choices, self._counted(choices))
        told = document["usage"]
        for echo in self._echoes:  # of scored prompts, whose tokens were those of answers
            told["prompt_tokens"] += len(echo.scored)
            told["completion_tokens"] -= len(echo.scored) * self._writes
        told["total_tokens"] = told["prompt_tokens"] + told["completion_tokens"]
        return document

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

    def _told(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._tokens.columns(logprobs, self._places[index]) if logprobs else None


def _choice(
    index: int, text: str, reason: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
