"""Packed weights of a file: the same logits to the bit, whether they were packed or mapped."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import written_gguf
from hybrid_gguf import Shape, write_hybrid
from numpy.typing import NDArray
from random_gguf import Q8_0, write_model

from edgespec.backends.base import DraftTree
from edgespec.backends.llama import packed_weights
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.store import packed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no kernels there")
SETTINGS = RunConfig(256, 32, 4, threads=2, mapped=False, kernels=True, packed_file=True)
TEXT = list(range(3, 23))


@pytest.fixture(scope="module", params=["dense", "experts"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 128 x 256 are no whole pages."""
    folder = tmp_path_factory.mktemp("packed")
    if request.param == "dense":
        return write_model(folder / "model.gguf", "llama", Q8_0)
    shape = Shape("qwen3moe", interval=1, width=128, hidden=256, vocabulary=272)
    return write_hybrid(folder / "model.gguf", shape, gguf.GGMLQuantizationType.Q4_0)


@pytest.fixture(autouse=True)
def _cache(attached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))


def rows(backend: LlamaBackend) -> NDArray[np.float32]:
    backend.truncate(0)
    backend.prefill(TEXT)
    return np.array(backend.verify(DraftTree.chain([5, 6])))


def logits(path: Path, *, new: bool, settings: RunConfig = SETTINGS) -> NDArray[np.float32]:
    """Of a load, whose file is new or was there."""
    with closing(LlamaBackend(path, settings)) as backend:
        assert backend.keeps_packed()
        assert backend._context.packed is not None
        assert (backend._context.packed._new is not None) is new
        return rows(backend)


def test_logits_are_the_same_to_the_bit_and_nothing_is_packed_again(path: Path) -> None:
    with closing(LlamaBackend(path, replace(SETTINGS, packed_file=False))) as plain:
        assert not plain.keeps_packed()
        wanted = rows(plain)
    np.testing.assert_array_equal(logits(path, new=True), wanted)
    np.testing.assert_array_equal(logits(path, new=False), wanted)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 4 layers with 16 experts of 36 KiB."""
    shape = Shape("qwen3moe", interval=1, width=128, hidden=256, vocabulary=272, experts=16)
    path = tmp_path_factory.mktemp("mixture") / "model.gguf"
    return write_hybrid(path, shape, gguf.GGMLQuantizationType.Q4_0)


FEW = replace(SETTINGS, expert_bytes=300 << 10)  # eight of 64


def test_experts_are_read_when_they_are_used(mixture: Path) -> None:
    """Of a file that is written first and of one that is there: the logits of all in memory.

    A step of all tokens uses more experts of a layer than there is room for.
    """
    with closing(LlamaBackend(mixture, replace(SETTINGS, packed_file=False))) as plain:
        wanted = rows(plain)
        assert plain.expert_counts.read_bytes == 0
    for _ in range(2):
        with closing(LlamaBackend(mixture, FEW)) as backend:
            for _ in range(3):
                np.testing.assert_array_equal(rows(backend), wanted)
            counts = backend.expert_counts
            assert counts.read_bytes > 3 * FEW.expert_bytes
            assert counts.busy_ns > 0
            assert resident_bytes(backend) <= FEW.expert_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what of a file is in memory")
def test_what_is_packed_leaves_memory_where_that_has_no_room_for_all(mixture: Path) -> None:
    most_kib = 0

    def look(_part: float) -> None:
        nonlocal most_kib
        _, _, mapping = Path("/proc/self/smaps").read_text().partition(".weights.")
        found = re.search(r"^Rss: +(\d+) kB", mapping, re.MULTILINE)
        most_kib = max(most_kib, int(found[1]) if found else 0)

    LlamaBackend(mixture, FEW, progress=look).close()
    assert 0 < most_kib <= 2 * 16 * 12  # of all experts, which are 2,304


def test_experts_that_others_share_stay_in_memory(tmp_path: Path) -> None:
    """GroveMoE's: they are chosen as others are, and are fewer."""
    shape = Shape("grovemoe", interval=1, width=128, hidden=256, vocabulary=272, experts=16)
    path = write_hybrid(tmp_path / "grove.gguf", shape, gguf.GGMLQuantizationType.Q4_0)
    with closing(LlamaBackend(path, replace(SETTINGS, packed_file=False))) as plain:
        wanted = rows(plain)
    with closing(LlamaBackend(path, FEW)) as backend:
        np.testing.assert_array_equal(rows(backend), wanted)
        assert backend.expert_counts.read_bytes > FEW.expert_bytes


EXPERT_BYTES = 3 * 12288  # three matrices of 128 x 128 values, which are 9 KiB


def resident_bytes(backend: LlamaBackend, all_bytes: int = 4 * 16 * EXPERT_BYTES) -> int:
    """Of experts, which are so many bytes in all; 0 where the system is not asked."""
    assert backend._context.packed is not None
    memory = backend._context.packed._memory
    if sys.platform != "linux":
        return 0
    pages = (ctypes.c_ubyte * (memory.size // 4096))()
    told = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(memory.begin), ctypes.c_size_t(memory.size), pages
    )
    assert told == 0
    others = int(memory.size) - all_bytes
    return 4096 * sum(int(page) & 1 for page in pages) - others


def test_experts_of_two_sizes_take_turns_in_one_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers have Q8_0 and two Q4_0, as files of K-quants mix types."""

    def add(writer: Any, name: str, data: Any, kind: Any) -> None:
        is_larger = "_exps" in name and name.startswith(("blk.0", "blk.1"))
        add_tensor(writer, name, data, Q8_0 if is_larger else kind)

    add_tensor = written_gguf.add_tensor
    monkeypatch.setattr(written_gguf, "add_tensor", add)
    shape = Shape("qwen3moe", interval=1, width=128, hidden=256, vocabulary=272, experts=16)
    path = write_hybrid(tmp_path / "two.gguf", shape, gguf.GGMLQuantizationType.Q4_0)
    larger, room = 3 * 20480, 12 * EXPERT_BYTES  # 17 KiB each
    wanted = []
    with closing(LlamaBackend(path, replace(SETTINGS, packed_file=False))) as plain:
        for token in TEXT:
            plain.truncate(0)
            wanted.append(np.array(plain.prefill([token])))
    with closing(LlamaBackend(path, replace(FEW, expert_bytes=room))) as backend:
        for _ in range(2):
            for token, row in zip(TEXT, wanted, strict=True):
                backend.truncate(0)
                np.testing.assert_array_equal(backend.prefill([token]), row)
                assert resident_bytes(backend, 2 * 16 * (larger + EXPERT_BYTES)) <= room
            rows(backend)  # asks a layer for more than there is room for
        assert backend.expert_counts.read_bytes > 3 * room


def test_experts_that_were_used_last_are_kept(mixture: Path) -> None:
    """Between two steps of one token comes one of another: what it takes the place of is older."""

    def experts_read(token: int) -> int:
        before = int(backend.expert_counts.read_bytes)
        backend.truncate(0)
        backend.prefill([token])
        read, part = divmod(int(backend.expert_counts.read_bytes) - before, EXPERT_BYTES)
        assert part == 0
        return read

    with closing(LlamaBackend(mixture, replace(FEW, expert_bytes=64 * EXPERT_BYTES))) as backend:
        assert experts_read(3) == 4 * 2  # in each layer two
        assert experts_read(3) == 0
        first_two = 8 + experts_read(4)
        most = first_two + experts_read(5) - 1
        assert 8 < first_two <= most
    with closing(LlamaBackend(mixture, replace(FEW, expert_bytes=most * EXPERT_BYTES))) as backend:
        assert experts_read(3) + experts_read(4) == first_two
        assert experts_read(3) == 0  # now those of token 4 are older
        assert experts_read(5) > 0
        assert experts_read(3) == 0
        assert experts_read(4) > 0
        assert resident_bytes(backend) <= most * EXPERT_BYTES


def test_a_step_leaves_the_experts_of_its_last_tokens(mixture: Path) -> None:
    """As if its tokens had come one by one, though it asks one layer after the other for all."""
    settings, found = replace(FEW, expert_bytes=24 * EXPERT_BYTES, max_nodes=32), []
    for size in (1, len(TEXT)):
        with closing(LlamaBackend(mixture, settings)) as backend:
            backend.prefill([7])
            backend.count_experts()
            for start in range(0, len(TEXT), size):
                backend.verify(DraftTree.chain(TEXT[start : start + size]))
                backend.commit(range(size))
            counts = backend.expert_counts
            uses, before = ([*counts.again], [*counts.first]), int(counts.read_bytes)
            assert sum(map(sum, uses)) == 4 * 2 * (len(TEXT) - 1)  # the first one follows nothing
            backend.verify(DraftTree.chain([7]))
            found.append((uses, int(backend.expert_counts.read_bytes) - before))
    assert found[0] == found[1]


@pytest.mark.parametrize("experts", [17, 24, 40])
def test_a_prompt_reads_ahead_and_its_logits_stay(mixture: Path, experts: int) -> None:
    """Of 100 tokens, in memory that has hardly more than a layer's experts, or half of all."""
    settings = replace(SETTINGS, batch_size=128, packed_file=False)
    texts = [[3 + (7 * i * i + 31 * i * one) % 250 for i in range(100)] for one in (1, 2, 3)]
    wanted = []
    with closing(LlamaBackend(mixture, settings)) as plain:
        for text in texts:
            plain.truncate(0)
            wanted.append(np.array(plain.prefill(text)))
    room = experts * EXPERT_BYTES
    with closing(
        LlamaBackend(mixture, replace(settings, packed_file=True, expert_bytes=room))
    ) as backend:
        for text, row in [*zip(texts, wanted, strict=True)] * 4:
            backend.truncate(0)
            np.testing.assert_array_equal(backend.prefill(text), row)
            assert resident_bytes(backend) <= room
            backend.verify(DraftTree.chain([5]))


def test_a_prompt_does_not_age_experts_of_the_last_layer(mixture: Path) -> None:
    """It asks that layer for those of its last token alone."""
    with closing(LlamaBackend(mixture, replace(FEW, expert_bytes=40 * EXPERT_BYTES))) as backend:
        for token in (3, 4, 5):
            backend.prefill([token])
        backend.count_experts()
        backend.prefill(TEXT)
        counts = backend.expert_counts
        ago = [number for number, count in enumerate(counts.again) if count]
        assert sum(counts.again) + sum(counts.first) == 3 * 2 * (len(TEXT) - 1)
        assert ago[-1] <= 8 * math.log2(len(TEXT))


def test_a_file_that_ends_early_ends_a_step_and_not_the_process(
    mixture: Path, tmp_path: Path
) -> None:
    with closing(LlamaBackend(mixture, FEW)) as backend:
        wanted = rows(backend)
        assert backend._context.packed is not None
        backend._context.packed.close()
        (kept,) = tmp_path.glob("packed/*.weights")
        size = kept.stat().st_size
        os.truncate(kept, 1 << 20)
        with pytest.raises(BackendError, match="cannot be read: it is shorter"):
            rows(backend)
    assert kept.stat().st_size < size
    np.testing.assert_array_equal(logits(mixture, new=True, settings=FEW), wanted)


def test_experts_need_a_file(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").touch()
    with pytest.raises(BackendError, match="cannot be written: File exists"):
        LlamaBackend(mixture, FEW, progress=nothing_is_read)


def nothing_is_read(_part: float) -> None:
    pytest.fail("all of it would be in memory")


def test_a_disk_without_room_ends_a_load_before_weights_are_read(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = packed.PackedFile.begin

    def full(*arguments: Any, **options: Any) -> packed.NewFile:
        new = begin(*arguments, **options)
        new.handle = nowhere.fileno()  # which cannot become larger
        return new

    monkeypatch.setattr(packed.PackedFile, "begin", full)
    with (
        open(os.devnull) as nowhere,
        pytest.raises(BackendError, match="cannot be written: its disk has no room"),
    ):
        LlamaBackend(mixture, FEW, progress=nothing_is_read)


def test_two_loads_have_one_copy(path: Path) -> None:
    with closing(LlamaBackend(path, SETTINGS)) as first:
        assert first._context.packed is not None
        first._context.packed.close()
        with closing(LlamaBackend(path, SETTINGS)) as second:
            maps = Path("/proc/self/maps")
            if maps.exists():
                assert maps.read_text().count(".weights\n") == 2
            np.testing.assert_array_equal(rows(first), rows(second))


def test_a_damaged_file_is_written_anew(path: Path, tmp_path: Path) -> None:
    wanted = logits(path, new=True)
    (kept,) = tmp_path.glob("packed/*.weights")
    with kept.open("r+b") as file:
        file.seek(kept.stat().st_size // 2)
        file.write(b"damaged")
    np.testing.assert_array_equal(logits(path, new=True), wanted)
    np.testing.assert_array_equal(logits(path, new=False), wanted)


def test_other_placements_and_kernels_have_files_of_their_own(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(path, new=True)
    here = replace(SETTINGS, overrides=((r"blk\.0\.", "host"),))
    logits(path, new=True, settings=here)
    monkeypatch.setattr(packed_weights, "kernels_key", lambda: "kernels of another version")
    logits(path, new=True)
    assert len(list(tmp_path.glob("packed/*.weights"))) == 3


def test_weights_in_another_order_are_not_computed_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(path, new=True)
    checked = packed.PackedFile._checked
    monkeypatch.setattr(packed.PackedFile, "_checked", lambda *args: checked(*args) and "other")
    with pytest.raises(BackendError, match="another order"):
        LlamaBackend(path, SETTINGS)
    monkeypatch.undo()


def test_a_load_that_is_given_up_leaves_nothing_behind(path: Path) -> None:
    """Names of tensors that are gone are not put back."""
    logits(path, new=True)

    def stop(_part: float) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        LlamaBackend(path, SETTINGS, progress=stop)
    logits(path, new=False)
