"""The pictures of README and docs: bars of results, a recorded terminal, a report's figures.

    python benchmarks/pictures.py bars
    python benchmarks/pictures.py terminal docs/images/run.svg -- edgespec run model.gguf "Hi"
    edgespec profile --html profile.html
    python benchmarks/pictures.py report profile.html docs/images/profile.svg \
        "Memory by component" "Step times" "Speed against budget" "Speed by task"
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import html
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import termios
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from shared import run

# -- bars -----------------------------------------------------------------------------------


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


def bars_of_results() -> None:
    """The bars of the README, from what `peers.py` kept in `results/`, for light and dark pages.

    Writes docs/images/speed-light.svg and speed-dark.svg; a test compares them with the results.
    """
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")


# -- terminal --------------------------------------------------------------------------------


_COLUMNS = 96
_LONGEST_WAIT_S = 1.0
_TICK_S = 0.05  # characters that came closer together appear at once
_CELL, _LINE, _MARGIN = 8.4, 19, 16  # pixels
_STYLES = {"1": "b", "2": "d", "31": "r", "32": "g", "33": "y", "34": "l", "36": "c", "90": "d"}
_BEGUN_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*)?$")
_ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


@dataclass(frozen=True)
class Cell:
    """One character, its classes, and when it came."""

    text: str
    style: str
    time_s: float


class Screen:
    """What a terminal shows after some output; lines never scroll away."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: list[list[Cell]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def write(self, text: str, time_s: float) -> None:
        """Follow `text`, which came at `time_s`; an escape sequence must be whole."""
        at = 0
        while at < len(text):
            match = _ESCAPE.match(text, at)
            if match:
                self._obey(match[1], match[2])
                at = match.end()
                continue
            self._put(text[at], time_s)
            at += 1

    def rows(self) -> list[list[Cell]]:
        """The lines, without blanks at their ends."""
        trimmed = []
        for row in self._rows:
            end = len(row)
            while end and row[end - 1].text == " ":
                end -= 1
            trimmed.append(row[:end])
        while trimmed and not trimmed[-1]:
            trimmed.pop()
        return trimmed

    def _put(self, letter: str, time_s: float) -> None:
        if letter == "\n":
            self._row += 1
            if self._row == len(self._rows):
                self._rows.append([])
        elif letter == "\r":
            self._column = 0
        elif letter == "\b":
            self._column = max(0, self._column - 1)
        elif letter >= " ":
            if self._column == self._columns:
                self._column = 0
                self._put("\n", time_s)
            row = self._rows[self._row]
            row += [Cell(" ", "", time_s)] * (self._column + 1 - len(row))
            row[self._column] = Cell(letter, self._style, time_s)
            self._column += 1

    def _obey(self, numbers: str, command: str) -> None:
        row = self._rows[self._row]
        if command == "K":
            del row[self._column :]
        elif command == "m":
            codes = [code for code in numbers.split(";") if code not in ("", "0")]
            self._style = " ".join(_STYLES[code] for code in codes if code in _STYLES)


def record(command: list[str], columns: int = _COLUMNS) -> list[list[Cell]]:
    """Run `command` in a terminal; the rows it leaves. Raises CalledProcessError if it fails."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    screen = Screen(columns)
    shown_s, last = 0.0, time.perf_counter()
    while True:
        try:
            data = os.read(leader, 1 << 16)
        except OSError:  # what Linux says when the last writer has gone
            break
        if not data:
            break
        now = time.perf_counter()
        shown_s, last = shown_s + min(_LONGEST_WAIT_S, now - last), now
        text = rest + decoder.decode(data)
        begun = _BEGUN_ESCAPE.search(text)
        whole = begun.start() if begun else len(text)
        screen.write(text[:whole], shown_s)
        rest = text[whole:]
    os.close(leader)
    if status := process.wait():
        raise subprocess.CalledProcessError(status, command)
    return screen.rows()


def svg_of(title: str, rows: list[list[Cell]], columns: int = _COLUMNS) -> str:
    """The rows under a prompt with the command, as a picture that plays once."""
    width = round(2 * _MARGIN + columns * _CELL)
    height = 2 * _MARGIN + _LINE * (len(rows) + 1)
    times = sorted({_ticks(cell) for row in rows for cell in row})
    delays = "".join(f".t{tick}{{animation-delay:{tick * _TICK_S + 0.5:.2f}s}}" for tick in times)
    lines = [_line(0, f'<tspan class="p">$ </tspan><tspan>{html.escape(title)}</tspan>')]
    for number, row in enumerate(rows, 1):
        spans = ""
        for (tick, style), cells in groupby(row, lambda cell: (_ticks(cell), cell.style)):
            text = html.escape("".join(cell.text for cell in cells))
            spans += f'<tspan class="t t{tick} {style}">{text}</tspan>'
        lines.append(_line(number, spans))
    return _SVG.format(width=width, height=height, delays=delays, lines="\n".join(lines))


def _ticks(cell: Cell) -> int:
    return round(cell.time_s / _TICK_S)


def _line(number: int, spans: str) -> str:
    return f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * (number + 0.75):.0f}">{spans}</text>'


_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">
<style>
rect {{ fill: #16191d; }}
text {{ fill: #d6dade; font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  white-space: pre; }}
.p {{ fill: #6fbf8b; }} .b {{ font-weight: bold; }} .d {{ fill: #8b949e; }} .r {{ fill: #e5786d; }}
.g {{ fill: #6fbf8b; }} .y {{ fill: #d9b45b; }} .l {{ fill: #6ea8dc; }} .c {{ fill: #62b8b8; }}
@media (prefers-reduced-motion: no-preference) {{
  .t {{ opacity: 0; animation: come 0.01s forwards; }}
  {delays}
  @keyframes come {{ to {{ opacity: 1; }} }}
}}
</style>
<rect width="100%" height="100%" rx="8"/>
{lines}
</svg>
"""


def terminal() -> None:
    """A command's output in a terminal as an animated SVG: real text, at the times it came.

    Runs the command in a pseudo-terminal of 96 columns, follows what a terminal would show
    (lines that are written over, colours), and gives every character of the last screen the
    time at which it came. Waits longer than a second are shortened to one. Nothing is fetched;
    viewers that do not animate, or are asked not to, show the last screen. Linux and macOS.
    """
    parser = argparse.ArgumentParser("pictures.py terminal")
    parser.add_argument("output", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    rows = record(command)
    shown = [Path(command[0]).name, *command[1:]]
    arguments.output.write_text(svg_of(shlex.join(shown).replace("'", '"'), rows))
    print("\n".join("".join(cell.text for cell in row) for row in rows))


# -- report ----------------------------------------------------------------------------------


_FIGURES_A_ROW = 2
_FIGURE_WIDTH, _HEADING, _FIGURE_GAP = 480, 34, 16  # pixels
_STYLE = (
    "svg{color:#1c2024;font-family:DejaVu Sans,Verdana,sans-serif}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e8eaed}.page{fill:#14171a}}"
)
_SECTION = re.compile(r"<section><h2>([^<]*)</h2>(.*?)</section>", re.DOTALL)
_FIGURE = re.compile(r"<figure[^>]*>(<svg.*?</svg>)\s*</figure>", re.DOTALL)
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_OPENING = re.compile(r"<svg[^>]*>\s*(<metadata>.*?</metadata>)?", re.DOTALL)


def picture_of(page: str, titles: list[str]) -> str:
    """The figures of these sections; ValueError names a section that has none."""
    sections = dict(_SECTION.findall(page))
    parts: list[str] = []
    column, top, bottom = 0, float(_FIGURE_GAP), float(_FIGURE_GAP)
    for title in titles:
        figure = _FIGURE.search(sections.get(title, ""))
        size = _SIZE.search(figure[1]) if figure else None
        if figure is None or size is None:
            raise ValueError(f"no figure under {title!r}; there are {', '.join(sections)}")
        height = _FIGURE_WIDTH * float(size[2]) / float(size[1])
        left = _FIGURE_GAP + column * (_FIGURE_WIDTH + _FIGURE_GAP)
        placed = (
            f'<svg x="{left}" y="{top + _HEADING:.0f}" width="{_FIGURE_WIDTH}" '
            f'height="{height:.0f}" {size[0]}>'
        )
        parts.append(
            f'<text x="{left}" y="{top + 20:.0f}" font-size="17" font-weight="600" '
            f'fill="currentColor">{title}</text>' + _OPENING.sub(placed, figure[1], count=1)
        )
        bottom = max(bottom, top + _HEADING + height + _FIGURE_GAP)
        column = (column + 1) % _FIGURES_A_ROW
        if column == 0:
            top = bottom
    width = _FIGURES_A_ROW * (_FIGURE_WIDTH + _FIGURE_GAP) + _FIGURE_GAP
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {bottom:.0f}" width="{width}" height="{bottom:.0f}">'
        f"<style>{_STYLE}</style>"
        f'<rect class="page" width="{width}" height="{bottom:.0f}"/>' + "".join(parts) + "</svg>\n"
    )


def report() -> None:
    """Some sections of a report page as one SVG picture, for a README.

    The figures are those of the page, two in a row, with their headings; text stays text and
    takes the reader's light or dark colours.
    """
    parser = argparse.ArgumentParser("pictures.py report")
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
    run(__doc__, bars=bars_of_results, terminal=terminal, report=report)
