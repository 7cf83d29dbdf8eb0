"""Pieces of a text in the tokens of one vocabulary: what is tokenized again, and by whom."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import TEXTS, TOKENIZERS, LongestMatch, loaded

from edgespec.backends.llama.tokenizer import LlamaTokenizer, open_tokenizer
from edgespec.drafting.drafters.pieces import Merges, Pieces, complete
from edgespec.drafting.drafters.translated import TranslatedText, Translation
from edgespec.models.embedded import embedded_model


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_grows_is_tokenized_as_it_would_be_at_once(name: str, text: str) -> None:
    """From the last word on; one whose tokens go across words differs in them alone."""
    tokenizer = TOKENIZERS[name]
    pieces, ids = Pieces(tokenizer), list[int]()
    for one in TEXTS[text]:
        start, changing = pieces.open_part(ids)
        ids[start:] = pieces.tokens(changing + one.encode())
    assert b"".join(map(tokenizer.token_bytes, ids)) == TEXTS[text].encode()
    assert all(tokenizer.token_bytes(one) for one in ids), "no control tokens"


@given(st.binary(max_size=12))
def test_what_is_complete_of_bytes(data: bytes) -> None:
    """The rest of them is the beginning of a character."""
    try:
        whole = len(data)
        data.decode()
    except UnicodeDecodeError as problem:
        if problem.reason != "unexpected end of data":
            return
        whole = problem.start
    assert complete(data) == whole


@pytest.fixture(scope="module")
def embedded() -> Iterator[LlamaTokenizer]:
    with open_tokenizer(embedded_model()) as tokenizer:
        yield tokenizer


def test_words_are_joined_as_llama_cpp_does_it(embedded: LlamaTokenizer) -> None:
    """Those of texts, and such as nobody has seen: all of their bytes are joined here."""
    tokens = embedded.all_bytes()
    assert tokens == [embedded.token_bytes(token) for token in range(embedded.vocab_size)]
    merges = Merges(tokens)
    words = [f" {word}" for word in TEXTS["english"].rstrip(".").split()]
    words += [" aardvark", "quizzically", "Zyzzyva", " x" + "ab" * 20, " supercalifragilistic"]
    for word in words:
        assert merges.join(word.encode()) == embedded.encode(word, add_special=False)
    assert merges.find(b"no such token") < 0


def test_words_are_not_asked_for(embedded: LlamaTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model's tokenizer takes 75 us a word; what pre-tokenizers may split is asked for."""
    pieces, asked = Pieces(embedded, joins=True), list[str]()
    encode = embedded.encode

    def counted(text: str, *, add_special: bool = True) -> list[int]:
        asked.append(text)
        return encode(text, add_special=add_special)

    monkeypatch.setattr(embedded, "encode", counted)
    for piece in (b" aardvark", b"wolf", b",", b"\n", b" 1984", " Öl".encode(), b" aardvark"):
        assert pieces.tokens(piece) == encode(piece.decode(), add_special=False)
    assert asked == [" 1984", " Öl"]


def test_a_round_asks_no_draft_models_tokenizer(
    embedded: LlamaTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target wrote of its own is told in tokens that are joined, a word begun included."""
    target, asked = TOKENIZERS["syllables"], list[str]()
    text = TranslatedText(
        loaded(lambda _context: (), TOKENIZERS["bytes"]), Translation(target, embedded), 16
    )
    text.begin(target.encode("Say it:\n"))
    encode = embedded.encode

    def counted(part: str, *, add_special: bool = True) -> list[int]:
        asked.append(part)
        return encode(part, add_special=add_special)

    monkeypatch.setattr(embedded, "encode", counted)
    for token in target.encode(" universe until there"):
        text.append([token])
    assert text.tokens[-3:] == encode(" universe until there") and not asked


class Listing(LongestMatch):
    """It lists its tokens, which are no merges: the longest one is taken."""

    def all_bytes(self) -> list[bytes]:
        return list(map(self.token_bytes, range(self.vocab_size)))


def test_a_vocabulary_of_another_kind_is_asked() -> None:
    """Words of it, joined in the order of its tokens, are not what its tokenizer makes of them."""
    tokenizer = Listing(["an", " ba"])
    assert Merges(tokenizer.all_bytes()).join(b" ban") != tokenizer.encode(" ban")
    assert list(Pieces(tokenizer, joins=True).tokens(b" ban")) == tokenizer.encode(" ban")
