"""The bars of the README, from what `peers.py` kept in `results/`, for light and dark pages.

    python benchmarks/chart.py

Writes docs/images/speed-light.svg and speed-dark.svg; a test compares them with the results.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FILES = ("smollm2-q4_0-zen5.json", "qwen-1.5b-q4_0-zen5.json")
_COLORS = {  # text, other programs' bars, edgespec's
    "light": ("#1f2328", "#afb8c1", "#0969da"),
    "dark": ("#e6edf3", "#6e7681", "#4493f8"),
}
_WIDTH, _LABELS, _BARS = 760, 250, 420  # pixels
_ROW, _BAR, _TITLE, _GAP = 26, 18, 30, 14


def bars(found: dict[str, Any]) -> list[tuple[str, float]]:
    """What is drawn of one file of results: names and tokens/s of decoding."""
    speeds = {one["name"]: one["decode"]["tokens_per_s"] for one in found["contenders"]}
    best = found["best_drafts"]["server"]
    return [
        ("llama-server, plain", speeds["server"]),
        (f"its best drafts ({best.removeprefix('server ')})", speeds[best]),
        ("edgespec, no drafts", speeds["edgespec plain"]),
        ("edgespec", speeds["edgespec"]),
    ]


def chart(results: list[dict[str, Any]], theme: str) -> str:
    """A picture as SVG."""
    text, other, ours = _COLORS[theme]
    parts, y = list[str](), 0
    for found in results:
        title = f"{found['model'].removesuffix('.gguf')}, {found['prompts']} prompts, tokens/s"
        parts.append(f'<text x="0" y="{y + 20}" class="t">{html.escape(title)}</text>')
        y += _TITLE
        shown = bars(found)
        longest = max(speed for _, speed in shown)
        for name, speed in shown:
            color, width = ours if name.startswith("edgespec") else other, _BARS * speed / longest
            middle = y + _BAR - 4
            parts += [
                f'<text x="0" y="{middle}">{html.escape(name)}</text>',
                f'<rect x="{_LABELS}" y="{y}" width="{width:.0f}" height="{_BAR}" rx="3" '
                f'fill="{color}"/>',
                f'<text x="{_LABELS + width + 8:.0f}" y="{middle}">{speed:.0f}</text>',
            ]
            y += _ROW
        y += _GAP
    style = f"text{{font:14px system-ui,sans-serif;fill:{text}}}.t{{font-weight:600}}"
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}">\n'
        f"<style>{style}</style>\n{inside}\n</svg>\n"
    )


def pictures() -> dict[Path, str]:
    """What the files of the pictures hold."""
    results = [json.loads((ROOT / "benchmarks" / "results" / name).read_text()) for name in FILES]
    folder = ROOT / "docs" / "images"
    return {folder / f"speed-{theme}.svg": chart(results, theme) for theme in _COLORS}


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
