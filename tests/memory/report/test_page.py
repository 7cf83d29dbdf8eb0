"""Parts of a page: what they look like, that texts stay texts, and that templates are shipped."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from edgespec.memory.report.page import page_of, section_of, table_of, tiles_of

ROOT = Path(__file__).parents[3]
EVIL = "<script>alert('1')</script>"
HARMLESS = "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;"


def test_numbers_stand_to_the_right() -> None:
    found = table_of(("name", "size", "why"), [("a", "1", "b")], numbers=1)
    assert '<th>name</th><th class="n">size</th><th>why</th>' in found
    assert '<td>a</td><td class="n">1</td><td>b</td>' in found


def test_a_section_without_a_lead_has_no_empty_paragraph() -> None:
    assert "<p>" not in section_of("title", "")
    assert "<p>lead</p>" in section_of("title", "lead")


@pytest.mark.parametrize(
    "page",
    [
        page_of(EVIL, "file", "kind", []),
        page_of("title", EVIL, "kind", []),
        page_of("title", "file", "kind", [section_of(EVIL, "")]),
        page_of("title", "file", "kind", [section_of("title", EVIL)]),
        page_of("title", "file", "kind", [section_of("title", "", table_of((EVIL,), []))]),
        page_of("title", "file", "kind", [section_of("title", "", table_of(("a",), [(EVIL,)]))]),
        page_of("title", "file", "kind", [tiles_of([("name", EVIL, "note")])]),
    ],
)
def test_a_text_cannot_become_markup_wherever_it_stands(page: str) -> None:
    """And the markup of parts stays markup."""
    assert EVIL not in page and HARMLESS in page
    assert "&lt;section" not in page and "&lt;t" not in page and "&lt;div" not in page


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_every_template_is_shipped() -> None:
    tomllib = import_module("tomllib")  # which type checkers of Python 3.10 do not know
    document: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    shipped = document["tool"]["setuptools"]["package-data"]["edgespec.memory.report"]
    folder = ROOT / "memory" / "report"
    templates = [path.relative_to(folder).as_posix() for path in folder.rglob("*.html")]
    assert len(templates) == 2
    assert all(any(fnmatch(name, glob) for glob in shipped) for name in templates)
