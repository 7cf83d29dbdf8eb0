"""The document of `edgespec bench --json` as a page: bars by task, speed by position, memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bench.ratios import interval_text, ratio_text
from edgespec.bench.summary import BIN_TOKENS, table_rows
from edgespec.memory.report.page import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    draw_timeline,
    figure_of,
    page_of,
    require_plots,
    section_of,
    size_of,
    table_of,
    tiles_of,
    write_page,
)

if TYPE_CHECKING:
    from markupsafe import Markup

_COLORS = (GREY, BLUE, ORANGE, GREEN, "#8a5fbf", "#c4513b")


def write_bench_report(document: dict[str, Any], path: Path) -> None:
    """Write the page to `path`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UnsupportedError: the file cannot be written.
    """
    write_page(render_bench_report(document), path)


def render_bench_report(document: dict[str, Any]) -> str:
    """The page as text."""
    require_plots()
    model, variants = document["model"], document["variants"]
    baseline = variants[0]["name"]
    sections = [
        tiles_of(_facts(document)),
        section_of(
            "Speed by task",
            f"How many times as fast as {baseline}, prompt by prompt in turns; the lines are 95% "
            "bootstrap intervals over prompts within tasks, where there are five prompts or more.",
            figure_of(_draw_ratios, variants),
            *(_task_table(one, variants[0]) for one in variants[1:] or variants),
        ),
        section_of(
            "Speed over the answer",
            f"Tokens per second by how many tokens were written already, in bins of {BIN_TOKENS}.",
            figure_of(_draw_positions, variants),
        ),
        *(_memory_section(load) for load in document["loads"]),
        section_of("Where drafts came from", "", _source_table(variants)),
        section_of("Machine and settings", "", _machine_table(document)),
    ]
    title = f"{model['name']} ({model['type']})"
    return page_of(title, model["file"], "benchmark", sections)


def _facts(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    variants, ceiling = document["variants"], document["ceiling"]
    fastest = max(variants, key=lambda one: one["overall"]["ratio"] or 0.0)
    overall = fastest["overall"]
    low, high = overall["ratio_low"], overall["ratio_high"]
    return [
        ("fastest", f"{overall['tokens_per_s']:.1f} tokens/s", fastest["name"]),
        (
            f"against {variants[0]['name']}",
            ratio_text(overall["ratio"]),
            f"95%: {interval_text(low, high)}",
        ),
        (
            "ceiling of plain decoding",
            f"{ceiling['tokens_per_s']:.1f} tokens/s",
            f"{ceiling['memory_bytes_per_s'] / 1e9:.1f} GB/s over "
            f"{size_of(ceiling['bytes_per_token'])} a token",
        ),
        (
            "identical answers",
            f"{overall['identical']} of {overall['prompts']}",
            f"{overall['unexplained']} not explained by rounding",
        ),
    ]


def _task_table(variant: dict[str, Any], baseline: dict[str, Any]) -> Markup:
    head = (
        variant["name"],
        f"{baseline['name']} tokens/s",
        "tokens/s",
        "ratio",
        "95%",
        "acceptance length",
        "first token",
        "identical",
    )
    return table_of(head, table_rows(variant, baseline), numbers=7)


def _memory_section(load: dict[str, Any]) -> Markup:
    memory = load["memory"]
    lead = (
        f"Peak of the process: {size_of(memory['measured_peak_bytes'])} measured, "
        f"{size_of(memory['predicted_peak_bytes'])} planned (dashed)."
    )
    title = f"Memory {load['settings']}".strip()
    return section_of(title, lead, figure_of(draw_timeline, memory))


def _source_table(variants: list[dict[str, Any]]) -> Markup:
    rows = [
        (one["name"], source, str(drafted), str(one["overall"]["accepted_by"].get(source, 0)))
        for one in variants
        for source, drafted in one["overall"]["drafted_by"].items()
    ]
    return table_of(("variant", "drafter", "drafted", "accepted"), rows or [("-",) * 4], numbers=3)


def _machine_table(document: dict[str, Any]) -> Markup:
    machine, settings = document["machine"], document["settings"]
    rows = [
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("system", f"{machine['system']}, Python {machine['python']}"),
        (
            "versions",
            f"edgespec {machine['edgespec']}, llama-cpp-python {machine['llama_cpp_python']}",
        ),
        (
            "prompts",
            f"{settings['prompts']} of {settings['tasks']} tasks, at most "
            f"{settings['max_tokens']} tokens each, greedy, {settings['repeats']} times",
        ),
    ]
    if (energy := document["energy"])["source"] is not None:
        each = (f"{v['name']} {v['overall']['j_per_token'] or 0:.3g}" for v in document["variants"])
        rows.append(
            (
                "J a token",
                f"{', '.join(each)} ({energy['source']}, {energy['idle_w']:.1f} W idle)",
            )
        )
    return table_of(("what", "value"), rows)


def _draw_ratios(axes: Any, variants: list[dict[str, Any]]) -> None:
    shown = variants[1:] or variants
    tasks = [*variants[0]["tasks"], "overall"]
    width = 0.8 / len(shown)
    for number, one in enumerate(shown):
        rows = [one["tasks"].get(task, one["overall"]) for task in tasks]
        places = [place + (number - (len(shown) - 1) / 2) * width for place in range(len(tasks))]
        ratios = [row["ratio"] or 0.0 for row in rows]
        below = [
            ratio - (row["ratio_low"] or ratio) for ratio, row in zip(ratios, rows, strict=True)
        ]
        above = [
            (row["ratio_high"] or ratio) - ratio for ratio, row in zip(ratios, rows, strict=True)
        ]
        color = _COLORS[(number + 1) % len(_COLORS)]
        axes.bar(places, ratios, width, color=color, label=one["name"])
        # Lines are drawn in grey, which shows on bars and on both themes.
        axes.errorbar(
            places, ratios, yerr=[below, above], fmt="none", ecolor=GREY, elinewidth=1.2, capsize=2
        )
    axes.axhline(1.0, color=GREY, linewidth=1.0, linestyle="--")
    axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    axes.set_ylabel(f"times {variants[0]['name']}")
    axes.margins(y=0.2)
    axes.legend(loc="upper left", ncols=min(3, len(shown)))


def _draw_positions(axes: Any, variants: list[dict[str, Any]]) -> None:
    for number, one in enumerate(variants):
        middles = [point["from_token"] + BIN_TOKENS / 2 for point in one["by_position"]]
        speeds = [point["tokens_per_s"] for point in one["by_position"]]
        color = _COLORS[number % len(_COLORS)]
        axes.plot(middles, speeds, marker="o", markersize=3.5, color=color, label=one["name"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens written")
    axes.set_ylabel("tokens/s")
    axes.legend(loc="lower right")
