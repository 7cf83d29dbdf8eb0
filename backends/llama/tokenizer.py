"""The tokenizer inside a GGUF file, through llama.cpp."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from edgespec.backends.base import AnswerFormat, FillTokens
from edgespec.backends.llama.library import (
    LIBRARY_LOG,
    interrupts_kept,
    library,
    quick_function,
    set_params,
)
from edgespec.errors import BackendError, UnsupportedError
from edgespec.models.control_texts import MARK, ControlTexts

if TYPE_CHECKING:
    from edgespec.backends.llama.grammar import LlamaGrammar


# What is in the names of tokens that end a text (`llama.cpp: src/llama-vocab.cpp`).
_END = re.compile("end|eo[tms]|return|call|flush", re.IGNORECASE)


class LlamaTokenizer:
    """Ids of a llama.cpp vocabulary, for any number of threads, until it is closed.

    Where the file of a byte-level BPE names no first or last token, llama.cpp takes token 11, which
    is Falcon's `<|endoftext|>` and a comma elsewhere. Here such a file has none.

    Whoever frees the model it came from closes it first. That waits for calls under way; later
    ones raise UnsupportedError, but for what was asked of a token before.
    """

    def __init__(self, library: ModuleType, model: Any) -> None:
        self._lib = library
        self._vocab = library.llama_model_get_vocab(model)
        self._bytes: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}
        self._control_texts: ControlTexts | None = None
        self._finding = threading.Lock()
        self._change = threading.Condition()
        self._calls: dict[object, threading.Thread] = {}
        self.vocab_size = int(library.llama_vocab_n_tokens(self._vocab))
        self._bos = self._special(model, "bos", library.llama_vocab_bos(self._vocab))
        eos = library.llama_vocab_eos(self._vocab)
        self._eos = self._special(model, "eos", eos)
        self._no_end = eos if self._eos < 0 else -1  # which llama.cpp still counts among the ends
        self._adds_bos = bool(library.llama_vocab_get_add_bos(self._vocab))
        self._adds_eos = bool(library.llama_vocab_get_add_eos(self._vocab))

    def _special(self, model: Any, which: str, token: int) -> int:
        """The token that llama.cpp has for it, or -1 where that is a default for other files."""
        if token < 0 or self._lib.llama_vocab_type(self._vocab) != self._lib.LLAMA_VOCAB_TYPE_BPE:
            return token
        value = ctypes.create_string_buffer(16)
        key = f"tokenizer.ggml.{which}_token_id".encode()
        self._lib.llama_model_meta_val_str(model, key, value, len(value))
        is_named = value.value == str(token).encode()
        return token if is_named or _is_end_name(self.token_text(token)) else -1

    @contextmanager
    def vocabulary(self) -> Iterator[Any]:
        """llama.cpp's own handle, which is not freed within."""
        call = object()
        try:
            with self._change:
                vocab = self._vocab
                if vocab is None:
                    raise UnsupportedError("the model is closed", hint="load the model again")
                self._calls[call] = threading.current_thread()
            yield vocab
        finally:
            with self._change:
                self._calls.pop(call, None)
                self._change.notify_all()

    def close(self) -> None:
        """Let the vocabulary go; safe to call twice.

        Raises UnsupportedError within a call of this thread, as a signal handler may be.
        """
        with self._change:
            if threading.current_thread() in self._calls.values():
                raise UnsupportedError(
                    "a model cannot be closed while this thread tokenizes with it",
                    hint="close it in another thread, or when the call has ended",
                )
            self._vocab = None
            self._change.wait_for(lambda: not self._calls)

    def encode(self, text: str, *, add_special: bool = True, is_whole: bool = False) -> list[int]:
        """Ids of `text`; a BOS is added where the file asks for it and the text has none yet.

        Control tokens are recognised, but where `control_texts` marked them as words.

        Args:
            is_whole: nothing is written behind it, as in an embedding: then the file's end token
                is added, too. A prompt has none, whatever the file says: an answer would be empty.
        """
        pieces = [(text, True)] if MARK not in text else [*self.control_texts.pieces(text)]
        # llama.cpp ends the process where it has to add a token that there is not.
        has_all = (self._bos >= 0 or not self._adds_bos) and (self._eos >= 0 or not self._adds_eos)
        by_library = add_special and is_whole and len(pieces) == 1 and has_all
        ids = [
            one for piece, is_meant in pieces for one in self._encoded(piece, by_library, is_meant)
        ]
        if add_special and not by_library:
            first = [self._bos] if self._adds_bos and self._bos >= 0 else []
            last = [self._eos] if is_whole and self._adds_eos and self._eos >= 0 else []
            ids = [*first, *ids, *last]
        doubled = add_special and len(ids) > 1 and ids[0] == self._bos == ids[1]
        return ids[1:] if doubled else ids

    def _encoded(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", errors="surrogatepass")
        capacity = len(data) + 8
        ids = (self._lib.llama_token * capacity)()
        with self.vocabulary() as vocab:
            count = self._lib.llama_tokenize(
                vocab, data, len(data), ids, capacity, add_special, parse_special
            )
            if count < 0:  # the buffer was too small: -count tells the size that is needed
                ids = (self._lib.llama_token * -count)()
                count = self._lib.llama_tokenize(
                    vocab, data, len(data), ids, -count, add_special, parse_special
                )
        return list(ids[:count])

    @property
    def control_texts(self) -> ControlTexts:
        """Texts that become control tokens: 17 ms for 49,152 tokens, once."""
        with self._finding:
            if self._control_texts is None:
                kinds = self._lib.LLAMA_TOKEN_ATTR_CONTROL | self._lib.LLAMA_TOKEN_ATTR_UNKNOWN
                types = ctypes.c_int, ctypes.c_void_p, ctypes.c_int32
                asked = quick_function("llama_vocab_get_attr", *types)
                with self.vocabulary() as vocab:
                    found = [one for one in range(self.vocab_size) if asked(vocab, one) & kinds]
                    self._control_texts = ControlTexts(map(self.token_text, found))
            return self._control_texts

    def find_control_texts(self) -> None:
        """Look for them in a thread, beside the rest of a load: 30 to 230 ms of the first chat."""

        def find() -> None:
            with suppress(UnsupportedError):  # it was closed meanwhile
                _ = self.control_texts

        threading.Thread(target=find, name="edgespec-vocabulary", daemon=True).start()

    def grammar(self, wanted: AnswerFormat) -> LlamaGrammar:
        from edgespec.backends.llama.grammar import LlamaGrammar

        return LlamaGrammar(self, wanted)

    def trial(self, wanted: AnswerFormat) -> Callable[[], object] | None:
        from edgespec.backends.llama.grammar import trial

        return trial(self, wanted)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token; control tokens have none."""
        piece = self._bytes.get(token)
        if piece is None:
            with self.vocabulary() as vocab:
                piece = self._bytes[token] = self.piece(vocab, token)
        return piece

    def piece(self, vocab: Any, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token, or the name of a control token if `special` ones are told."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._lib.llama_token_to_piece(vocab, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def all_bytes(self) -> list[bytes]:
        """The bytes of each token (control tokens: none): 35 ms for 49,152 tokens."""
        size, found = 64, list[bytes]()
        number, place = ctypes.c_int32, ctypes.c_void_p
        types = number, place, number, place, number, number, ctypes.c_bool
        ask = quick_function("llama_token_to_piece", *types)
        buffer = ctypes.create_string_buffer(size)
        with self.vocabulary() as vocab:
            for token in range(self.vocab_size):
                count = ask(vocab, token, buffer, size, 0, False)
                found.append(buffer.raw[:count] if count >= 0 else self.piece(vocab, token))
        return found

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (EOS, end of turn, ...)."""
        end = self._ends.get(token)
        if end is None:
            with self.vocabulary() as vocab:
                end = token != self._no_end and bool(self._lib.llama_vocab_is_eog(vocab, token))
                self._ends[token] = end
        return end

    def token_text(self, token: int) -> str:
        """The vocabulary's own name of a token, control tokens included; ``""`` for -1."""
        if token < 0:
            return ""
        with self.vocabulary() as vocab:
            text: bytes = self._lib.llama_vocab_get_text(vocab, token)
            return text.decode("utf-8", errors="replace")

    def fill_tokens(self) -> FillTokens | None:
        """As `FillsIn.fill_tokens`: those of the file, or those llama.cpp knows by their names."""
        lib = self._lib
        with self.vocabulary() as vocab:
            found = FillTokens(
                lib.llama_vocab_fim_pre(vocab),
                lib.llama_vocab_fim_suf(vocab),
                lib.llama_vocab_fim_mid(vocab),
                lib.llama_vocab_fim_rep(vocab),
                lib.llama_vocab_fim_sep(vocab),
            )
        return None if min(found.prefix, found.suffix, found.middle) < 0 else found

    @property
    def bos_text(self) -> str:
        with self.vocabulary():
            return self.token_text(self._bos)

    @property
    def eos_text(self) -> str:
        with self.vocabulary():
            return self.token_text(self._eos)


def _is_end_name(name: str) -> bool:
    is_tag = name.startswith(("<", "[", "_")) and name.endswith((">", "]"))
    return name.lower() == "</s>" or (is_tag and _END.search(name, 1, len(name) - 1) is not None)


class VocabularyTokenizer(LlamaTokenizer):
    """The tokenizer in a file, without its weights. Raises BackendError with llama.cpp's words.

    One that nobody refers to any more is closed, too.
    """

    _opened: ExitStack | None = None

    def __init__(self, path: Path) -> None:
        lib = library()
        params = lib.llama_model_default_params()
        set_params(params, vocab_only=True)
        LIBRARY_LOG.clear()
        with ExitStack() as opened:
            with interrupts_kept():
                model = lib.llama_model_load_from_file(os.fsencode(path), params)
                if model:
                    opened.callback(lib.llama_model_free, model)
            if not model:
                reason = LIBRARY_LOG.problem() or "no reason"
                raise BackendError(f"llama.cpp cannot read the vocabulary of {path.name}: {reason}")
            super().__init__(lib, model)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Free the vocabulary; safe to call twice."""
        if self._opened is not None:
            super().close()
            self._opened.close()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit():  # when modules may be gone, and the system frees everything
            self.close()


def open_tokenizer(path: Path) -> closing[VocabularyTokenizer]:
    """The tokenizer in a file, closed at the end of a `with`. Raises as `VocabularyTokenizer`."""
    return closing(VocabularyTokenizer(path))
