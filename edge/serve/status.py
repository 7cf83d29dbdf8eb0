"""What a server says of itself: `/props`, `/status`, `/lora-adapters` and `/metrics`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from edgespec.memory.device.energy import is_on_battery
from edgespec.memory.device.track import peak_resident_bytes, resident_bytes
from edgespec.sampling.params import FIELD_NAMES
from edgespec.serve.pool import Member, Pool
from edgespec.serve.serializers import fingerprint
from edgespec.serve.service import Service


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
    totals, (running, waiting) = pool.shared.totals, _queue(pool)
    sums, loads = totals.sums, {one.name: one.loads for one in pool.members}
    ahead, used = sums["read_ahead"], sums["read_ahead_used"]
    first_s = sums["time_to_first_token_s"]
    # By name what it is, and a number or several. llama.cpp's server has none for these:
    own: dict[str, tuple[str, Any]] = {
        "generations_total": ("Answers that ended.", sums["generations"]),
        "cancelled_total": ("Answers whose client went away.", sums["cancelled"]),
        "read_ahead_total": ("Tokens of prompts that were read before anybody asked.", ahead),
        "read_ahead_used_total": ("Tokens of these that prompts began with.", used),
        "time_to_first_token_seconds_total": (
            "Seconds from arrival to first tokens, waiting included.",
            first_s,
        ),
        "drafted_by_total": ("Tokens drafted, by drafter.", _by("drafter", totals.drafted_by)),
        "accepted_by_total": ("Tokens accepted, by drafter.", _by("drafter", totals.accepted_by)),
        "requests_total": ("Requests by their status.", _by("status", totals.statuses)),
        "model_loads_total": ("Times a model was loaded.", _by("model", loads)),
        "resident_memory_bytes": ("Memory of the process.", resident_bytes()),
    }
    if (energy := pool.shared.energy) is not None:
        about = "Energy since the server began, idle time included, as the counter counts it."
        counted = _by("counter", {energy.source.name: round(energy.joules(), 3)})
        own["energy_joules_total"] = about, counted
        about = "Energy while prompts were read ahead."
        own["read_ahead_joules_total"] = about, round(sums["read_ahead_joules"], 3)
    cached, accepted = sums["cached_tokens"], sums["accepted_tokens"]
    read, decoded = sums["prompt_tokens"] - cached, accepted + sums["rounds"]
    decode_rate = _rate(decoded, sums["decode_s"])
    # It has for these, so that its dashboards show them:
    named: dict[str, tuple[str, Any]] = {
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
    lines = []
    for prefix, metrics in (("edgespec_", own), ("llamacpp:", named)):
        for name, (about, value) in metrics.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {prefix}{name} {about}", f"# TYPE {prefix}{name} {kind}"]
            values = value if isinstance(value, dict) else {"": value}
            lines += [f"{prefix}{name}{label} {number}" for label, number in values.items()]
    return "\n".join([*lines, ""])


def _by(label: str, counts: Mapping[Any, float]) -> dict[str, float]:
    """Numbers by their labels; other threads count on meanwhile."""
    sorted_ = sorted(dict(counts).items())
    return {f"{{{label}={json.dumps(str(value))}}}": count for value, count in sorted_}


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0
