"""Control groups made of files: nested ones, both versions, namespaces, and odd contents."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.memory.device import cgroups, host

MIB = 1 << 20
Tree = Callable[..., None]
V2 = "0::{}\n"
V1 = "4:memory:{0}\n1:cpu,cpuacct:{0}\n0::/elsewhere\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def mountinfo(root: Path, mounted: str, *, v2: bool) -> str:
    """The mounts of both versions as kernels list them; a space is written as \\040."""
    point = str(root).replace(" ", "\\040")
    if v2:
        return f"30 24 0:26 {mounted} {point}/c rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    return "".join(
        f"3{number} 24 0:2{number} {mounted} {point}/c/{name} rw - cgroup cgroup rw,{name}\n"
        for number, name in enumerate(("memory", "cpu,cpuacct", "pids"))
    )


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Pretends the groups of a machine with 8 CPUs and 8 GiB: files by path, and where we are."""
    root = tmp_path / "a machine"
    monkeypatch.setattr(cgroups, "_PROC", root)
    monkeypatch.setattr(host, "allowed_cpus", lambda: list(range(8)))
    monkeypatch.setattr(host, "_CPUS", root / "cpus")
    memory = SimpleNamespace(available=8192 * MIB, total=16384 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr("platform.system", lambda: "Linux")

    def pretend(path: str, files: dict[str, str], mounted: str = "/", *, v2: bool = True) -> None:
        told = {"cgroup": (V2 if v2 else V1).format(path)}
        told["mountinfo"] = "1 0 8:1 / / rw - ext4 /dev/sda rw\n" + mountinfo(root, mounted, v2=v2)
        write(root, told | {f"c/{name}": text for name, text in files.items()})

    return pretend


def limit(mib: int, used: int = 0, name: str = "memory.max") -> dict[str, str]:
    return {name: str(mib * MIB), "memory.current": str(used * MIB)}


def at(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    "group", ["user.slice", "user.slice/app.service", "user.slice/app.service/x"]
)
def test_a_limit_of_the_process_and_of_any_group_above_it_counts(tree: Tree, group: str) -> None:
    tree("/user.slice/app.service/x", at(group, limit(220, 20)) | at("other", limit(10)))
    assert host.available_bytes() == 200 * MIB


def test_a_limit_that_throttles_counts_as_one_that_kills(tree: Tree) -> None:
    tree("/a", at("a", limit(1000, 50) | limit(300, 50, "memory.high")))
    assert host.available_bytes() == 250 * MIB


def test_the_older_version_has_a_hierarchy_for_each_controller(tree: Tree) -> None:
    files = {
        "memory/docker/memory.limit_in_bytes": str(300 * MIB),
        "memory/docker/memory.usage_in_bytes": str(200 * MIB),
        "memory/docker/memory.stat": f"active_file 1\ntotal_active_file {150 * MIB}",
        "cpu,cpuacct/docker/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/docker/cpuacct.usage": "3000000000",
    }
    tree("/docker/x", files, v2=False)
    assert host.available_bytes() == 250 * MIB
    assert (host.usable_cores(), host.granted_cpus()) == (1, 1.5)
    assert host.cgroup_busy_s() == 3.0


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/", "/"),  # a namespace whose root is the container's group
        ("/docker/x", "/docker/x"),  # no namespace, but a mount of the group alone
        ("/../..", "/"),  # moved out of the namespace's root
        ("/../other", "/"),
        ("/", "/.."),  # mounted before the namespace was made
        ("/docker/x", "/docker/y"),
    ],
)
def test_a_group_that_is_all_one_sees_counts(tree: Tree, path: str, mounted: str, v2: bool) -> None:
    old = {
        "memory/memory.limit_in_bytes": str(300 * MIB),
        "memory/memory.usage_in_bytes": str(50 * MIB),
    }
    tree(path, limit(300, 50) if v2 else old, mounted, v2=v2)
    assert host.available_bytes() == 250 * MIB


def test_a_process_that_is_moved_has_other_limits(tree: Tree) -> None:
    tree("/a", at("a", limit(100)) | at("b", limit(50)))
    assert host.available_bytes() == 100 * MIB
    tree("/b", {})
    assert host.available_bytes() == 50 * MIB


def test_a_process_sees_no_groups_where_none_are_mounted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cgroups, "_PROC", tmp_path)
    assert cgroups.groups("memory") == ()
    assert list(cgroups.free_memory()) == []
    assert cgroups.quota() == (float("inf"), None)


# ------------------------------------------------------------------------------ processors


def test_a_quota_of_any_group_above_bounds_the_threads(tree: Tree) -> None:
    """Neighbours are those that share the tightest quota."""
    files = {
        "a/cpu.max": "100000 100000",
        "a/cpu.stat": "usage_usec 7000000\nuser_usec 1",
        "a/b/cpu.max": "300000 100000",
        "a/b/cpu.stat": "usage_usec 1000000",
    }
    tree("/a/b", files)
    assert (host.usable_cores(), host.granted_cpus()) == (1, 1.0)
    assert host.cgroup_busy_s() == 7.0


# ------------------------------------------------------------------------------ anything


NUMBERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.integers(0, 1 << 34).map(str),
    st.sampled_from(["max", "", "-1", "9" * 5000, "0", "nan", "1e400", "\u00b2", "\u0664", "0x10"]),
    st.text(max_size=20),
)
CONTENTS = st.one_of(
    NUMBERS,
    st.lists(NUMBERS, max_size=4).map(" ".join),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["active_file", "inactive_file", "total_active_file", "file_dirty", "usage_usec"]
            ),
            NUMBERS,
        ).map(" ".join),
        max_size=6,
    ).map("\n".join),
).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=40)
NAMES = ["", "c", "c/a", "c/a/b", "c/memory", "c/memory/a", "c/cpu,cpuacct", "c/cpu,cpuacct/a"]
FILES = [
    "memory.max", "memory.high", "memory.current", "memory.stat", "memory.limit_in_bytes",
    "memory.usage_in_bytes", "cpu.max", "cpu.stat", "cpu.cfs_quota_us", "cpu.cfs_period_us",
    "cpuacct.usage",
]  # fmt: skip
PATHS = st.sampled_from(["/", "/a", "/a/b", "/..", "/../..", "", "a", "//a", "/a/../b", "/a\\040b"])
MISSING = None


@settings(max_examples=40)
@given(
    path=PATHS | st.text(max_size=8),
    mounted=PATHS,
    v2=st.booleans(),
    noise=st.text(max_size=30),
    files=st.dictionaries(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(FILES)),
        CONTENTS | st.sampled_from([MISSING]),
        max_size=12,
    ),
)
def test_whatever_is_written_there_nothing_fails_and_no_more_than_the_machine_is_free(
    path: str,
    mounted: str,
    v2: bool,
    noise: str,
    files: dict[tuple[str, str], bytes | None],
) -> None:
    """A file that is missing is a folder here: neither can be read."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root = Path(folder)
        (root / "cgroup").write_bytes(
            (V2 if v2 else V1).format(path).encode("utf-8", "surrogatepass")
            + noise.encode("utf-8", "surrogatepass")
        )
        mounts = noise + "\n" + mountinfo(root, mounted, v2=v2)
        (root / "mountinfo").write_bytes(mounts.encode("utf-8", "surrogatepass"))
        for (group, name), content in files.items():
            (root / group).mkdir(parents=True, exist_ok=True)
            if content is MISSING:
                (root / group / name).mkdir()
            else:
                (root / group / name).write_bytes(content)
        patch.setattr(cgroups, "_PROC", root)
        patch.setattr(host, "allowed_cpus", lambda: [0, 1, 2])
        memory = SimpleNamespace(available=8192 * MIB, total=16384 * MIB)
        patch.setattr(psutil, "virtual_memory", lambda: memory)
        assert 0 <= host.available_bytes() <= 8192 * MIB
        assert 1 <= host.usable_cores() <= 3
        assert 0 < host.granted_cpus() <= 3
        assert (host.cgroup_busy_s() or 0.0) >= 0.0


@given(
    st.lists(
        st.tuples(*[st.integers(0, 1 << 40)] * 2, st.integers(0, 1 << 40), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60)
def test_free_is_what_every_group_leaves(groups: list[tuple[int, int, int, bool]]) -> None:
    """The slow way: each limit less what is used, of which cached files come back."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root, place, expected = Path(folder), "", [8192 * MIB]
        for most, used, cached, is_active in groups:
            place += "/g"
            write(
                root,
                {
                    f"c{place}/memory.max": str(most),
                    f"c{place}/memory.current": str(used),
                    f"c{place}/memory.stat": f"{'' if is_active else 'in'}active_file {cached}",
                },
            )
            expected.append(max(0, most - max(0, used - cached)))
        write(root, {"cgroup": f"0::{place}", "mountinfo": mountinfo(root, "/", v2=True)})
        patch.setattr(cgroups, "_PROC", root)
        memory = SimpleNamespace(available=8192 * MIB, total=16384 * MIB)
        patch.setattr(psutil, "virtual_memory", lambda: memory)
        assert host.available_bytes() == min(expected)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads anything")
def test_a_group_that_may_not_be_read_limits_nothing(tree: Tree, tmp_path: Path) -> None:
    tree("/a", at("a", limit(100)))
    (tmp_path / "a machine" / "c" / "a" / "memory.max").chmod(0)
    assert host.available_bytes() == 8192 * MIB
