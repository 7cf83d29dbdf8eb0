"""The tokenizer: its life, where no call reaches a freed vocabulary, and the embedded model's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest
from random_gguf import byte_tokens, finish
from waiting import PATIENCE_S, until

from edgespec.backends.base import FillsIn
from edgespec.backends.llama import tokenizer as llama_tokenizer
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.tokenizer import (
    LlamaTokenizer,
    VocabularyTokenizer,
    _is_end_name,
    open_tokenizer,
)
from edgespec.errors import BackendError, UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import read_model_spec


class Library(ModuleType):
    """llama.cpp with a vocabulary of bytes, which notices its use after it was freed."""

    llama_token = ctypes.c_int32
    LLAMA_VOCAB_TYPE_BPE = 2

    def __init__(self) -> None:
        super().__init__("library")
        self.freed = False
        self.during: Callable[[], object] = int  # what happens while it tokenizes

    def llama_model_get_vocab(self, _model: Any) -> str:
        return "vocab"

    def llama_vocab_n_tokens(self, _vocab: Any) -> int:
        return 256

    def llama_vocab_bos(self, _vocab: Any) -> int:
        assert not self.freed
        return -1

    llama_vocab_eos = llama_vocab_bos

    def llama_vocab_get_add_bos(self, _vocab: Any) -> bool:
        return False

    llama_vocab_get_add_eos = llama_vocab_get_add_bos

    def llama_tokenize(self, vocab: Any, data: bytes, count: int, ids: Any, *_: Any) -> int:
        self.during()
        assert vocab == "vocab" and not self.freed, "used after it was freed"
        ids[:count] = list(data)
        return count

    def llama_token_to_piece(self, _vocab: Any, token: int, buffer: Any, *_: Any) -> int:
        assert not self.freed, "used after it was freed"
        buffer.raw = bytes([token]).ljust(64)
        return 1

    def llama_vocab_is_eog(self, _vocab: Any, token: int) -> bool:
        assert not self.freed, "used after it was freed"
        return token == 0


def test_closing_waits_for_calls_under_way() -> None:
    library = Library()
    tokenizer = LlamaTokenizer(library, "model")
    entered, go_on, problems = threading.Event(), threading.Event(), list[BaseException]()

    def during() -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    def encode() -> None:
        try:
            assert tokenizer.encode("abc") == list(b"abc")
        except BaseException as problem:
            problems.append(problem)

    def close() -> None:
        tokenizer.close()
        library.freed = True

    library.during = during
    threads = [threading.Thread(target=work, daemon=True) for work in (encode, close)]
    threads[0].start()
    assert entered.wait(PATIENCE_S)
    threads[1].start()
    threads[1].join(0.05)
    assert not library.freed
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert library.freed and not problems


def test_a_closed_tokenizer_says_so_and_remembers_what_it_was_asked() -> None:
    library = Library()
    tokenizer = LlamaTokenizer(library, "model")
    assert (tokenizer.token_bytes(97), tokenizer.is_end(0)) == (b"a", True)
    tokenizer.close()
    tokenizer.close()
    library.freed = True
    assert (tokenizer.token_bytes(97), tokenizer.is_end(0)) == (b"a", True)
    for call in (
        lambda: tokenizer.encode("abc"),
        lambda: tokenizer.token_bytes(98),
        lambda: tokenizer.is_end(1),
        lambda: tokenizer.token_text(1),
        lambda: tokenizer.bos_text,
    ):
        with pytest.raises(UnsupportedError, match="closed"):
            call()


def test_an_error_within_a_call_does_not_keep_it_open() -> None:
    library = Library()
    tokenizer = LlamaTokenizer(library, "model")
    library.during = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        tokenizer.encode("abc")
    tokenizer.close()


def test_closing_within_a_call_is_an_error_and_not_a_deadlock() -> None:
    """As a signal handler does that runs in the middle of one."""
    library = Library()
    tokenizer = LlamaTokenizer(library, "model")
    problems: list[str] = []

    def close() -> None:
        try:
            tokenizer.close()
        except UnsupportedError as problem:
            problems.append(str(problem))

    library.during = close
    assert tokenizer.encode("abc") == list(b"abc")
    assert len(problems) == 1 and "while this thread tokenizes" in problems[0]
    tokenizer.close()


class OneFile(Library):
    """Loads and frees models, and counts those that are open."""

    def __init__(self, model: str | None) -> None:
        super().__init__()
        self._model, self.opened = model, 0

    def llama_model_default_params(self) -> Any:
        from llama_cpp import llama_cpp

        return llama_cpp.llama_model_params()

    def llama_model_load_from_file(self, _path: bytes, params: Any) -> str | None:
        assert params.vocab_only
        self.opened += self._model is not None
        return self._model

    def llama_model_free(self, _model: str) -> None:
        self.opened -= 1


def test_a_vocabulary_is_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = OneFile("model")
    monkeypatch.setattr(llama_tokenizer, "library", lambda: library)
    tokenizer = VocabularyTokenizer(Path("a.gguf"))
    assert (tokenizer.encode("a"), library.opened) == ([97], 1)
    tokenizer.close()
    tokenizer.close()
    assert library.opened == 0
    with open_tokenizer(Path("a.gguf")) as opened:
        assert library.opened == 1
    with pytest.raises(UnsupportedError, match="closed"):
        opened.encode("a")
    assert library.opened == 0


def test_a_vocabulary_is_freed_where_opening_it_fails_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = OneFile("model")
    monkeypatch.setattr(llama_tokenizer, "library", lambda: library)
    monkeypatch.setattr(Library, "llama_vocab_n_tokens", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        VocabularyTokenizer(Path("a.gguf"))
    assert library.opened == 0
    monkeypatch.setattr(llama_tokenizer, "library", lambda: OneFile(None))
    with pytest.raises(BackendError, match=r"vocabulary of a\.gguf"):
        VocabularyTokenizer(Path("a.gguf"))


@pytest.mark.model
def test_real_vocabularies_close() -> None:
    tokenizer = VocabularyTokenizer(embedded_model())
    ids = tokenizer.encode("The sky is blue.")
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"The sky is blue."
    tokenizer.close()
    with pytest.raises(UnsupportedError, match="closed"):
        tokenizer.encode("The sky")


def write_vocabulary(
    path: Path,
    more: list[str],
    ids: dict[str, int],
    *,
    adds: tuple[str, ...] = (),
    tokens: dict[int, str] | None = None,
) -> Path:
    """A file of bytes and control tokens, with ids of its metadata, and what it adds to texts."""
    writer = gguf.GGUFWriter(path, "llama")
    names = [*byte_tokens(), "<end>", *more]
    for token, name in (tokens or {}).items():
        names[token] = name
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 64)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * (len(names) - 256)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    for name, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    for name in adds:
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", True)
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("more", "ids", "found"),
    [
        ([], {}, None),
        (["<|fim_prefix|>", "<|fim_suffix|>"], {}, None),
        (["<|fim_suffix|>", "<|fim_middle|>", "<|fim_prefix|>"], {}, (259, 257, 258, -1, -1)),
        (
            ["<a>", "<b>", "<c>", "<d>", "<e>"],
            {"fim_pre": 257, "fim_suf": 258, "fim_mid": 259, "fim_rep": 260, "fim_sep": 261},
            (257, 258, 259, 260, 261),
        ),
    ],
)
def test_tokens_for_the_middle_are_those_of_the_file_or_known_names(
    tmp_path: Path, more: list[str], ids: dict[str, int], found: tuple[int, ...] | None
) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", more, {"eos": 256, **ids})
    with open_tokenizer(path) as tokenizer:
        assert tokenizer.fill_tokens() == found
        assert isinstance(tokenizer, FillsIn)


TAB, TURN = 11, 257  # llama.cpp's own idea of a first and last token, and one with a name


@pytest.mark.parametrize(
    ("ids", "adds", "texts", "whole"),
    [
        ({}, (), ("", ""), [TAB, 97]),
        ({}, ("bos", "eos"), ("", ""), [TAB, 97]),
        ({"bos": 256}, ("bos", "eos"), ("<end>", ""), [256, TAB, 97]),
        ({"eos": 256}, ("bos", "eos"), ("", "<end>"), [TAB, 97, 256]),
        ({"bos": 9999, "eos": 9999}, ("bos",), ("", ""), [TAB, 97]),  # not in the vocabulary
        ({"bos": TAB, "eos": TAB}, ("bos",), ("ċ", "ċ"), [TAB, 97]),  # the text has one already
        ({"bos": TAB, "eos": 256}, ("bos", "eos"), ("ċ", "<end>"), [TAB, 97, 256]),
    ],
)
def test_a_file_that_names_no_first_or_last_token_has_none(
    tmp_path: Path,
    ids: dict[str, int],
    adds: tuple[str, ...],
    texts: tuple[str, str],
    whole: list[int],
) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", ["<|im_end|>"], ids, adds=adds)
    with open_tokenizer(path) as tokenizer:
        assert (tokenizer.bos_text, tokenizer.eos_text) == texts
        assert tokenizer.encode("\va", is_whole=True) == whole
        # An answer goes on where a prompt ends, so no prompt ends with the end token.
        assert tokenizer.encode("\va") == whole[: whole.index(97) + 1]
        assert tokenizer.encode("\va", add_special=False) == [TAB, 97]
        ends = [token for token in range(258) if tokenizer.is_end(token)]
        assert ends == sorted({*(ids[one] for one in ids if one == "eos" and ids[one] < 258), TURN})


def test_words_that_look_like_control_tokens_change_no_end(tmp_path: Path) -> None:
    ids = {"bos": 256, "eos": 257}
    path = write_vocabulary(tmp_path / "v.gguf", ["<|im_end|>"], ids, adds=("bos", "eos"))
    with open_tokenizer(path) as tokenizer:
        marked = tokenizer.control_texts.mark("a<|im_end|>")
        assert tokenizer.encode(marked) == [256, *b"a<|im_end|>"]
        assert tokenizer.encode(marked, is_whole=True) == [256, *b"a<|im_end|>", 257]


def test_token_11_is_falcons_end_where_its_name_says_so(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", [], {}, tokens={TAB: "<|endoftext|>"})
    with open_tokenizer(path) as tokenizer:
        assert tokenizer.bos_text == tokenizer.eos_text == "<|endoftext|>"
        assert tokenizer.is_end(TAB)


# ----------------------------------------------------------------- on the embedded model


@pytest.fixture(scope="module")
def embedded() -> Iterator[LlamaTokenizer]:
    with open_tokenizer(embedded_model()) as tokenizer:
        yield tokenizer


TEXTS = {
    "code": "def f(x):\n\treturn [i**2 for i in range(10) if i % 2]  # ok\r\n\n\n    pass\n",
    "emoji": "👍🏽 👩\u200d👩\u200d👧 🇩🇪 ☕️",
    "CJK": "日本語と한국어、中文。「引用」",
    "digits": "0 12 345 6789 1234567890 3.14159e-10 1,000,000 ²³½",
    "spaces": "  two leading,   three inside, trailing  ",
    "accents": "naïve Ångström e\u0301 ﬁ Straße ПРИВЕТ שלום",
    "control characters": "a\x00b\x01c\x7f\x1b[0m",
    "long": "antidisestablishmentarianism" * 40,
    "no text": "",
}


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_bytes_of_the_tokens_are_the_text(embedded: LlamaTokenizer, text: str) -> None:
    tokenizer = embedded
    ids = tokenizer.encode(text, add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert bool(ids) == bool(text)


@pytest.mark.model
def test_control_tokens_are_recognised_and_have_no_bytes(embedded: LlamaTokenizer) -> None:
    tokenizer = embedded
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>", add_special=False)
    assert [tokenizer.token_text(ids[0]), tokenizer.token_text(ids[-1])] == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert tokenizer.token_bytes(ids[0]) == tokenizer.token_bytes(ids[-1]) == b""
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"user\nHi"


@pytest.mark.model
def test_ends(embedded: LlamaTokenizer) -> None:
    tokenizer = embedded
    (end,) = tokenizer.encode("<|im_end|>", add_special=False)
    (start,) = tokenizer.encode("<|im_start|>", add_special=False)
    (word,) = tokenizer.encode("the", add_special=False)
    assert [tokenizer.is_end(token) for token in (end, start, word, end)] == [
        True,
        False,
        False,
        True,
    ]
    assert tokenizer.eos_text == "<|im_end|>"
    assert tokenizer.token_text(-1) == ""


@pytest.mark.model
def test_vocabulary_is_the_file_s(embedded: LlamaTokenizer) -> None:
    assert embedded.vocab_size == read_model_spec(embedded_model()).vocab_size == 49152
    pieces = {embedded.token_bytes(token) for token in range(300, 3000)}
    assert len(pieces) == 2700, "no two tokens of the ordinary ones stand for the same bytes"


@pytest.mark.model
def test_text_that_is_no_unicode_is_encoded(embedded: LlamaTokenizer) -> None:
    """A lone surrogate, as a file name or a broken JSON escape brings it."""
    ids = embedded.encode("a\ud800b", add_special=False)
    joined = b"".join(map(embedded.token_bytes, ids))
    assert joined.startswith(b"a") and joined.endswith(b"b")


@pytest.mark.model
def test_marked_control_tokens_are_text_among_the_ids_that_the_text_has_without_them(
    embedded: LlamaTokenizer,
) -> None:
    end = embedded.encode("<|im_end|>", add_special=False)
    assert len(end) == 1
    marked = embedded.control_texts.mark("<|im_end|>")
    text = f"<|im_start|>user\nsay {marked} now<|im_end|>\n"
    ids = embedded.encode(text, add_special=False)
    assert ids.count(end[0]) == 1
    written = b"".join(map(embedded.token_bytes, ids)).decode()
    assert written == "user\nsay <|im_end|> now\n"
    # what stands around is cut as llama.cpp cuts it between control tokens
    first = embedded.encode("<|im_start|>", add_special=False)
    last = embedded.encode("<|im_end|>\n", add_special=False)
    assert ids[:1] == first and ids[-2:] == last


def test_a_text_without_a_mark_asks_for_no_control_texts() -> None:
    """The vocabulary is looked through at the first chat, never for a raw prompt."""
    tokenizer = LlamaTokenizer(Library(), None)
    assert tokenizer.encode("日本<|im_end|>") == list("日本<|im_end|>".encode())


# -- hostile files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_end"),
    [
        *((one, True) for one in ("</s>", "</S>", "<|im_end|>", "[EOS]", "_<EOT>", "<|call|>")),
        *((one, False) for one in ("", "<", ">", "<end", "end>", ",", "<|im_start|>", "_")),
        ("<" + "end" * 100_000, False),  # it was tried again from each of them
    ],
    ids=lambda one: str(one)[:20],
)
def test_the_name_of_a_token_that_ends_a_text(name: str, is_end: bool) -> None:
    assert _is_end_name(name) is is_end


@pytest.mark.model
def test_a_file_that_chats_is_looked_through_beside_its_load() -> None:
    """It was looked through at the first prompt."""
    settings = RunConfig(context_size=256, threads=1)
    with closing(LlamaBackend(str(embedded_model()), settings)) as backend:
        until(lambda: backend.tokenizer._control_texts is not None)
        assert "<|im_end|>" in backend.tokenizer.control_texts.texts
