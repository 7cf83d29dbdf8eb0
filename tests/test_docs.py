"""The examples of docs/api.md run as they stand, and the document names what is public."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import edgespec

DOCUMENT = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)


def test_every_public_name_is_in_the_document_or_is_an_error() -> None:
    for name in edgespec.__all__:
        if not name.endswith("Error"):
            assert f"`{name}" in DOCUMENT, name


@pytest.mark.model
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "examples"}
    try:
        for example in EXAMPLES:
            exec(compile(example, "docs/api.md", "exec"), names)
    finally:
        if "engine" in names:
            names["engine"].close()
    assert len(EXAMPLES) >= 6
