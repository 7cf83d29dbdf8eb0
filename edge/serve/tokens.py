"""`/tokenize` and `/detokenize`, as llama.cpp's server has them."""

from __future__ import annotations

from typing import Any

from edgespec.serve.fields import Fields
from edgespec.serve.service import Service


def tokenize(service: Service, body: Any) -> dict[str, Any]:
    """Ids of a text; with `with_pieces`, each with its own. Raises Refusal."""
    fields = Fields(body)
    text = fields.text("content")
    add_special, with_pieces = fields.flag("add_special"), fields.flag("with_pieces")
    tokenizer = service.engine.backend.tokenizer
    if not fields.flag("parse_special", True):
        text = tokenizer.control_texts.mark(text)
    fields.end()
    ids = tokenizer.encode(text, add_special=add_special)
    if not with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": one, "piece": _piece(tokenizer.token_bytes(one))} for one in ids]}


def detokenize(service: Service, body: Any) -> dict[str, Any]:
    """The text of ids. Raises Refusal."""
    fields = Fields(body)
    ids = fields.list("tokens", service.limits.body_bytes)
    fields.end()
    size = service.engine.vocab_size
    for one in ids:
        if type(one) is not int or not 0 <= one < size:
            fields.refuse("tokens", f"must be whole numbers from 0 to {size - 1}")
    tokenizer = service.engine.backend.tokenizer
    return {"content": b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")}


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
