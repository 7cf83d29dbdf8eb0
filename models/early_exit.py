"""Early-exit drafter files: the first blocks of a target, an adapter block, and a smaller head.

Kangaroo (arXiv 2404.18911) drafts with the target's own shallow blocks and one trained block on
top; FR-Spec (arXiv 2502.14856) restricts the head to the tokens that occur most. Here both are one
ordinary GGUF model whose vocabulary is the head's: the first `exit_layer` blocks are the target's
bytes, `token_ids` says which token of the target each row of the head stands for. Inputs are
embeddings of the target's whole table, so that nothing is lost where a token has no row; the file's
one table is the head.

Such a file drafts for the one target it was made from, and for no other.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Any

from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.models.gguf.reader import Gguf, read_numbers
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.spec import ModelSpec, header_hash

PREFIX = "edgespec.early_exit"  # of the keys in a file
VERSION = 1
# What a trained exit reads: it is as often right as with all of the text before (docs/drafters.md).
WINDOW, CONTEXT = 64, 512
_SAMPLED_BYTES = 256  # of each tensor go into a target's hash


@dataclass(frozen=True, slots=True)
class MadeFor:
    """The target that a drafter was made for, and how; `report` is for people."""

    target_hash: str
    target_name: str
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExitInfo(MadeFor):
    """What an early exit's file says of itself."""

    exit_layer: int
    token_ids: array[int]  # [V'], ascending


def file_hash(path: Path) -> str:
    """Tells files apart by their header, size and the first bytes of each tensor."""
    shards = read_gguf_shards(path)
    digest = blake2b(header_hash(shards).encode(), digest_size=16)
    for shard in shards:
        with shard.path.open("rb") as file:
            for tensor in shard.tensors:
                file.seek(tensor.offset)
                digest.update(file.read(min(_SAMPLED_BYTES, tensor.data_bytes)))
    return digest.hexdigest()


def read_exit(spec: ModelSpec) -> ExitInfo | None:
    """What makes `spec` an early-exit drafter, or None for any other model.

    Raises ModelFileError for one that cannot be right.
    """
    file = read_gguf_shards(spec.path)[0]
    if f"{PREFIX}.version" not in file.metadata:
        return None
    version = file.integer(f"{PREFIX}.version")
    if version != VERSION:
        raise ModelFileError(
            f"{spec.path.name} is an early exit of version {version}, and {VERSION} is read",
            hint="train it again with this edgespec",
        )
    ids = read_numbers(file.path, file.metadata.get(f"{PREFIX}.token_ids"))
    ascending = all(first < second for first, second in pairwise(ids))
    if not ids or len(ids) != spec.vocab_size or ids[0] < 0 or not ascending:
        raise ModelFileError(
            f"{spec.path.name} does not say which tokens its {spec.vocab_size} rows stand for",
            hint="train it again",
        )
    return ExitInfo(*made_for(file, PREFIX), file.integer(f"{PREFIX}.exit_layer"), ids)


def made_for(file: Gguf, prefix: str) -> tuple[str, str, dict[str, Any]]:
    """The target of a drafter's file, and how it was made; nothing where it does not say."""
    try:
        report = json.loads(file.text(f"{prefix}.report", "{}"))
    except ValueError:
        report = {}
    report = report if isinstance(report, dict) else {}
    return file.text(f"{prefix}.target"), file.text(f"{prefix}.target_name"), report


def gains_of(report: Mapping[str, Any]) -> Sequence[float]:
    """What a report says that a 1st, 2nd, ... draft adds to the tokens of a round; or nothing."""
    gains = report.get("gains")
    if not isinstance(gains, list) or not all(isinstance(part, (int, float)) for part in gains):
        return ()
    return gains


def check_exit(target: ModelSpec, draft: ModelSpec, info: ExitInfo) -> None:
    """Raise UnsupportedError unless `draft` was made from `target`."""
    fits = draft.embedding_size == target.embedding_size and info.token_ids[-1] < target.vocab_size
    if fits and info.target_hash == file_hash(target.path):
        return
    raise UnsupportedError(
        f"{draft.path.name} is an early exit of {info.target_name or 'another model'}: it cannot "
        f"draft for {target.path.name}, which is another file",
        hint=f"make one with `edgespec draft train {quote(str(target.path))} -o FILE`",
    )


# -- heads that edgespec trained: what plans ask of their files, read without numpy ----------------

HEAD_PREFIX = "edgespec.head"  # of the keys in a file


def read_made_for(path: str | os.PathLike[str]) -> MadeFor | None:
    """None for other files and other people's heads.

    Raises ModelNotFoundError and ModelFileError.
    """
    file = read_gguf_shards(path)[0]
    if f"{HEAD_PREFIX}.version" not in file.metadata:
        return None
    return MadeFor(*made_for(file, HEAD_PREFIX))
