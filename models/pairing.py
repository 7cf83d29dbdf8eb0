"""Which model can draft for which: token ids must mean the same text to both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.models.early_exit import check_exit, read_exit
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.gguf.values import read_strings
from edgespec.models.heads import check_head, heads_beside
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, read_model_spec

_HINT = "draft with a smaller model of the same family"


def check_pair(target: ModelSpec, draft: ModelSpec) -> None:
    """Raise UnsupportedError unless `draft` can draft for `target`.

    An early exit drafts for the file it was made from. In other models every token must be the
    same text in both; one vocabulary may end earlier, and rows that only pad it are never drafted.
    A head also has to read states that the target has.
    10 ms for 150,000 tokens that lie in both files alike, 0.2 s otherwise.
    """
    if target.format == ONNX_FORMAT:
        raise UnsupportedError(
            f"{target.path.name} is an ONNX folder: its tokens cannot be compared with a GGUF's",
            hint="draft models work with GGUF files, also with --backend onnx",
        )
    if draft.reads is None and (draft.keeps_state or any(draft.is_sliding)):
        raise UnsupportedError(
            f"{draft.path.name} cannot draft: its cache cannot go back to an earlier token",
            hint="use a draft model without sliding windows or recurrent layers",
        )
    early_exit = read_exit(draft)
    if early_exit is not None:
        check_exit(target, draft, early_exit)
        return
    if draft.reads is not None:
        check_head(target, draft)
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


def heads_for(target: ModelSpec) -> Iterator[tuple[Path, str]]:
    """Heads beside a model, each with the reason why it cannot draft for it, "" where it can."""
    for path in heads_beside(target):
        try:
            head = read_model_spec(path, heads=True)
            check_pair(target, head)
        except EdgespecError as problem:
            yield path, str(problem)
        else:
            yield path, "" if head.reads is not None else "a whole model, and no head"


def tokens_of(spec: ModelSpec) -> list[bytes]:
    """The vocabulary as it stands in the file, by token id."""
    file = read_gguf(spec.files[0])
    return read_strings(file.path, file.metadata.get("tokenizer.ggml.tokens"))


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace")[:40])
