"""Attention over a cache against float64; what a token's result depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernels import link_check, run, run_on_arm


@pytest.fixture(scope="module")
def program(objects: list[Path]) -> Path:
    return link_check("check_attention", objects, "c++")


@pytest.mark.slow
def test_attention_is_that_of_float64_and_depends_on_what_is_seen_alone(program: Path) -> None:
    """Eighty shapes, masks and types: any step size, threads and instruction set."""
    shown = run(program)
    if "none here" in shown:
        pytest.skip("edgespec's attention needs AVX2, AVX-512 or NEON with dotprod")
    assert shown.endswith("\n0 failures\n"), shown


@pytest.mark.slow
def test_attention_by_neon(arm_objects: list[Path]) -> None:
    shown = run_on_arm("check_attention", arm_objects, "16", instructions="neon_dotprod")
    assert shown.endswith("\n0 failures\n"), shown
