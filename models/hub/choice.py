"""Which file of a repository is the model, by the rule of llama.cpp's `-hf`.

A repository holds one model in many quantizations, in parts, with projectors, importance matrices
and heads beside it. Names of files are all that the rule reads (`llama.cpp: common/download.cpp`,
`find_best_model`), so that both programs fetch, and find again, the same files.

llama.cpp takes the first file whose name has the tag anywhere, so that Q4_K_M may get UD-Q4_K_M.
Here a tag is what a file's name has after the repository's: `UD-Q4_K_M` of `Tiny-UD-Q4_K_M.gguf`
in `owner/Tiny-GGUF`. A part of it is taken where one file alone has it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgespec.errors import ModelNotFoundError

DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
# Beginnings of the names of heads that draft for the model beside them.
HEADS = ("mtp-", "eagle3-", "dflash-", "dspark-")
PROJECTOR = "mmproj"  # in the names of the part of a model that sees
_NO_MODELS = (PROJECTOR, "imatrix", *HEADS)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
_TAG = re.compile(r"[-.]((?:UD-)?[A-Za-z0-9_]+)$", re.IGNORECASE)
_SUFFIX = ".gguf"
_REPOSITORY_SUFFIX = re.compile(r"[-_.]?gguf$", re.IGNORECASE)
_SEPARATORS = str.maketrans("_. ", "---")
_OFFERED = 6  # names in an error


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


def tag_of(path: str, repository: str) -> tuple[str, bool]:
    """The tag of a model in OWNER/REPO, and whether no other name there can have it.

    >>> tag_of("Q4/tiny-UD-Q4_K_M.gguf", "owner/Tiny-GGUF")
    ('UD-Q4_K_M', True)
    """
    name = read_name(path)
    stem = name.prefix.rpartition("/")[2]
    model = _REPOSITORY_SUFFIX.sub("", repository.rpartition("/")[2])
    begins, plain = _plain(model), _plain(stem)
    if plain.startswith(f"{begins}-"):
        return stem[len(model) + 1 :].upper(), True
    return name.tag, plain == begins


def _plain(name: str) -> str:
    return name.translate(_SEPARATORS).lower()


def name_of(path: str, repository: str) -> str:
    """The name that means this file wherever the repository is read: by its tag, or by its path."""
    tag, is_certain = tag_of(path, repository)
    if tag and is_certain and is_model(path) and "/" not in path:
        return f"{repository}:{tag}"
    return f"{repository}/{path}"


def choose(
    paths: Iterable[str], tag: str, repository: str, *, is_listing: bool = True
) -> str | None:
    """The model that a tag means in OWNER/REPO, or None.

    Q4_K_M, then Q8_0, then the first where no tag is given. A tag that ends in `.gguf` is the path
    of a file, which may be a head. Case does not matter.

    Args:
        is_listing: whether `paths` is all that the repository has. In a part of it, a part of a
            tag says nothing.

    Raises ModelNotFoundError, with their names, where several files may be meant.
    """
    paths = list(paths)
    if tag.endswith(_SUFFIX):
        same = [path for path in paths if path.lower() == tag.lower()]
        return tag if tag in same else _only(same, tag, repository)
    found = models(paths)
    if tag:
        tagged = _tagged(found, tag, repository)
        if not tagged and is_listing:
            tagged = _holding(found, tag)
        return _only(tagged, tag, repository)
    for wanted in DEFAULT_TAGS:
        for path in (*_tagged(found, wanted, repository), *_holding(found, wanted)):
            return path
    return found[0] if found else None


def _tagged(paths: list[str], tag: str, repository: str) -> list[str]:
    """Files whose tag it is; where some lie in no folder, those."""
    found = [path for path in paths if tag_of(path, repository)[0] == tag.upper()]
    return [path for path in found if "/" not in path] or found


def _holding(paths: list[str], tag: str) -> list[str]:
    # Unlike llama.cpp's, F16 is no end of BF16.
    pattern = re.compile(f"(?<![a-z0-9]){re.escape(tag)}[.-]", re.IGNORECASE)
    return [path for path in paths if pattern.search(path)]


def _only(paths: list[str], tag: str, repository: str) -> str | None:
    if len(paths) < 2:
        return paths[0] if paths else None
    names = [name_of(path, repository) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{repository}/{path}" for path in paths]
    more = f" and {len(names) - _OFFERED} more" if len(names) > _OFFERED else ""
    raise ModelNotFoundError(
        f"{tag} means {len(paths)} files of {repository}",
        hint=f"name one: {', '.join(f'hf:{name}' for name in names[:_OFFERED])}{more}",
    )


def parts_of(paths: Iterable[str], chosen: str) -> list[str]:
    """All parts of a model, in order, as far as they are there."""
    name = read_name(chosen)
    if name.parts == 1:
        return [chosen]
    others = ((read_name(path), path) for path in paths if path.endswith(_SUFFIX))
    same = {other.part: path for other, path in others if other[::3] == (name.prefix, name.parts)}
    return [same[part] for part in sorted(same)]


def is_whole(paths: Sequence[str], chosen: str) -> bool:
    return len(parts_of(paths, chosen)) == read_name(chosen).parts


def heads_of(paths: Iterable[str], chosen: str) -> list[str]:
    """Heads for a model: of each kind the one nearest to it in folder and bits."""
    paths = list(paths)
    nearest = (
        _nearest([path for path in paths if path.rpartition("/")[2].startswith(kind)], chosen)
        for kind in HEADS
    )
    return [path for path in nearest if path is not None]


def projector_of(paths: Iterable[str], chosen: str) -> str | None:
    """The projector for a model that sees, the nearest to it in folder and bits."""
    return _nearest([path for path in paths if PROJECTOR in path.rpartition("/")[2]], chosen)


def _nearest(paths: Sequence[str], chosen: str) -> str | None:
    bits, folder = _bits(chosen), os.path.dirname(chosen)
    beside = [
        path for path in paths if path.endswith(_SUFFIX) and os.path.dirname(path) in ("", folder)
    ]
    far = [(os.path.dirname(one) != folder, abs(_bits(one) - bits)) for one in beside]
    return beside[far.index(min(far))] if beside else None


def _bits(path: str) -> int:
    digits = re.search(r"\d+", read_name(path).tag)
    return int(digits[0]) if digits else 0
