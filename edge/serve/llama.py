"""`/completion` and `/infill`, llama.cpp's own: from a request to what it wants, and its answers.

A prompt that fills in the middle of a text stands between the model's own tokens for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.backends.base import FillsIn, FillTokens, Tokenizer
from edgespec.decode.generation import Chunk, Result
from edgespec.decode.options import GenerationOptions
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.serve.api_error import ApiError
from edgespec.serve.asked import Setup, take_model
from edgespec.serve.completions import take_prompts
from edgespec.serve.parsing import Fields, take_format, take_sampling, take_stops
from edgespec.serve.shapes import Choice, Delta, Shape, ToldTokens, timings, unwritten
from edgespec.serve.worker import Generation

_MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens")
_MOST = 1 << 31
_MOST_PATHS, _MOST_PATH_CHARS = 64, 256  # of `response_fields`
# What would change an answer, by the values that ask for nothing.
_NOTHING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("adaptive_target", (-1, -1.0)),
    ("grammar_lazy", (False,)),
    ("image_data", ([],)),
    ("lora", ([],)),
    ("min_keep", (0,)),
    ("penalize_nl", (False,)),
    ("post_sampling_probs", (False,)),
    ("tfs_z", (1, 1.0)),
)
# What changes no token: where the cache is, how contexts are shifted (they never are here), what
# else is told. `n_indent` and `t_max_prompt_ms`, which editors send, would only stop sooner.
_IGNORED = (
    *("id_slot", "slot_id", "n_cache_reuse", "n_keep", "n_discard", "n_indent", "t_max_prompt_ms"),
    *("return_progress", "return_tokens", "timings_per_token", "verbose", "stream_options", "user"),
)


@dataclass(frozen=True, slots=True)
class LlamaAsked:
    """What is continued, or filled in, and how its answers are told."""

    options: GenerationOptions
    prompts: Sequence[str | list[int]]
    gap: Gap | None  # in place of the prompts
    streams: bool
    never_ends: bool  # the model may not end an answer itself
    only_reads: bool  # the prompt goes into the cache, and nothing is written
    most_s: float | None  # for an answer, once it has a whole line
    paths: Sequence[str]  # what alone is told; all of it where there are none


def read_llama(body: Any, setup: Setup) -> LlamaAsked:
    """What `/completion` is asked for. Raises ApiError."""
    fields = Fields(body)
    return _asked(fields, setup, take_prompts(fields, setup.limits), None)


def read_infill(body: Any, setup: Setup) -> LlamaAsked:
    """What `/infill` is asked for. Raises ApiError."""
    fields = Fields(body)
    prefix, suffix = fields.text("input_prefix"), fields.text("input_suffix")
    files = [
        _file(Fields(value, f"input_extra[{index}]"))
        for index, value in enumerate(fields.list("input_extra", setup.limits.messages))
    ]
    gap = Gap(prefix + fields.text("prompt", ""), suffix, files)
    return _asked(fields, setup, [], gap)


def _file(fields: Fields) -> tuple[str, str]:
    found = fields.text("filename", ""), fields.text("text")
    fields.ignore("time")  # which llama.vscode adds
    fields.end()
    return found


def _asked(
    fields: Fields, setup: Setup, prompts: list[str | list[int]], gap: Gap | None
) -> LlamaAsked:
    take_model(fields, setup)
    limits = setup.limits
    count = fields.whole("n_probs" if "n_probs" in fields else "logprobs", 0, 0, limits.logprobs)
    most = _most_tokens(fields, setup)
    most_ms = fields.whole("t_max_predict_ms", -1, -1, _MOST)
    options = GenerationOptions(
        max_tokens=max(1, most),
        sampling=take_sampling(fields, setup.defaults.sampling, setup.limits),
        stop=take_stops(fields, limits),
        raw=True,
        reuse=fields.flag("cache_prompt", True),
        logprobs=count or None,
        **take_format(fields, setup.limits),
    )
    asked = LlamaAsked(
        options,
        prompts,
        gap,
        streams=fields.flag("stream"),
        never_ends=fields.flag("ignore_eos"),
        only_reads=most == 0,
        most_s=most_ms / 1e3 if most_ms > 0 else None,
        paths=_paths(fields),
    )
    for name, values in _NOTHING:
        fields.only(name, *values)
    fields.ignore(*_IGNORED)
    fields.end()
    return asked


def _most_tokens(fields: Fields, setup: Setup) -> int:
    """Most tokens of an answer; what is below 0 goes on to the end of the context."""
    found = [fields.whole(name, -1, -2, _MOST) for name in _MAX_TOKENS if name in fields]
    most = found[0] if found else setup.defaults.max_tokens
    return setup.context_size if most is None or most < 0 else most


def _paths(fields: Fields) -> list[str]:
    """`response_fields`, such as "content" and "timings/predicted_n", as llama.vim asks."""
    paths = fields.list("response_fields", _MOST_PATHS)
    if not all(isinstance(path, str) and len(path) <= _MOST_PATH_CHARS for path in paths):
        fields.refuse("response_fields", "must be a list of names")
    return paths


class LlamaShape(Shape):
    """Answers to one request.

    Args:
        asked: what is told, and what is not.
        tokens: tells logprobs, where there are any.
        generations: by answer.
        is_cut: whether texts of the prompt were left out.
    """

    def __init__(
        self,
        model: str,
        asked: LlamaAsked,
        tokens: ToldTokens,
        generations: Sequence[Generation],
        is_cut: bool,
    ) -> None:
        self._model, self._tokens, self._asked = model, tokens, asked
        self._generations, self._is_cut = generations, is_cut

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """One event."""
        ids = [token for chunk in chunks for token in chunk.token_ids]
        if self._asked.only_reads or not (delta.content or ids):
            return []
        told = self._probabilities([one for chunk in chunks for one in chunk.logprobs])
        return [{"index": index, "content": delta.content, "tokens": ids, "stop": False, **told}]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """Everything but the text."""
        return [self._final(choice, "")]

    def whole(self, choices: Sequence[Choice]) -> Any:
        """The answer, or a list of them for several prompts."""
        told = [
            self._final(one, one.content, **self._probabilities(one.result.logprobs))
            for one in choices
        ]
        return told[0] if len(told) == 1 else told

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        told = logprobs and not self._asked.only_reads
        return {"completion_probabilities": self._tokens.entries(logprobs)} if told else {}

    def _final(self, choice: Choice, content: str, **more: Any) -> dict[str, Any]:
        if self._asked.only_reads:
            choice, content = unwritten(choice), ""
        if not self._generations[choice.index].ran_out:
            choice.check_complete()
        result, counters = choice.result, choice.result.counters
        document = {
            "index": choice.index,
            "content": content,
            "stop": True,
            "model": self._model,
            "tokens_predicted": counters.generated_tokens,
            "tokens_evaluated": counters.prompt_tokens,
            "truncated": self._is_cut or result.finish_reason == "context_full",
            "stop_type": _stop_type(result),
            "stopping_word": result.stop_string or "",
            "tokens_cached": counters.prompt_tokens + max(0, counters.generated_tokens - 1),
            "timings": timings([choice]),
            **more,
        }
        return _picked(document, self._asked.paths) if self._asked.paths else document


def _picked(document: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Only what these name; "a/b" is b of a. Those that are not there are left out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = document
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


def _stop_type(result: Result) -> str:
    if result.stop_string is not None:
        return "word"
    return "eos" if result.finish_reason == "stop" else "limit"


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
    before, after = ids_of(gap.prefix), ids_of(gap.suffix)
    others = _files(gap.files, tokens, ids_of)
    left = None if room is None else max(0, room - len(begin) - 3)
    kept_before, kept_after, kept_others = _kept(before, after, others, left)
    cut = [len(kept_before), len(kept_after), len(kept_others)]
    ids = [*begin, *kept_others, tokens.prefix, *kept_before, tokens.suffix, *kept_after]
    return [*ids, tokens.middle], cut != [len(before), len(after), len(others)]


def _files(
    files: Sequence[tuple[str, str]], tokens: FillTokens, ids_of: Callable[[str], list[int]]
) -> list[int]:
    """Ids of other files, and of what says that the gap is in another one."""
    if not files:
        return []
    ids: list[int] = []
    if tokens.repository >= 0:
        ids += [tokens.repository, *ids_of(f"{_REPOSITORY}\n")]
    for name, text in [*files, (_CURRENT, "")]:
        if tokens.file >= 0:
            ids += [tokens.file, *ids_of(f"{name or _NAMELESS}\n{text}")]
        else:
            ids += ids_of(f"{text}\n\n")
    return ids


def _kept(
    before: list[int], after: list[int], others: list[int], room: int | None
) -> tuple[list[int], list[int], list[int]]:
    """What is nearest to the gap: the text before it goes first, then that after it."""
    if room is None:
        return before, after, others
    num_after = min(len(after), max(room // _SUFFIX_SHARE, room - len(before)))
    num_before = min(len(before), room - num_after)
    num_others = min(len(others), room - num_after - num_before)
    return (
        before[len(before) - num_before :],
        after[:num_after],
        others[len(others) - num_others :],
    )
