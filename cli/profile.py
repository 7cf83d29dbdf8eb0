"""`edgespec profile`: measure this device with a model, beside what was predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from edgespec.cli import options
from edgespec.cli.bench import warn_if_busy
from edgespec.cli.options import OUTPUT
from edgespec.cli.render import Progress, note, paragraph, printable, size_text, table
from edgespec.cli.start import cancel_on_interrupt, end_if_interrupted, until_set
from edgespec.memory.plan.options import DRAFTS
from edgespec.option_fields import option


def profile(
    model: options.ModelOptions,
    plan_options: options.PlanOptions,
    html: Path | None = option(None, "Write a report as a web page to this file.", panel=OUTPUT),
    large_share: float | None = option(
        None, "With --switch: share of tokens by the large model; 0.4 is 40%.", panel=DRAFTS
    ),
    quality: float | None = option(
        None, "With --switch: part of the disagreement to remove; 0.9 is 90%.", panel=DRAFTS
    ),
    as_json: options.JsonOption = False,
) -> None:
    """Measure step times, memory and speed. Example: edgespec profile model.gguf --html out.html

    With --switch SMALL: set the thresholds at which two models take turns, for a wanted share of
    tokens by the large one (--large-share, 0.4 unless said) or a wanted --quality, and keep them.
    Ctrl-C shows what is measured of one model.
    """
    from edgespec.models.onnx.folder import read_model

    if large_share is not None and quality is not None:
        raise typer.BadParameter("give --large-share or --quality, not both")
    is_pair = "switch" in plan_options.given
    if not is_pair and (large_share is not None or quality is not None):
        raise typer.BadParameter("--large-share and --quality belong to --switch")
    if is_pair and html is not None:
        raise typer.BadParameter("--html draws a profile of one model, and no pair")
    if html is not None:  # a missing library or folder is found before minutes are spent
        from edgespec.bench.report import render_profile
        from edgespec.memory.report.page import require_place, require_plots, write_page

        require_plots()
        require_place(html)
    spec = read_model(model.path(plan_options))
    request = plan_options.request(is_plain_greedy=True)
    measured: dict[str, Any]
    with Progress(has_lines=True) as line:
        progress = until_set(cancel_on_interrupt(), line)
        if request.switch is None:
            from edgespec.bench.profiling import profile as measure

            measured = measure(spec, request, progress=progress)
        else:
            from edgespec.bench.switch_calibration import calibrate

            measured = calibrate(
                spec, request, large_share=large_share, quality=quality, progress=progress
            )
    if request.switch is None:
        warn_if_busy(measured["busy_neighbours"])
    text = _text if request.switch is None else _switch_text
    # First what took time: a file that cannot be written must not cost it.
    print(json.dumps(measured) if as_json else text(measured), flush=True)
    if html is not None and measured.get("speed"):  # none before the first answer
        write_page(render_profile(measured), html)
        note(f"report: {html}")
    if request.switch is None:
        end_if_interrupted(measured)


def _text(measured: dict[str, Any]) -> str:
    model, memory = measured["model"], measured["memory"]
    title = f"{printable(model['name'])} ({model['type']}) on {measured['machine']['cpu']}"
    curves = measured["step_ms"]
    steps: list[tuple[str, ...]]
    steps = [("tokens", *(f"after {curve['depth']}" for curve in curves), "")]
    for size in curves[0]["ms"]:
        times = (f"{curve['ms'][size]:.1f}" for curve in curves)
        chosen = "<- largest planned" if int(size) == measured["draft_max"] + 1 else ""
        steps.append((str(size), *times, chosen))
    rows = []
    for name, predicted in memory["predicted"].items():
        real = memory["allocated"].get(name)
        told = size_text(real) if real is not None else "in the peak"
        rows.append((name.replace("_", " "), size_text(predicted), told))
    peaks = [size_text(memory[f"{kind}_peak_bytes"]) for kind in ("predicted", "measured")]
    rows.append(("peak of the process", peaks[0], f"{peaks[1]} measured"))
    parts = [
        paragraph(title),
        "step times in ms by tokens in a step\n" + table(steps),
        "memory: planned and allocated\n" + table(rows),
    ]
    speeds = [
        (
            row["drafter"],
            f"{row['predicted_tokens_per_s']:.1f}",
            f"{row['measured_tokens_per_s']:.1f}, acceptance length "
            f"{row['acceptance_length']:.2f} (plain is 1.00)"
            + ("" if (each := row["j_per_token"]) is None else f", {each:.3g} J a token"),
        )
        for row in measured["speed"]
    ]
    if speeds:
        parts.append(paragraph("tokens per second: predicted and measured") + "\n" + table(speeds))
    return "\n\n".join((*parts, table(_fact_rows(measured))))


def _nats(threshold: float | None, if_infinite: str = "never") -> str:
    if threshold is None:
        return if_infinite
    return f"{threshold:.2f} nats" if threshold >= 0.0 else "never"


def _switch_text(found: dict[str, Any]) -> str:
    policy, expected = found["policy"], found["expected"]
    down, window = policy["down_nats"], policy["window"]
    asked = "after every token"
    if down is not None:
        asked = f"where the large one's entropy is at most {_nats(down)}"
    way_down = f"the small one is asked {asked}"
    if down is not None and down < 0.0:
        way_down = "the small one is never asked"
    head = ("large model", "quality", "agreement", "tokens/s", "up at", "down at")
    rows = [head]
    for point in found["points"]:
        rows.append(
            (
                f"{point['large_share']:.0%}",
                f"{point['quality']:.0%}",
                f"{point['agreement']:.1%}",
                f"{point['tokens_per_s']:.1f}",
                _nats(point["up_nats"]),
                _nats(point["down_nats"], "always"),
            )
        )
    chosen = [
        ("up", f"the large model writes from {policy['up_nats']:.2f} nats on"),
        ("down", way_down),
        ("window", f"{window} token{'s' * (window != 1)}, stays of {policy['min_stay']} and more"),
        ("large model", f"{expected['large_share']:.0%} of the tokens expected"),
        (
            "quality",
            f"{expected['quality']:.0%} of the disagreement removed: {expected['agreement']:.1%} "
            f"of the tokens are the large model's best, {found['alone']['small']['agreement']:.1%} "
            "with the small one alone",
        ),
        (
            "speed",
            f"{expected['tokens_per_s']:.1f} tokens/s expected without drafts, "
            f"{found['alone']['large']['tokens_per_s']:.1f} with the large model alone, "
            f"{found['lossless']['drafting_tokens_per_s']:.1f} if the small one drafts (lossless)",
        ),
    ]
    title = f"{printable(found['large'])} and {printable(found['small'])} in turns"
    return "\n\n".join(
        (paragraph(title), "expected by threshold\n" + table(rows), "kept\n" + table(chosen))
    )


def _fact_rows(measured: dict[str, Any]) -> list[tuple[str, ...]]:
    bandwidth, prefill = measured["bandwidth"], measured["prefill"]
    used = f"{bandwidth['used_bytes_per_s'] / 1e9:.1f} GB/s of weights"
    if moved := bandwidth.get("memory_bytes_per_s"):
        share = bandwidth["used_bytes_per_s"] / moved
        used += (
            f", {share:.0%} of what memory moves; the ceiling is "
            f"{bandwidth['ceiling_tokens_per_s']:.1f} tokens/s plain"
        )
    rows: list[tuple[str, ...]] = [("bandwidth", used)]
    if prefill is not None:
        reading = f"{prefill['tokens_per_s']:.0f} tokens/s in batches of {prefill['batch_size']}"
        rows.insert(0, ("prompts", reading))
    if (alike := measured["largest_invariant_step"]) is not None:
        rows.append(("--exact", f"steps of up to {alike} tokens round like single ones"))
    return rows
