"""Prompts of a file, as they are told a model that writes texts."""

from __future__ import annotations

from pathlib import Path

from edgespec.exits.chat import read_prompts


def test_prompts_are_lines_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('<1>\n\n{"prompt": "<2>"}\n{"turns": ["<3>", "<4>"]}\n{broken\n')

    class Lines:
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return [len(text), int(add_special)]

    assert [p[0] for p in read_prompts(path, Lines())] == [3, 3, 3, 3, 7]  # type: ignore[arg-type]
