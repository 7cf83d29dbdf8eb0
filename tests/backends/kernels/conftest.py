"""The kernels are compiled once for all checks, by the installation where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernels import built_kernels, compile_kernels


@pytest.fixture(scope="session")
def objects() -> list[Path]:
    return built_kernels() or compile_kernels("c++")
