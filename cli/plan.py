"""`edgespec plan`: what would be allocated and how fast it should be, without loading weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli import options
from edgespec.cli.options import PROMPT, load_option, read_text
from edgespec.cli.render import (
    embedding_memory_json,
    memory_json,
    paragraph,
    printable,
    size_text,
    speed_text,
    table,
)
from edgespec.option_fields import option

if TYPE_CHECKING:
    from edgespec.memory.plan.embedding import EmbeddingPlan
    from edgespec.memory.plan.plan import Plan
    from edgespec.models.spec import ModelSpec


def plan(
    model: options.ModelOptions,
    plan_options: options.PlanOptions,
    file: Path | None = option(None, "Plan for the prompt in this file.", also="-f", panel=PROMPT),
    images: int = option(0, "Images that the prompt shows.", panel=PROMPT, low=0),
    max_tokens: int = options.max_tokens_option(),
    users: int | None = load_option("users"),
    as_json: options.JsonOption = False,
) -> None:
    """Show what a run would allocate and choose, without loading weights.

    It leaves room for a short prompt, or that of --file, and the longest answer of --max-tokens.
    """
    from edgespec.memory.bytes.simulation import simulating
    from edgespec.memory.plan.embedding import embeds, plan_embedding
    from edgespec.models.onnx.folder import read_model
    from edgespec.setup.planning import most_prompt_tokens, plan_or_say_what_fits

    spec = read_model(model.path(plan_options))
    named = {"model": str(spec.path), "name": spec.name, "file_type": spec.file_type}
    if embeds(spec):
        asked = plan_options.request()
        embedding = plan_embedding(spec, asked)
        whose = "free" if asked.budget_bytes is None else "budget"
        memory = embedding_memory_json(embedding)
        document: dict[str, Any] = {**named, "plan": embedding.as_json(), "memory": memory}
        sections = _sections(spec, embedding, embedding.predicted_peak_bytes, whose)
        print(json.dumps(document) if as_json else "\n\n".join(sections))
        return
    request = plan_options.request(
        prompt_tokens=most_prompt_tokens(spec, [read_text(file) or ""]),
        max_tokens=max_tokens,
        is_plain_greedy=True,
        sees=True,
        images=images,
        users=users,
    )
    with simulating():  # one process for the plan and its alternatives
        made = plan_or_say_what_fits(spec, request)
        if not as_json:
            print(plan_text(spec, made))
            return
        document = {
            **named,
            "plan": made.as_json(),
            "kv_loss_nats": made.kv_loss,
            "memory": memory_json(made),
            "predicted_plain_tokens_per_s": made.plain_tokens_per_s,
            "predicted_plain_range": made.plain_range,
            "predicted_tokens_per_s": made.tokens_per_s,
            "predicted_range": made.speed_range,
            "speed_source": made.speed_source,
            "alternatives": [dataclasses.asdict(other) for other in made.alternatives],
        }
        print(json.dumps(document))


def plan_text(spec: ModelSpec, plan: Plan) -> str:
    """The plan as tables: bytes, choices with their reasons, predicted speed."""
    whose = "free" if plan.limit_bytes == plan.available_bytes else "budget"
    budgeted = plan.predicted_peak_bytes
    if plan.limit_bytes != plan.available_bytes:  # a budget covers the GPU's memory too
        budgeted += plan.predicted_gpu_bytes
    speed = (
        f"{speed_text(plan.speed_range)} tokens/s, plain {speed_text(plan.plain_range)}, while "
        f"nothing else computes ({plan.speed_source})"
    )
    sections = [*_sections(spec, plan, budgeted, whose), table([("predicted", speed)])]
    if plan.alternatives:
        others = [
            (
                other.name,
                f"{other.options}: {size_text(other.peak_bytes)}, {other.context_size} tokens of "
                f"context, about {speed_text((other.tokens_per_s,) * 2)} tokens/s",
            )
            for other in plan.alternatives
        ]
        sections.append("you could also have\n" + table(others))
    return "\n\n".join(sections)


def _sections(
    spec: ModelSpec, plan: Plan | EmbeddingPlan, peak_bytes: int, whose: str
) -> list[str]:
    """Title, bytes, and choices with their reasons."""
    components = [
        (name.replace("_", " "), size_text(size)) for name, size in plan.component_bytes.items()
    ]
    left = size_text(plan.limit_bytes - peak_bytes)
    peak, limit = size_text(peak_bytes), size_text(plan.limit_bytes)
    components.append(("at most", f"{peak} of {limit} {whose}, {left} left"))
    choices = [(c.name.replace("_", " "), str(c.value), c.reason) for c in plan.choices]
    title = f"{printable(spec.name) or spec.path.name} ({spec.file_type})"
    return [paragraph(title), table(components), table(choices)]
