"""The kernels are compiled once for all checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernels import ARM_COMPILER, compile_kernels
from shared_folders import shared_folder


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_kernels(shared_folder(tmp_path_factory, "kernels"), "c++")


@pytest.fixture(scope="session")
def arm_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_kernels(shared_folder(tmp_path_factory, "arm"), ARM_COMPILER)
