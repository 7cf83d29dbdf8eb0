"""A model in two backends: one for the tests, and one that is their reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_cases import RecordingBackend, recording, settings

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.kernels import refusal_of_kernels
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec


@pytest.fixture(scope="module")
def model() -> Path:
    return embedded_model()


@pytest.fixture(scope="module")
def spec(model: Path) -> ModelSpec:
    return read_model_spec(model)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[RecordingBackend]:
    made = recording(model, settings())
    yield made
    made.close()


@pytest.fixture(scope="module")
def loaded_reference(model: Path) -> Iterator[LlamaBackend]:
    made = LlamaBackend(model, settings(max_leaves=1, max_nodes=8))
    yield made
    made.close()


@pytest.fixture
def backend(loaded: RecordingBackend) -> RecordingBackend:
    loaded.truncate(0)
    loaded.seen.clear()
    return loaded


@pytest.fixture
def reference(loaded_reference: LlamaBackend) -> LlamaBackend:
    loaded_reference.truncate(0)
    return loaded_reference


@pytest.fixture(scope="session")
def attached() -> None:
    """Where edgespec's kernels are, llama.cpp has them."""
    if reason := refusal_of_kernels():
        pytest.skip(f"edgespec has no kernels here: {reason}")
