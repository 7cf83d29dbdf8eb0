"""`edgespec models list`: every model file of this machine, and what it would do here."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from edgespec.cli.render import Progress, note, printable, size_text, table
from edgespec.errors import DoesNotFitError, EdgespecError

if TYPE_CHECKING:
    from edgespec.memory.plan.machine import Machine
    from edgespec.memory.plan.request import Request
    from edgespec.models.hub.caches import Local
    from edgespec.models.spec import ModelSpec


def list_models(request: Request, *, as_json: bool) -> None:
    """Print a row for every file, with what a plan of `request` says about it."""
    from edgespec.memory.bytes.simulation import simulating
    from edgespec.memory.plan.machine import this_machine
    from edgespec.models.hub.caches import local_models

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
        print(printable(_text(rows)))
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
    return {**row, **_planned(read, request, machine)}


def _planned(spec: ModelSpec, request: Request, machine: Machine) -> dict[str, Any]:
    """Whether the file fits, and how fast it would be."""
    from edgespec.setup.planning import make_run_plan

    try:
        plan = make_run_plan(spec, request, machine)
    except DoesNotFitError as problem:
        return {"fits": False, "problem": str(problem)}
    except EdgespecError as problem:
        return {"fits": None, "problem": str(problem)}
    return {
        "fits": True,
        "peak_bytes": plan.predicted_peak_bytes,
        "context_size": plan.context_size,
        "predicted_tokens_per_s": plan.tokens_per_s,
        "speed_source": plan.speed_source,
    }


def _text(rows: list[dict[str, Any]]) -> str:
    head = ("model", "type", "size", "takes", "tokens/s", "what it is")
    return table([head, *map(_cells, rows)])


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
