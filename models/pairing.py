"""Which model can draft for which: token ids must mean the same text to both."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.models.gguf import GgufSpan, read_gguf
from edgespec.models.spec import ONNX_FORMAT, ModelSpec

_LENGTH = struct.Struct("<Q")
_HINT = "draft with a smaller model of the same family"


def check_pair(target: ModelSpec, draft: ModelSpec) -> None:
    """Raise UnsupportedError unless `draft` can draft for `target`.

    Every token must be the same text in both. One vocabulary may end earlier: rows that only pad
    it are never drafted. 10 ms for 150,000 tokens that lie in both files alike, 0.2 s otherwise.
    """
    if target.format == ONNX_FORMAT:
        raise UnsupportedError(
            f"{target.path.name} is an ONNX folder: its tokens cannot be compared with a GGUF's",
            hint="draft models work with GGUF files, also with --backend onnx",
        )
    if draft.is_recurrent or draft.is_hybrid or any(draft.is_sliding):
        raise UnsupportedError(
            f"{draft.path.name} cannot draft: its cache cannot go back to an earlier token",
            hint="use a draft model without sliding windows or recurrent layers",
        )
    if target.tokenizer_model != draft.tokenizer_model or not draft.tokenizer_hash:
        raise UnsupportedError(
            f"{draft.path.name} cannot draft for {target.path.name}: their tokenizers are "
            f"{draft.tokenizer_model or 'missing'} and {target.tokenizer_model or 'missing'}",
            hint=_HINT,
        )
    if target.tokenizer_hash and target.tokenizer_hash == draft.tokenizer_hash:
        return
    pairs = zip_longest(tokens_of(target), tokens_of(draft))
    for number, (ours, theirs) in enumerate(pairs):
        if ours is None or theirs is None:
            return
        if ours != theirs:
            raise UnsupportedError(
                f"{draft.path.name} cannot draft for {target.path.name}: token {number} is "
                f"{_shown(theirs)} in one and {_shown(ours)} in the other",
                hint=_HINT,
            )


def partners(target: ModelSpec, others: Iterable[ModelSpec]) -> Iterator[tuple[ModelSpec, str]]:
    """Each other model with the reason why it cannot draft for `target`, "" where it can."""
    for other in others:
        try:
            check_pair(target, other)
        except EdgespecError as problem:
            yield other, str(problem)
        else:
            yield other, ""


def tokens_of(spec: ModelSpec) -> list[bytes]:
    """The vocabulary as it stands in the file, by token id."""
    span = read_gguf(spec.files[0]).metadata.get("tokenizer.ggml.tokens")
    if not isinstance(span, GgufSpan):
        return []
    with spec.files[0].open("rb") as file:
        file.seek(span.offset)
        data = file.read(span.data_bytes)
    tokens, place = [], 0
    for _ in range(span.count):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        tokens.append(data[place : place + length])
        place += length
    return tokens


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace")[:40])
