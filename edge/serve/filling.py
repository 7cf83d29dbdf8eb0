"""Prompts that ask a model to fill in the middle of a text, between its own tokens for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.backends.base import FillsIn, FillTokens, Tokenizer
from edgespec.serve.refusal import Refusal

_SUFFIX_SHARE = 4  # the text after the gap may take one part in this many, as in llama.cpp's server
_NAMELESS, _REPOSITORY, _CURRENT = "file", "repository", "current"


@dataclass(frozen=True, slots=True)
class Gap:
    """What stands before and after a gap, and texts of other files, by their names."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()


def fill_ids(
    tokenizer: Tokenizer, gap: Gap, room: int | None, param: str
) -> tuple[list[int], bool]:
    """Ids of the prompt, and whether texts were cut.

        <|fim_prefix|>prefix<|fim_suffix|>suffix<|fim_middle|>

    Other files come before it, each after its name, where the vocabulary has tokens for that.

    Args:
        room: most ids. What is farthest from the gap is left out beyond it; None cuts nothing.
        param: the field that asks for it, for the refusal.

    Raises Refusal where the model has no such tokens.
    """
    tokens = tokenizer.fill_tokens() if isinstance(tokenizer, FillsIn) else None
    if tokens is None:
        message = f"{param} is not supported: this model has no tokens for filling in the middle"
        raise Refusal(message, param=param, code="unsupported_parameter")

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False) if text else []

    begin = [one for one in tokenizer.encode("", add_special=True) if not tokenizer.is_end(one)]
    before, after = ids_of(gap.prefix), ids_of(gap.suffix)
    others = _files(gap.files, tokens, ids_of)
    left = None if room is None else max(0, room - len(begin) - 3)
    kept_before, kept_after, kept_others = _kept(before, after, others, left)
    cut = [len(kept_before), len(kept_after), len(kept_others)]
    ids = [*begin, *kept_others, tokens.prefix, *kept_before, tokens.suffix, *kept_after]
    return [*ids, tokens.middle], cut != [len(before), len(after), len(others)]


def _files(
    files: Sequence[tuple[str, str]], tokens: FillTokens, ids_of: Callable[[str], list[int]]
) -> list[int]:
    """Ids of other files, and of what says that the gap is in another one."""
    if not files:
        return []
    ids: list[int] = []
    if tokens.repository >= 0:
        ids += [tokens.repository, *ids_of(f"{_REPOSITORY}\n")]
    for name, text in [*files, (_CURRENT, "")]:
        if tokens.file >= 0:
            ids += [tokens.file, *ids_of(f"{name or _NAMELESS}\n{text}")]
        else:
            ids += ids_of(f"{text}\n\n")
    return ids


def _kept(
    before: list[int], after: list[int], others: list[int], room: int | None
) -> tuple[list[int], list[int], list[int]]:
    """What is nearest to the gap: the text before it goes first, then that after it."""
    if room is None:
        return before, after, others
    num_after = min(len(after), max(room // _SUFFIX_SHARE, room - len(before)))
    num_before = min(len(before), room - num_after)
    num_others = min(len(others), room - num_after - num_before)
    return (
        before[len(before) - num_before :],
        after[:num_after],
        others[len(others) - num_others :],
    )
