"""`edgespec plan`: what would be allocated and how fast it should be, without loading weights."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from edgespec.cli import options
from edgespec.cli.render import size_text, table
from edgespec.memory.curve import CostCurve
from edgespec.memory.plan import Plan
from edgespec.models.spec import ModelSpec


def plan(
    model: Annotated[str | None, typer.Argument(help="GGUF file. Default: embedded.")] = None,
    ctx: options.ContextOption = None,
    drafter: options.DrafterOption = "auto",
    draft_max: options.DraftMaxOption = None,
    kv_type: options.KvTypeOption = "auto",
    gpu_layers: options.GpuLayersOption = "auto",
    threads: options.ThreadsOption = None,
    backend: options.BackendOption = "auto",
    exact: options.ExactOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Show what a run would allocate and choose, without loading weights."""
    from edgespec.models.spec import read_model_spec
    from edgespec.planning import make_run_plan, stored_curve

    spec = read_model_spec(options.model_path(model))
    request = options.make_request(
        ctx=ctx,
        drafter=drafter,
        draft_max=draft_max,
        kv_type=kv_type,
        gpu_layers=gpu_layers,
        threads=threads,
        backend=backend,
        exact=exact,
    )
    made = make_run_plan(spec, request)
    curve = stored_curve(spec, made)
    print(json.dumps(_document(spec, made, curve)) if as_json else _text(spec, made, curve))


def _document(spec: ModelSpec, plan: Plan, curve: CostCurve | None) -> dict[str, Any]:
    return {
        "model": str(spec.path),
        "name": spec.name,
        "file_type": spec.file_type,
        "plan": plan.as_json(),
        "memory": {
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "available_bytes": plan.available_bytes,
            "components": plan.components,
        },
        "measured_step_ms": None if curve is None else curve.base[1],
    }


def _text(spec: ModelSpec, plan: Plan, curve: CostCurve | None) -> str:
    components = [
        (name.replace("_", " "), size_text(size)) for name, size in plan.components.items()
    ]
    total = size_text(plan.predicted_peak_bytes)
    components.append(("at most", f"{total} of {size_text(plan.available_bytes)} free"))
    choices = [(c.name.replace("_", " "), str(c.value), c.reason) for c in plan.choices]
    speed = (
        "not measured on this device yet"
        if curve is None
        else f"{1e3 / curve.base[1]:.1f} tokens/s plain, measured earlier; drafts only add to it"
    )
    title = f"{spec.name or spec.path} ({spec.file_type})"
    return "\n\n".join((title, table(components), table(choices), f"speed: {speed}"))
