"""Bytes of model files."""

from __future__ import annotations

import errno
import io
import mmap
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import DoesNotFitError, ModelFileError
from edgespec.models.gguf.access import mapped, read_part


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


def test_a_file_that_there_is_no_room_to_map_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `ulimit -v`; the hint said to check the file's name and permissions."""
    resource = pytest.importorskip("resource")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")

    def full(*_: Any, **_more: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    for limit, hint in ((300 << 20, "300 MiB of addresses"), (resource.RLIM_INFINITY, "other pro")):
        monkeypatch.setattr(resource, "getrlimit", lambda _which, limit=limit: (limit, limit))
        with pytest.raises(DoesNotFitError, match="Cannot allocate memory") as caught:
            mapped(file).__enter__()
        assert hint in caught.value.hint
