"""How much a client may ask of the server. Everything beyond is refused, with the number in it."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.memory.bytes.projector import BODY_BYTES, MOST_BODIES


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are of one request."""

    body_bytes: int = 4 << 20
    image_body_bytes: int = BODY_BYTES  # where a model sees images, in place of `body_bytes`
    image_bodies: int = MOST_BODIES  # larger than `body_bytes`, of all requests at once
    json_depth: int = 64
    messages: int = 4096
    choices: int = 8
    stops: int = 16
    stop_chars: int = 256
    biases: int = 1024
    logprobs: int = 20  # best tokens told at each place
    tools: int = 128
    format_chars: int = 256 << 10  # of a schema, an expression or a grammar
    format_choices: int = 1024  # texts of which an answer is one
    response_bytes: int = 8 << 20  # of all responses that are kept
    responses: int = 512  # that are kept
    waiting: int = 16  # generations in the queue, of all requests
    connections: int = 256
    header_s: float = 15.0  # to send a request's line and headers
    body_s: float = 30.0  # to send its body
    write_s: float = 60.0  # until a client takes what it is sent
    model_s: float = 300.0  # until a request has the model that it waits for
    comment_s: float = 10.0  # of a stream without an event, before a comment is sent
