"""`edgespec draft`: make and inspect drafters for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from edgespec.cli import options
from edgespec.cli.command import Commands
from edgespec.cli.options import OUTPUT, PROMPT
from edgespec.cli.render import Progress, note, printable, size_text, table
from edgespec.errors import UnsupportedError
from edgespec.option_fields import argument, option
from edgespec.paths import expanded

_KINDS = ("auto", "exit", "eagle3")
# What an i + 1st draft of a head trained for an hour adds to a round of an answer (SmolLM2 135M, 48
# prompts), and a draft's step in plain ones, the first one twice that.
_USUAL_GAINS, _USUAL_STEP = (0.56, 0.27, 0.11, 0.07), 0.05
_DRAFTS = (1, 2, 4, 8)  # in a round, that are told of

draft_app = Commands("Make and inspect drafters for a model.")


@draft_app.add()
def train(
    model: str | None = argument("GGUF file. Default: embedded.", panel=PROMPT),
    output: Path | None = option(
        None,
        "File to write. Default: of a head eagle3-MODEL beside the model, where it is found; of an "
        "exit drafter.gguf.",
        also="-o",
        panel=OUTPUT,
    ),
    kind: str = option(
        "auto",
        "eagle3: a head that reads the model's states; exit: its first blocks; auto: a head where "
        "the model has one.",
        choices=_KINDS,
    ),
    quick: bool = option(False, "Take 12 minutes, not 120."),
    minutes: float | None = option(None, "Most minutes to take. Default: 120.", low=0.01),
    data: Path | None = option(None, "More prompts to answer: lines of text or JSON."),
    begin: Path | None = option(None, "Train this earlier drafter further.", called="--from"),
    exit_layer: int | None = option(None, "First blocks to keep. Default: a sixth of them.", low=1),
    head_size: int | None = option(
        None, "Most frequent tokens it may draft. Default: 4096, of a head 8192.", low=1
    ),
    as_json: options.JsonOption = False,
) -> None:
    """Train a drafter for a model. Example: edgespec draft train model.gguf -o drafter.gguf

    The model writes the text it is trained on. Stopped with Ctrl-C while training, the best so far
    is written; the same command goes on where it was stopped.
    """
    from edgespec.exits.training import (
        FULL_MINUTES,
        QUICK_MINUTES,
        best_kind,
        output_of,
        train_drafter,
    )
    from edgespec.memory.plan.plan import Request
    from edgespec.memory.times import predicted_speedup
    from edgespec.models.spec import read_model_spec
    from edgespec.quantize.convert import check_target
    from edgespec.setup.planning import make_run_plan
    from edgespec.setup.stored import stored_curve

    if kind == "eagle3" and exit_layer is not None:
        raise UnsupportedError(
            f"--exit-layer {exit_layer} is for early exits, and a head has none",
            hint="leave it out, or use --kind exit",
        )
    spec = read_model_spec(options.model_path(model))
    kind = kind if kind != "auto" else "exit" if exit_layer is not None else best_kind(spec, begin)
    output = output_of(spec, kind) if output is None else output
    check_target(output, spec.files)
    minutes = minutes or (QUICK_MINUTES if quick else FULL_MINUTES)
    note(f"{kind}, in {minutes:g} minutes of the processors' time, half of it to write text")
    if kind == "eagle3":  # by the step times of this device, where they are known
        curve = stored_curve(spec, make_run_plan(spec, Request()))
        if curve is None:
            note("step times are not known yet: `edgespec profile` tells what it may bring")
        else:
            step_ms = _USUAL_STEP * curve.base[1]
            speed, _ = predicted_speedup(_USUAL_GAINS, curve.base, step_ms, 2 * step_ms)
            note(f"about {speed:.2f}x of plain decoding may be expected where text does not repeat")
    progress = Progress()

    def say(text: str) -> None:
        progress.clear()
        note(text)

    with progress:
        report = train_drafter(
            spec,
            output,
            kind,
            minutes=minutes,
            exit_layer=exit_layer,
            head_size=head_size,
            data=data,
            begin=begin,
            progress=progress,
            note=say,
        )
    note(f"written: {output}")
    found = make_run_plan(spec, Request(draft_model=output)).choices
    for choice in (one for one in found if one.name in ("head", "early_exit")):
        note(f"{choice.name} {choice.value}: {choice.reason}")
    print(json.dumps(report) if as_json else printable(_training_text(report)))


@draft_app.add()
def info(
    drafter: Path = argument("A drafter's GGUF file.", default=...),
    as_json: options.JsonOption = False,
) -> None:
    """Show what a drafter file was made from, and how."""
    from edgespec.exits.files import read_head
    from edgespec.models.early_exit import read_exit
    from edgespec.models.spec import read_model_spec

    path = expanded(drafter)
    if (head := read_head(path)) is not None:
        report, ids, file_bytes = head.report, len(head.token_ids), head.file.file_bytes
        made = head.target_name, head.target_hash
        reads: dict[str, Any] = {"layers": list(head.layers)}
        shown = ("reads", f"inputs of the layers {', '.join(map(str, head.layers))}")
    else:
        spec = read_model_spec(path)
        found = read_exit(spec)
        if found is None:
            raise UnsupportedError(
                f"{drafter} is no drafter that edgespec made",
                hint="`edgespec models show` shows other models",
            )
        report, ids, file_bytes = found.report, len(found.token_ids), spec.file_bytes
        made = found.target_name, found.target_hash
        reads = {"exit_layer": found.exit_layer}
        shown = ("exit", f"after block {found.exit_layer}, and one block of its own")
    if as_json:
        facts = {"target": made[0], "target_hash": made[1], **reads, "head_size": ids}
        print(json.dumps({**facts, "file_bytes": file_bytes, "report": report}))
        return
    rows = [
        ("drafts for", f"{made[0]} ({made[1]})"),
        shown,
        ("head", f"{ids} tokens"),
        ("file", size_text(file_bytes)),
    ]
    text = f"\n\n{_training_text(report)}" if "gains" in report else ""
    print(printable(f"{table(rows)}{text}"))


def _training_text(report: Mapping[str, Any]) -> str:
    """How well a drafter does: on text held out, or on what its gains were measured with later."""
    lengths = list(accumulate(report["gains"], initial=1.0))
    measured = f" of {report['gains_of']}" if "gains_of" in report else ""
    rows = [(f"drafts in every round{measured}", "tokens/round")]
    rows += [(str(count), f"{lengths[count]:.2f}") for count in _DRAFTS if count < len(lengths)]
    loss = f"loss {report['loss']:.3f}, " if "loss" in report else ""
    return (
        f"{report.get('text_tokens', 0)} tokens of text, on those held out: {loss}"
        f"agreement {report.get('agreement', 0.0):.3f}\n\n{table(rows)}"
    )
