"""What the file of a head that edgespec trained says of itself, read without numpy: plans ask."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.models.exits.early_exit import report_of
from edgespec.models.gguf.shards import read_gguf_shards

PREFIX = "edgespec.head"  # of the keys in a file


@dataclass(frozen=True, slots=True)
class MadeFor:
    """The target that a head was made for, and how; `report` is for people."""

    target_hash: str
    target_name: str
    report: Mapping[str, Any]


def read_made_for(path: str | os.PathLike[str]) -> MadeFor | None:
    """None for other files and other people's heads.

    Raises ModelNotFoundError and ModelFileError.
    """
    file = read_gguf_shards(path)[0]
    if f"{PREFIX}.version" not in file.metadata:
        return None
    return MadeFor(
        file.text(f"{PREFIX}.target"), file.text(f"{PREFIX}.target_name"), report_of(file, PREFIX)
    )
