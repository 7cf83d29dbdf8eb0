"""Which model can draft for which, on small files written in the test."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from random_gguf import finish

from edgespec.errors import UnsupportedError
from edgespec.models.pairing import (
    check_drafter,
    check_pair,
    is_translated,
)
from edgespec.models.spec import ModelSpec, read_model_spec

WORDS = ["<s>", "</s>", "a", "é", "日本", ""]


def model(
    folder: Path,
    name: str,
    tokens: list[str],
    *,
    tokenizer: str | None = "gpt2",
    merges: list[str] | None = None,
    window: int = 0,
) -> ModelSpec:
    """A model of one layer with these tokens, or without any."""
    arch = "gemma3" if window else "llama"
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    if window:
        writer.add_sliding_window(window)
    if tokenizer is not None:
        writer.add_tokenizer_model(tokenizer)
    if tokens:
        writer.add_token_list(tokens)
    if merges:
        writer.add_token_merges(merges)
    for tensor in ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"):
        writer.add_tensor(tensor, np.zeros((max(1, len(tokens)), 32), np.float32))
    finish(writer)
    return read_model_spec(folder / f"{name}.gguf")


def unsupported(target: ModelSpec, draft: ModelSpec) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        check_pair(target, draft)
    return caught.value


def test_the_same_vocabulary(tmp_path: Path) -> None:
    """The files lie alike, or their merges differ: what tokens mean is the same."""
    target = model(tmp_path, "target", WORDS)
    check_pair(target, target)
    check_pair(target, model(tmp_path, "draft", WORDS))
    check_pair(target, model(tmp_path, "merges", WORDS, merges=["a b"]))


def test_padding_does_not_matter_on_either_side(tmp_path: Path) -> None:
    short = model(tmp_path, "short", WORDS)
    padded = model(tmp_path, "padded", [*WORDS, "[PAD6]", "[PAD7]"])
    check_pair(short, padded)
    check_pair(padded, short)


def test_a_token_that_means_something_else(tmp_path: Path) -> None:
    target = model(tmp_path, "target", WORDS)
    draft = model(tmp_path, "draft", [*WORDS[:3], "è", *WORDS[4:]])
    error = unsupported(target, draft)
    assert str(error).startswith(
        "draft.gguf cannot draft for target.gguf: token 3 is 'è' in one and 'é' in the other"
    )
    assert error.hint == "draft with a smaller model of the same family"


def test_the_first_of_several_differences_is_named(tmp_path: Path) -> None:
    target = model(tmp_path, "target", ["a" * 50, "b", "c"])
    draft = model(tmp_path, "draft", ["z", "y", "c"])
    assert f"token 0 is 'z' in one and '{'a' * 40}' in the other" in str(unsupported(target, draft))


def test_another_tokenizer(tmp_path: Path) -> None:
    target = model(tmp_path, "target", WORDS)
    draft = model(tmp_path, "draft", WORDS, tokenizer="llama")
    error = unsupported(target, draft)
    assert "their tokenizers are llama and gpt2" in str(error)
    assert error.hint == "draft with a smaller model of the same family"
    missing = model(tmp_path, "missing", WORDS, tokenizer=None)
    assert "their tokenizers are missing and gpt2" in str(unsupported(target, missing))


def test_a_cache_that_cannot_go_back(tmp_path: Path) -> None:
    sliding = model(tmp_path, "sliding", WORDS, window=8)
    target = model(tmp_path, "target", WORDS)
    error = unsupported(target, sliding)
    assert "sliding.gguf cannot draft: its cache cannot go back" in str(error)
    assert "sliding windows" in error.hint
    check_pair(sliding, target)  # as the target it is verified, which is another matter


def test_a_model_of_another_vocabulary_is_told_the_text(tmp_path: Path) -> None:
    """By bytes, whatever its tokenizer, unless that loses some; a copy needs no telling."""
    target = model(tmp_path, "target", WORDS)
    for name, tokens, kind in (("other", ["x", "y"], "gpt2"), ("pieces", WORDS, "llama")):
        draft = model(tmp_path, name, tokens, tokenizer=kind)
        check_drafter(target, draft)
        assert is_translated(target, draft) and is_translated(draft, target)
    check_drafter(target, model(tmp_path, "sliding", ["x", "y"], window=8))
    longer = model(tmp_path, "longer", [*WORDS, "more"])
    check_drafter(target, longer)
    assert not is_translated(target, longer)


@pytest.mark.parametrize(
    ("tokenizer", "sentence"),
    [("bert", "lossy.gguf has a WordPiece tokenizer"), (None, "lossy.gguf has no tokenizer")],
)
def test_text_that_would_not_come_back_whole(
    tmp_path: Path, tokenizer: str | None, sentence: str
) -> None:
    lossy = model(tmp_path, "lossy", ["x"], tokenizer=tokenizer)
    other = model(tmp_path, "other", WORDS)
    for target, draft in ((lossy, other), (other, lossy)):
        with pytest.raises(UnsupportedError, match=sentence) as caught:
            check_drafter(target, draft)
        assert "carried over" in str(caught.value)
