"""`edgespec models`: look at model files."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.render import printable, size_text, table

models_app = typer.Typer(help="Look at model files.", no_args_is_help=True, rich_markup_mode=None)


@models_app.command()
def show(
    model: Annotated[str | None, typer.Argument(help="GGUF file. Default: embedded.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show what a model file says about itself, without reading its weights."""
    from edgespec.models.spec import read_model_spec

    spec = read_model_spec(options.model_path(model))
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


@models_app.command()
def path() -> None:
    """Print where the embedded model lies."""
    print(options.model_path(None))
