"""`edgespec bench`: plain against speculative decoding, by task, in turns, in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.cli import options
from edgespec.cli.options import PROMPT
from edgespec.cli.render import Progress, note, paragraph, printable, size_text, table
from edgespec.cli.start import cancel_on_interrupt, end_if_interrupted, until_set
from edgespec.option_fields import option

_SHORT = 9  # letters of a name that fits over a column


def warn_if_busy(cores: float) -> None:
    """Say that other programs computed while something was measured."""
    from edgespec.memory.device.neighbours import BUSY

    if cores > BUSY:
        note(
            f"warning: other programs kept {cores:.1f} cores busy meanwhile; an idle machine is "
            "faster, and ratios differ"
        )


def bench(
    model: options.ModelOptions,
    settings: options.SettingsInTurns,
    prompts: Path | None = option(
        None,
        "Prompts as JSON lines, like Spec-Bench's. Default: twenty built-in ones.",
        panel=PROMPT,
    ),
    per_task: int | None = option(
        None, "Use only this many prompts of each task.", panel=PROMPT, low=1
    ),
    max_tokens: int = option(128, "Most tokens of an answer.", also="-n", panel=PROMPT, low=2),
    repeats: int = option(1, "Answer all prompts this many times; medians count.", low=1),
    as_json: options.JsonOption = False,
) -> None:
    """Compare speeds by task. Example: edgespec bench model.gguf --drafter plain --drafter suffix

    --drafter may be given several times: plain and auto if none is named. One other option from
    --budget on may be given twice: the model is loaded with both. All answer the same prompts in
    turns, and the first one is what others are compared with. Ctrl-C shows what is measured.
    """
    from edgespec.bench.measure import bench as measure
    from edgespec.measure.prompts import PROMPTS, first_of_each_task, read_prompts
    from edgespec.models.onnx.folder import read_model
    from edgespec.setup.planning import most_prompt_tokens

    chosen = list(PROMPTS) if prompts is None else read_prompts(prompts)
    if per_task is not None:
        chosen = first_of_each_task(chosen, per_task)
    spec = read_model(model.path(settings.each[0][1]))
    longest = most_prompt_tokens(spec, (prompt.text for prompt in chosen))
    sizes: dict[str, Any] = {"prompt_tokens": longest, "max_tokens": max_tokens}
    requests = [(label, one.request(**sizes, is_plain_greedy=True)) for label, one in settings.each]
    with Progress(has_lines=True) as progress:
        measured = measure(
            spec,
            requests,
            [options.drafters_of(name) for name in settings.drafters or ("none", "auto")],
            chosen,
            max_tokens=max_tokens,
            repeats=repeats,
            progress=until_set(cancel_on_interrupt(), progress),
        )
    warn_if_busy(measured["busy_neighbours"])
    print(json.dumps(measured) if as_json else bench_text(measured), flush=True)
    end_if_interrupted(measured)


# -- text ----------------------------------------------------------------------------------


def bench_text(measured: dict[str, Any]) -> str:
    """The document as tables: what could be reached first, then every variant."""
    variants = measured["variants"]
    model, machine, settings = measured["model"], measured["machine"], measured["settings"]
    title = f"{printable(model['name'])} ({model['type']}) on {machine['cpu']}"
    asked = (
        f"{settings['prompts']} prompts of {settings['tasks']} tasks, greedy, at most "
        f"{settings['max_tokens']} tokens each, answered in turns"
    )
    if settings["repeats"] > 1:
        asked += f", {settings['repeats']} times"
    ceiling = measured["ceiling"]
    moved = (
        f"{ceiling['tokens_per_s']:.1f} tokens/s plain: {ceiling['memory_bytes_per_s'] / 1e9:.1f} "
        f"GB/s over {size_text(ceiling['bytes_per_token'])} of weights a token"
    )
    rows = [("ceiling", moved)]
    if (plain := ceiling.get("plain_tokens_per_s")) is not None:
        share = plain / ceiling["tokens_per_s"]
        rows.append(("plain", f"{plain:.1f} tokens/s, {share:.0%} of the ceiling"))
    parts = [paragraph(title), paragraph(asked), table(rows)]
    parts += [_variant_table(one, variants[0]) for one in variants[1:] or variants]
    parts += [paragraph(text) for one in variants if (text := _remarks(one))]
    if (energy := measured["energy"])["source"] is not None:
        each = (
            f"{one['name']} {one['overall']['j_per_token']:.3g}"
            for one in variants
            if one["overall"]["j_per_token"] is not None
        )
        parts.append(
            paragraph(
                f"J a token: {', '.join(each)} ({energy['source']}, {energy['idle_w']:.1f} W idle)"
            )
        )
    rows = []
    for load in measured["loads"]:
        peak, planned = (load["memory"][f"{kind}_peak_bytes"] for kind in ("measured", "predicted"))
        label = f"{load['settings']}: " if load["settings"] else ""
        rows.append(("memory", f"{label}peak {size_text(peak)}, planned {size_text(planned)}"))
    return "\n\n".join([*parts, table(rows)])


def _variant_table(variant: dict[str, Any], baseline: dict[str, Any]) -> str:
    """One variant beside the baseline, a line for every task."""
    from edgespec.bench.summary import table_rows

    names = [baseline["name"], variant["name"]]
    heads = [
        name if len(name) <= _SHORT else letter for name, letter in zip(names, "AB", strict=True)
    ]
    told = [
        name if name == head else f"{name} ({head})"
        for name, head in zip(names, heads, strict=True)
    ]
    rows = [("task", *heads, "ratio", "95%", "length", "start", "same")]
    rows += table_rows(variant, baseline)
    if variant is baseline:
        return f"{variant['name']}, tokens/s\n{table(rows)}"
    return paragraph(f"{told[1]} against {told[0]}, tokens/s") + "\n" + table(rows)


def _remarks(variant: dict[str, Any]) -> str:
    """What a table has no room for: where drafts came from, what was spent, what differs."""
    from edgespec.bench.summary import ratio_text

    overall = variant["overall"]
    if not overall["drafted_tokens"]:
        return ""
    sources = (
        f"{overall['accepted_by'].get(name, 0)} of {drafted} by {name}"
        for name, drafted in overall["drafted_by"].items()
    )
    text = (
        f"{variant['name']}: drafts accepted {', '.join(sources)}; acceptance length "
        f"{overall['acceptance_length']:.2f} (plain is 1.00), {overall['host_share']:.0%} of the "
        f"time outside the models; end to end {overall['end_to_end_tokens_per_s']:.1f} tokens/s, "
        + ratio_text(overall["end_to_end_ratio"])
    )
    if parted := overall["prompts"] - overall["identical"]:
        text += (
            f"; {parted} answers part from the first drafter's, {overall['unexplained']} of them "
            "where rounding does not explain it"
        )
    return text
