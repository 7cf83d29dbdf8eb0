"""From the document of a request to generations that can begin. Runs in threads of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from edgespec.serve.answers import Prepared
from edgespec.serve.asked import ChatAsked
from edgespec.serve.chat_request import read_chat
from edgespec.serve.chat_shape import ChatShape
from edgespec.serve.completion_request import read_completion
from edgespec.serve.completion_shape import CompletionShape
from edgespec.serve.conversation import conversation_of
from edgespec.serve.responses_request import read_response
from edgespec.serve.responses_shape import ResponsesShape
from edgespec.serve.service import Service
from edgespec.serve.shapes import Shape


def prepare_chat(service: Service, body: Any, loop: asyncio.AbstractEventLoop) -> Prepared:
    """The next message of a conversation. Raises Refusal, and as `Engine.stream`."""
    asked = read_chat(body, service.setup)
    shape = ChatShape(service.setup.names[0], asked.output)
    return _chat(service, asked, shape, loop)


def prepare_response(service: Service, body: Any, loop: asyncio.AbstractEventLoop) -> Prepared:
    """The same by another interface. Raises Refusal, and as `Engine.stream`."""
    asked, told = read_response(body, service.setup)
    shape = ResponsesShape(service.setup.names[0], told)
    return replace(_chat(service, asked, shape, loop), names_events=True)


def _chat(
    service: Service, asked: ChatAsked, shape: Shape, loop: asyncio.AbstractEventLoop
) -> Prepared:
    talk = conversation_of(asked, service.prompts, service.engine.chat_template or "")
    ids = service.prompts.ids_of(talk.text)
    generations = service.generations(loop, talk.text, ids, talk.options, asked.output.choices)
    return Prepared(generations, shape, asked.output.streams, talk.make_reader)


def prepare_completion(service: Service, body: Any, loop: asyncio.AbstractEventLoop) -> Prepared:
    """Prompts as they are, continued. Raises Refusal, and as `Engine.stream`."""
    asked = read_completion(body, service.setup)
    generations, echoes = [], []
    tokenizer = service.engine.backend.tokenizer
    for prompt in asked.prompts:
        ids = service.engine.encode(prompt, raw=True)
        generations += service.generations(loop, "", ids, asked.options, asked.output.choices)
        text = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        echoes += [(prompt if isinstance(prompt, str) else text)] * asked.output.choices
    shape = CompletionShape(
        service.setup.names[0], asked.output, echoes if asked.echo else [""] * len(echoes)
    )
    return Prepared(generations, shape, asked.output.streams)
