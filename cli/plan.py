"""`edgespec plan`: what would be allocated and how fast it should be, without loading weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgespec.cli import options
from edgespec.cli.answer_options import read_text
from edgespec.cli.options import PROMPT, load_option
from edgespec.cli.render import memory_json, printable, size_text, table
from edgespec.option_fields import option

if TYPE_CHECKING:
    from edgespec.memory.plan.plan import Alternative, Plan
    from edgespec.memory.plan.request import Request
    from edgespec.models.spec import ModelSpec


def plan(
    models: options.ModelsOptions,
    plan_options: options.PlanOptions,
    file: Path | None = option(None, "Plan for the prompt in this file.", also="-f", panel=PROMPT),
    images: int = option(0, "Images that the prompt shows.", panel=PROMPT, low=0),
    max_tokens: int = options.max_tokens_option(),
    users: int | None = load_option("users"),
    as_json: options.JsonOption = False,
) -> None:
    """Show what a run would allocate and choose, without loading weights.

    It leaves room for a short prompt, or that of --file, and the longest answer of --max-tokens.
    Of several models it says which fit together, and ends with 1 where one of them does not fit.
    """
    from edgespec.memory.bytes.simulation import simulating
    from edgespec.models.onnx.folder import read_model
    from edgespec.setup.prompt_size import most_prompt_tokens
    from edgespec.setup.smaller_files import plan_or_say_what_fits

    spec, *others = map(read_model, models.paths(plan_options))
    request = plan_options.request(
        prompt_tokens=most_prompt_tokens(spec, [read_text(file) or ""]),
        max_tokens=max_tokens,
        is_plain_greedy=True,
        sees=True,
        images=images,
        users=users,
    )
    if others:
        found = _set_document([spec, *others], request)
        print(json.dumps(found) if as_json else set_text(found), flush=True)
        if any(one["problem"] for one in found["models"]):
            raise typer.Exit(1)
        return
    with simulating():  # one process for the plan and its alternatives
        made = plan_or_say_what_fits(spec, request)
        print(json.dumps(_document(spec, made)) if as_json else plan_text(spec, made))


def _document(spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    return {
        "model": str(spec.path),
        "name": spec.name,
        "file_type": spec.file_type,
        "plan": plan.as_json(),
        "kv_loss_nats": plan.kv_loss,
        "memory": memory_json(plan),
        "predicted_plain_tokens_per_s": plan.plain_tokens_per_s,
        "predicted_tokens_per_s": plan.tokens_per_s,
        "speed_source": plan.speed_source,
        "alternatives": [dataclasses.asdict(other) for other in plan.alternatives],
    }


def plan_text(spec: ModelSpec, plan: Plan) -> str:
    """The plan as tables: bytes, choices with their reasons, predicted speed."""
    components = [
        (name.replace("_", " "), size_text(size)) for name, size in plan.component_bytes.items()
    ]
    whose = "free" if plan.limit_bytes == plan.available_bytes else "budget"
    budgeted = plan.predicted_peak_bytes
    if plan.limit_bytes != plan.available_bytes:  # a budget covers the GPU's memory too
        budgeted += plan.predicted_gpu_bytes
    left = size_text(plan.limit_bytes - budgeted)
    peak, limit = size_text(budgeted), size_text(plan.limit_bytes)
    components.append(("at most", f"{peak} of {limit} {whose}, {left} left"))
    choices = [(c.name.replace("_", " "), str(c.value), c.reason) for c in plan.choices]
    speed = (
        f"{plan.tokens_per_s:.1f} tokens/s, plain {plan.plain_tokens_per_s:.1f} "
        f"({plan.speed_source})"
    )
    title = f"{printable(spec.name) or spec.path.name} ({spec.file_type})"
    sections = [title, table(components), table(choices), table([("predicted", speed)])]
    if alternatives := plan.alternatives:
        sections.append("you could also have\n" + table([_row(o) for o in alternatives]))
    return "\n\n".join(sections)


def _row(other: Alternative) -> tuple[str, str]:
    brings = (
        f"{other.options}: {size_text(other.peak_bytes)}, {other.context_size} tokens of context, "
        f"{other.tokens_per_s:.1f} tokens/s"
    )
    return other.name, brings


# -- several models --------------------------------------------------------------------------------


def _set_document(specs: Sequence[ModelSpec], request: Request) -> dict[str, Any]:
    """What each model adds to a process, and the largest sets that fit into it."""
    from edgespec.memory.plan.machine import this_machine
    from edgespec.setup.model_sets import largest_sets, plan_set

    planned, capacity = plan_set(specs, request, this_machine(request.workers))
    there = [one for one in planned if one.plan is not None]
    return {
        "models": [
            {
                "model": str(one.spec.path),
                "name": one.spec.name,
                "file_type": one.spec.file_type,
                "bytes": sum(one.sizes.values()),
                "context_size": None if one.plan is None else one.plan.context_size,
                "problem": "" if one.problem is None else str(one.problem),
            }
            for one in planned
        ],
        "shared_bytes": capacity.shared_bytes,
        "limit_bytes": capacity.host_bytes,
        "sets": [
            {
                "models": [there[i].spec.path.name for i in one],
                "bytes": capacity.shared_bytes + sum(sum(there[i].sizes.values()) for i in one),
            }
            for one in largest_sets([one.sizes for one in there], capacity)
        ],
    }


def set_text(found: dict[str, Any]) -> str:
    """The same as tables."""
    head = ("model", "type", "adds", "tokens of context")
    rows = [
        (
            printable(Path(one["model"]).name),
            one["file_type"],
            size_text(one["bytes"]) if one["bytes"] else "-",
            str(one["context_size"] or one["problem"]),
        )
        for one in found["models"]
    ]
    limit, once = size_text(found["limit_bytes"]), size_text(found["shared_bytes"])
    sets = [
        f"{size_text(one['bytes'])} of {limit}: {' + '.join(map(printable, one['models']))}"
        for one in found["sets"]
    ]
    head_line = f"fit together, with {once} that the program takes"
    return "\n\n".join(
        [table([head, *rows]), "\n".join([head_line, *sets] if sets else ["none fits"])]
    )
