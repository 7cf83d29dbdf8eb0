"""A test is found by the path of what it tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("backends", "cli", "edge", "memory", "models", "quantize")
SMALL = 80  # lines; what is shorter may be tested by what uses it
# Larger modules whose tests lie elsewhere, and why.
ELSEWHERE = {
    # There is nothing to run but what others do with it.
    "backends/base.py": "tests/backends/test_fake.py",  # protocols
    # Graphs, and runners of them: compared with llama.cpp as a whole.
    "backends/ort/gqa.py": "tests/backends/ort/test_backend.py",
    "models/onnx/graph.py": "tests/backends/ort/test_backend.py",
    "models/onnx/writer.py": "tests/backends/ort/test_backend.py",
    # What llama.cpp would allocate: compared with what it allocates.
    "backends/llama/simulator.py": "tests/memory/bytes/test_simulation.py",
    "memory/bytes/head_footprint.py": "tests/memory/bytes/test_simulation.py",
    # They need the packages of an export, and a model of transformers.
    "models/onnx_export/probe.py": "tests/models/onnx_export/test_export.py",
    "models/onnx_export/torch_decoder.py": "tests/models/onnx_export/test_export.py",
    # Models that write what others are trained on, and the files of these.
    "backends/llama/hidden_rows.py": "tests/models/exits/test_target_states.py",
    "backends/llama/writing.py": "tests/models/exits/test_text_writer.py",
    # What heads of all kinds have in common.
    "backends/llama/following.py": "tests/backends/llama/test_head.py",
    # Between a request and its answer: seen from outside, by clients.
    "edge/serve/generation.py": "tests/serve/test_answers.py",
    "edge/serve/prepare.py": "tests/serve/test_app.py",
    # What earlier runs counted: each part by itself, and loads that fail.
    "edge/setup/learning.py": "tests/setup/test_loading.py",
}


def modules() -> Iterator[str]:
    """Modules with more lines than `SMALL`."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name != "__init__.py" and len(path.read_text("utf-8").splitlines()) > SMALL:
                yield path.relative_to(ROOT).as_posix()


def place_of(module: str) -> str:
    """Where its tests lie."""
    path = Path(module)
    return (Path("tests") / path.with_name(f"test_{path.name}")).as_posix().replace("/edge/", "/")


def test_every_larger_module_has_tests_at_its_path() -> None:
    missing = {module for module in modules() if not (ROOT / place_of(module)).is_file()}
    assert sorted(missing - ELSEWHERE.keys()) == []
    assert sorted(ELSEWHERE.keys() - missing) == []  # which no longer have to be here


def test_what_is_tested_elsewhere_is_tested_there() -> None:
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).is_file()] == []
