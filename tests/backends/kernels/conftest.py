"""The kernels are compiled once for all checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernels import ARM_COMPILER, compile_kernels


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_kernels(tmp_path_factory.mktemp("kernels"), "c++")


@pytest.fixture(scope="session")
def arm_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_kernels(tmp_path_factory.mktemp("arm"), ARM_COMPILER)
