"""How a model's conversations begin, in tokens: what `models.exits.text_writer` writes with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from edgespec.backends.base import Tokenizer
from edgespec.errors import ModelFileError
from edgespec.models.chat import render_chat
from edgespec.models.exits.openings import OPENINGS, PASSAGE_TASKS, Chat
from edgespec.models.spec import ModelSpec
from edgespec.paths import read_text

_MARK = "\u2402user\u2402"  # in place of the user's words

_SHORTEST_WORD = 4


def chat_of(spec: ModelSpec, tokenizer: Tokenizer) -> Chat:
    """The chat format of a model; without a template, texts just begin."""
    before, between = tokenizer.bos_text, "\n"
    if spec.chat_template:
        message = {"role": "user", "content": _MARK}
        text = render_chat(
            spec.chat_template,
            [message],
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
        )
        before, found, between = text.partition(_MARK)
        if not found:
            raise ModelFileError(f"{spec.path.name}: the chat template changes the user's words")
    start = next((token for token in (spec.bos_id, spec.eos_id) if token is not None), 0)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False) if text else []

    everything = range(tokenizer.vocab_size)
    return Chat(
        before=tokenizer.encode(before) or [start],
        between=encode(between),
        ends=frozenset(token for token in everything if tokenizer.is_end(token)),
        openings=[encode(text) for text in OPENINGS],
        words=[token for token in everything if _is_word(tokenizer.token_bytes(token))],
        tasks=[(encode(first), encode(last)) for first, last in PASSAGE_TASKS],
    )


def _is_word(text: bytes) -> bool:
    """Whether a token is a space and some letters."""
    return len(text) > _SHORTEST_WORD and text[:1] == b" " and text[1:].isalpha()


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Sequence[int]]:
    """Prompts of a file, one a line: plain text, or JSON with "prompt", "text" or "turns".

    Raises UnsupportedError for what is no text.
    """
    lines = read_text(path).split("\n")
    texts = [text for line in lines if line.strip() for text in _texts(line)]
    return [tokenizer.encode(text, add_special=False) for text in texts]


def _texts(line: str) -> list[str]:
    if not line.lstrip().startswith("{"):
        return [line]
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    for key in ("prompt", "text", "question"):
        if isinstance(document.get(key), str):
            return [document[key]]
    turns = document.get("turns")
    return [turn for turn in turns if isinstance(turn, str)] if isinstance(turns, list) else []
