"""Which file of a repository is the model, by the rule of llama.cpp's `-hf`.

A repository holds one model in many quantizations, in parts, with projectors, importance matrices
and heads beside it. Names of files are all that the rule reads (`llama.cpp: common/download.cpp`,
`find_best_model`), so that both programs fetch, and find again, the same files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
# Beginnings of the names of heads that draft for the model beside them.
HEADS = ("mtp-", "eagle3-", "dflash-", "dspark-")
_NO_MODELS = ("mmproj", "imatrix", *HEADS)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")
_SUFFIX = ".gguf"


class Name(NamedTuple):
    """What a file's name says: `prefix` is the path without part and suffix, `tag` the type."""

    prefix: str
    tag: str
    part: int
    parts: int


def read_name(path: str) -> Name:
    """What the name of a GGUF file says; part 1 of 1 where it is whole.

    >>> read_name("Q8_0/Tiny-Q8_0-00002-of-00003.gguf")
    Name(prefix='Q8_0/Tiny-Q8_0', tag='Q8_0', part=2, parts=3)
    """
    prefix, part, parts = path.removesuffix(_SUFFIX), 1, 1
    if split := _PART.fullmatch(prefix):
        prefix, part, parts = split[1], int(split[2]), int(split[3])
    tag = _TAG.search(prefix)
    return Name(prefix, tag[1].upper() if tag else "", part, parts)


def is_model(path: str) -> bool:
    """Whether a file is a model or its first part, and no head, projector or matrix beside one."""
    name = path.rpartition("/")[2]
    if not name.endswith(_SUFFIX) or any(word in name for word in _NO_MODELS):
        return False
    return read_name(path).part == 1


def models(paths: Iterable[str]) -> list[str]:
    """The models among the files of a repository, each by its first part."""
    return [path for path in paths if is_model(path)]


def choose(paths: Iterable[str], tag: str = "") -> str | None:
    """The model that a tag means, or None: Q4_K_M, then Q8_0, then the first where none is given.

    A tag that ends in `.gguf` is the path of a file, which may be a head.
    """
    paths = list(paths)
    if tag.endswith(_SUFFIX):
        return tag if tag in paths else None
    found = models(paths)
    for wanted in (tag,) if tag else DEFAULT_TAGS:
        # Unlike llama.cpp's, F16 is no end of BF16.
        pattern = re.compile(f"(?<![a-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        for path in found:
            if pattern.search(path):
                return path
    return found[0] if found and not tag else None


def parts_of(paths: Iterable[str], chosen: str) -> list[str]:
    """All parts of a model, in order, as far as they are there."""
    name = read_name(chosen)
    if name.parts == 1:
        return [chosen]
    others = ((read_name(path), path) for path in paths if path.endswith(_SUFFIX))
    same = {other.part: path for other, path in others if other[::3] == (name.prefix, name.parts)}
    return [same[part] for part in sorted(same)]


def is_whole(paths: Sequence[str], chosen: str) -> bool:
    """Whether all parts of a model are there."""
    return len(parts_of(paths, chosen)) == read_name(chosen).parts


def heads_of(paths: Iterable[str], chosen: str) -> list[str]:
    """Heads for a model: of each kind the one nearest to it in folder and bits."""
    bits, folder = _bits(chosen), os.path.dirname(chosen)
    found = []
    for kind in HEADS:
        beside = [
            path
            for path in paths
            if path.rpartition("/")[2].startswith(kind)
            and path.endswith(_SUFFIX)
            and os.path.dirname(path) in ("", folder)
        ]
        if beside:
            far = [(os.path.dirname(one) != folder, abs(_bits(one) - bits)) for one in beside]
            found.append(beside[far.index(min(far))])
    return found


def _bits(path: str) -> int:
    digits = re.search(r"\d+", read_name(path).tag)
    return int(digits[0]) if digits else 0
