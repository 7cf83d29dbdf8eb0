"""The memory-profile report: the document of `edgespec profile --json` as a page.

Predicted beside measured, everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.memory.report.page import (
    BLUE,
    GREEN,
    GREY,
    MEBIBYTE,
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


def write_profile(profile: dict[str, Any], path: Path) -> None:
    """Write the report of a profile document to `path`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        UnsupportedError: the file cannot be written.
    """
    page = render_switching(profile) if "points" in profile else render_profile(profile)
    write_page(page, path)


def render_profile(profile: dict[str, Any]) -> str:
    """The page as text."""
    require_plots()
    model, machine = profile["model"], profile["machine"]
    title = f"{model['name']} ({model['type']})"
    memory = profile["memory"]
    speeds = {row["drafter"]: row for row in profile["speed"]}
    sections = [
        _tiles(profile),
        section_of(
            "Memory by component",
            "What the plan allowed for and what llama.cpp says it allocated.",
            figure_of(_draw_components, memory),
            _component_table(memory),
        ),
        section_of(
            "Memory over time",
            "Resident memory of the whole process. The dashed line is the predicted peak.",
            figure_of(draw_timeline, memory),
        ),
        section_of(
            "Step times",
            "What one step of the model costs by the number of tokens in it. Verifying a draft is "
            "one such step; the mark shows the largest one planned.",
            figure_of(_draw_steps, profile),
        ),
        section_of(
            "Speed against budget",
            "Predicted tokens per second of the best plan for each budget, and its context. Below "
            "the left end nothing fits.",
            figure_of(_draw_frontier, profile),
        ),
        section_of(
            "Speed by task",
            "Measured, the same answers plain and with drafts, in turns.",
            figure_of(_draw_tasks, speeds),
            _speed_table(profile["speed"]),
        ),
        *_users_section(profile["users"]),
        section_of("The plan", "", _choice_table(profile["plan"])),
        section_of("Machine and versions", "", _machine_table(machine, profile)),
    ]
    return page_of(title, model["file"], "memory profile", sections)


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
    section = section_of(
        "Quality against speed",
        "Quality is the part of the disagreement with the large model that is removed: 0 is the "
        "small model alone. Each mark is a setting of the thresholds.",
        figure_of(_draw_switching, found),
        table_of(head, rows, numbers=3),
    )
    file = f"{found['large']} and {found['small']}"
    return page_of("Two models in turns", file, "quality against speed", [section])


# -- parts of the page ---------------------------------------------------------------------


def _tiles(profile: dict[str, Any]) -> Markup:
    memory, rows = profile["memory"], profile["speed"]
    fastest = max(rows, key=lambda row: row["measured_tokens_per_s"])
    facts = [
        ("peak memory", size_of(memory["measured_peak_bytes"]), _beside_peak(memory)),
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
    return tiles_of(facts)


def _beside_peak(memory: dict[str, Any]) -> str:
    predicted = memory["predicted_peak_bytes"]
    return f"{size_of(predicted)} predicted, {size_of(memory['limit_bytes'])} allowed"


def _component_table(memory: dict[str, Any]) -> Markup:
    rows = [
        (name.replace("_", " "), size_of(size), size_of(memory["allocated"].get(name)))
        for name, size in memory["predicted"].items()
    ]
    rows.append(
        (
            "peak of the process",
            size_of(memory["predicted_peak_bytes"]),
            size_of(memory["measured_peak_bytes"]),
        )
    )
    return table_of(("component", "predicted", "measured"), rows, numbers=2)


def _speed_table(speeds: Sequence[dict[str, Any]]) -> Markup:
    is_counted = all(row.get("j_per_token") is not None for row in speeds)
    rows = [
        (
            row["drafter"],
            f"{row['predicted_tokens_per_s']:.1f}",
            f"{row['measured_tokens_per_s']:.1f}",
            f"{row['acceptance_length']:.2f}",
            *([f"{row['j_per_token']:.3g}"] if is_counted else []),
        )
        for row in speeds
    ]
    head = ["drafter", "predicted tokens/s", "measured tokens/s", "acceptance length"]
    if is_counted:
        head.append(f"J a token ({speeds[0]['energy_source']})")
    return table_of(head, rows, numbers=len(head) - 1)


def _users_section(rows: Sequence[dict[str, Any]]) -> Iterator[Markup]:
    """Nothing where only one user is possible."""
    if len(rows) < 2:
        return
    cells = [
        (
            str(row["users"]),
            size_of(row["peak_bytes"]),
            str(row["tokens_each"]),
            f"{row['tokens_per_s'] / row['users']:.1f}",
            f"{row['tokens_per_s']:.1f}",
        )
        for row in rows
    ]
    head = ("users", "peak memory", "tokens of context each", "tokens/s each", "tokens/s of all")
    yield section_of(
        "Several users",
        "Predicted, without drafts, for `edgespec serve --users N`. One step brings a token for "
        "each user: each one gets fewer tokens per second, and all together get more. Users have "
        "the cache in common, so memory grows by their part of it and not by a whole model.",
        figure_of(_draw_users, rows),
        table_of(head, cells, numbers=4),
    )


def _choice_table(plan: dict[str, Any]) -> Markup:
    rows = [
        (name.replace("_", " "), str(choice["value"]), str(choice["reason"]))
        for name, choice in plan.items()
    ]
    return table_of(("setting", "value", "why"), rows)


def _machine_table(machine: dict[str, Any], profile: dict[str, Any]) -> Markup:
    bandwidth = profile["bandwidth"]
    used = f"one-token steps read {bandwidth['used_bytes_per_s'] / 1e9:.1f} GB/s of weights"
    if moved := bandwidth.get("memory_bytes_per_s"):
        used = f"{moved / 1e9:.1f} GB/s; {used}"
    rows = [
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("instruction sets", ", ".join(machine["features"]) or "not told"),
        (
            "memory",
            f"{size_of(machine['memory_bytes'])}, {size_of(machine['available_bytes'])} free",
        ),
        ("bandwidth", used),
        ("GPUs llama.cpp was built for", ", ".join(machine["gpu_kinds"]) or "none"),
        ("steps that round alike", f"up to {profile['largest_invariant_step']} tokens"),
        ("system", f"{machine['system']}, Python {machine['python']}"),
        (
            "versions",
            f"edgespec {machine['edgespec']}, llama-cpp-python {machine['llama_cpp_python']}",
        ),
    ]
    return table_of(("what", "value"), rows)


# -- plots ---------------------------------------------------------------------------------


def _draw_components(axes: Any, memory: dict[str, Any]) -> None:
    names = list(memory["predicted"])[::-1]
    places = range(len(names))
    predicted = [memory["predicted"][name] / MEBIBYTE for name in names]
    real = [memory["allocated"].get(name, 0) / MEBIBYTE for name in names]
    axes.barh([place + 0.2 for place in places], predicted, 0.38, color=BLUE, label="predicted")
    axes.barh([place - 0.2 for place in places], real, 0.38, color=ORANGE, label="allocated")
    axes.set_yticks(list(places), [name.replace("_", " ") for name in names])
    axes.set_xlabel("MiB")
    axes.set_xlim(right=1.25 * max([*predicted, *real]))
    axes.legend(loc="center right")


def _draw_steps(axes: Any, profile: dict[str, Any]) -> None:
    colors = (BLUE, ORANGE, GREEN, GREY)
    for curve, color in zip(profile["step_ms"], colors, strict=False):
        sizes = [int(size) for size in curve["ms"]]
        label = f"{curve['depth']} tokens of context"
        axes.plot(
            sizes, list(curve["ms"].values()), marker="o", markersize=3.5, color=color, label=label
        )
    axes.axvline(profile["draft_max"] + 1, color=GREY, linestyle=":", linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the step")
    axes.set_ylabel("ms")
    axes.legend(loc="upper left")


def _draw_frontier(axes: Any, profile: dict[str, Any]) -> None:
    points = [point for point in profile["frontier"] if point["tokens_per_s"] is not None]
    budgets = [point["budget_bytes"] / MEBIBYTE for point in points]
    speeds = [point["tokens_per_s"] for point in points]
    axes.step(budgets, speeds, where="post", color=BLUE, linewidth=1.8)
    contexts = [point["context_size"] for point in points]
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    right.step(budgets, contexts, where="post", color=ORANGE, linewidth=1.2, linestyle="--")
    right.set_ylim(0, 1.2 * max(contexts, default=1))
    right.set_ylabel("tokens of context (dashed)")
    axes.set_ylim(0, 1.2 * max(speeds, default=1.0))
    axes.set_xlabel("budget in MiB")
    axes.set_ylabel("tokens/s")


def _draw_users(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    places = range(len(rows))
    speeds = [row["tokens_per_s"] for row in rows]
    each = [row["tokens_per_s"] / row["users"] for row in rows]
    axes.bar([place - 0.2 for place in places], speeds, 0.38, color=BLUE, label="of all users")
    axes.bar([place + 0.2 for place in places], each, 0.38, color=ORANGE, label="of each user")
    axes.set_xticks(list(places), [str(row["users"]) for row in rows])
    axes.set_xlabel("users answered at once")
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.2)
    axes.legend(loc="upper left")


def _draw_switching(axes: Any, found: dict[str, Any]) -> None:
    points = found["points"]
    speeds = [point["tokens_per_s"] for point in points]
    axes.plot(speeds, [100 * p["quality"] for p in points], color=BLUE, marker="o", markersize=4)
    for point in points[:: max(1, len(points) // 5)]:
        place = (point["tokens_per_s"], 100 * point["quality"])
        axes.annotate(
            f"{point['large_share']:.0%}", place, (6, 4), textcoords="offset points", fontsize=8
        )
    lossless = found["lossless"]["drafting_tokens_per_s"]
    axes.plot([lossless], [100], color=ORANGE, marker="s", linestyle="", label="drafting: lossless")
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
        axes.bar(places, values, width, color=(GREY, BLUE, ORANGE)[number % 3], label=name)
    axes.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.2)
    axes.legend(loc="upper right", ncols=len(speeds))
