"""Experts that some threads read while others wait for them: no races, and the file's bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernels import SANITIZERS, compile_kernels, link_check, run


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sanitizers", [SANITIZERS, ("-fsanitize=thread",)], ids=["address", "thread"]
)
def test_sanitizers_report_nothing_of_reads(tmp_path: Path, sanitizers: tuple[str, ...]) -> None:
    """With little room, reads ahead, files that end early, and while the cache is closed."""
    options = ("-O1", *sanitizers)
    built = compile_kernels("c++", *options, only=("expert_cache", "packed_memory"))
    program = link_check(tmp_path, "check_expert_cache", built, "c++", *options)
    assert run(program) == "0 failures\n"
