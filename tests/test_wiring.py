"""What the product calls has its effect in a real process: memory by the system's own figures.

Functions that are tested and never called would pass everywhere else. Each test runs a process of
its own, because what is looked at belongs to the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="only Linux tells what a process's memory is made of"
    ),
    pytest.mark.model,
]
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_PRELUDE = """
    import ctypes, json, sys, threading
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def bits(size):  # glibc's word before a block: 2 is a mapping of its own, 4 another arena
        at = libc.malloc(size)
        word = ctypes.c_size_t.from_address(at - ctypes.sizeof(ctypes.c_size_t)).value
        libc.free(at)
        return word & 7
"""


def _said_by(program: str, cache: Path) -> Any:
    source = dedent(_PRELUDE) + dedent(program)
    environment = {**os.environ, "EDGESPEC_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(
    not _ENABLED.exists() or "[never]" in _ENABLED.read_text(),
    reason="this kernel gives nobody huge pages",
)
def test_weights_and_the_cache_lie_on_huge_pages(measured_cache: Path) -> None:
    """Weights are 94 MiB of the file, and 4,096 cells of the cache 90 MiB."""
    program = """
        import edgespec
        from edgespec.backends.llama.huge_pages import HugePages
        from edgespec.backends.llama.library import LIBRARY_LOG
        granted, ask = {False: 0, True: 0}, HugePages.ask

        def counted(self, *, written=False):
            size = ask(self, written=written)
            granted[written] += size
            return size

        def noted(self, spare):
            fill(self, spare)
            filled.append(sum(end - start for start, end in self._new) - spare)

        fill, filled = HugePages.fill, []
        HugePages.ask, HugePages.fill = counted, noted
        with edgespec.load(context_size=4096, drafter="none") as engine:
            sizes = engine.memory_bytes()
        assert LIBRARY_LOG.on_cache is None
        both = sizes["weights_repacked"] + sizes["kv_cache"]
        print(json.dumps([granted[False] / both,
                          granted[True] / sizes["kv_cache"],
                          sum(filled) / sizes["weights_repacked"]]))
    """
    unwritten, of_cache, zeroed_ahead = _said_by(program, measured_cache)
    assert unwritten > 0.9, "small pages of a cache would be cleared first, and copied then"
    assert of_cache > 0.9
    assert 0.5 < zeroed_ahead < 0.9  # all but the room for the largest tensor


def test_packed_weights_are_kept_and_mapped(measured_cache: Path) -> None:
    """And not reserved any more: other programs may plan with what their pages take."""
    program = """
        import edgespec
        from edgespec.memory.device import reservations
        from edgespec.memory.store import cache
        from edgespec.memory.device.track import private_bytes

        def loaded(choice):
            with edgespec.load(context_size=512, drafter="none", packed_file=choice) as engine:
                engine.generate("Hello", max_tokens=2)
                reserved = reservations._ours(cache.load("reservations", "programs"))
                return private_bytes() - before, reserved

        edgespec.load(context_size=512, drafter="none").close()
        before = private_bytes()
        print(json.dumps([loaded("off"), loaded("on"), loaded("on")]))
    """
    off, first, second = _said_by(program, measured_cache)
    packed = 85 << 20  # of 94 MiB
    assert off[0] - first[0] > packed and off[0] - second[0] > packed
    assert off[1] - first[1] > packed and off[1] - second[1] > packed


def test_freed_buffers_go_back_after_a_load(measured_cache: Path) -> None:
    """A block of 24 MiB is a mapping of its own again after one was freed.

    glibc's threshold grows to the largest block that was freed, unless it was set.
    """
    program = """
        import edgespec
        edgespec.load(context_size=256, drafter="none").close()
        bits(24 << 20)
        print(json.dumps(bits(24 << 20)))
    """
    assert _said_by(program, measured_cache) & 2


def test_a_server_allocates_in_one_arena(measured_cache: Path) -> None:
    program = """
        from edgespec.cli.main import main
        sys.argv = ["edgespec", "serve", "/no/such/file.gguf"]
        try:
            main()
        except SystemExit:
            pass
        found = []
        thread = threading.Thread(target=lambda: found.append(bits(1000)))
        thread.start()
        thread.join()
        print(json.dumps(found[0]))
    """
    assert not _said_by(program, measured_cache) & 4


def test_a_run_allocates_what_its_plan_says(measured_cache: Path) -> None:
    """Work memory too, with a row of logits for each of 8 tokens: 32 would be more than all."""
    program = """
        from edgespec.cli.main import main
        sys.argv = ["edgespec", "run", "-p", "Hi", "--max-tokens", "2", "--ctx", "512", "--json"]
        sys.argv += ["--drafter", "suffix", "--draft-max", "7"]
        main()
    """
    memory = _said_by(program, measured_cache)["memory"]
    planned, made = memory["components"], memory["allocated_bytes"]
    assert made["logits"] == planned["logits"] and made["kv_cache"] == planned["kv_cache"]
    assert made["compute"] < 4 * made["logits"]
    assert 0.9 * planned["compute"] < made["compute"] <= planned["compute"]
    assert memory["measured_peak_bytes"] <= memory["predicted_peak_bytes"]
