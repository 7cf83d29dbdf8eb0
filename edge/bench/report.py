"""The document of `profile` as a page, predicted beside measured.

What a page looks like is `edgespec.memory.report.page`'s; here is what stands on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.memory.bytes.config import MEBIBYTE
from edgespec.memory.device.neighbours import BUSY
from edgespec.memory.report.page import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    figure_of,
    page_of,
    require_plots,
    section_of,
    size_of,
    table_of,
    tiles_of,
    timeline_of,
)

if TYPE_CHECKING:
    from markupsafe import Markup

Row = Mapping[str, Any]


def render_profile(profile: dict[str, Any]) -> str:
    """The page of a profile. Raises MissingDependencyError where matplotlib is not installed."""
    require_plots()
    model, memory, speeds = profile["model"], profile["memory"], profile["speed"]
    components = [
        (name.replace("_", " "), size_of(size), size_of(memory["allocated"].get(name)))
        for name, size in memory["predicted"].items()
    ]
    predicted, measured = (
        size_of(memory[f"{kind}_peak_bytes"]) for kind in ("predicted", "measured")
    )
    components.append(("peak of the process", predicted, measured))
    sections = [
        tiles_of(_profile_tiles(profile)),
        section_of(
            "Memory by component",
            "What the plan allowed for and what llama.cpp says it allocated; where that is "
            "nothing (-), it is part of the peak.",
            figure_of(_draw_components, memory),
            table_of(("component", "predicted", "measured"), components, numbers=2),
        ),
        section_of(
            "Memory over time",
            "Resident memory of the whole process. The dashed line is the predicted peak.",
            timeline_of(memory),
        ),
        section_of(
            "Step times",
            "What one step of the model costs by the number of tokens in it. Verifying a draft is "
            "one such step; the mark shows the largest one planned.",
            figure_of(_draw_steps, profile)
            if len(profile["step_ms"][0]["ms"]) > 1
            else table_of(
                ("tokens of context", "ms of a step over one token"),
                [(str(one["depth"]), f"{one['ms']['1']:.1f}") for one in profile["step_ms"]],
                numbers=1,
            ),
        ),
        section_of(
            "Speed against budget",
            "Predicted tokens per second of the best plan for each budget, and its context. Below "
            "the left end nothing fits.",
            figure_of(_draw_frontier, profile),
        ),
        section_of(
            "Speed by task",
            "Measured, the same answers plain and with drafts, in turns."
            if len(speeds) > 1
            else "Measured, without drafts.",
            figure_of(_draw_tasks, speeds),
            _speed_table(speeds),
        ),
        section_of(
            "The plan",
            "",
            table_of(
                ("setting", "value", "why"),
                [
                    (name.replace("_", " "), str(choice["value"]), str(choice["reason"]))
                    for name, choice in profile["plan"].items()
                ],
            ),
        ),
        section_of("Machine and versions", "", _profiled_machine(profile)),
    ]
    return page_of(f"{model['name']} ({model['type']})", model["file"], "memory profile", sections)


def _profile_tiles(profile: dict[str, Any]) -> list[tuple[str, str, str]]:
    memory, rows, prefill = profile["memory"], profile["speed"], profile["prefill"]
    fastest = max(rows, key=lambda row: row["measured_tokens_per_s"])
    speed, plain = fastest["measured_tokens_per_s"], rows[0]["measured_tokens_per_s"]
    planned = f"{size_of(memory['predicted_peak_bytes'])} predicted"
    planned += f", {size_of(memory['limit_bytes'])} allowed"
    length = f"acceptance length {fastest['acceptance_length']:.2f}"
    predicted = f"{fastest['predicted_tokens_per_s']:.1f} predicted"
    reading = f"{prefill['tokens_per_s']:.0f} tokens/s"
    return [
        ("peak memory", size_of(memory["measured_peak_bytes"]), planned),
        ("speed", f"{speed:.1f} tokens/s", predicted),
        ("gain by drafts", f"{speed / plain:.2f}x", length),
        ("reading prompts", reading, f"in batches of {prefill['batch_size']}"),
    ]


def _speed_table(speeds: Sequence[Row]) -> Markup:
    head = ["drafter", "predicted tokens/s", "measured tokens/s", "acceptance length"]
    rows = [
        [
            row["drafter"],
            f"{row['predicted_tokens_per_s']:.1f}",
            f"{row['measured_tokens_per_s']:.1f}",
            f"{row['acceptance_length']:.2f}",
        ]
        for row in speeds
    ]
    if all(row.get("j_per_token") is not None for row in speeds):
        head.append(f"J a token ({speeds[0]['energy_source']})")
        for cells, row in zip(rows, speeds, strict=True):
            cells.append(f"{row['j_per_token']:.3g}")
    return table_of(head, rows, numbers=len(head) - 1)


def _profiled_machine(profile: dict[str, Any]) -> Markup:
    """When and where it was measured, and what else the machine did."""
    machine, bandwidth, busy = profile["machine"], profile["bandwidth"], profile["busy_neighbours"]
    others = "computed nothing that counts"
    if busy > BUSY:
        others = f"kept {busy:.1f} cores busy: an idle machine is faster, and ratios differ"
    versions = f"edgespec {machine['edgespec']}, llama-cpp-python {machine['llama_cpp_python']}"
    used = f"one-token steps read {bandwidth['used_bytes_per_s'] / 1e9:.1f} GB/s of weights"
    if moved := bandwidth.get("memory_bytes_per_s"):
        used = f"{moved / 1e9:.1f} GB/s; {used}"
    size = profile["largest_invariant_step"]
    free = f"{size_of(machine['memory_bytes'])}, {size_of(machine['available_bytes'])} free"
    rows = [
        ("measured", machine["measured_at"]),
        ("other programs", others),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("system", f"{machine['system']}, Python {machine['python']}"),
        ("versions", versions),
        ("instruction sets", ", ".join(machine["features"]) or "not told"),
        ("memory", free),
        ("bandwidth", used),
        ("GPUs llama.cpp was built for", ", ".join(machine["gpu_kinds"]) or "none"),
        (
            "steps that round alike",
            f"up to {size} tokens" if size > 1 else "none of several tokens",
        ),
    ]
    return table_of(("what", "value"), rows)


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
    for curve, color in zip(profile["step_ms"], (BLUE, ORANGE, GREEN, GREY), strict=False):
        sizes, label = [int(size) for size in curve["ms"]], f"{curve['depth']} tokens of context"
        times = list(curve["ms"].values())
        axes.plot(sizes, times, marker="o", markersize=3.5, color=color, label=label)
    axes.axvline(profile["draft_max"] + 1, color=GREY, linestyle=":", linewidth=1.2)
    axes.margins(y=0.15)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the step")
    axes.set_ylabel("ms")
    axes.legend(loc="upper left")


def _draw_frontier(axes: Any, profile: dict[str, Any]) -> None:
    points = [point for point in profile["frontier"] if point["tokens_per_s"] is not None]
    budgets = [point["budget_bytes"] / MEBIBYTE for point in points]
    speeds = [point["tokens_per_s"] for point in points]
    contexts = [point["context_size"] for point in points]
    axes.step(budgets, speeds, where="post", color=BLUE, linewidth=1.8, label="tokens/s")
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    right.step(budgets, contexts, where="post", color=ORANGE, linewidth=1.2, linestyle="--")
    right.set_ylim(0, 1.2 * max(contexts, default=1))
    right.set_ylabel("tokens of context (dashed)")
    axes.set_ylim(0, 1.2 * max(speeds, default=1.0))
    axes.set_xlabel("budget in MiB")
    axes.set_ylabel("tokens/s")
    axes.plot([], [], color=ORANGE, linewidth=1.2, linestyle="--", label="tokens of context")
    axes.legend(loc="lower right")


def _draw_tasks(axes: Any, speeds: Sequence[Row]) -> None:
    labels, width = list(speeds[0]["by_task"]), 0.8 / len(speeds)
    for number, (row, color) in enumerate(zip(speeds, (GREY, BLUE, ORANGE), strict=False)):
        shift = (number - (len(speeds) - 1) / 2) * width
        places = [place + shift for place in range(len(labels))]
        axes.bar(places, list(row["by_task"].values()), width, color=color, label=row["drafter"])
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
    axes.margins(y=0.2)
    axes.set_ylabel("tokens/s")
    axes.legend(loc="upper right", ncols=len(speeds))
