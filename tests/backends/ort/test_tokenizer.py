"""Tokens of a folder's own tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_folder import END, write_folder

from edgespec.backends.ort.tokenizer import FolderTokenizer
from edgespec.errors import ModelFileError, UnsupportedError

pytest.importorskip("onnx", reason="the onnx extra is not installed")
pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
pytest.importorskip("tokenizers", reason="the onnx extra is not installed")

import tokenizers

TEXT = "Grüße, 世界! 🙂\tx  y\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_byte_level_tokens_give_the_bytes_of_a_text(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder, 300)
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 256
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == TEXT.encode()
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")  # a template may have written it
    assert tokenizer.encode("a", add_special=False) == ids[:0] + tokenizer.encode("a")[1:]
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<s>", "</s>")
    assert tokenizer.is_end(END) and not tokenizer.is_end(0)
    assert tokenizer.token_bytes(299) == b""  # a row of logits without a token
    assert tokenizer.vocab_size == 300


def test_a_prompt_has_no_end_whatever_the_file_puts_there(copy: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    special = [("<s>", 256), ("</s>", END)]
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, special)
    made.save(str(copy / "tokenizer.json"))
    tokenizer = FolderTokenizer(copy, 300)
    assert tokenizer.encode("ab") == [256, *tokenizer.encode("ab", add_special=False)]
    assert tokenizer.encode("") == [256]


def test_tokens_with_marks_for_spaces_and_bytes(copy: Path) -> None:
    """As sentencepiece's: U+2581 for spaces, `<0xNN>` for what has no token of its own."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "x", "y", "G", "r", "e", "\u2581x"]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[("\u2581", "x")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(["added"])
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    make = tokenizers.decoders
    made.decoder = make.Sequence(
        [make.Replace("\u2581", " "), make.ByteFallback(), make.Fuse(), make.Strip(" ", 1, 0)]
    )
    made.save(str(copy / "tokenizer.json"))
    tokenizer = FolderTokenizer(copy, len(pieces))
    ids = tokenizer.encode(TEXT)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == TEXT.encode()
    assert tokenizer.token_bytes(pieces.index("\u2581x")) == b" x"
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(len(pieces)) == b"added"


def test_tokens_of_an_unknown_kind_are_refused(copy: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}))
    made.decoder = tokenizers.decoders.WordPiece()
    made.save(str(copy / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match=r"unknown kind \(WordPiece\)"):
        FolderTokenizer(copy, 3)


def test_a_damaged_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json cannot be read"):
        FolderTokenizer(copy, 3)
