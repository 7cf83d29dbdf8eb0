"""Which model can draft for which: in the same tokens, or told the text in its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from edgespec.errors import EdgespecError, UnsupportedError
from edgespec.models.early_exit import check_exit, read_exit
from edgespec.models.gguf.reader import read_gguf, read_strings
from edgespec.models.heads import check_head, heads_beside
from edgespec.models.spec import ONNX_FORMAT, ModelSpec, read_model_spec

_HINT = "draft with a smaller model of the same family"
# Of tokenizers that leave out what they do not know, or change it: text does not come back whole.
_LOSSY = {"bert": "a WordPiece", "t5": "a Unigram", "no_vocab": "no", "none": "no", "": "no"}


def check_drafter(target: ModelSpec, draft: ModelSpec) -> None:
    """Raise UnsupportedError unless `draft` can draft for `target`, in whatever vocabulary.

    Heads and early exits need the target's own; as `check_pair`. A whole model is told the text, of
    which it sees so little that layers that slide keep all of it.
    """
    if is_translated(target, draft):
        _check_rollback(draft, draft.keeps_state)
    else:
        check_pair(target, draft)


def is_translated(target: ModelSpec, draft: ModelSpec) -> bool:
    """Whether text is carried over: a whole model whose tokens are not those of the target.

    Raises UnsupportedError where a tokenizer cannot be carried over.
    """
    if draft.reads is not None or read_exit(draft) is not None:
        return False
    if target.format != ONNX_FORMAT and not _other_tokens(target, draft):
        return False
    for spec in (target, draft):
        if kind := _LOSSY.get(spec.tokenizer_model):
            raise UnsupportedError(
                f"{draft.path.name} cannot draft for {target.path.name}: {spec.path.name} has "
                f"{kind} tokenizer, and text cannot be carried over between their vocabularies",
                hint=_HINT,
            )
    return True


def check_pair(target: ModelSpec, draft: ModelSpec) -> None:
    """Raise UnsupportedError unless `draft` drafts for `target` in the target's own tokens.

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
    _check_rollback(draft, draft.keeps_state or any(draft.is_sliding))
    early_exit = read_exit(draft)
    if early_exit is not None:
        check_exit(target, draft, early_exit)
        return
    if draft.reads is not None:
        check_head(target, draft)
    if problem := _other_tokens(target, draft):
        raise UnsupportedError(
            f"{draft.path.name} cannot draft for {target.path.name}: {problem}", hint=_HINT
        )


def _check_rollback(draft: ModelSpec, cannot: bool) -> None:
    """Raise UnsupportedError for a model that cannot take back what was only a draft."""
    if draft.reads is None and cannot:
        raise UnsupportedError(
            f"{draft.path.name} cannot draft: its cache cannot go back to an earlier token",
            hint="use a draft model without sliding windows or recurrent layers",
        )


def _other_tokens(target: ModelSpec, draft: ModelSpec) -> str:
    """In what two vocabularies differ; "" where tokens that both have are the same."""
    kinds = draft.tokenizer_model, target.tokenizer_model
    if kinds[0] != kinds[1] or not draft.tokenizer_hash:
        return f"their tokenizers are {kinds[0] or 'missing'} and {kinds[1] or 'missing'}"
    if target.tokenizer_hash and target.tokenizer_hash == draft.tokenizer_hash:
        return ""
    files = target.files[0], target.tokenizer_hash, draft.files[0], draft.tokenizer_hash
    return _first_difference(*files)


@lru_cache(maxsize=64)
def _first_difference(target: Path, _hash: str, draft: Path, _draft_hash: str) -> str:
    """The first token that is another text in one of two files, in words; else ""."""
    pairs = zip_longest(_tokens_in(target), _tokens_in(draft))
    for number, (ours, theirs) in enumerate(pairs):
        if ours is None or theirs is None:
            return ""
        if ours != theirs:
            return f"token {number} is {_shown(theirs)} in one and {_shown(ours)} in the other"
    return ""


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


def _tokens_in(path: Path) -> Iterator[bytes]:
    file = read_gguf(path)
    return read_strings(file.path, file.metadata.get("tokenizer.ggml.tokens"))


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace")[:40])
