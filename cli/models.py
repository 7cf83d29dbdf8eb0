"""`edgespec models`: what is here, what the hub has, and files from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from edgespec.cli import options
from edgespec.cli.command import Commands
from edgespec.cli.options import OUTPUT
from edgespec.cli.render import Progress, note, printable, size_text, table
from edgespec.errors import DoesNotFitError, EdgespecError
from edgespec.option_fields import argument, option
from edgespec.paths import expanded

if TYPE_CHECKING:
    from edgespec.memory.plan.machine import Machine
    from edgespec.memory.plan.plan import Request
    from edgespec.models.hub.resolve import Local
    from edgespec.models.spec import ModelSpec


models_app = Commands("List, fetch, look at, remove or export models.")


@models_app.add("list")
def list_(plan_options: options.PlanOptions, as_json: options.JsonOption = False) -> None:
    """List the models on this machine, with what they would take and how fast they would be.

    Looks into the caches of the Hugging Face hub, llama.cpp, Ollama and LM Studio, and into the
    folders that EDGESPEC_MODELS names. Speeds are of files that were measured here.
    """
    from concurrent.futures import ThreadPoolExecutor

    from edgespec.memory.bytes.simulation import simulating
    from edgespec.memory.plan.machine import this_machine
    from edgespec.models.hub.resolve import local_models

    request = plan_options.request(is_plain_greedy=True)
    machine, progress = this_machine(), Progress()
    locals_, rows = local_models(), []
    with progress:
        # One process says what all of them take, while the next header is read.
        with simulating(), ThreadPoolExecutor(1) as reader:
            for number, read in enumerate(reader.map(_read, locals_)):
                progress("reading headers", number / len(locals_))
                rows.append(_row(locals_[number], read, request, machine))
    if as_json:
        print(json.dumps(rows))
    elif rows:
        head = ("model", "type", "size", "takes", "tokens/s", "what it is")
        print(printable(table([head, *map(_cells, rows)])))
    else:
        note("no model is here; `edgespec models pull hf:OWNER/REPO` gets one")


def _read(local: Local) -> ModelSpec | EdgespecError:
    from edgespec.models.spec import read_model_spec

    try:
        return read_model_spec(local.path)
    except EdgespecError as problem:
        return problem


def _row(
    local: Local, read: ModelSpec | EdgespecError, request: Request, machine: Machine
) -> dict[str, Any]:
    from edgespec.setup.planning import make_run_plan

    row: dict[str, Any] = {
        "name": local.name,
        "path": str(local.path),
        "source": local.source,
        "file_bytes": local.file_bytes,
        "problem": "",
    }
    if isinstance(read, EdgespecError):
        return {**row, "problem": str(read).removeprefix(f"{local.path} is ")}
    row |= {"file_type": read.file_type, "arch": read.arch, "description": read.name}
    try:
        plan = make_run_plan(read, request, machine)
    except EdgespecError as problem:
        fits = False if isinstance(problem, DoesNotFitError) else None
        return {**row, "fits": fits, "problem": str(problem)}
    return {
        **row,
        "fits": True,
        "peak_bytes": plan.predicted_peak_bytes,
        "context_size": plan.context_size,
        "predicted_tokens_per_s": plan.tokens_per_s,
        "speed_source": plan.speed_source,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    is_measured = row.get("speed_source", "").startswith("measured")
    fits = row.get("fits")
    return (
        row["name"],
        row.get("file_type", "-"),
        size_text(row["file_bytes"]),
        size_text(row["peak_bytes"]) if fits else ("too much" if fits is False else "-"),
        f"{row['predicted_tokens_per_s']:.0f}" if fits and is_measured else "-",
        row["problem"] or row["description"],
    )


@models_app.add()
def pull(
    plan_options: options.PlanOptions,
    name: str = argument("hf:OWNER/REPO[:QUANT], .../FILE.gguf, or bge-small.", default=...),
    force: bool = option(False, "Fetch it even if this machine could not run it."),
) -> None:
    """Fetch a model of the Hugging Face hub. Example: edgespec models pull hf:OWNER/REPO:Q4_K_M

    It is planned from its header before its weights are fetched, and goes where llama.cpp looks
    for it, too. Without QUANT it is Q4_K_M, then Q8_0, then the first file. Prints its path.
    """
    from edgespec.cli import start
    from edgespec.models.hub.resolve import hub_name, missing

    found = hub_name(name) or hub_name(f"hf:{name}")
    if found is None:
        raise missing(name)
    print(start.pull(*found, None if force else plan_options.request(is_plain_greedy=True)))


@models_app.add()
def remove(
    name: str = argument("A name that `models list` shows.", default=...),
    yes: bool = option(False, "Remove it without asking.", also="-y"),
) -> None:
    """Remove a fetched model from the hub's cache. What other programs keep stays theirs."""
    from edgespec.models.hub import fetching
    from edgespec.models.hub.resolve import missing, named

    local = named(name)
    if local is None:
        raise missing(name)
    files, kept = fetching.files_of(local)
    size = size_text(sum(file.lstat().st_size for file in files))
    if not yes and not typer.confirm(f"remove {local.path} ({size})?", err=True):
        note("nothing was removed")
        raise typer.Exit(1)
    for file in files:
        file.unlink()
    note(f"removed {local.name} ({size})")
    for file in kept:
        note(f"{file} stays: the cache had a link to it")


@models_app.add()
def packed(remove: bool = option(False, "Remove them: later starts pack weights again.")) -> None:
    """List the packed weights that are kept for later starts, with what they take of the disk."""
    from edgespec.memory.store.packed import kept, remove_all

    found = kept()
    for name, size in found:
        print(printable(f"{size_text(size):>9}  {name}"))
    if not found:
        note("no packed weights are kept")
    elif remove:
        remove_all()
        note(f"removed {size_text(sum(size for _, size in found))}")


@models_app.add()
def show(
    model: options.ModelOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Show what a model file says about itself, without reading its weights."""
    from edgespec.memory.bytes.snapshots import most_snapshots
    from edgespec.models.heads import has_head
    from edgespec.models.onnx.folder import read_model
    from edgespec.models.pairing import heads_for

    spec = read_model(model.path())
    can: dict[str, Any] = {  # do for drafting
        "most_snapshots": most_snapshots(spec),
        "has_head": has_head(spec),
        "heads_beside": {path.name: problem for path, problem in heads_for(spec)},
    }
    if as_json:
        told = dataclasses.asdict(spec) | can
        del told["settings"]  # bytes of the header
        print(json.dumps(told, default=str))
        return
    heads = f"{max(spec.num_heads)} heads, {max(spec.num_kv_heads)} for keys and values"
    window = f", window of {spec.sliding_window} tokens" if any(spec.is_sliding) else ""
    types = ", ".join(f"{kind} {size_text(size)}" for kind, size in spec.type_bytes)
    rows: list[tuple[str, Any]] = [
        ("name", spec.name or "(none)"),
        ("architecture", f"{spec.arch}, {spec.num_layers} layers, {heads}{window}"),
        ("file", f"{size_text(spec.file_bytes)}, {spec.file_type} ({types})"),
        ("context", f"trained for {spec.context_length} tokens"),
        ("vocabulary", f"{spec.vocab_size} tokens ({spec.tokenizer_model})"),
        ("KV cache", f"{2 * spec.kv_values_per_token / 1024:.1f} KiB per token in f16"),
    ]
    if spec.keeps_state:
        layers = f"{sum(spec.is_recurrent_layer)} of {spec.num_layers} layers"
        back = f"drafts of up to {can['most_snapshots']} tokens, each with a copy of it"
        if not can["most_snapshots"]:
            back = "no drafts: llama.cpp cannot take it back"
        rows.append(("recurrent state", f"in {layers}; {back}"))
    if spec.num_prediction_layers:
        inside = "yes" if can["has_head"] else "yes, of a kind that does not draft here"
        rows.append(("head inside", inside))
    for name, problem in can["heads_beside"].items():
        rows.append(("head beside it", f"{name}: {problem or '--draft-model uses it'}"))
    rows += [
        ("chat template", "yes" if spec.chat_template else "no"),
        ("fingerprint", spec.fingerprint),
        *(("note", text) for text in spec.notes),
    ]
    print(printable(table([(name, str(value)) for name, value in rows])))


@models_app.add()
def export(
    folder: Path = argument("Folder of a Hugging Face model.", default=...),
    output: Path | None = option(
        None, "Folder to write. Default: FOLDER-onnx.", also="-o", panel=OUTPUT
    ),
    bits: int | None = option(
        None, "Bits per weight, 4 or 8. Default: 8 below 0.5B parameters, else 4."
    ),
) -> None:
    """Export a Hugging Face folder to ONNX. Example: edgespec models export smollm2 -o smollm2-onnx

    Takes any architecture optimum knows, needs the `export` extra, and prints the new folder.
    """
    from edgespec.models.onnx.folder import read_model
    from edgespec.models.onnx_export.export import export_model

    if bits not in (None, 4, 8):
        raise typer.BadParameter(f"--bits {bits} is neither 4 nor 8")
    folder = expanded(folder)
    target = expanded(output) if output else Path(f"{folder.resolve()}-onnx")
    progress, start = Progress(), perf_counter()
    with progress:
        export_model(folder, target, bits=bits, progress=progress)
    spec = read_model(target)
    note(
        f"{printable(spec.name)} ({spec.arch}): {size_text(spec.file_bytes)} in {spec.file_type}, "
        f"{perf_counter() - start:.0f} s"
    )
    print(target)
