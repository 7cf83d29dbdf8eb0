"""Tokens that ask a model for the middle of a text."""

from __future__ import annotations

import pytest
from decoding_cases import VOCAB
from filling_cases import Filling

from edgespec.backends.fake import ByteTokenizer
from edgespec.serve.filling import Gap, fill_ids
from edgespec.serve.refusal import Refusal


def test_what_is_far_from_the_gap_is_cut() -> None:
    """Of 19 ids three mark the places; a quarter may be the suffix's, more where it is free."""
    gap = Gap("p" * 20, "s" * 20)
    ids, is_cut = fill_ids(Filling(), gap, 19, "it")
    assert (bytes(ids), is_cut) == (b"\1" + b"p" * 12 + b"\2" + b"s" * 4 + b"\3", True)
    ids, _ = fill_ids(Filling(), Gap("p", "s" * 20), 19, "it")
    assert bytes(ids) == b"\1p\2" + b"s" * 15 + b"\3"
    ids, is_cut = fill_ids(Filling(), gap, 43, "it")
    assert (len(ids), is_cut) == (43, False)
    files = Gap("p", "s", [("f", "0123456789")])
    ids, is_cut = fill_ids(Filling(with_files=False), files, 9, "it")
    assert (bytes(ids), is_cut) == (b"\n\n\n\n\1p\2s\3", True)


def test_a_tokenizer_that_cannot_is_refused() -> None:
    with pytest.raises(Refusal, match="/infill is not supported"):
        fill_ids(ByteTokenizer(VOCAB), Gap("a", "b"), None, "/infill")
