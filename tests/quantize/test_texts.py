"""Texts that files are judged by: written by the model, or cut from what was given."""

from __future__ import annotations

from pathlib import Path

from quantize_cases import CHAT

from edgespec.quantize.texts import CountedText, texts_of_tokens, write_texts


def test_texts_keep_to_the_chat_and_count_what_was_drawn(texts: list[CountedText]) -> None:
    for text in texts:
        assert text.tokens[:2].tolist() == [1, 2] and len(text.tokens) <= 48
        assert not text.counted[0] and not text.counted[-1]
        assert len(text.counted) == len(text.tokens) and text.counted.sum() >= 6


def test_texts_are_the_same_for_the_same_seed(source: Path, texts: list[CountedText]) -> None:
    again = write_texts(source, CHAT, 3, threads=1, seed=4, length=48)
    other = write_texts(source, CHAT, 3, threads=1, seed=5, length=48)
    assert [t.tokens.tolist() for t in again] == [t.tokens.tolist() for t in texts]
    assert [t.tokens.tolist() for t in other] != [t.tokens.tolist() for t in texts]


def test_given_tokens_are_cut_into_pieces_that_begin_alike() -> None:
    pieces = texts_of_tokens([list(range(25)), [7]], [99], length=11)
    assert [piece.tokens.tolist() for piece in pieces] == [
        [99, *range(10)],
        [99, *range(10, 20)],
    ]
    assert all(piece.counted.sum() == len(piece.tokens) - 1 for piece in pieces)
