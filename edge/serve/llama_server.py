"""`/completion`, `/infill`, `/tokenize` and `/detokenize`, as llama.cpp's server has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from edgespec.decode.generation import Chunk
from edgespec.decode.options import GenerationOptions
from edgespec.memory.bytes.requests import MOST_VALUES
from edgespec.sampling.chain import TokenLogprob
from edgespec.sampling.params import SamplingParams
from edgespec.serve.completions import Gap, fill_ids, parse_prompts
from edgespec.serve.parsing import (
    Fields,
    ServedModel,
    parse_max_tokens,
    parse_options,
)
from edgespec.serve.serializers import (
    Choice,
    Delta,
    Serializer,
    ToldTokens,
    json_bytes,
    timings,
    unwritten,
)
from edgespec.serve.service import AnswerJob, Generation, Service, Underway

_MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens")
_MOST = 1 << 31
_MOST_PATHS, _MOST_PATH_CHARS = 64, 256  # of `response_fields`
# What would change an answer, by the values that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("grammar_lazy", "penalize_nl", "post_sampling_probs"), (False,)),
    **{"adaptive_target": (-1, -1.0), "image_data": ([],), "min_keep": (0,), "tfs_z": (1, 1.0)},
}
# What changes no token: where the cache is, how contexts are shifted (they never are here), what
# else is told. `n_indent` and `t_max_prompt_ms`, which editors send, would only stop sooner.
_IGNORED = (
    *("id_slot", "slot_id", "n_cache_reuse", "n_keep", "n_discard", "n_indent", "t_max_prompt_ms"),
    *("return_progress", "return_tokens", "timings_per_token", "verbose", "stream_options", "user"),
)


@dataclass(frozen=True, slots=True)
class LlamaRequest:
    """What is continued, or filled in, and how its answers are told."""

    options: GenerationOptions
    prompts: Sequence[str | list[int]]
    gap: Gap | None  # in place of the prompts
    streams: bool
    never_ends: bool  # the model may not end an answer itself
    only_reads: bool  # the prompt goes into the cache, and nothing is written
    most_s: float | None  # for an answer, once it has a whole line
    paths: Sequence[str]  # what alone is told; all of it where there are none


def read_llama(fields: Fields, setup: ServedModel) -> LlamaRequest:
    """What `/completion` is asked for. Raises ApiError."""
    return _asked(fields, setup, parse_prompts(fields, setup.limits), None)


def read_infill(fields: Fields, setup: ServedModel) -> LlamaRequest:
    """What `/infill` is asked for. Raises ApiError."""
    prefix, suffix = fields.text("input_prefix"), fields.text("input_suffix")
    files = []
    for one in fields.objects("input_extra", setup.limits.messages):
        files.append((one.text("filename", ""), one.text("text")))
        one.ignore("time")  # which llama.vscode adds
    gap = Gap(prefix + fields.text("prompt", ""), suffix, files)
    return _asked(fields, setup, [], gap)


def _asked(
    fields: Fields, setup: ServedModel, prompts: list[str | list[int]], gap: Gap | None
) -> LlamaRequest:
    limits = setup.limits
    count = fields.whole("n_probs" if "n_probs" in fields else "logprobs", 0, 0, limits.logprobs)
    usual, size = setup.defaults.max_tokens, setup.context_size
    most = parse_max_tokens(fields, usual, size, *_MAX_TOKENS, low=-2)
    most_ms = fields.whole("t_max_predict_ms", -1, -1, _MOST)
    options = parse_options(
        *(fields, setup, most),
        reuse=fields.flag("cache_prompt", True),
        logprobs=count or None,
    )
    # Such as "content" and "timings/predicted_n", as llama.vim asks.
    paths = fields.list("response_fields", _MOST_PATHS)
    if not all(isinstance(path, str) and len(path) <= _MOST_PATH_CHARS for path in paths):
        fields.refuse("response_fields", "must be a list of names")
    asked = LlamaRequest(
        options,
        prompts,
        gap,
        streams=fields.flag("stream"),
        never_ends=fields.flag("ignore_eos"),
        only_reads=most == 0,
        most_s=most_ms / 1e3 if most_ms > 0 else None,
        paths=paths,
    )
    for name, values in _NOTHING.items():
        fields.only(name, *values)
    fields.ignore(*_IGNORED)
    return asked


@dataclass(frozen=True, slots=True)
class LlamaSerializer(Serializer):
    """Answers to one request."""

    names_events = True

    model: str
    asked: LlamaRequest  # what is told, and what is not
    tokens: ToldTokens  # tells logprobs, where there are any
    generations: Sequence[Generation]  # by answer
    is_cut: bool  # texts of the prompt were left out

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        ids = [token for chunk in chunks for token in chunk.token_ids]
        if self.asked.only_reads or not (delta.content or ids):
            return []
        told = self._probabilities([one for chunk in chunks for one in chunk.logprobs])
        return [{"index": index, "content": delta.content, "tokens": ids, "stop": False, **told}]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._final(choice, "")]

    def whole(self, choices: Sequence[Choice]) -> Any:
        told = [
            self._final(one, one.content, **self._probabilities(one.result.logprobs))
            for one in choices
        ]
        return told[0] if len(told) == 1 else told

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        told = logprobs and not self.asked.only_reads
        return {"completion_probabilities": self.tokens.entries(logprobs)} if told else {}

    def _final(self, choice: Choice, content: str, **more: Any) -> dict[str, Any]:
        if self.asked.only_reads:
            choice, content = unwritten(choice), ""
        if not self.generations[choice.index].ran_out:
            choice.check_complete()
        result, counters = choice.result, choice.result.counters
        ends = "eos" if result.finish_reason == "stop" else "limit"
        document = {
            "index": choice.index,
            "content": content,
            "stop": True,
            "model": self.model,
            "tokens_predicted": counters.generated_tokens,
            "tokens_evaluated": counters.prompt_tokens,
            "truncated": self.is_cut or result.finish_reason == "context_full",
            "stop_type": ends if result.stop_string is None else "word",
            "stopping_word": result.stop_string or "",
            "tokens_cached": counters.prompt_tokens + max(0, counters.generated_tokens - 1),
            "timings": timings([choice]),
            **more,
        }
        if not self.asked.paths:
            return document
        found: dict[str, Any] = {}
        for path in self.asked.paths:  # "a/b" is b of a; what is not there is left out
            value: Any = document
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found


_ANSWER_SHARE = 4  # of the context, kept free for an answer whose length nobody said
# -- what is answered ----------------------------------------------------------------------


def prepare_llama(service: Service, asked: LlamaRequest, request: Underway) -> AnswerJob:
    """`/completion`. Raises ApiError, and as `Engine.stream`."""
    for one in asked.prompts:
        if isinstance(one, str):
            service.prompts.check_length(one, param="prompt")
    several = [service.engine.encode(one, raw=True) for one in asked.prompts]
    return _llama(service, asked, several, request)


def prepare_infill(service: Service, asked: LlamaRequest, request: Underway) -> AnswerJob:
    """`/infill`. Raises ApiError, also where the model cannot, and as `Engine.stream`."""
    assert asked.gap is not None
    size, most, gap = service.setup.context_size, service.prompts.bound.most_bytes, asked.gap
    files, left = list[tuple[str, str]](), most  # the last ones: others never fit
    for name, text in reversed(gap.files):
        if left > 0:
            files.insert(0, (name, text[-left:]))
        left -= len(text)
    near = Gap(gap.prefix[-most:], gap.suffix[:most], files)
    room = size - min(asked.options.max_tokens, size // _ANSWER_SHARE)
    ids, is_cut = fill_ids(service.engine.backend.tokenizer, near, room, "/infill")
    is_cut = is_cut or len(near.files) < len(gap.files)
    return _llama(service, asked, [ids], request, is_cut=is_cut)


def _llama(
    service: Service,
    asked: LlamaRequest,
    several: list[list[int]],
    request: Underway,
    *,
    is_cut: bool = False,
) -> AnswerJob:
    options = asked.options
    if asked.never_ends:  # what ends an answer is never picked
        params = options.sampling or SamplingParams()
        biases = {**dict(params.logit_bias), **dict.fromkeys(service.end_ids, -inf)}
        options = replace(options, sampling=replace(params, logit_bias=biases))
    made = [
        one
        for ids in several
        for one in service.generations(request, "", ids, options, 1, asked.most_s)
    ]
    serializer = LlamaSerializer(service.setup.names[0], asked, service.told_tokens, made, is_cut)
    return AnswerJob(made, serializer, asked.streams)


# -- `/tokenize` and `/detokenize`, as llama.cpp's server has them -----------------------------


def tokenize(
    service: Service, asked: tuple[str, bool, bool, bool], _request: Underway
) -> dict[str, Any] | bytes:
    """Ids of a text; with `with_pieces`, each with its own. Raises ApiError."""
    text, add_special, with_pieces, is_parsed = asked
    service.prompts.check_length(text, param="content")
    tokenizer = service.engine.backend.tokenizer
    meant = text if is_parsed else tokenizer.control_texts.mark(text)
    ids = tokenizer.encode(meant, add_special=add_special)
    if not with_pieces:
        return {"tokens": ids}
    # Each piece is written once: a document of all would be ten times as large as its text.
    written = {one: _piece(one, tokenizer.token_bytes(one)) for one in set(ids)}
    return b'{"tokens":[' + b",".join(map(written.__getitem__, ids)) + b"]}"


def read_text(fields: Fields, _setup: ServedModel) -> tuple[str, bool, bool, bool]:
    """A text to tokenize, and how: `add_special`, `with_pieces`, `parse_special`."""
    text = fields.text("content")
    flags = fields.flag("add_special"), fields.flag("with_pieces")
    return text, *flags, fields.flag("parse_special", True)


def detokenize(
    service: Service, asked: tuple[Fields, list[Any]], _request: Underway
) -> dict[str, str]:
    """The text of ids. Raises ApiError, also for a text that is longer than any that fits."""
    fields, ids = asked
    size, most = service.engine.vocab_size, service.prompts.bound.most_bytes
    if not all(type(one) is int and 0 <= one < size for one in ids):
        fields.refuse("tokens", f"must be whole numbers from 0 to {size - 1}")
    written = {one: service.engine.backend.tokenizer.token_bytes(one) for one in set(ids)}
    if sum(len(written[one]) for one in ids) > most:
        fields.refuse("tokens", f"have a text of more than {most} bytes")
    return {"content": b"".join(map(written.__getitem__, ids)).decode(errors="replace")}


def read_ids(fields: Fields, _setup: ServedModel) -> tuple[Fields, list[Any]]:
    """Ids to make a text of, and the request that has them."""
    return fields, fields.list("tokens", MOST_VALUES)


def _piece(token: int, data: bytes) -> bytes:
    """A token with its text, or with the bytes of a part of a character."""
    try:
        return json_bytes({"id": token, "piece": data.decode()})
    except UnicodeDecodeError:
        return json_bytes({"id": token, "piece": list(data)})
