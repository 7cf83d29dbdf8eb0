"""Memory that other programs plan with: real processes, what they hold and what they will take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.memory.device import cgroups, host, reservations
from edgespec.memory.store import cache

MIB = 1 << 20
FREE = 1000 * MIB
OTHER = f"""
import sys
from edgespec.memory.device import cgroups, reservations
from pathlib import Path
cgroups._PROC = Path(sys.argv[2])
held = b"x" * (int(sys.argv[3]) * {MIB})
print(reservations.reserve(int(sys.argv[1]) * {MIB}, lambda: True), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """1000 MiB are free, and no group limits anybody."""
    monkeypatch.setattr(cgroups, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "free_memory", lambda: iter([(None, FREE)]))


@contextmanager
def other(
    tmp_path: Path, mib: int, *, held_mib: int = 0, proc: str = "proc"
) -> Iterator[subprocess.Popen[str]]:
    """A process of edgespec that has reserved memory and waits."""
    arguments = [str(mib), str(tmp_path / proc), str(held_mib)]
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


def entries() -> list[dict[str, Any]]:
    return list((cache.load("reservations", "programs") or {"programs": []})["programs"])


def test_what_a_living_program_has_reserved_is_not_free_for_others(tmp_path: Path) -> None:
    with other(tmp_path, 400) as process:
        left = reservations.unreserved_bytes()
        assert 600 * MIB <= left < 700 * MIB, "what it holds already counts as used"
        assert not reservations.reserve(MIB, lambda: reservations.unreserved_bytes() > left)
        process.kill()
        process.wait()
        assert reservations.unreserved_bytes() == FREE
    assert reservations.reserve(MIB, lambda: True)
    assert [one["pid"] for one in entries()] == [os.getpid()], "dead ones are cleared away"


def test_what_it_holds_is_not_counted_twice(tmp_path: Path) -> None:
    with other(tmp_path, 400, held_mib=300):
        assert FREE - 100 * MIB < reservations.unreserved_bytes() < FREE
    with other(tmp_path, 200, held_mib=300):
        assert reservations.unreserved_bytes() == FREE


def test_a_child_that_died_and_was_not_waited_for_reserves_nothing(tmp_path: Path) -> None:
    with other(tmp_path, 400) as process:
        process.kill()
        deadline = time.monotonic() + 60
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert reservations.unreserved_bytes() == FREE


def test_a_limit_is_shared_by_those_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group has 500 MiB left, and what others reserve outside of it is the machine's."""
    for proc, group in (("proc", "a/b"), ("far", "c")):
        (tmp_path / proc).mkdir()
        (tmp_path / proc / "cgroup").write_text(f"0::/{group}")
        (tmp_path / proc / "mountinfo").write_text("1 0 0:1 / /groups rw - cgroup2 cgroup2 rw")
    limits = [(None, FREE), (Path("/groups/a"), 500 * MIB)]
    monkeypatch.setattr(host, "free_memory", lambda: iter(limits))
    with other(tmp_path, 400, proc="far"):
        assert reservations.unreserved_bytes() == 500 * MIB
    with other(tmp_path, 400):
        assert 100 * MIB <= reservations.unreserved_bytes() < 200 * MIB
    with other(tmp_path, 900, proc="far"):
        assert 100 * MIB <= reservations.unreserved_bytes() < 200 * MIB


def test_programs_that_start_together_do_not_get_the_same_bytes(tmp_path: Path) -> None:
    """Four at once ask for 400 of 1000 MiB each, as far as they are unreserved: two get them."""
    program = f"""
import sys
from edgespec.memory.device import cgroups, host, reservations
from pathlib import Path
cgroups._PROC = Path(sys.argv[1])
host.free_memory = lambda: iter([(None, {FREE})])
reservations._taken = lambda _pid: 0
print("ready", flush=True)
sys.stdin.readline()
need = 400 * {MIB}
print(reservations.reserve(need, lambda: need <= reservations.unreserved_bytes()), flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "proc")]
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]

    def read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def go_on(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    try:
        assert {read(one) for one in running} == {"ready"}
        for one in running:
            go_on(one)
        assert sorted(read(one) for one in running) == ["False", "False", "True", "True"]
    finally:
        for one in running:
            one.communicate("\n")


def test_ours_is_free_for_us_and_replaced_by_the_next(tmp_path: Path) -> None:
    assert reservations.reserve(900 * MIB, lambda: True)
    assert reservations.unreserved_bytes() == FREE
    assert reservations.reserve(900 * MIB, lambda: False), "it is reserved already"
    assert not reservations.reserve(901 * MIB, lambda: False)
    assert reservations.reserve(100 * MIB, lambda: True)
    assert [one["bytes"] for one in entries()] == [100 * MIB]
    reservations.release()
    reservations.release()
    assert entries() == []


@pytest.mark.parametrize(
    "change",
    [{"start": 1.0}, {"pid": 1 << 40}, {"pid": -1}, {"where": "another machine"}],
    ids=str,
)
def test_entries_of_others_that_cannot_be_these_processes_count_for_nothing(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with other(tmp_path, 400):
        (entry,) = entries()
        cache.store("reservations", "programs", {"programs": [entry | change]})
        assert reservations.unreserved_bytes() == FREE
        kept = "where" in change
        for age in (0.0, 3600.0, 90000.0):
            old = entry | change | {"time": time.time() - age}
            cache.store("reservations", "programs", {"programs": [old]})
            assert reservations.reserve(MIB, lambda: True)
            assert len(entries()) == 1 + (kept and age < 86400)


def test_without_a_folder_to_write_to_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file"))
    assert reservations.reserve(MIB, lambda: True)
    assert not reservations.reserve(MIB, lambda: False)
    assert reservations.unreserved_bytes() == FREE
    reservations.release()


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
ENTRY = st.fixed_dictionaries(
    {
        "pid": st.integers() | st.just(os.getppid()) | ANYTHING,
        "start": st.floats() | ANYTHING,
        "bytes": st.integers() | ANYTHING,
        "group": st.text(max_size=5) | ANYTHING,
        "where": st.text(max_size=5) | st.just(reservations._where()) | ANYTHING,
        "time": st.floats() | ANYTHING,
    }
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=st.lists(ENTRY | ANYTHING, max_size=3) | ANYTHING)
def test_a_damaged_document_is_no_document(
    document: Any, cache_folder: Path, free: Callable[[], None]
) -> None:
    """JSON as Python writes it: with NaN, infinities and integers of any size."""
    cache.store("reservations", "programs", {"programs": document})
    json.dumps(document)
    assert 0 <= reservations.unreserved_bytes() <= FREE
    assert reservations.reserve(MIB, lambda: True)
    assert reservations.unreserved_bytes() <= FREE
    reservations.release()
