"""Pages of measurements: one HTML file that opens offline, prints, and follows the theme.

Plots are SVG by matplotlib, with text and axes in the page's own colour, so that light, dark and
paper all read well. Nothing is fetched and nothing runs in the page. What is on a page is the
business of the modules that call this one.
"""

from __future__ import annotations

import html
import importlib.util
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import MissingDependencyError, UnsupportedError
from edgespec.models.writing import reason, whole_file

MEBIBYTE = 1 << 20
BLUE, ORANGE, GREEN, GREY = "#3b82c4", "#e08a2e", "#3fa66b", "#9aa0a6"
_INK = "#010203"  # replaced by the page's text colour
_WIDTH, _HEIGHT = 7.2, 3.3  # inches; the page scales them


def write_page(page: str, path: Path) -> None:
    """Write a page to `path`. Raises UnsupportedError where it cannot be written."""
    write_text(page, path, "--html")


def write_text(text: str, path: Path, option: str) -> None:
    """Write what an option asked for. Raises UnsupportedError where it cannot be written."""
    try:
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8", newline="")
    except OSError as problem:
        raise UnsupportedError(
            f"cannot write {path}: {reason(problem)}", hint=f"name another file with {option}"
        ) from problem


def require_plots() -> None:
    """Raise MissingDependencyError now rather than after minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "the report needs matplotlib", hint="pip install 'edgespec[report]'"
        )


def require_place(path: Path) -> None:
    """Raise UnsupportedError now where `path` cannot become a file."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UnsupportedError(
            f"cannot write {path}: there is no folder {path.parent}", hint="make it first"
        )
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        reason = "it is a folder" if path.is_dir() else "it may not be written to"
        raise UnsupportedError(f"cannot write {path}: {reason}", hint="name another file")


def page_of(title: str, file: str, kind: str, sections: Sequence[str]) -> str:
    """A whole page about a model; `kind` says what it is of it."""
    return _PAGE.format(title=text_of(title), file=text_of(file), kind=kind, body="".join(sections))


# -- parts of a page -----------------------------------------------------------------------


def tiles_of(facts: Sequence[tuple[str, str, str]]) -> str:
    """The most important numbers: name, value, and what to compare it with."""
    tiles = "".join(
        f"<div class='tile'><span>{text_of(name)}</span><b>{text_of(value)}</b>"
        f"<small>{text_of(note)}</small></div>"
        for name, value, note in facts
    )
    return f"<div class='tiles'>{tiles}</div>"


def section_of(title: str, lead: str, *parts: str) -> str:
    """A heading, a sentence, and what follows."""
    lead = f"<p>{text_of(lead)}</p>" if lead else ""
    return f"<section><h2>{text_of(title)}</h2>{lead}{''.join(parts)}</section>"


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A table; the cells of columns 1 to `numbers` are aligned to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        styled = (
            f"<{tag}{' class=n' if 1 <= i <= numbers else ''}>{text_of(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(styled)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<div class='scroll'><table>{line(head, 'th')}{body}</table></div>"


def ms_of(ms: float | None) -> str:
    """The time of a step; a slow model leaves some sizes unmeasured."""
    return "-" if ms is None else f"{ms:.2f} ms"


def size_of(size_bytes: float | None) -> str:
    """MiB or GiB; a dash for what is not known."""
    if size_bytes is None:
        return "-"
    return f"{size_bytes / MEBIBYTE:,.1f} MiB" if size_bytes < 1 << 30 else _gib(size_bytes)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"


def text_of(text: str) -> str:
    """`text` without markup."""
    return html.escape(text)


# -- plots ---------------------------------------------------------------------------------


def figure_of(draw: Callable[[Any, Any], None], data: Any) -> str:
    """An SVG element of what `draw` puts on a pair of axes."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": draw.__name__,
        "font.family": "sans-serif",
        "font.size": 10,
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK
        ),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.subplots()
        axes.patch.set_alpha(0.0)
        axes.grid(True, color=GREY, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        draw(axes, data)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return f"<figure>{svg}</figure>"


def draw_timeline(axes: Any, memory: dict[str, Any]) -> None:
    """Resident memory over time with its phases, and the predicted peak as a dashed line."""
    times = [sample["time_s"] for sample in memory["samples"]]
    sizes = [sample["resident_bytes"] / MEBIBYTE for sample in memory["samples"]]
    axes.fill_between(times, sizes, color=BLUE, alpha=0.25, linewidth=0)
    axes.plot(times, sizes, color=BLUE, linewidth=1.5)
    predicted = memory["predicted_peak_bytes"] / MEBIBYTE
    axes.axhline(predicted, color=ORANGE, linestyle="--", linewidth=1.2)
    axes.set_ylim(0, 1.25 * max([predicted, *sizes]))
    top = axes.get_ylim()[1]
    end = times[-1] if times else 1.0
    last = -end
    for phase in memory["phases"]:
        axes.axvline(phase["time_s"], color=GREY, linewidth=0.8)
        if phase["time_s"] - last > 0.12 * end:  # labels closer than this would overlap
            axes.text(phase["time_s"], 0.97 * top, f" {phase['name']}", fontsize=8, va="top")
            last = phase["time_s"]
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}: {kind}</title>
<style>
:root {{ --page: #ffffff; --card: #f5f6f8; --ink: #1c2024; --soft: #5c6570; --line: #d9dde2; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #14171a; --card: #1d2126; --ink: #e8eaed; --soft: #a3abb5; --line: #343a41; }}
}}
body {{ margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 56rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .25rem; }}
p, header small {{ color: var(--soft); margin: .25rem 0 .75rem; overflow-wrap: anywhere; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr));
  gap: .75rem; margin-top: 1.25rem; }}
.tile {{ background: var(--card); border-radius: .5rem; padding: .75rem 1rem; }}
.tile span, .tile small {{ display: block; color: var(--soft); font-size: .85rem; }}
.tile b {{ font-size: 1.35rem; font-variant-numeric: tabular-nums; }}
figure {{ margin: 0; }}
figure svg {{ width: 100%; height: auto; color: var(--ink); }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: .92rem; }}
th, td {{ text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }}
th {{ color: var(--soft); font-weight: 600; }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
@media print {{
  :root {{ --page: #ffffff; --card: #ffffff; --ink: #000000; --soft: #333333; --line: #999999; }}
  body {{ max-width: none; font-size: 11pt; }}
  section {{ break-inside: avoid; }}
  .tile {{ border: 1px solid var(--line); }}
}}
</style>
</head>
<body>
<header><h1>{title}</h1><small>{kind} of {file}</small></header>
{body}
</body>
</html>
"""
