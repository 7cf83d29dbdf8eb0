"""The kernels are compiled once for all checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernels import compile_kernels


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_kernels(tmp_path_factory.mktemp("kernels"), "c++")
