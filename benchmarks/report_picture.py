"""Some sections of a report page as one SVG picture, for a README.

    edgespec profile --html profile.html
    python benchmarks/report_picture.py profile.html docs/images/profile.svg \
        "Memory by component" "Step times" "Speed against budget" "Speed by task"

The figures are those of the page, two in a row, with their headings; text stays text and takes the
reader's light or dark colours.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

_COLUMNS = 2
_WIDTH, _HEADING, _GAP = 480, 34, 16  # pixels
_STYLE = (
    "svg{color:#1c2024;font-family:DejaVu Sans,Verdana,sans-serif}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e8eaed}.page{fill:#14171a}}"
)
_SECTION = re.compile(r"<section><h2>([^<]*)</h2>(.*?)</section>", re.DOTALL)
_FIGURE = re.compile(r"<figure>(<svg.*?</svg>)\s*</figure>", re.DOTALL)
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_OPENING = re.compile(r"<svg[^>]*>\s*(<metadata>.*?</metadata>)?", re.DOTALL)


def picture_of(page: str, titles: list[str]) -> str:
    """The figures of these sections; ValueError names a section that has none."""
    sections = dict(_SECTION.findall(page))
    parts: list[str] = []
    column, top, bottom = 0, float(_GAP), float(_GAP)
    for title in titles:
        figure = _FIGURE.search(sections.get(title, ""))
        size = _SIZE.search(figure[1]) if figure else None
        if figure is None or size is None:
            raise ValueError(f"no figure under {title!r}; there are {', '.join(sections)}")
        height = _WIDTH * float(size[2]) / float(size[1])
        left = _GAP + column * (_WIDTH + _GAP)
        placed = (
            f'<svg x="{left}" y="{top + _HEADING:.0f}" width="{_WIDTH}" height="{height:.0f}" '
            f"{size[0]}>"
        )
        parts.append(
            f'<text x="{left}" y="{top + 20:.0f}" font-size="17" font-weight="600" '
            f'fill="currentColor">{title}</text>' + _OPENING.sub(placed, figure[1], count=1)
        )
        bottom = max(bottom, top + _HEADING + height + _GAP)
        column = (column + 1) % _COLUMNS
        if column == 0:
            top = bottom
    width = _COLUMNS * (_WIDTH + _GAP) + _GAP
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {bottom:.0f}" width="{width}" height="{bottom:.0f}">'
        f"<style>{_STYLE}</style>"
        f'<rect class="page" width="{width}" height="{bottom:.0f}"/>' + "".join(parts) + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("sections", nargs="+", metavar="SECTION")
    arguments = parser.parse_args()
    try:
        picture = picture_of(arguments.page.read_text(encoding="utf-8"), arguments.sections)
    except ValueError as problem:
        parser.error(str(problem))
    arguments.picture.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
