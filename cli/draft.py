"""`edgespec draft`: make and inspect drafters for a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.command import Command, Group
from edgespec.cli.render import Progress, note, printable, size_text, table
from edgespec.errors import UnsupportedError
from edgespec.paths import expanded

if TYPE_CHECKING:
    from edgespec.models.exits.eagle import HeadInfo
    from edgespec.models.spec import ModelSpec

_KINDS = ("exit", "eagle3")
_DRAFTS = (1, 2, 4, 8)  # in a round, that are told of

draft_app = typer.Typer(
    cls=Group,
    help="Make and inspect drafters for a model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@draft_app.command(cls=Command)
def train(
    model: Annotated[str | None, typer.Argument(help="GGUF file. Default: embedded.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "drafter.gguf"
    ),
    kind: Annotated[
        str, typer.Option("--kind", help="exit, or eagle3: a head that reads the model's states.")
    ] = "exit",
    quick: Annotated[bool, typer.Option("--quick", help="Take 12 minutes, not 120.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=0.01, help="Most minutes to take. Default: 120."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="More prompts to answer: lines of text or JSON."),
    ] = None,
    begin: Annotated[
        Path | None, typer.Option("--from", help="Train this earlier drafter further.")
    ] = None,
    exit_layer: Annotated[
        int | None,
        typer.Option("--exit-layer", min=1, help="First blocks to keep. Default: the best found."),
    ] = None,
    head_size: Annotated[
        int | None,
        typer.Option(
            "--head-size", min=1, help="Most frequent tokens it may draft. Default: the best found."
        ),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Train a drafter for a model. Example: edgespec draft train model.gguf -o drafter.gguf

    The model writes the text it is trained on. Stopped with Ctrl-C while training, the best so far
    is written; the same command goes on where it was stopped.
    """
    from edgespec.exits.heads import train_head
    from edgespec.exits.texts import FULL_MINUTES, QUICK_MINUTES
    from edgespec.exits.training import train_draft
    from edgespec.models.spec import read_model_spec

    options.one_of("--kind", kind, _KINDS)
    make: Callable[..., dict[str, Any]] = train_head
    if kind == "exit":
        make = partial(train_draft, exit_layer=exit_layer)
    elif exit_layer is not None:
        raise UnsupportedError(
            f"--exit-layer {exit_layer} is for early exits, and a head has none",
            hint="leave it out, or use --kind exit",
        )
    spec = read_model_spec(options.model_path(model))
    with _writing(output, spec) as (progress, say):
        report = make(
            spec,
            output,
            minutes=minutes or (QUICK_MINUTES if quick else FULL_MINUTES),
            head_size=head_size,
            data=data,
            begin=begin,
            progress=progress,
            note=say,
        )
    text = _training_text if kind == "exit" else _head_text
    print(json.dumps(report) if as_json else printable(text(report)))


@contextmanager
def _writing(output: Path, spec: ModelSpec) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """Progress and notes while a drafter of `spec` is made."""
    from edgespec.quantize.convert import check_target

    check_target(output, spec.files)
    progress = Progress()

    def say(text: str) -> None:
        progress.clear()
        note(text)

    try:
        yield progress, say
    finally:
        progress.clear()
    note(f"written: {output}")


@draft_app.command(cls=Command)
def info(
    drafter: Annotated[Path, typer.Argument(help="A drafter's GGUF file.")],
    as_json: options.JsonOption = False,
) -> None:
    """Show what a drafter file was made from, and how."""
    from edgespec.models.exits.eagle import read_head
    from edgespec.models.exits.early_exit import read_exit
    from edgespec.models.spec import read_model_spec

    head = read_head(expanded(drafter))
    if head is not None:
        print(json.dumps(_head_facts(head)) if as_json else printable(_head_shown(head)))
        return
    spec = read_model_spec(expanded(drafter))
    found = read_exit(spec)
    if found is None:
        raise UnsupportedError(
            f"{drafter} is no drafter that edgespec made",
            hint="`edgespec models show` shows other models",
        )
    facts = {
        "target": found.target_name,
        "target_hash": found.target_hash,
        "exit_layer": found.exit_layer,
        "head_size": len(found.token_ids),
        "file_bytes": spec.file_bytes,
    }
    if as_json:
        print(json.dumps({**facts, "report": found.report}))
        return
    rows = [
        ("drafts for", f"{found.target_name} ({found.target_hash})"),
        ("exit", f"after block {found.exit_layer}, and one block of its own"),
        ("head", f"{len(found.token_ids)} tokens"),
        ("file", size_text(spec.file_bytes)),
    ]
    print(printable(table(rows)))
    if "result" in found.report:
        print(printable(_training_text(found.report)))


def _head_facts(head: HeadInfo) -> dict[str, Any]:
    return {
        "target": head.target_name,
        "target_hash": head.target_hash,
        "layers": list(head.layers),
        "head_size": len(head.token_ids),
        "file_bytes": head.file.file_bytes,
        "report": head.report,
    }


def _head_shown(head: HeadInfo) -> str:
    rows = [
        ("drafts for", f"{head.target_name} ({head.target_hash})"),
        ("reads", f"inputs of the layers {', '.join(map(str, head.layers))}"),
        ("head", f"{len(head.token_ids)} tokens"),
        ("file", size_text(head.file.file_bytes)),
    ]
    told = f"\n\n{_head_text(head.report)}" if "gains" in head.report else ""
    return f"{table(rows)}{told}"


def _training_text(report: Mapping[str, Any]) -> str:
    """What was compared, and what was made; the numbers of the latter are of text held out."""
    is_trained = "loss" in report
    first, mark = ("exit", " (trained)") if is_trained else ("blocks", " (written)")
    head = (first, "head", "agreement", "tokens/round", "step", "predicted speed")
    rows = [head, *(_row(candidate, "") for candidate in report["compared"])]
    rows.append(_row(report["result"], mark))
    text = f"{report['text_tokens']} tokens of text"
    if is_trained:
        text += f", loss {report['loss']:.3f} on those held out"
    return f"{text}\n\n{table(rows)}"


def _head_text(report: Mapping[str, Any]) -> str:
    """How well a head does: on text held out, or on what its gains were measured with later."""
    lengths = list(accumulate(report["gains"], initial=1.0))
    measured = f" of {report['gains_of']}" if "gains_of" in report else ""
    rows = [(f"drafts in every round{measured}", "tokens/round")]
    rows += [(str(count), f"{lengths[count]:.2f}") for count in _DRAFTS if count < len(lengths)]
    return (
        f"{report['text_tokens']} tokens of text, on those held out: loss {report['loss']:.3f}, "
        f"agreement {report['agreement']:.3f}\n\n{table(rows)}"
    )


def _row(candidate: dict[str, Any], mark: str) -> tuple[str, ...]:
    return (
        str(candidate["exit_layer"]),
        str(candidate["head_size"]),
        f"{candidate['agreement']:.3f}",
        f"{candidate['acceptance_length']:.2f}",
        f"{candidate['draft_step_ms']:.2f} ms",
        f"{candidate['predicted_speedup']:.2f}x{mark}",
    )
