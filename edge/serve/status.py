"""What a server says of itself: `/props`, `/status`, `/lora-adapters` and `/metrics`."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from edgespec.memory.device.energy import is_on_battery
from edgespec.memory.device.track import peak_resident_bytes, resident_bytes
from edgespec.sampling.params import FIELD_NAMES
from edgespec.serve.pool import Member, Pool
from edgespec.serve.serializers import fingerprint
from edgespec.serve.service import Service

# What llama.cpp's server has no name for.
_HELP = {
    "generations": "Answers that ended.",
    "cancelled": "Answers whose client went away.",
    "read_ahead": "Tokens of prompts that were read before anybody asked.",
    "read_ahead_used": "Tokens of these that prompts began with.",
    "time_to_first_token_s": "Seconds from arrival to first tokens, waiting included.",
}


def props(_pool: Pool, member: Member) -> dict[str, Any]:
    """The model and the settings of answers, under the names that llama.cpp's server gives them.

    Of a model that is not loaded, or makes embeddings, only what its plan says.
    """
    service = member.loaded
    told = {"model_alias": member.name, "build_info": fingerprint(), "is_sleeping": service is None}
    if not isinstance(service, Service):
        size = member.model.about["context_length"]
        return {**told, "default_generation_settings": {"n_ctx": size}}
    engine, setup = service.engine, service.setup
    template, sampling = engine.chat_template or "", setup.defaults.sampling
    names = [one.name for one in fields(sampling) if one.name != "logit_bias"]
    params = {FIELD_NAMES.get(name, name): getattr(sampling, name) for name in names}
    most = setup.defaults.max_tokens
    params["n_predict"] = -1 if most is None else most
    return {
        **told,
        "default_generation_settings": {"n_ctx": setup.context_size, "params": params},
        "total_slots": service.engine.users,
        "model_path": service.file_name,
        "chat_template": template,
        "chat_template_caps": {
            "supports_tools": "tools" in template,
            "supports_tool_calls": "tool_calls" in template,
            "supports_system_role": "system" in template,
        },
        "modalities": member.model.about["modalities"],
        "bos_token": engine.backend.tokenizer.bos_text,
        "eos_token": engine.backend.tokenizer.eos_text,
    }


def adapters(_pool: Pool, member: Member) -> list[dict[str, Any]]:
    """The adapters of a model that is loaded, under the names that llama.cpp's server gives them.

    Their scales are those of requests that say nothing.
    """
    service = member.loaded
    named = service.plan.lora if isinstance(service, Service) and service.plan else ()
    asked = service.lora if named else None
    return [
        {
            "id": number,
            "path": path.name,
            "scale": scale if asked is None else asked.get(number, 0.0),
        }
        for number, (path, scale) in enumerate(named)
    ]


def status(pool: Pool, member: Member) -> dict[str, Any]:
    """Everything that changes while it runs, and the plan of a model with its reasons."""
    loaded = member.loaded
    plan = None if loaded is None else loaded.plan
    running, waiting = _queue(pool)
    return {
        "model": member.name,
        "context_size": member.model.about["context_length"],
        "models": [one.card for one in pool.members],
        "queue": {
            "running": running,
            "users": sum(one.engine.users for one in pool.ready()),
            "waiting": waiting,
            "most": pool.shared.limits.waiting,
        },
        "memory": {
            "resident_bytes": resident_bytes(),
            "peak_bytes": peak_resident_bytes(),
            "planned_peak_bytes": pool.planned_bytes,
            "limit_bytes": pool.capacity.host_bytes or (0 if plan is None else plan.limit_bytes),
            "planned": {} if plan is None else plan.component_bytes,
            "allocated": {} if loaded is None else loaded.memory_bytes(),
        },
        "on_battery": is_on_battery(),
        "draft_failure": loaded.engine.draft_failure if isinstance(loaded, Service) else None,
        "totals": pool.shared.totals.as_json(),
        "plan": {} if plan is None else plan.as_json(),
    }


def _queue(pool: Pool) -> tuple[int, int]:
    """Answers under way, and those that wait for their turn or for a model."""
    executors = [one.executor for one in pool.ready()]
    asked = sum(len(one.tickets) for one in pool.members)
    waiting = sum(len(executor.waiting) for executor in executors) + asked
    return sum(len(executor.running) for executor in executors), waiting


def metrics(pool: Pool, _member: Member) -> str:
    """Numbers as Prometheus reads them."""
    totals = pool.shared.totals
    running, waiting = _queue(pool)
    lines = []
    for name, about in _HELP.items():
        unit = f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
        lines += _metric(f"{unit}_total", "counter", about, {"": totals.sums[name]})
    for kind in ("drafted", "accepted"):
        counts = getattr(totals, f"{kind}_by").copy()
        values = {f'{{drafter="{name}"}}': count for name, count in sorted(counts.items())}
        lines += _metric(f"{kind}_by_total", "counter", f"Tokens {kind}, by drafter.", values)
    statuses = {f'{{status="{one}"}}': n for one, n in sorted(totals.statuses.copy().items())}
    lines += _metric("requests_total", "counter", "Requests by their status.", statuses)
    loads = {f"{{model={json.dumps(one.name)}}}": one.loads for one in pool.members}
    lines += _metric("model_loads_total", "counter", "Times a model was loaded.", loads)
    held = resident_bytes()
    lines += _metric("resident_memory_bytes", "gauge", "Memory of the process.", {"": held})
    if (energy := pool.shared.energy) is not None:
        about = "Energy since the server began, idle time included, as the counter counts it."
        counted = {f'{{counter="{energy.source.name}"}}': round(energy.joules(), 3)}
        lines += _metric("energy_joules_total", "counter", about, counted)
        about, ahead = "Energy while prompts were read ahead.", totals.sums["read_ahead_joules"]
        lines += _metric("read_ahead_joules_total", "counter", about, {"": round(ahead, 3)})
    sums = totals.sums
    cached, accepted = sums["cached_tokens"], sums["accepted_tokens"]
    read, decoded = sums["prompt_tokens"] - cached, accepted + sums["rounds"]
    decode_rate = _rate(decoded, sums["decode_s"])
    # What llama.cpp's server has a name for, so that its dashboards show it.
    named = {
        "prompt_tokens_total": ("Tokens of prompts that were read.", read),
        "prompt_tokens_cached_total": ("Tokens of prompts that were in the cache.", cached),
        "prompt_seconds_total": ("Seconds of reading prompts.", sums["prompt_s"]),
        "prompt_tokens_seconds": ("Tokens of prompts per second.", _rate(read, sums["prompt_s"])),
        "tokens_predicted_total": ("Tokens written.", sums["generated_tokens"]),
        "tokens_predicted_seconds_total": ("Seconds from first to last tokens.", sums["decode_s"]),
        "predicted_tokens_seconds": ("Tokens written per second.", decode_rate),
        "n_decode_total": ("Steps, one for each prompt.", sums["generations"] + sums["rounds"]),
        "spec_decode_num_draft_tokens_total": ("Tokens drafted.", sums["drafted_tokens"]),
        "spec_decode_num_accepted_tokens_total": ("Drafted tokens that were right.", accepted),
        "requests_processing": ("Answers under way.", running),
        "requests_deferred": ("Answers in the queue.", waiting),
    }
    for name, (about, value) in named.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += _metric(name, kind, about, {"": value}, "llamacpp:")
    return "\n".join([*lines, ""])


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _metric(
    name: str, kind: str, about: str, values: dict[str, Any], prefix: str = "edgespec_"
) -> list[str]:
    name = f"{prefix}{name}"
    head = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{labels} {value}" for labels, value in values.items()]
