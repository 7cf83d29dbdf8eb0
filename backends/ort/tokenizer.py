"""The tokenizer of an ONNX model folder: `tokenizer.json` through the `tokenizers` package.

Text is decoded token by token, so each token needs its own bytes. Two kinds of vocabularies write
them: byte-level ones spell every byte as a letter, the others write text with a mark for spaces
(mostly U+2581), with `<0xNN>` for bytes that are no text of their own.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError, UnsupportedError, imported
from edgespec.models.control_texts import ControlTexts
from edgespec.models.onnx.folder import TOKENIZER_FILE, end_ids, special_text

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_READABLE = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip")


class FolderTokenizer:
    """Ids of a folder's vocabulary.

    Args:
        vocab_size: rows of logits; a graph may have more of them than there are tokens.

    Raises:
        MissingDependencyError: the `tokenizers` package is not installed.
        ModelFileError: tokenizer.json cannot be read.
        UnsupportedError: its tokens are of a kind whose bytes are not known.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        path = folder / TOKENIZER_FILE
        self._tokenizer = _load(path)
        self.vocab_size = vocab_size
        self.bos_text = special_text(folder, "bos_token")
        self.eos_text = special_text(folder, "eos_token")
        self._bos = self._tokenizer.token_to_id(self.bos_text)
        eos = self._tokenizer.token_to_id(self.eos_text)
        self._ends = frozenset(end_ids(folder) or (() if eos is None else (eos,)))
        added = self._tokenizer.get_added_tokens_decoder()
        self._encoding = threading.Lock()
        self.control_texts = ControlTexts(a.content for a in added.values() if a.special)
        self._added = {i: b"" if a.special else a.content.encode() for i, a in added.items()}
        self._is_byte_level, self._replaced = _decoder(self._tokenizer, path)
        self._bytes: dict[int, bytes] = {}
        plain, whole = (
            self._tokenizer.encode("a", add_special_tokens=to).ids for to in (False, True)
        )
        size = len(plain)
        starts = (at for at in range(len(whole)) if whole[at : at + size] == plain)
        self._first: list[int] = whole[: next(starts, 0)]  # what the file begins a text with

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; what begins one is added as the file asks, a BOS never twice.

        What the file puts at the end of a text is not: an answer comes there. Control tokens are
        recognised, but where `control_texts` marked them as words.
        """
        ids = list(self._first) if add_special else []
        for piece, is_meant in self.control_texts.pieces(text):
            with self._encoding:
                self._tokenizer.encode_special_tokens = not is_meant
                ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        doubled = add_special and len(ids) > 1 and ids[0] == self._bos == ids[1]
        return ids[1:] if doubled else ids

    def token_bytes(self, token: int) -> bytes:
        piece = self._bytes.get(token)
        if piece is None:
            piece = self._bytes[token] = self._piece(token)
        return piece

    def token_text(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def close(self) -> None:
        """Nothing is held that Python does not free."""

    def _piece(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        text: str | None = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            return b"".join(_BYTE_OF.get(letter) or letter.encode() for letter in text)
        if byte := _BYTE.fullmatch(text):
            return bytes((int(byte[1], 16),))
        for mark, written in self._replaced:
            text = text.replace(mark, written)
        return text.encode()


def _load(path: Path) -> Any:
    needed = "an ONNX model folder needs the tokenizers package"
    tokenizers = imported("tokenizers", needed, "pip install 'edgespec[onnx]'")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        raise ModelFileError(f"{path} cannot be read: {error}") from error


def _decoder(tokenizer: Any, path: Path) -> tuple[bool, list[tuple[str, str]]]:
    """Whether tokens spell bytes, and else what stands for what in them."""
    decoder = tokenizer.decoder  # pickled as the JSON it was read from
    steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    unknown = {str(step.get("type")) for step in steps} - set(_READABLE)
    if unknown or not steps:
        raise UnsupportedError(
            f"{path} has tokens of an unknown kind ({', '.join(sorted(unknown)) or 'no decoder'})",
            hint="use a GGUF file of this model",
        )
    if any(step["type"] == "ByteLevel" for step in steps):
        return True, []
    replaced = []
    for step in steps:
        if step["type"] == "Metaspace":
            replaced.append((step.get("replacement", _SPACE), " "))
        if step["type"] == "Replace" and "String" in step.get("pattern", {}):
            replaced.append((step["pattern"]["String"], step.get("content", "")))
    return False, replaced


def _steps(part: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder as the list of those it is a sequence of."""
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part["decoders"] for step in _steps(inner)]


# The letter that stands for each byte in byte-level vocabularies (`gpt-2: encoder.py`): printable
# Latin-1 letters stand for themselves; the 68 others follow from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF = {chr(byte): bytes((byte,)) for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + place): bytes((byte,)) for place, byte in enumerate(_OTHERS)}
