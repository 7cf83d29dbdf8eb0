"""A model for tests of programs that use edgespec: it needs no file, and its answers are known.

>>> from edgespec.testing import scripted_engine
>>> with scripted_engine(lambda prompt: f"{len(prompt)} bytes") as engine:
...     engine.generate("Hello", raw=True).text
'5 bytes'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from edgespec.backends.base import Capabilities, Logits, require_room
from edgespec.models.control_texts import NO_CONTROLS

if TYPE_CHECKING:
    from edgespec.backends.base import DraftTree
    from edgespec.decode.engine import Engine

_END = 256  # behind the bytes
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def scripted_engine(
    answer: str | Callable[[str], str] = "Hello!", *, context_size: int = 4096
) -> Engine:
    """An engine that answers each prompt with `answer`, or with what this function makes of it.

    The function gets the prompt as the model reads it, roles in angle brackets: chats, tools,
    sessions, streams and `edgespec.Server` run on it. A token is a byte; nothing is drafted.
    Samplers and grammars may pick other tokens than the answer's, as of any model.
    """
    make = answer if callable(answer) else lambda _: answer
    # Of the public package, whose engines take tools.
    engine: Engine = import_module("edgespec").Engine(
        _ScriptedBackend(make, context_size), chat_template=_TEMPLATE
    )
    return engine


class ByteTokenizer:
    """One token per byte; ids above 255 have no text, and `end` ends a generation."""

    bos_text = eos_text = ""
    control_texts = NO_CONTROLS

    def __init__(self, vocab_size: int, end: int = -1) -> None:
        self.vocab_size = vocab_size
        self._end = end

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """UTF-8 bytes as ids, wrapped into a smaller vocabulary where there is one."""
        return [byte % self.vocab_size for byte in text.encode()]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 and token != self._end else b""

    def token_text(self, token: int) -> str:
        return chr(token) if token < 256 else f"<{token}>"

    def is_end(self, token: int) -> bool:
        return token == self._end


class _ScriptedBackend:
    """A model whose most probable next token is the next byte of an answer.

    The answer is made anew where a prompt is read: what `prefill` has read last ends the prompt.
    """

    capabilities = Capabilities(False, False, True, "a scripted model drafts nothing")
    pending, max_nodes, contention = 0, 1, 1.0

    def __init__(self, make: Callable[[str], str], context_size: int) -> None:
        self.tokenizer = ByteTokenizer(_END + 1, _END)
        self.context_size = self.batch_size = context_size
        self.tokens: list[int] = []
        self._make = make
        self._answer: tuple[int, ...] = ()
        self._start = 0  # of the answer
        self._next: Sequence[int] = ()

    @property
    def length(self) -> int:
        return len(self.tokens)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        require_room(self, len(tokens))
        self.tokens += tokens
        prompt = bytes(token for token in self.tokens if token < _END).decode(errors="replace")
        self._answer, self._start = (*self._make(prompt).encode(), _END), self.length
        return self._row(0)

    def verify(self, tree: DraftTree) -> Logits:
        require_room(self, len(tree))
        self._next = tree.tokens
        return self._row(self.length + 1 - self._start)[None]

    def commit(self, path: Sequence[int]) -> None:
        self.tokens += [self._next[node] for node in path]

    def truncate(self, length: int) -> int:
        del self.tokens[length:]
        return self.length

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...

    def _row(self, place: int) -> Logits:
        row = np.zeros(self.tokenizer.vocab_size, np.float32)
        row[self._answer[min(place, len(self._answer) - 1)]] = 100.0
        return row
