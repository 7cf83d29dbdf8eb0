"""The tokenizer inside a GGUF file, through llama.cpp."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from edgespec.backends.llama_library import LOG, library
from edgespec.errors import BackendError


@contextmanager
def open_tokenizer(path: Path) -> Iterator[LlamaTokenizer]:
    """The tokenizer of a file, without its weights. Raises BackendError with llama.cpp's words."""
    lib = library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    LOG.clear()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise BackendError(f"llama.cpp cannot load {path.name}: {LOG.problem() or 'no reason'}")
    try:
        yield LlamaTokenizer(lib, model)
    finally:
        lib.llama_model_free(model)


class LlamaTokenizer:
    """Ids of a llama.cpp vocabulary. Valid while the model it came from is loaded."""

    def __init__(self, library: ModuleType, model: Any) -> None:
        self._lib = library
        self._vocab = library.llama_model_get_vocab(model)
        self._bytes: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self.vocab_size = int(library.llama_vocab_n_tokens(self._vocab))

    @property
    def vocabulary(self) -> Any:
        """llama.cpp's own handle."""
        return self._vocab

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; a BOS is added where the file asks for it and the text has none yet."""
        data = text.encode("utf-8", errors="surrogatepass")
        capacity = len(data) + 8
        ids = (self._lib.llama_token * capacity)()
        count = self._lib.llama_tokenize(
            self._vocab, data, len(data), ids, capacity, add_special, True
        )
        if count < 0:  # the buffer was too small: -count tells the size that is needed
            ids = (self._lib.llama_token * -count)()
            count = self._lib.llama_tokenize(
                self._vocab, data, len(data), ids, -count, add_special, True
            )
        bos = self._lib.llama_vocab_bos(self._vocab)
        doubled = add_special and count > 1 and ids[0] == bos == ids[1]
        return list(ids[1:count] if doubled else ids[:count])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; control tokens have none."""
        piece = self._bytes.get(token)
        if piece is None:
            piece = self._bytes[token] = self._piece(token)
        return piece

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (EOS, end of turn, ...)."""
        end = self._ends.get(token)
        if end is None:
            end = self._ends[token] = self._is_end(token)
        return end

    def _is_end(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def one_byte_tokens(self) -> dict[int, int]:
        """A token for each byte that has one of its own, and one that ends a generation at -1.

        Looks at the whole vocabulary once, and keeps none of it: that would take 150 bytes a token.
        """
        found: dict[int, int] = {}
        for token in range(self.vocab_size):
            if self._is_end(token):
                found.setdefault(-1, token)
            elif len(piece := self._piece(token)) == 1:
                found.setdefault(piece[0], token)
        return found

    def token_text(self, token: int) -> str:
        """The vocabulary's own name of a token, control tokens included; ``""`` for -1."""
        if token < 0:
            return ""
        text: bytes = self._lib.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", errors="replace")

    @property
    def bos_text(self) -> str:
        """Name of the begin-of-sequence token, for chat templates."""
        return self.token_text(self._lib.llama_vocab_bos(self._vocab))

    @property
    def eos_text(self) -> str:
        """Name of the end-of-sequence token, for chat templates."""
        return self.token_text(self._lib.llama_vocab_eos(self._vocab))
