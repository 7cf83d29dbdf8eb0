"""`benchmarks/gpu_check.py` on a worker of this machine, and on a GPU where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from random_gguf import Q8_0, write_model
from rpc_workers import NO_RPC, local_worker

from edgespec.memory.device.accelerators import accelerators, has_rpc

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


# The script, in a process that times its steps as briefly as this one does.
BRIEFLY = """
import runpy, sys
from edgespec.setup import loading
loading._CURVE_SECONDS = 0.1
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BRIEFLY, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_every_check_passes_on_another_device(tmp_path: Path) -> None:
    """Random weights: the embedded model takes minutes."""
    if not accelerators() and not has_rpc():
        pytest.skip(f"llama.cpp sees no GPU here, and {NO_RPC}")
    file = str(write_model(tmp_path / "m.gguf", "llama", Q8_0, reads_bytes=True))
    with nullcontext() if accelerators() else local_worker("--threads", "1") as worker:
        named = () if worker is None else ("--workers", worker.address)
        done = check(file, "--json", "--tokens", "16", *named)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert [one for one in found if not one["ok"]] == [] and done.returncode == 0
    assert {"tree", "rollback", "saved cache", "drafts", "--exact"} <= {
        one["check"] for one in found
    }


@pytest.mark.slow
def test_without_a_device_it_says_so() -> None:
    if accelerators():
        pytest.skip("there is a GPU")
    done = check()
    assert done.returncode == 0 and done.stdout.startswith("skipped: llama.cpp sees no GPU here")
