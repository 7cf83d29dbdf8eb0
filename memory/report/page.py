"""Pages of measurements: one HTML file that opens offline, prints, and follows the theme.

Plots are SVG by matplotlib, with text and axes in the page's own colour, so that light, dark and
paper all read well. Nothing is fetched and nothing runs in the page. How it looks is written in the
templates beside this module; what is on a page is the business of the modules that call it.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import MissingDependencyError, UnsupportedError
from edgespec.memory.bytes.config import MEBIBYTE
from edgespec.models.writing import refusing, whole_file

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

BLUE, ORANGE, GREEN, GREY = "#3b82c4", "#e08a2e", "#3fa66b", "#9aa0a6"
_INK = "#010203"  # replaced by the page's text colour


def write_page(page: str, path: Path) -> None:
    """Write a page to `path`. Raises UnsupportedError where it cannot be written."""
    with refusing(path, "name another file with --html"), whole_file(path) as partial:
        partial.write_text(page, encoding="utf-8", newline="")


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


# -- parts of a page -----------------------------------------------------------------------


def page_of(title: str, file: str, kind: str, sections: Sequence[Markup]) -> str:
    """A whole page about a model; `kind` says what it is of it."""
    page = _templates().get_template("page.html")
    return page.render(title=title, file=file, kind=kind, sections=sections)


def tiles_of(facts: Sequence[tuple[str, str, str]]) -> Markup:
    """The most important numbers: name, value, and what to compare it with."""
    return _part("tiles", facts)


def section_of(title: str, lead: str, *parts: Markup) -> Markup:
    """A heading, a sentence, and what follows."""
    return _part("section", title, lead, parts)


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> Markup:
    """A table; the cells of columns 1 to `numbers` are aligned to the right."""
    return _part("table", head, rows, numbers)


@cache
def _templates() -> Environment:
    """Whatever a template is given is text, and only what another one made is markup."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("edgespec.memory.report") / "templates"
    return Environment(
        loader=FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def _part(name: str, *arguments: Any) -> Markup:
    made: Markup = getattr(_templates().get_template("parts.html").module, name)(*arguments)
    return made


def ms_of(ms: float | None) -> str:
    """The time of a step; a slow model leaves some sizes unmeasured."""
    return "-" if ms is None else f"{ms:.2f} ms"


def size_of(size_bytes: float | None) -> str:
    """MiB or GiB; a dash for what is not known."""
    if size_bytes is None:
        return "-"
    if size_bytes < 1 << 30:
        return f"{size_bytes / MEBIBYTE:,.1f} MiB"
    return f"{size_bytes / (1 << 30):.2f} GiB"


# -- plots ---------------------------------------------------------------------------------


def figure_of(draw: Callable[[Any, Any], None], data: Any) -> Markup:
    """An SVG element of what `draw` puts on a pair of axes."""
    import matplotlib
    from markupsafe import Markup
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
        # Inches, which the page scales.
        figure = Figure(figsize=(7.2, 3.3), layout="constrained")
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
    return _part("figure", Markup(svg))  # matplotlib escapes its texts


def timeline_of(memory: dict[str, Any]) -> Markup:
    """The plot of resident memory over time; none of a process that was looked at once."""
    from markupsafe import Markup

    return figure_of(_draw_timeline, memory) if len(memory["samples"]) > 1 else Markup()


def _draw_timeline(axes: Any, memory: dict[str, Any]) -> None:
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
