"""How fast a disk gives pieces of a file."""

from __future__ import annotations

from pathlib import Path

from edgespec.memory.device.disk import disk_bandwidth


def test_a_file_that_is_long_enough_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 8192))
    found = disk_bandwidth(path, 8192)  # None on file systems that read nothing past the cache
    assert found is None or found > 0
    assert disk_bandwidth(path, 1 << 20) is None
    assert disk_bandwidth(tmp_path / "missing", 8192) is None
