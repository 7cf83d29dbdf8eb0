"""Huge pages are asked for what is new and large, once; errors change nothing."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from edgespec.backends.llama import huge_pages
from edgespec.backends.llama.huge_pages import HugePages, large_regions

MIB = 1 << 20


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux lists a process's memory in /proc/self/maps"
)
def test_a_large_new_region_is_found_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, bool]] = []

    def advise(start: int, end: int, written: bool) -> int:
        asked.append((start, end, written))
        return end - start

    monkeypatch.setattr(huge_pages, "_advise", advise)
    pages = HugePages()
    region = mmap.mmap(-1, 24 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        assert pages.ask(written=True) >= 24 * MIB
        assert all(written for _, _, written in asked)
        assert pages.ask() == 0, "what was asked for is not asked for again"
    finally:
        region.close()


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_HUGEPAGE exists on Linux only")
def test_asking_changes_no_content() -> None:
    pages = HugePages()
    region = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region[5 * MIB : 5 * MIB + 4] = b"edge"
        pages.ask(written=True)
        assert region[5 * MIB : 5 * MIB + 4] == b"edge" and region[:4] == bytes(4)
    finally:
        region.close()


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_POPULATE_WRITE exists on Linux only")
def test_large_regions_are_zeroed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one but for what is spared, nothing of a small one, and nothing once it is closed."""
    done = list[tuple[int, ...]]()
    monkeypatch.setattr(huge_pages, "_advise", lambda *_: 0)

    def madvise(*call: int) -> int:
        done.append(call)
        return 0

    monkeypatch.setattr(huge_pages, "_madvise", lambda: madvise)
    for size in (8 * MIB, 80 * MIB):
        pages = HugePages()
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            pages.ask()
            pages.fill(10 * MIB)
            pages.fill(10 * MIB)
            pages._filling.join()
            zeroed = sum(size for _, size, _ in done)
            assert 0 <= zeroed - (size - 10 * MIB) < 4 * MIB if size > 32 * MIB else zeroed == 0
            pages.close()
            done.clear()
            pages._fill()
            assert done == []
        finally:
            region.close()


def test_a_region_without_a_whole_huge_page_is_left_alone() -> None:
    assert huge_pages._advise(MIB, 3 * MIB, False) == 0


def test_where_nobody_tells_regions_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bytes:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert large_regions() == {}
    assert HugePages().ask() == 0
