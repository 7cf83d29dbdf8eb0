"""From the document of a request to generations that can begin. Runs in threads of its own.

Each interface reads the fields of a request first, which needs no model: what is wrong in itself is
refused before one is loaded. What it returns does the rest with the model that is asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.memory.bytes.requests import MOST_VALUES
from edgespec.models.images import images_of
from edgespec.sampling.params import SamplingParams
from edgespec.serve.access import HISTORY
from edgespec.serve.answers import Prepared
from edgespec.serve.api_error import ApiError
from edgespec.serve.asked import ChatAsked, CompletionAsked, Setup
from edgespec.serve.chat import ChatShape, read_chat
from edgespec.serve.completions import CompletionShape, Echo, read_completion
from edgespec.serve.conversation import Conversation, conversation_of
from edgespec.serve.llama import (
    Gap,
    LlamaAsked,
    LlamaPrompt,
    LlamaShape,
    Prompt,
    fill_ids,
    read_infill,
    read_llama,
)
from edgespec.serve.messages import MessagesShape, read_messages
from edgespec.serve.parsing import Fields, biases_by_id, take_sampling
from edgespec.serve.responses import ResponsesShape, read_response
from edgespec.serve.service import Service, Shared, settings_of
from edgespec.serve.shapes import Shape, ToldTokens

Loop = asyncio.AbstractEventLoop
# What is left of a request once its fields were read: it needs the model that it asks for.
Prepare = Callable[[Service, Loop], Prepared]
Tell = Callable[[Service], Any]
_ANSWER_SHARE = 4  # of the context, kept free for an answer whose length nobody said

# -- chats ---------------------------------------------------------------------------------


def chat(body: Any, setup: Setup, _shared: Shared) -> Prepare:
    """The next message of a conversation. Raises ApiError; what is left to do as `Engine.stream`.

    So do all of these.
    """
    asked = read_chat(body, setup)

    def prepare(service: Service, loop: Loop) -> Prepared:
        talk, ids = _prompt(service, asked)
        shape = ChatShape(service.setup.names[0], asked.output, _tokens(service))
        return _chat(service, asked, talk, ids, shape, loop)

    return prepare


def response(body: Any, setup: Setup, shared: Shared) -> Prepare:
    """The same by another interface."""
    kept, owner = shared.responses, HISTORY.get()
    asked, told = read_response(body, setup, kept, owner)

    def keep(response: dict[str, Any]) -> None:
        kept.add(owner, response, [*told.items, *response["output"]])

    def prepare(service: Service, loop: Loop) -> Prepared:
        talk, ids = _prompt(service, asked)
        shape = ResponsesShape(
            service.setup.names[0],
            told.repeats,
            keep if told.keeps else None,
            summarises=told.summarises,
        )
        prepared = _chat(service, asked, talk, ids, shape, loop)
        return replace(prepared, names_events=True, fail=shape.failed)

    return prepare


def message(body: Any, setup: Setup, _shared: Shared) -> Prepare:
    """The same by Anthropic's interface."""
    asked = read_messages(body, setup)

    def prepare(service: Service, loop: Loop) -> Prepared:
        talk, ids = _prompt(service, asked)
        shape = MessagesShape(service.setup.names[0], len(ids))
        return replace(_chat(service, asked, talk, ids, shape, loop), names_events=True)

    return prepare


def count_message(body: Any, setup: Setup, _shared: Shared) -> Tell:
    """How many tokens a request of Anthropic's interface has."""
    asked = read_messages(body, setup, counts=True)
    return lambda service: {"input_tokens": len(_prompt(service, asked)[1])}


def count_chat(body: Any, setup: Setup, _shared: Shared) -> Tell:
    """How many tokens the prompt of a chat has."""
    asked = read_chat(body, setup)
    return lambda service: {"input_tokens": len(_prompt(service, asked)[1])}


def apply_template(body: Any, setup: Setup, _shared: Shared) -> Tell:
    """The prompt of a chat, as a text."""
    opens = "add_generation_prompt"
    more = {opens: body[opens]} if isinstance(body, dict) and opens in body else {}
    if not isinstance(more.get(opens, True), bool):
        raise ApiError(f"{opens} must be true or false", param=opens)
    given = {name: value for name, value in body.items() if name != opens} if more else body
    asked = read_chat(given, setup)
    asked = replace(asked, variables={**asked.variables, **more})
    return lambda service: {"prompt": _prompt(service, asked)[0].text}


def _prompt(service: Service, asked: ChatAsked) -> tuple[Conversation, list[int]]:
    service.prompts.check_length(*(str(one.get("content", "")) for one in asked.messages))
    template = service.prompts.template(with_tools=bool(asked.tools.offered)) or ""
    talk, images = conversation_of(asked, service.prompts, template), images_of(asked.messages)
    talk = replace(talk, options=replace(talk.options, images=images))
    return talk, service.prompts.ids_of(talk.text, images)


def _chat(
    service: Service, asked: ChatAsked, talk: Conversation, ids: list[int], shape: Shape, loop: Loop
) -> Prepared:
    generations = service.generations(loop, talk.text, ids, talk.options, asked.output.choices)
    return Prepared(
        generations,
        shape,
        asked.output.streams,
        talk.make_reader,
        tells_progress=asked.output.progress,
    )


def _tokens(service: Service) -> ToldTokens:
    return ToldTokens(service.engine.backend.tokenizer)


# -- completions ---------------------------------------------------------------------------


def completion(body: Any, setup: Setup, _shared: Shared) -> Prepare:
    """Prompts as they are, continued."""
    asked = read_completion(body, setup)

    def prepare(service: Service, loop: Loop) -> Prepared:
        generations, echoes = [], []
        for prompt in asked.prompts:
            ids = _completion_ids(service, asked, prompt)
            options, echo = asked.options, _text_of(service, prompt) if asked.echo else ""
            if asked.scores:
                options, echo = _scoring(service, asked, ids), _text_of(service, ids[:1])
                ids = ids[:1]
            generations += service.generations(loop, "", ids, options, asked.output.choices)
            told = Echo(echo, options.begun, ids[0] if asked.scores else -1)
            echoes += [told] * asked.output.choices
        shape = CompletionShape(
            service.setup.names[0], asked.output, _tokens(service), echoes, writes=asked.writes
        )
        streams, progress = asked.output.streams, asked.output.progress
        return Prepared(generations, shape, streams, tells_progress=progress)

    return prepare


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


def llama(body: Any, setup: Setup, _shared: Shared) -> Prepare:
    """`/completion`."""
    asked, biases = _read_with_biases(read_llama, body, setup)

    def prepare(service: Service, loop: Loop) -> Prepared:
        several = [service.engine.encode(_llama_ids(service, one), raw=True) for one in asked.prompts]
        prompts = [
            LlamaPrompt(one if isinstance(one, str) else _text_of(service, ids), len(ids))
            for one, ids in zip(asked.prompts, several, strict=True)
        ]
        return _llama(service, biases(service, asked), several, prompts, loop)

    return prepare


def _read_with_biases(
    read: Callable[[Any, Setup], LlamaAsked], body: Any, setup: Setup
) -> tuple[LlamaAsked, Callable[[Service, LlamaAsked], LlamaAsked]]:
    """What is asked for, and what gives its biases of texts the ids of their tokens."""
    asked = read(biases_by_id(body, lambda _text: (0,)), setup)
    given = body.get("logit_bias") if asked.options.sampling and asked.options.sampling.logit_bias else None

    def with_ids(service: Service, asked: LlamaAsked) -> LlamaAsked:
        if given is None:
            return asked
        encode = service.engine.backend.tokenizer.encode
        made = biases_by_id({"logit_bias": given}, lambda text: encode(text, add_special=False))
        sampling = take_sampling(Fields(made), asked.options.sampling, setup.limits)
        return replace(asked, options=replace(asked.options, sampling=sampling))

    return asked, with_ids


def _llama_ids(service: Service, prompt: Prompt) -> str | list[int]:
    """A prompt of texts and token ids as ids; only a text at its beginning has what begins one."""
    texts = [prompt] if isinstance(prompt, str) else [one for one in prompt if isinstance(one, str)]
    service.prompts.check_length(*texts, param="prompt")
    if isinstance(prompt, str):
        return prompt
    tokenizer, ids = service.engine.backend.tokenizer, list[int]()
    for place, one in enumerate(prompt):
        added = [one] if isinstance(one, int) else tokenizer.encode(one, add_special=place == 0)
        ids += added
    return ids


def infill(body: Any, setup: Setup, _shared: Shared) -> Prepare:
    """`/infill`. What is left to do raises ApiError where the model cannot."""
    asked, biases = _read_with_biases(read_infill, body, setup)
    assert asked.gap is not None
    gap = asked.gap

    def prepare(service: Service, loop: Loop) -> Prepared:
        size, most = service.setup.context_size, service.prompts.bound.most_bytes
        near = Gap(gap.prefix[-most:], gap.suffix[:most], _last(gap.files, most))
        room = size - min(asked.options.max_tokens, size // _ANSWER_SHARE)
        ids, is_cut = fill_ids(service.engine.backend.tokenizer, near, room, "/infill")
        prompt = LlamaPrompt(near.prefix, len(ids), is_cut or near != gap)
        return _llama(service, biases(service, asked), [ids], [prompt], loop)

    return prepare


def _last(files: Sequence[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """The last texts, of at most so many characters together."""
    found: list[tuple[str, str]] = []
    for name, text in reversed(files):
        if most > 0:
            found.insert(0, (name, text[-most:]))
        most -= len(text)
    return found


def _llama(
    service: Service,
    asked: LlamaAsked,
    several: list[list[int]],
    prompts: list[LlamaPrompt],
    loop: Loop,
) -> Prepared:
    options, choices = asked.options, asked.choices
    if asked.never_ends:
        options = replace(options, sampling=_without(options.sampling, service.end_ids))
    made = [
        one
        for ids in several
        for one in service.generations(loop, "", ids, options, choices, asked.most_s)
    ]
    shape = LlamaShape(
        service.setup.names[0],
        asked,
        _tokens(service),
        made,
        [prompt for prompt in prompts for _ in range(choices)],
        _told_settings(options, service.setup.context_size),
    )
    progress = asked.tells_progress
    return Prepared(made, shape, asked.streams, names_events=True, tells_progress=progress)


def _without(sampling: SamplingParams | None, tokens: Sequence[int]) -> SamplingParams:
    """The same, but these tokens are never picked."""
    params = sampling or SamplingParams()
    return replace(params, logit_bias={**dict(params.logit_bias), **dict.fromkeys(tokens, -inf)})


def _told_settings(options: GenerationOptions, context_size: int) -> dict[str, Any]:
    sampling = options.sampling or SamplingParams()
    told = {**settings_of(sampling), "n_ctx": context_size, "n_predict": options.max_tokens}
    return {**told, "stop": list(options.stop), "n_probs": options.logprobs or 0}


# -- `/tokenize` and `/detokenize`, as llama.cpp's server has them -----------------------------


def tokenize(body: Any, _setup: Setup, _shared: Shared) -> Tell:
    """Ids of a text; with `with_pieces`, each with its own."""
    fields = Fields(body)
    fields.ignore("model")
    text = fields.text("content")
    add_special, with_pieces = fields.flag("add_special"), fields.flag("with_pieces")
    is_parsed = fields.flag("parse_special", True)
    fields.end()

    def tell(service: Service) -> Any:
        service.prompts.check_length(text, param="content")
        tokenizer = service.engine.backend.tokenizer
        ids = tokenizer.encode(
            text if is_parsed else tokenizer.control_texts.mark(text), add_special=add_special
        )
        if not with_pieces:
            return {"tokens": ids}
        written = {
            one: json.dumps({"id": one, "piece": _piece(tokenizer.token_bytes(one))})
            for one in set(ids)
        }
        return f'{{"tokens": [{", ".join(map(written.__getitem__, ids))}]}}'.encode()

    return tell


def detokenize(body: Any, _setup: Setup, _shared: Shared) -> Tell:
    """The text of ids."""
    fields = Fields(body)
    fields.ignore("model")
    ids = fields.list("tokens", MOST_VALUES)
    fields.end()

    def tell(service: Service) -> Any:
        size, tokenizer = service.engine.vocab_size, service.engine.backend.tokenizer
        for one in ids:
            if type(one) is not int or not 0 <= one < size:
                fields.refuse("tokens", f"must be whole numbers from 0 to {size - 1}")
        data = bytearray()
        for one in ids:
            data += tokenizer.token_bytes(one)
            if len(data) > service.limits.body_bytes:
                fields.refuse("tokens", f"have a text of more than {len(data)} bytes")
        return {"content": data.decode(errors="replace")}

    return tell


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
