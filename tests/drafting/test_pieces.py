"""Pieces of a text in the tokens of one vocabulary: what is tokenized again, and by whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import TEXTS, TOKENIZERS

from edgespec.drafting.translated import Pieces
from edgespec.prefix import complete


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
