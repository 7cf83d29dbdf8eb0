"""The memory-profile report: one HTML file that opens offline, prints, and follows the theme.

Draws the document of `edgespec profile --json`: predicted beside measured, everywhere. Plots are
SVG by matplotlib, with text and axes in the page's own colour, so that light, dark and paper all
read well. Nothing is fetched and nothing runs in the page.
"""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import MissingDependencyError, UnsupportedError

_MEBIBYTE = 1 << 20
_INK = "#010203"  # replaced by the page's text colour
_BLUE, _ORANGE, _GREEN, _GREY = "#3b82c4", "#e08a2e", "#3fa66b", "#9aa0a6"
_WIDTH, _HEIGHT = 7.2, 3.3  # inches; the page scales them


def write_report(profile: dict[str, Any], path: Path) -> None:
    """Write the report of a profile document to `path`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UnsupportedError: the file cannot be written.
    """
    page = render_switching(profile) if "points" in profile else render_report(profile)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as problem:
        raise UnsupportedError(
            f"cannot write {path}: {problem.strerror}", hint="name another file with --html"
        ) from problem


def require_plots() -> None:
    """Raise MissingDependencyError now rather than after minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "the report needs matplotlib", hint="pip install 'edgespec[report]'"
        )


def render_report(profile: dict[str, Any]) -> str:
    """The page as text."""
    require_plots()
    model, machine = profile["model"], profile["machine"]
    title = f"{model['name']} ({model['type']})"
    memory = profile["memory"]
    speeds = {row["drafter"]: row for row in profile["speed"]}
    sections = [
        _tiles(profile),
        _section(
            "Memory by component",
            "What the plan allowed for and what llama.cpp says it allocated.",
            _figure(_draw_components, memory),
            _component_table(memory),
        ),
        _section(
            "Memory over time",
            "Resident memory of the whole process. The dashed line is the predicted peak.",
            _figure(_draw_timeline, memory),
        ),
        _section(
            "Step times",
            "What one step of the model costs by the number of tokens in it. Verifying a draft is "
            "one such step; the mark shows the largest one planned.",
            _figure(_draw_steps, profile),
        ),
        _section(
            "Speed against budget",
            "Predicted tokens per second of the best plan for each budget, and its context. Below "
            "the left end nothing fits.",
            _figure(_draw_frontier, profile),
        ),
        _section(
            "Speed by task",
            "Measured, the same answers plain and with drafts, in turns.",
            _figure(_draw_tasks, speeds),
            _speed_table(profile["speed"]),
        ),
        _section("The plan", "", _choice_table(profile["plan"])),
        _section("Machine and versions", "", _machine_table(machine, profile)),
    ]
    return _PAGE.format(title=_text(title), file=_text(model["file"]), body="".join(sections))


def render_switching(found: dict[str, Any]) -> str:
    """A page for a pair of models in turns: quality against speed, by share of the large one.

    Draws the document of `edgespec profile --switch --json`, or of `benchmarks/switching.py`.
    """
    require_plots()
    rows = [
        (
            f"{point['large_share']:.0%}",
            f"{point['quality']:.0%}",
            f"{point['agreement']:.1%}",
            f"{point['tokens_per_s']:.1f}",
        )
        for point in found["points"]
    ]
    head = ("tokens by the large model", "quality", "agreement", "tokens/s")
    body = _section(
        "Quality against speed",
        "Quality is the part of the disagreement with the large model that is removed: 0 is the "
        "small model alone. Each mark is a setting of the thresholds.",
        _figure(_draw_switching, found),
        _table(head, rows, numbers=3),
    )
    file = f"{found['large']} and {found['small']}"
    return _PAGE.format(title="Two models in turns", file=_text(file), body=body)


# -- parts of the page ---------------------------------------------------------------------


def _tiles(profile: dict[str, Any]) -> str:
    memory, rows = profile["memory"], profile["speed"]
    fastest = max(rows, key=lambda row: row["measured_tokens_per_s"])
    facts = [
        ("peak memory", _mib(memory["measured_peak_bytes"]), _beside_peak(memory)),
        (
            "speed",
            f"{fastest['measured_tokens_per_s']:.1f} tokens/s",
            f"{fastest['predicted_tokens_per_s']:.1f} predicted",
        ),
        (
            "gain by drafts",
            f"{fastest['measured_tokens_per_s'] / rows[0]['measured_tokens_per_s']:.2f}x",
            f"acceptance length {fastest['acceptance_length']:.2f}",
        ),
        (
            "reading prompts",
            f"{profile['prefill']['tokens_per_s']:.0f} tokens/s",
            f"in batches of {profile['prefill']['batch_size']}",
        ),
    ]
    tiles = "".join(
        f"<div class='tile'><span>{_text(name)}</span><b>{_text(value)}</b>"
        f"<small>{_text(note)}</small></div>"
        for name, value, note in facts
    )
    return f"<div class='tiles'>{tiles}</div>"


def _beside_peak(memory: dict[str, Any]) -> str:
    predicted = memory["predicted_peak_bytes"]
    return f"{_mib(predicted)} predicted, {_mib(memory['limit_bytes'])} allowed"


def _section(title: str, lead: str, *parts: str) -> str:
    lead = f"<p>{_text(lead)}</p>" if lead else ""
    return f"<section><h2>{_text(title)}</h2>{lead}{''.join(parts)}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A table; the cells of columns 1 to `numbers` are aligned to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        styled = (
            f"<{tag}{' class=n' if 1 <= i <= numbers else ''}>{_text(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(styled)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<div class='scroll'><table>{line(head, 'th')}{body}</table></div>"


def _component_table(memory: dict[str, Any]) -> str:
    rows = [
        (name.replace("_", " "), _mib(size), _mib(memory["allocated"].get(name)))
        for name, size in memory["predicted"].items()
    ]
    rows.append(
        (
            "peak of the process",
            _mib(memory["predicted_peak_bytes"]),
            _mib(memory["measured_peak_bytes"]),
        )
    )
    return _table(("component", "predicted", "measured"), rows, numbers=2)


def _speed_table(speeds: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            row["drafter"],
            f"{row['predicted_tokens_per_s']:.1f}",
            f"{row['measured_tokens_per_s']:.1f}",
            f"{row['acceptance_length']:.2f}",
        )
        for row in speeds
    ]
    head = ("drafter", "predicted tokens/s", "measured tokens/s", "acceptance length")
    return _table(head, rows, numbers=3)


def _choice_table(plan: dict[str, Any]) -> str:
    rows = [
        (name.replace("_", " "), str(choice["value"]), str(choice["reason"]))
        for name, choice in plan.items()
    ]
    return _table(("setting", "value", "why"), rows)


def _machine_table(machine: dict[str, Any], profile: dict[str, Any]) -> str:
    bandwidth = profile["bandwidth"]
    rows = [
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("instruction sets", ", ".join(machine["features"]) or "not told"),
        ("memory", f"{_mib(machine['memory_bytes'])}, {_mib(machine['available_bytes'])} free"),
        (
            "bandwidth",
            f"{bandwidth['memory_bytes_per_s'] / 1e9:.1f} GB/s; one-token steps read "
            f"{bandwidth['used_bytes_per_s'] / 1e9:.1f} GB/s of weights",
        ),
        ("GPUs llama.cpp was built for", ", ".join(machine["gpu_kinds"]) or "none"),
        ("steps that round alike", f"up to {profile['largest_invariant_step']} tokens"),
        ("system", f"{machine['system']}, Python {machine['python']}"),
        (
            "versions",
            f"edgespec {machine['edgespec']}, llama-cpp-python {machine['llama_cpp_python']}",
        ),
    ]
    return _table(("what", "value"), rows)


def _mib(size_bytes: float | None) -> str:
    if size_bytes is None:
        return "-"
    return f"{size_bytes / _MEBIBYTE:,.1f} MiB" if size_bytes < 1 << 30 else _gib(size_bytes)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"


def _text(text: str) -> str:
    return html.escape(text)


# -- plots ---------------------------------------------------------------------------------


def _figure(draw: Callable[[Any, Any], None], data: Any) -> str:
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
        axes.grid(True, color=_GREY, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        draw(axes, data)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return f"<figure>{svg}</figure>"


def _draw_components(axes: Any, memory: dict[str, Any]) -> None:
    names = list(memory["predicted"])[::-1]
    places = range(len(names))
    predicted = [memory["predicted"][name] / _MEBIBYTE for name in names]
    real = [memory["allocated"].get(name, 0) / _MEBIBYTE for name in names]
    axes.barh([place + 0.2 for place in places], predicted, 0.38, color=_BLUE, label="predicted")
    axes.barh([place - 0.2 for place in places], real, 0.38, color=_ORANGE, label="allocated")
    axes.set_yticks(list(places), [name.replace("_", " ") for name in names])
    axes.set_xlabel("MiB")
    axes.set_xlim(right=1.25 * max([*predicted, *real]))
    axes.legend(loc="center right")


def _draw_timeline(axes: Any, memory: dict[str, Any]) -> None:
    times = [sample["time_s"] for sample in memory["samples"]]
    sizes = [sample["resident_bytes"] / _MEBIBYTE for sample in memory["samples"]]
    axes.fill_between(times, sizes, color=_BLUE, alpha=0.25, linewidth=0)
    axes.plot(times, sizes, color=_BLUE, linewidth=1.5)
    predicted = memory["predicted_peak_bytes"] / _MEBIBYTE
    axes.axhline(predicted, color=_ORANGE, linestyle="--", linewidth=1.2)
    axes.set_ylim(0, 1.25 * max([predicted, *sizes]))
    top = axes.get_ylim()[1]
    end = times[-1] if times else 1.0
    last = -end
    for phase in memory["phases"]:
        axes.axvline(phase["time_s"], color=_GREY, linewidth=0.8)
        if phase["time_s"] - last > 0.12 * end:  # labels closer than this would overlap
            axes.text(phase["time_s"], 0.97 * top, f" {phase['name']}", fontsize=8, va="top")
            last = phase["time_s"]
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB")


def _draw_steps(axes: Any, profile: dict[str, Any]) -> None:
    colors = (_BLUE, _ORANGE, _GREEN, _GREY)
    for curve, color in zip(profile["step_ms"], colors, strict=False):
        sizes = [int(size) for size in curve["ms"]]
        label = f"{curve['depth']} tokens of context"
        axes.plot(
            sizes, list(curve["ms"].values()), marker="o", markersize=3.5, color=color, label=label
        )
    axes.axvline(profile["draft_max"] + 1, color=_GREY, linestyle=":", linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the step")
    axes.set_ylabel("ms")
    axes.legend(loc="upper left")


def _draw_frontier(axes: Any, profile: dict[str, Any]) -> None:
    points = [point for point in profile["frontier"] if point["tokens_per_s"] is not None]
    budgets = [point["budget_bytes"] / _MEBIBYTE for point in points]
    speeds = [point["tokens_per_s"] for point in points]
    axes.step(budgets, speeds, where="post", color=_BLUE, linewidth=1.8)
    contexts = [point["context_size"] for point in points]
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    right.step(budgets, contexts, where="post", color=_ORANGE, linewidth=1.2, linestyle="--")
    right.set_ylim(0, 1.2 * max(contexts, default=1))
    right.set_ylabel("tokens of context (dashed)")
    axes.set_ylim(0, 1.2 * max(speeds, default=1.0))
    axes.set_xlabel("budget in MiB")
    axes.set_ylabel("tokens/s")


def _draw_switching(axes: Any, found: dict[str, Any]) -> None:
    points = found["points"]
    speeds = [point["tokens_per_s"] for point in points]
    axes.plot(speeds, [100 * p["quality"] for p in points], color=_BLUE, marker="o", markersize=4)
    for point in points[:: max(1, len(points) // 5)]:
        place = (point["tokens_per_s"], 100 * point["quality"])
        axes.annotate(
            f"{point['large_share']:.0%}", place, (6, 4), textcoords="offset points", fontsize=8
        )
    lossless = found["lossless"]["drafting_tokens_per_s"]
    axes.plot(
        [lossless], [100], color=_ORANGE, marker="s", linestyle="", label="drafting: lossless"
    )
    axes.set_xlim(0, 1.15 * max([*speeds, lossless]))
    axes.set_xlabel("tokens/s; marks say the large model's share")
    axes.set_ylabel("quality in %")
    axes.legend(loc="lower left")


def _draw_tasks(axes: Any, speeds: dict[str, dict[str, Any]]) -> None:
    tasks = list(next(iter(speeds.values()))["by_task"])
    width = 0.8 / len(speeds)
    for number, (name, row) in enumerate(speeds.items()):
        places = [place + (number - (len(speeds) - 1) / 2) * width for place in range(len(tasks))]
        values = [row["by_task"][task] for task in tasks]
        axes.bar(places, values, width, color=(_GREY, _BLUE, _ORANGE)[number % 3], label=name)
    axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.2)
    axes.legend(loc="upper right", ncols=len(speeds))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}: memory profile</title>
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
<header><h1>{title}</h1><small>memory profile of {file}</small></header>
{body}
</body>
</html>
"""
