"""`edgespec models`: look at model files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.render import note, printable, size_text, table
from edgespec.errors import EdgespecError, UnsupportedError

if TYPE_CHECKING:
    from edgespec.models.spec import ModelSpec

models_app = typer.Typer(help="Look at model files.", no_args_is_help=True, rich_markup_mode=None)


@models_app.command()
def show(
    model: Annotated[str | None, typer.Argument(help="GGUF file. Default: embedded.")] = None,
    pairs: Annotated[
        Path | None, typer.Option("--pairs", help="Which GGUF files of this folder can draft.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show what a model file says about itself, without reading its weights."""
    from edgespec.models.spec import read_model_spec

    spec = read_model_spec(options.model_path(model))
    if pairs is not None:
        _show_pairs(spec, pairs.expanduser(), as_json)
        return
    if as_json:
        print(json.dumps(dataclasses.asdict(spec), default=str))
        return
    heads = f"{max(spec.num_heads)} heads, {max(spec.num_kv_heads)} for keys and values"
    window = f", window of {spec.sliding_window} tokens" if spec.sliding_window else ""
    types = ", ".join(f"{kind} {size_text(size)}" for kind, size in spec.type_bytes)
    rows: list[tuple[str, Any]] = [
        ("name", spec.name or "(none)"),
        ("architecture", f"{spec.arch}, {spec.num_layers} layers, {heads}{window}"),
        ("file", f"{size_text(spec.file_bytes)}, {spec.file_type} ({types})"),
        ("context", f"trained for {spec.context_length} tokens"),
        ("vocabulary", f"{spec.vocab_size} tokens ({spec.tokenizer_model})"),
        ("KV cache", f"{2 * spec.kv_values_per_token / 1024:.1f} KiB per token in f16"),
        ("chat template", "yes" if spec.chat_template else "no"),
        ("fingerprint", spec.fingerprint),
        *(("note", text) for text in spec.notes),
    ]
    print(printable(table([(name, str(value)) for name, value in rows])))


def _show_pairs(spec: ModelSpec, folder: Path, as_json: bool) -> None:
    """Which models of a folder can draft for this one, the smallest first."""
    from edgespec.models.pairing import partners
    from edgespec.models.spec import read_model_spec

    if not folder.is_dir():
        raise UnsupportedError(f"{folder} is no folder", hint="name a folder with GGUF files")
    others: list[ModelSpec] = []
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*.gguf")):
        try:
            others.append(read_model_spec(path))
        except EdgespecError as problem:
            rows.append({"file": str(path.relative_to(folder)), "problem": str(problem)})
    others.sort(key=lambda other: other.weight_bytes)
    for other, reason in partners(spec, others):
        if not reason and other.weight_bytes >= spec.weight_bytes:
            reason = f"{other.path.name} is no smaller than {spec.path.name}"
        name, size = str(other.path.relative_to(folder)), other.weight_bytes
        rows.append({"file": name, "weight_bytes": size, "problem": reason})
    rows.sort(key=lambda row: row["problem"] != "")
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        note(f"no GGUF files in {folder}")
    for row in rows:
        shown = f" ({size_text(row['weight_bytes'])})" if "weight_bytes" in row else ""
        print(printable(f"{row['file']}{shown}: {row['problem'] or 'can draft'}"))


@models_app.command()
def path() -> None:
    """Print where the embedded model lies."""
    print(options.model_path(None))
