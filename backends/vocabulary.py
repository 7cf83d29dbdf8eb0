"""The tokenizer of a model, without its weights: a GGUF's through llama.cpp, or a folder's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

from edgespec.backends.base import Tokenizer
from edgespec.backends.llama.tokenizer import VocabularyTokenizer
from edgespec.backends.ort.tokenizer import FolderTokenizer
from edgespec.memory.bytes.requests import TOKEN_CHARS
from edgespec.models.spec import ONNX_FORMAT, ModelSpec

OwnTokenizer: TypeAlias = VocabularyTokenizer | FolderTokenizer  # closed by who opened it


def open_vocabulary(spec: ModelSpec) -> OwnTokenizer:
    """The tokenizer of a model. Raises as `VocabularyTokenizer` and `FolderTokenizer`."""
    if spec.format == ONNX_FORMAT:
        return FolderTokenizer(spec.path, spec.vocab_size)
    return VocabularyTokenizer(spec.path)


class TextBound:
    """The longest text that a context may hold, known without tokenizing it.

    Each token takes at most the bytes of the longest one. What is longer would cost many times its
    size in memory and seconds of a core, only to be refused then.
    """

    def __init__(self, tokenizer: Tokenizer, context_size: int) -> None:
        self._tokenizer, self.context_size = tokenizer, context_size

    @cached_property
    def _token_bytes(self) -> int:
        """Of the longest token as the vocabulary writes it, which is no shorter than its bytes."""
        names = map(self._tokenizer.token_text, range(self._tokenizer.vocab_size))
        return max(TOKEN_CHARS, *(len(name.encode(errors="replace")) for name in names))

    @property
    def most_bytes(self) -> int:
        """Of a text that may fit."""
        return self.context_size * self._token_bytes

    def least_tokens(self, *texts: str) -> int:
        """Tokens that texts have together at least, where that is more than fit; else 0.

        Names of tokens are looked at for the longest texts alone: 1.4 s for 152,000 of them.
        """
        usual_bytes = self.context_size * TOKEN_CHARS
        if _least_bytes(texts, usual_bytes) <= usual_bytes:
            return 0
        nbytes = _least_bytes(texts, self.most_bytes)
        return -(-nbytes // self._token_bytes) if nbytes > self.most_bytes else 0


def _least_bytes(texts: Sequence[str], most: int) -> int:
    """Bytes of texts; their characters alone, where these are more than `most`."""
    chars = sum(map(len, texts))
    return chars if chars > most else sum(len(text.encode(errors="replace")) for text in texts)
