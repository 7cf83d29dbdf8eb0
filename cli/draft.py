"""`edgespec draft`: make and inspect early-exit drafters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.render import Progress, note, printable, size_text, table
from edgespec.errors import UnsupportedError

draft_app = typer.Typer(
    help="Make and inspect early-exit drafters.", no_args_is_help=True, rich_markup_mode=None
)


@draft_app.command()
def train(
    model: Annotated[str | None, typer.Argument(help="GGUF file. Default: embedded.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The drafter's file.")] = Path(
        "drafter.gguf"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="In 12 minutes instead of 120.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="How long it may take.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Prompts to answer: text lines or JSON lines."),
    ] = None,
    exit_layer: Annotated[
        int | None, typer.Option("--exit-layer", min=1, help="Blocks to keep. Default: compared.")
    ] = None,
    head_size: Annotated[
        int | None,
        typer.Option("--head-size", min=1, help="Tokens it drafts. Default: compared."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Train a drafter for a model. Example: edgespec draft train model.gguf -o drafter.gguf

    The model writes the text it is trained on. Stopped with Ctrl-C while training, the best so far
    is written; the same command goes on where it was stopped.
    """
    from edgespec.draft_training import FULL_MINUTES, QUICK_MINUTES, train_draft
    from edgespec.models.spec import read_model_spec

    if not output.absolute().parent.is_dir():
        raise UnsupportedError(f"cannot write {output}: its folder is not there", hint="make it")
    progress = Progress()

    def say(text: str) -> None:
        progress.clear()
        note(text)

    try:
        report = train_draft(
            read_model_spec(options.model_path(model)),
            output,
            minutes=minutes or (QUICK_MINUTES if quick else FULL_MINUTES),
            exit_layer=exit_layer,
            head_size=head_size,
            data=data,
            progress=progress,
            note=say,
        )
    finally:
        progress.clear()
    note(f"written: {output}")
    print(json.dumps(report) if as_json else printable(_training_text(report)))


@draft_app.command()
def info(
    drafter: Annotated[Path, typer.Argument(help="A drafter's GGUF file.")],
    as_json: options.JsonOption = False,
) -> None:
    """Show what a drafter file was made from, and how."""
    from edgespec.models.early_exit import read_exit
    from edgespec.models.spec import read_model_spec

    spec = read_model_spec(drafter.expanduser())
    found = read_exit(spec)
    if found is None:
        raise UnsupportedError(
            f"{drafter} is no early-exit drafter",
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


def _training_text(report: Mapping[str, Any]) -> str:
    """The exits that were compared after a short training, and the one that was trained."""
    head = ("exit", "head", "agreement", "tokens/round", "step", "predicted speed")
    rows = [head, *(_row(candidate, "") for candidate in report["compared"])]
    rows.append(_row(report["result"], " (trained)"))
    text = f"{report['text_tokens']} tokens of text, loss {report['loss']:.3f} on those held out"
    return f"{text}\n\n{table(rows)}"


def _row(candidate: dict[str, Any], mark: str) -> tuple[str, ...]:
    return (
        str(candidate["exit_layer"]),
        str(candidate["head_size"]),
        f"{candidate['agreement']:.3f}",
        f"{candidate['acceptance_length']:.2f}",
        f"{candidate['draft_step_ms']:.2f} ms",
        f"{candidate['predicted_speedup']:.2f}x{mark}",
    )
