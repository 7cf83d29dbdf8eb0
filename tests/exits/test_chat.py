"""Prompts of a file, as they are told a model that writes texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import UnsupportedError
from edgespec.exits.chat import read_prompts


class Lines:
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [len(text), int(add_special)]


def test_prompts_are_lines_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('<1>\n\n{"prompt": "<2>"}\n{"turns": ["<3>", "<4>"]}\n{broken\n')

    assert [p[0] for p in read_prompts(path, Lines())] == [3, 3, 3, 3, 7]  # type: ignore[arg-type]


def test_lists_of_other_programs_are_read_and_other_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "äö"}\r\nthree\r\n', encoding="utf-8-sig", newline="")
    assert [p[0] for p in read_prompts(path, Lines())] == [2, 5]  # type: ignore[arg-type]
    path.write_bytes(b"one\ntw\xe9\n")
    with pytest.raises(UnsupportedError, match="prompts is not UTF-8 text: byte 6 is 0xe9"):
        read_prompts(path, Lines())  # type: ignore[arg-type]
