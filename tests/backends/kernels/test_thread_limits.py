"""Kernels in processes that get fewer threads than they were planned for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hybrid_gguf import Shape, write_hybrid
from random_gguf import Q4_0

from edgespec.memory.device.kernels import missing_kernels
from edgespec.models.embedded import embedded_model

resource = pytest.importorskip("resource")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's"),
    pytest.mark.skipif(bool(missing_kernels()), reason="edgespec has no kernels here"),
]

BACKEND = """
import os, sys
from edgespec.backends.llama import context
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.memory.bytes.config import RunConfig
from edgespec.backends.base import DraftTree

context.TEAMS.enter = lambda most: most  # as on a machine with so many cores

def opened(threads, progress=None, **changes):
    settings = RunConfig(
        batch_size=256, max_leaves=1, threads=threads, mapped=False, kernels=True, **changes
    )
    return LlamaBackend(sys.argv[2], settings, progress=progress)
"""

# Two texts come back from files, so that the first step is one over a long cache: a long prompt
# would have made the work memory larger before.
STEPS = (
    BACKEND
    + """
def backend(threads):
    return opened(threads, context_size=2048, cells=4096, max_nodes=8, users=2)

tokens = [i % 251 for i in range(1900)]
if sys.argv[1] == "save":
    made = backend(2)
    for number, sequence in enumerate(made.sequences):
        for start in range(0, len(tokens), 256):
            sequence.prefill(tokens[start : start + 256])
        sequence.save_cache(f"cache{number}.bin")
else:
    made = backend(8)
    for number, sequence in enumerate(made.sequences):
        sequence.load_cache(f"cache{number}.bin", tokens)
    rows = made.verify_together([(0, DraftTree.chain([100])), (1, DraftTree.chain([200]))])
    print([int(row[0].argmax()) for row in rows])
made.close()
"""
)

# A stack of a thread takes 256 MiB of addresses here: the limit leaves room for one.
PACKING = (
    BACKEND
    + """
import resource

def limit(fraction):
    if fraction == 0.0 and sys.argv[1] == "limited":
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (384 << 20), hard))
    elif fraction == 1.0:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

_, hard = resource.getrlimit(resource.RLIMIT_AS)
made = opened(4, limit, context_size=512, max_nodes=4)
context.TEAMS.enter = lambda most: 1
print(made.prefill([1, 2, 3, 4])[:8].tolist())
made.close()
"""
)


SHAPE = Shape("llama", width=128, hidden=256, vocabulary=272, head=64, interval=1)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Its heads have 64 values, which edgespec's attention reads."""
    return str(write_hybrid(tmp_path / "model.gguf", SHAPE, Q4_0))


def output(program: str, *arguments: str, folder: Path, **environment: str) -> str:
    """What a process of its own prints, whose threads have large stacks."""

    def limit() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (256 << 20, hard))

    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_attention_with_fewer_threads_than_planned(small: str, tmp_path: Path) -> None:
    """OpenMP gives as many as it may: work memory is enough for each number of them."""
    output(STEPS, "save", small, folder=tmp_path)
    found = {output(STEPS, "step", small, folder=tmp_path)}
    for most in (3, 6):
        found.add(output(STEPS, "step", small, folder=tmp_path, OMP_THREAD_LIMIT=str(most)))
    assert len(found) == 1


def test_packing_under_a_limit_on_threads(tmp_path: Path) -> None:
    """What no thread could be started for is packed by the one that loads."""
    model = str(embedded_model())
    limited, free = (output(PACKING, how, model, folder=tmp_path) for how in ("limited", "free"))
    assert limited == free
