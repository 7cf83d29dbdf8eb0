"""Attention over a cache against float64; what a token's result depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernels import link_check, run, run_on_arm

pytestmark = pytest.mark.timeout(600)  # where the kernels have to be compiled


@pytest.fixture(scope="module")
def program(objects: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_check(tmp_path_factory.mktemp("check"), "check_attention", objects, "c++")


@pytest.mark.parametrize("shapes", ["16", pytest.param("80", marks=pytest.mark.long)])
def test_attention_is_that_of_float64_and_depends_on_what_is_seen_alone(
    program: Path, shapes: str
) -> None:
    """Shapes, masks and types: any step size, threads and instruction set."""
    shown = run(program, shapes)
    if "none here" in shown:
        pytest.skip("this processor has no AVX2, AVX-512 or NEON with dotprod")
    assert shown.endswith("\n0 failures\n"), shown


@pytest.mark.long
def test_attention_by_neon(tmp_path: Path) -> None:
    shown = run_on_arm(tmp_path, "check_attention", "16", instructions="neon_dotprod")
    assert shown.endswith("\n0 failures\n"), shown
