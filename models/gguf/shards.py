"""Models in several files: all parts found, and checked to be of one model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.models.gguf.reader import Gguf, read_gguf

_SHOWN = 4  # names of missing parts
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def read_gguf_shards(path: str | os.PathLike[str]) -> tuple[Gguf, ...]:
    """Reads all parts of a model, in order; `path` may be any one of them, or the only one.

    Parts are found by name (`name-00001-of-00003.gguf`) beside the given one, as llama.cpp does.
    """
    given = read_gguf(path)
    count = given.integer("split.count", 1)
    if count <= 1:
        return (given,)
    _check_alone(given, count)
    paths = _shard_paths(given.path, count)
    shards = tuple(given if shard == given.path else read_gguf(shard) for shard in paths)
    for number, shard in enumerate(shards):
        found = shard.integer("split.no"), shard.integer("split.count")
        if found != (number, count):
            raise ModelFileError(
                f"{shard.path} is named part {number + 1} of {count}, and says inside that it is "
                f"part {found[0] + 1} of {found[1]}",
                hint="give the parts back their original names",
            )
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    expected = shards[0].integer("split.tensors.count", len(names))
    if len(set(names)) != len(names) or len(names) != expected:
        raise ModelFileError(
            f"{shards[0].path} and its {len(shards) - 1} other parts hold {len(set(names))} "
            f"different tensors in {len(names)}, and {expected} were announced",
            hint="the parts are not of one model; download them again",
        )
    return shards


def _check_alone(gguf: Gguf, count: int) -> None:
    """Raises ModelFileError for a part with others behind it, as `cat` would join them."""
    ends = (tensor.offset + tensor.data_bytes for tensor in gguf.tensors)
    extra = gguf.file_bytes - max(ends, default=gguf.data_offset)
    if extra >= gguf.alignment:
        raise ModelFileError(
            f"{gguf.path} is part {gguf.integer('split.no', 0) + 1} of a model in {count} files, "
            f"with {extra} bytes behind it: parts of a GGUF cannot be joined with cat",
            hint=f"name the first of the {count} parts as they were, or join them with "
            "`llama-gguf-split --merge FIRST-PART NEW-FILE`",
        )


def _shard_paths(path: Path, count: int) -> list[Path]:
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelFileError(
            f"{path} is part of a model in {count} files, and its name does not end in "
            f"-NNNNN-of-{count:05}.gguf",
            hint="give the parts back their original names",
        )
    paths = [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, count + 1)]
    missing = [shard for shard in paths if not os.path.exists(shard)]
    if missing:
        names = ", ".join(shard.name for shard in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        verb = "is" if len(missing) == 1 else "are"
        raise ModelFileError(
            f"{names}{more} {verb} missing: {len(missing)} of the {count} parts of this model",
            hint=f"download the missing parts into {path.parent}",
        )
    return paths
