"""Bytes of model files."""

from __future__ import annotations

import io

import pytest

from edgespec.errors import ModelFileError
from edgespec.models.gguf.access import read_part


class Slow(io.BytesIO):
    """A disk that gives three bytes at a time."""

    name = "slow.gguf"

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(3, size or 0))


def test_parts_are_read_whole_or_not_at_all() -> None:
    file = Slow(bytes(range(20)))
    assert read_part(file, 5, 0) == b""
    assert read_part(file, 5, 10) == bytes(range(5, 15))
    assert read_part(file, 5, 15) == bytes(range(5, 20))
    for offset, size in ((5, 16), (20, 1), (30, 5)):
        with pytest.raises(ModelFileError, match=r"'slow\.gguf' has become shorter"):
            read_part(file, offset, size)
