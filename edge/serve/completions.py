"""`/v1/completions`: from the fields of a request to what it wants, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, NamedTuple

from edgespec.backends.base import FillsIn, Tokenizer
from edgespec.decode.generation import Chunk
from edgespec.decode.options import GenerationOptions
from edgespec.sampling.chain import TokenLogprob
from edgespec.serve.chat import NO_EFFECT, NOT_THERE, parse_prediction
from edgespec.serve.parsing import (
    ApiError,
    Fields,
    Limits,
    Output,
    ServedModel,
    parse_max_tokens,
    parse_options,
    parse_output,
    shown,
)
from edgespec.serve.serializers import (
    Choice,
    Delta,
    OpenAISerializer,
    TextPlace,
    ToldTokens,
    choice_of,
    timings,
    unwritten,
)
from edgespec.serve.service import AnswerJob, Service, Underway

_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Output):
    """A request to continue prompts as they are: texts, or token ids.

    With a `suffix` what stands between each text and that is filled in. Without `writes` only the
    prompt is told, as `echo` asks for it.
    """

    prompts: Sequence[str | list[int]]
    options: GenerationOptions
    echo: bool = False
    suffix: str = ""
    writes: bool = True

    @property
    def scores(self) -> bool:
        """Whether the tokens of the prompts have logprobs as well."""
        return self.echo and self.options.logprobs is not None


def read_completion(fields: Fields, setup: ServedModel) -> CompletionRequest:
    """What a request wants. Raises ApiError for a field that is wrong or not supported."""
    prompts = parse_prompts(fields, setup.limits)
    output = parse_output(fields, setup.limits)
    if output["choices"] * len(prompts) > setup.limits.choices:
        fields.refuse("n", f"asks for more than {setup.limits.choices} answers, prompts counted")
    usual = setup.defaults.max_tokens or _MAX_TOKENS
    most = parse_max_tokens(fields, usual, setup.context_size, "max_tokens")
    if fields.peek("logprobs") is False:
        fields.ignore("logprobs")  # as some clients write "none"
    logprobs = None  # no best tokens to be told at each place, and no logprobs at all
    if "logprobs" in fields:
        logprobs = fields.whole("logprobs", 0, 0, setup.limits.logprobs)
    options = parse_options(
        *(fields, setup, most),
        logprobs=logprobs,
        prediction=parse_prediction(fields),
    )
    echo = fields.flag("echo")
    several = output["streams"] or output["choices"] > 1
    if echo and logprobs is not None and (several or options.stop or options.answer_format):
        fields.refuse(
            "logprobs",
            "of a prompt are told alone: leave out stream, n, stop and the form of the answer",
            code="unsupported_value",
        )
    suffix = fields.text("suffix", "")
    if suffix and (echo or not all(isinstance(prompt, str) for prompt in prompts)):
        fields.refuse("suffix", "needs prompts that are texts, without echo")
    fields.ignore(*NO_EFFECT)
    fields.only("best_of", 0, 1, output["choices"])
    fields.refuse_set(NOT_THERE)
    return CompletionRequest(
        **output, prompts=prompts, options=options, echo=echo, suffix=suffix, writes=most > 0
    )


def parse_prompts(fields: Fields, limits: Limits) -> list[str | list[int]]:
    """The field `prompt`: a text, several, token ids, or several lists of them. Raises ApiError."""
    value = fields.pop("prompt")
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(o, str) or _is_ids(o) for o in value):
        if len(value) > limits.choices:
            fields.refuse("prompt", f"has {len(value)} prompts, and {limits.choices} are the limit")
        return value
    fields.refuse("prompt", f"must be text or token ids, or a list of them, not {shown(value)}")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def prepare_completion(service: Service, asked: CompletionRequest, request: Underway) -> AnswerJob:
    """Prompts as they are, continued. Raises ApiError, and as `Engine.stream`."""
    generations, echoes, text_of = [], [], service.told_tokens.text_of
    for prompt in asked.prompts:
        options, echo = asked.options, ""
        if isinstance(prompt, str):
            service.prompts.check_length(prompt, asked.suffix, param="prompt")
        if isinstance(prompt, str) and asked.suffix:
            tokenizer = service.engine.backend.tokenizer
            ids = fill_ids(tokenizer, Gap(prompt, asked.suffix), None, "suffix")[0]
        else:
            ids = service.engine.encode(prompt, raw=True)
        if asked.scores:  # all but the first token are an answer that is known already
            if len(ids) >= (size := service.setup.context_size):
                problem = f"the prompt has {len(ids)} tokens and the context {size}"
                raise ApiError(problem, param="prompt", code="context_length_exceeded")
            if any(map(service.engine.backend.tokenizer.is_end, ids[1:])):
                problem = "a prompt with a token that ends answers has no logprobs"
                raise ApiError(problem, param="prompt")
            most = max(1, len(ids) - 1 + (options.max_tokens if asked.writes else 0))
            options = replace(options, begun=ids[1:], max_tokens=most)
            ids, echo = ids[:1], text_of(ids[:1])
        elif asked.echo:
            echo = prompt if isinstance(prompt, str) else text_of(prompt)
        generations += service.generations(request, "", ids, options, asked.choices)
        echoes += [Echo(echo, options.begun, ids[0] if asked.scores else -1)] * asked.choices
    serializer = CompletionSerializer(
        service.setup.names[0], asked, service.told_tokens, echoes, writes=asked.writes
    )
    writes = asked.writes or asked.echo
    return AnswerJob(generations, serializer, asked.streams, writes=writes)


class Echo(NamedTuple):
    """What is sent before an answer: its prompt, or nothing.

    Where the prompt is scored, `text` is that of its `first` token, and the answer begins with the
    `scored` ones.
    """

    text: str = ""
    scored: Sequence[int] = ()
    first: int = -1


class CompletionSerializer(OpenAISerializer):
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
        echo = self._echoes[index].text
        return [self._event(choice_of(index, text=echo))] if echo else []

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        if not self._writes:
            return []
        more = self._more(chunks)
        told = self._told(index, [one for chunk in chunks for one in chunk.logprobs])
        if not (delta.content or more or told):
            return []
        return [self._event(choice_of(index, None, told, text=delta.content), **more)]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        last = choice_of(choice.index, choice.reason, text="")
        return [self._event(last, timings=timings(self._counted([choice])))]

    def close(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        return super().close(self._counted(choices))

    def _counted(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        return choices if self._writes else list(map(unwritten, choices))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
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
        return choice_of(choice.index, choice.reason, told, text=echo.text + content)

    def _told(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._tokens.columns(logprobs, self._places[index]) if logprobs else None


# -- filling in the middle ----------------------------------------------------------------


_SUFFIX_SHARE = 4  # the text after the gap may take one part in this many, as in llama.cpp's server
_NAMELESS, _REPOSITORY, _CURRENT = "file", "repository", "current"


@dataclass(frozen=True, slots=True)
class Gap:
    """What stands before and after a gap, and texts of other files, by their names."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()


def fill_ids(
    tokenizer: Tokenizer, gap: Gap, room: int | None, param: str
) -> tuple[list[int], bool]:
    """Ids of the prompt, and whether texts were cut.

        <|fim_prefix|>prefix<|fim_suffix|>suffix<|fim_middle|>

    Other files come before it, each after its name, where the vocabulary has tokens for that.

    Args:
        room: most ids. What is farthest from the gap is left out beyond it; None cuts nothing.
        param: the field that asks for it, for the error.

    Raises ApiError where the model has no such tokens.
    """
    tokens = tokenizer.fill_tokens() if isinstance(tokenizer, FillsIn) else None
    if tokens is None:
        message = f"{param} is not supported: this model has no tokens for filling in the middle"
        raise ApiError(message, param=param, code="unsupported_parameter")

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False) if text else []

    begin = tokenizer.encode("")
    before, after, others = ids_of(gap.prefix), ids_of(gap.suffix), list[int]()
    if gap.files and tokens.repository >= 0:
        others += [tokens.repository, *ids_of(f"{_REPOSITORY}\n")]
    # Behind the last of the other files it is said that the gap is in another one.
    for name, text in [*gap.files, (_CURRENT, "")] if gap.files else ():
        if tokens.file >= 0:
            others += [tokens.file, *ids_of(f"{name or _NAMELESS}\n{text}")]
        else:
            others += ids_of(f"{text}\n\n")
    whole = len(before) + len(after) + len(others)
    left = whole if room is None else max(0, room - len(begin) - 3)
    # The text before the gap has its part first, then that after it, then other files.
    num_after = min(len(after), max(left // _SUFFIX_SHARE, left - len(before)))
    num_before = min(len(before), left - num_after)
    num_others = min(len(others), left - num_after - num_before)
    ids = [*begin, *others[len(others) - num_others :], tokens.prefix]
    ids += [*before[len(before) - num_before :], tokens.suffix, *after[:num_after], tokens.middle]
    return ids, num_after + num_before + num_others < whole
