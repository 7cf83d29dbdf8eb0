"""From the document of a request to generations that can begin. Runs in threads of its own.

What reads the fields needs no model: what is wrong in a request itself is refused before a model is
loaded for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from edgespec.backends.base import AnswerFormat
from edgespec.decode.options import GenerationOptions
from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.requests import MOST_VALUES
from edgespec.models.images import images_of
from edgespec.sampling.constrained import make_grammar
from edgespec.sampling.params import SamplingParams
from edgespec.serve.answers import Prepared, Task
from edgespec.serve.api_error import ApiError, api_error_of
from edgespec.serve.asked import ChatAsked, CompletionAsked, Setup
from edgespec.serve.chat import ChatShape, read_chat
from edgespec.serve.completions import CompletionShape, Echo, read_completion
from edgespec.serve.conversation import Conversation, conversation_of
from edgespec.serve.llama import (
    Gap,
    LlamaAsked,
    LlamaShape,
    fill_ids,
    read_infill,
    read_llama,
)
from edgespec.serve.messages import MessagesShape, read_messages
from edgespec.serve.parsing import Fields, json_bytes
from edgespec.serve.responses import ResponsesShape, read_response
from edgespec.serve.service import Service
from edgespec.serve.shapes import Shape, ToldTokens

_ANSWER_SHARE = 4  # of the context, kept free for an answer whose length nobody said

# -- chats ---------------------------------------------------------------------------------


def prepare_chat(service: Service, body: Any, task: Task) -> Prepared:
    """The next message of a conversation. Raises ApiError, and as `Engine.stream`."""
    asked = read_chat(body, service.setup)
    talk, ids = _prompt(service, asked)
    shape = ChatShape(service.setup.names[0], asked.output, _tokens(service))
    return _chat(service, asked, talk, ids, shape, task)


def prepare_response(service: Service, body: Any, task: Task) -> Prepared:
    """The same by another interface. Raises ApiError, and as `Engine.stream`."""
    asked, repeated, summarises = read_response(body, service.setup)
    talk, ids = _prompt(service, asked)
    tokens = None if asked.options.logprobs is None else _tokens(service)
    shape = ResponsesShape(service.setup.names[0], repeated, summarises=summarises, tokens=tokens)
    prepared = _chat(service, asked, talk, ids, shape, task)
    return replace(prepared, names_events=True, fail=shape.failed)


def prepare_message(service: Service, body: Any, task: Task) -> Prepared:
    """The same by Anthropic's interface. Raises ApiError, and as `Engine.stream`."""
    asked = read_messages(body, service.setup)
    talk, ids = _prompt(service, asked)
    shape = MessagesShape(service.setup.names[0], len(ids))
    return replace(_chat(service, asked, talk, ids, shape, task), names_events=True)


def count_message(service: Service, body: Any) -> dict[str, int]:
    """How many tokens a request of Anthropic's interface has. Raises as `prepare_message`."""
    asked = read_messages(body, service.setup, counts=True)
    return {"input_tokens": len(_prompt(service, asked)[1])}


def count_chat(service: Service, body: Any) -> dict[str, int]:
    """How many tokens the prompt of a chat has. Raises as `prepare_chat`."""
    asked = read_chat(body, service.setup)
    return {"input_tokens": len(_prompt(service, asked)[1])}


def count_response(service: Service, body: Any) -> dict[str, Any]:
    """How many tokens the prompt of a response has. Raises as `prepare_response`."""
    asked, *_ = read_response(body, service.setup)
    return {"object": "response.input_tokens", "input_tokens": len(_prompt(service, asked)[1])}


def apply_template(service: Service, body: Any) -> dict[str, str]:
    """The prompt of a chat, as a text. Raises as `prepare_chat`."""
    given, more = _with_opening(body)
    asked = read_chat(given, service.setup)
    asked = replace(asked, variables={**asked.variables, **more})
    return {"prompt": _prompt(service, asked)[0].text}


def check_template(body: Any, setup: Setup) -> None:
    """Raise ApiError for a field that is wrong or not supported."""
    read_chat(_with_opening(body)[0], setup)


def _with_opening(body: Any) -> tuple[Any, dict[str, bool]]:
    """A chat, and the variable that says whether its template opens an answer."""
    opens = "add_generation_prompt"
    more = {opens: body[opens]} if isinstance(body, dict) and opens in body else {}
    if not isinstance(more.get(opens, True), bool):
        raise ApiError(f"{opens} must be true or false", param=opens)
    return ({name: value for name, value in body.items() if name != opens} if more else body), more


def _prompt(service: Service, asked: ChatAsked) -> tuple[Conversation, list[int]]:
    template = service.prompts.template(with_tools=bool(asked.tools.offered)) or ""
    talk, images = conversation_of(asked, service.prompts, template), images_of(asked.messages)
    talk = replace(talk, options=replace(talk.options, images=images))
    return talk, service.prompts.ids_of(talk.text, images)


def _chat(
    service: Service, asked: ChatAsked, talk: Conversation, ids: list[int], shape: Shape, task: Task
) -> Prepared:
    try:
        generations = service.generations(task, talk.text, ids, talk.options, asked.output.choices)
    except UnsupportedError:
        if not asked.tools.required:
            raise
        names = " or ".join(asked.tools.required)
        for name in asked.tools.required:
            try:  # by itself, as its schema is read by who wrote it
                schema = AnswerFormat("json_schema", json.dumps(asked.tools.schemas[name]))
                make_grammar(service.engine.backend.tokenizer, schema)
            except UnsupportedError as one:
                names, problem = name, one
                break
        unsupported = UnsupportedError(
            f"a call of {names} cannot be required: {problem}", hint=problem.hint
        )
        raise api_error_of(unsupported, "tools") from problem
    streams, writes = asked.output.streams, asked.writes
    return Prepared(generations, shape, streams, talk.make_reader, writes=writes)


def _tokens(service: Service) -> ToldTokens:
    return ToldTokens(service.engine.backend.tokenizer)


# -- completions ---------------------------------------------------------------------------


def prepare_completion(service: Service, body: Any, task: Task) -> Prepared:
    """Prompts as they are, continued. Raises ApiError, and as `Engine.stream`."""
    asked = read_completion(body, service.setup)
    generations, echoes = [], []
    for prompt in asked.prompts:
        ids = _completion_ids(service, asked, prompt)
        options, echo = asked.options, _text_of(service, prompt) if asked.echo else ""
        if asked.scores:
            options, echo = _scoring(service, asked, ids), _text_of(service, ids[:1])
            ids = ids[:1]
        generations += service.generations(task, "", ids, options, asked.output.choices)
        echoes += [Echo(echo, options.begun, ids[0] if asked.scores else -1)] * asked.output.choices
    shape = CompletionShape(
        service.setup.names[0], asked.output, _tokens(service), echoes, writes=asked.writes
    )
    writes = asked.writes or asked.echo
    return Prepared(generations, shape, asked.output.streams, writes=writes)


def _scoring(service: Service, asked: CompletionAsked, ids: list[int]) -> GenerationOptions:
    """How a prompt is scored: all but its first token are an answer that is known already."""
    size, is_end = service.setup.context_size, service.engine.backend.tokenizer.is_end
    if len(ids) >= size:
        raise ApiError(
            f"the prompt has {len(ids)} tokens and the context {size}",
            param="prompt",
            code="context_length_exceeded",
        )
    if any(map(is_end, ids[1:])):
        raise ApiError("a prompt with a token that ends answers has no logprobs", param="prompt")
    most = asked.options.max_tokens if asked.writes else 0
    return replace(asked.options, begun=ids[1:], max_tokens=max(1, len(ids) - 1 + most))


def _completion_ids(service: Service, asked: CompletionAsked, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        service.prompts.check_length(prompt, asked.suffix, param="prompt")
    if asked.suffix and isinstance(prompt, str):
        tokenizer = service.engine.backend.tokenizer
        return fill_ids(tokenizer, Gap(prompt, asked.suffix), None, "suffix")[0]
    return service.engine.encode(prompt, raw=True)


def _text_of(service: Service, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    tokenizer = service.engine.backend.tokenizer
    return b"".join(map(tokenizer.token_bytes, prompt)).decode(errors="replace")


# -- llama.cpp's own -----------------------------------------------------------------------


def prepare_llama(service: Service, body: Any, task: Task) -> Prepared:
    """`/completion`. Raises ApiError, and as `Engine.stream`."""
    asked = read_llama(body, service.setup)
    for one in asked.prompts:
        if isinstance(one, str):
            service.prompts.check_length(one, param="prompt")
    several = [service.engine.encode(one, raw=True) for one in asked.prompts]
    return _llama(service, asked, several, task)


def prepare_infill(service: Service, body: Any, task: Task) -> Prepared:
    """`/infill`. Raises ApiError, also where the model cannot, and as `Engine.stream`."""
    asked = read_infill(body, service.setup)
    assert asked.gap is not None
    size, most, gap = service.setup.context_size, service.prompts.bound.most_bytes, asked.gap
    near = Gap(gap.prefix[-most:], gap.suffix[:most], _last(gap.files, most))
    room = size - min(asked.options.max_tokens, size // _ANSWER_SHARE)
    ids, is_cut = fill_ids(service.engine.backend.tokenizer, near, room, "/infill")
    is_cut = is_cut or len(near.files) < len(gap.files)
    return _llama(service, asked, [ids], task, is_cut=is_cut)


def _last(files: Sequence[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """The last files, with at most so many characters of text: others never fit."""
    found: list[tuple[str, str]] = []
    for name, text in reversed(files):
        if most <= 0:
            break
        found.insert(0, (name, text[-most:]))
        most -= len(text)
    return found


def _llama(
    service: Service,
    asked: LlamaAsked,
    several: list[list[int]],
    task: Task,
    *,
    is_cut: bool = False,
) -> Prepared:
    options = asked.options
    if asked.never_ends:
        options = replace(options, sampling=_without(options.sampling, service.end_ids))
    made = [
        one
        for ids in several
        for one in service.generations(task, "", ids, options, 1, asked.most_s)
    ]
    shape = LlamaShape(service.setup.names[0], asked, _tokens(service), made, is_cut)
    return Prepared(made, shape, asked.streams, names_events=True)


def _without(sampling: SamplingParams | None, tokens: Sequence[int]) -> SamplingParams:
    """The same, but these tokens are never picked."""
    params = sampling or SamplingParams()
    return replace(params, logit_bias={**dict(params.logit_bias), **dict.fromkeys(tokens, -inf)})


# -- `/tokenize` and `/detokenize`, as llama.cpp's server has them -----------------------------


def tokenize(service: Service, body: Any) -> Any:
    """Ids of a text; with `with_pieces`, each with its own. Raises ApiError."""
    text, add_special, with_pieces, is_parsed = read_text(body)
    service.prompts.check_length(text, param="content")
    tokenizer = service.engine.backend.tokenizer
    meant = text if is_parsed else tokenizer.control_texts.mark(text)
    ids = tokenizer.encode(meant, add_special=add_special)
    if not with_pieces:
        return {"tokens": ids}
    # Each piece is written once: a document of all would be ten times as large as its text.
    written = {one: _piece(one, tokenizer.token_bytes(one)) for one in set(ids)}
    return b'{"tokens":[' + b",".join(map(written.__getitem__, ids)) + b"]}"


def read_text(body: Any, _setup: Setup | None = None) -> tuple[str, bool, bool, bool]:
    """A text to tokenize, and how: `add_special`, `with_pieces`, `parse_special`."""
    fields = Fields(body)
    fields.ignore("model")  # by which this one was found
    text = fields.text("content")
    flags = fields.flag("add_special"), fields.flag("with_pieces")
    is_parsed = fields.flag("parse_special", True)
    fields.end()
    return text, *flags, is_parsed


def detokenize(service: Service, body: Any) -> dict[str, Any]:
    """The text of ids. Raises ApiError, also for a text that is longer than any that fits."""
    fields, ids = read_ids(body)
    size, most = service.engine.vocab_size, service.prompts.bound.most_bytes
    if not all(type(one) is int and 0 <= one < size for one in ids):
        fields.refuse("tokens", f"must be whole numbers from 0 to {size - 1}")
    written = {one: service.engine.backend.tokenizer.token_bytes(one) for one in set(ids)}
    if sum(len(written[one]) for one in ids) > most:
        fields.refuse("tokens", f"have a text of more than {most} bytes")
    return {"content": b"".join(map(written.__getitem__, ids)).decode(errors="replace")}


def read_ids(body: Any, _setup: Setup | None = None) -> tuple[Fields, list[Any]]:
    """Ids to make a text of, and the request that has them."""
    fields = Fields(body)
    fields.ignore("model")
    ids = fields.list("tokens", MOST_VALUES)
    fields.end()
    return fields, ids


def _piece(token: int, data: bytes) -> bytes:
    """A token with its text, or with the bytes of a part of a character."""
    try:
        return json_bytes({"id": token, "piece": data.decode()})
    except UnicodeDecodeError:
        return json_bytes({"id": token, "piece": list(data)})
