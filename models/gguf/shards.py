"""Models in several files: all parts found, and checked to be of one model."""

from __future__ import annotations

import os
import re

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
    # A part has no others behind it, as `cat` would join them.
    ends = (tensor.offset + tensor.data_bytes for tensor in given.tensors)
    extra = given.file_bytes - max(ends, default=given.data_offset)
    if extra >= given.alignment:
        raise ModelFileError(
            f"{given.path} is part {given.integer('split.no', 0) + 1} of a model in {count} files, "
            f"with {extra} bytes behind it: parts of a GGUF cannot be joined with cat",
            hint=f"name the first of the {count} parts as they were, or join them with "
            "`llama-gguf-split --merge FIRST-PART NEW-FILE`",
        )
    path, match = given.path, _SHARD_NAME.fullmatch(given.path.name)
    if match is None or int(match[3]) != count:
        raise ModelFileError(
            f"{path} is part of a model in {count} files, and its name does not end in "
            f"-NNNNN-of-{count:05}.gguf",
            hint="give the parts back their original names",
        )
    paths = [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, count + 1)]
    if missing := [shard.name for shard in paths if not os.path.exists(shard)]:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        verb = "is" if len(missing) == 1 else "are"
        raise ModelFileError(
            f"{', '.join(missing[:_SHOWN])}{more} {verb} missing: {len(missing)} of the {count} "
            "parts of this model",
            hint=f"download the missing parts into {path.parent}",
        )
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
