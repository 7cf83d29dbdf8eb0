"""What a server says about itself: its state, its settings, and numbers for monitoring."""

from __future__ import annotations

import json
from dataclasses import fields
from math import isfinite
from typing import Any

from edgespec.memory.device.track import peak_resident_bytes, resident_bytes
from edgespec.sampling.params import FIELD_NAMES, SamplingParams, bias_pairs
from edgespec.serve.pool import Member, Pool
from edgespec.serve.service import Service, Shared, Totals
from edgespec.serve.shapes import fingerprint
from edgespec.serve.worker import Generation

_HELP = {
    "generations": "Answers that ended.",
    "cancelled": "Answers whose client went away.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were in the cache.",
    "generated_tokens": "Tokens written.",
    "drafted_tokens": "Tokens drafted.",
    "accepted_tokens": "Drafted tokens that were right.",
    "rounds": "Steps after prompts.",
    "prompt_s": "Seconds until first tokens.",
    "decode_s": "Seconds from first tokens to last ones.",
}


def slots(pool: Pool, _shared: Shared, _member: Member) -> list[dict[str, Any]]:
    """The generations that may run at once, as llama.cpp's server tells of its slots."""
    told: list[dict[str, Any]] = []
    for service in pool.ready():
        running = {one.slot: one for one in service.worker.running}
        size = service.setup.context_size
        for number in range(service.engine.users):
            told.append({"id": len(told), "n_ctx": size, **_slot(running.get(number))})
    return told


def _slot(one: Generation | None) -> dict[str, Any]:
    decoded = 0 if one is None else one.num_tokens
    return {
        "is_processing": one is not None,
        "n_prompt_tokens": 0 if one is None else len(one.prompt_ids),
        "n_decoded": decoded,
        "next_token": [{"has_next_token": one is not None, "n_remain": -1, "n_decoded": decoded}],
    }


def props(_pool: Pool, _shared: Shared, member: Member) -> dict[str, Any]:
    """The model and the settings of answers, under the names that llama.cpp's server gives them.

    Of a model that is not loaded, or makes embeddings, only what its plan says.
    """
    service = member.loaded
    told = {"model_alias": member.name, "build_info": fingerprint(), "is_sleeping": service is None}
    if not isinstance(service, Service):
        size = member.model.about["context_length"]
        return {**told, "default_generation_settings": {"n_ctx": size}}
    engine, setup = service.engine, service.setup
    params = settings_of(setup.defaults.sampling)
    template = engine.chat_template or ""
    return {
        **told,
        "default_generation_settings": {
            "n_ctx": setup.context_size,
            "params": {**params, "max_tokens": setup.defaults.max_tokens or -1},
        },
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


def settings_of(sampling: SamplingParams) -> dict[str, Any]:
    """How tokens are picked, under the names that llama.cpp's server gives the settings."""
    names = [one.name for one in fields(sampling)]
    told = {FIELD_NAMES.get(name, name): getattr(sampling, name) for name in names}
    biases = [
        {"token": token, "bias": bias if isfinite(bias) else None}
        for token, bias in bias_pairs(sampling.logit_bias)
    ]
    return {**told, "seed": -1 if sampling.seed is None else sampling.seed, "logit_bias": biases}


def status(pool: Pool, shared: Shared, member: Member) -> dict[str, Any]:
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
            "most": shared.limits.waiting,
        },
        "memory": {
            "resident_bytes": resident_bytes(),
            "peak_bytes": peak_resident_bytes(),
            "planned_peak_bytes": pool.planned_bytes,
            "limit_bytes": pool.limit_bytes or (0 if plan is None else plan.limit_bytes),
            "planned": {} if plan is None else plan.component_bytes,
            "allocated": {} if loaded is None else loaded.memory_bytes(),
        },
        "draft_failure": loaded.engine.draft_failure if isinstance(loaded, Service) else None,
        "totals": _numbers(shared.totals),
        "plan": {} if plan is None else plan.as_json(),
    }


def _queue(pool: Pool) -> tuple[int, int]:
    """Answers under way, and those that wait for their turn or for a model."""
    workers = [one.worker for one in pool.ready()]
    asked = sum(len(one.tickets) for one in pool.members)
    waiting = sum(worker.num_waiting for worker in workers) + asked
    return sum(len(worker.running) for worker in workers), waiting


def metrics(pool: Pool, shared: Shared, _member: Member) -> str:
    """Numbers as Prometheus reads them."""
    totals = shared.totals
    running, waiting = _queue(pool)
    lines = []
    for name, value in _numbers(totals).items():
        if name in _HELP:
            unit = f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
            lines += _metric(f"{unit}_total", "counter", _HELP[name], {"": value})
    for kind in ("drafted", "accepted"):
        counts = getattr(totals, f"{kind}_by").copy()
        values = {f'{{drafter="{name}"}}': count for name, count in sorted(counts.items())}
        lines += _metric(f"{kind}_by_total", "counter", f"Tokens {kind}, by drafter.", values)
    statuses = {f'{{status="{one}"}}': n for one, n in sorted(totals.statuses.copy().items())}
    lines += _metric("requests_total", "counter", "Requests by their status.", statuses)
    loads = {f"{{model={json.dumps(one.name)}}}": one.loads for one in pool.members}
    lines += _metric("model_loads_total", "counter", "Times a model was loaded.", loads)
    lines += _metric("generations_running", "gauge", "Answers under way.", {"": running})
    lines += _metric("generations_waiting", "gauge", "Answers in the queue.", {"": waiting})
    held = resident_bytes()
    lines += _metric("resident_memory_bytes", "gauge", "Memory of the process.", {"": held})
    if shared.energy is not None:
        about = "Energy since the server began, idle time included, as the counter counts it."
        counted = {f'{{counter="{shared.energy.source.name}"}}': round(shared.energy.joules(), 3)}
        lines += _metric("energy_joules_total", "counter", about, counted)
    for name, (about, value) in _llama_metrics(totals, running, waiting).items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += _metric(name, kind, about, {"": value}, "llamacpp:")
    return "\n".join([*lines, ""])


def _llama_metrics(totals: Totals, running: int, waiting: int) -> dict[str, tuple[str, float]]:
    """The same numbers as llama.cpp's server names them, for its dashboards."""
    read = totals.prompt_tokens - totals.cached_tokens
    decoded = totals.accepted_tokens + totals.rounds
    return {
        "prompt_tokens_total": ("Tokens of prompts that were read.", read),
        "prompt_tokens_cached_total": (_HELP["cached_tokens"], totals.cached_tokens),
        "prompt_seconds_total": (_HELP["prompt_s"], totals.prompt_s),
        "prompt_tokens_seconds": ("Tokens of prompts per second.", _rate(read, totals.prompt_s)),
        "tokens_predicted_total": (_HELP["generated_tokens"], totals.generated_tokens),
        "tokens_predicted_seconds_total": (_HELP["decode_s"], totals.decode_s),
        "predicted_tokens_seconds": (
            "Tokens written per second.",
            _rate(decoded, totals.decode_s),
        ),
        "n_decode_total": ("Steps, one for each prompt.", totals.generations + totals.rounds),
        "spec_decode_num_draft_tokens_total": (_HELP["drafted_tokens"], totals.drafted_tokens),
        "spec_decode_num_accepted_tokens_total": (_HELP["accepted_tokens"], totals.accepted_tokens),
        "requests_processing": ("Answers under way.", running),
        "requests_deferred": ("Answers in the queue.", waiting),
    }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _metric(
    name: str, kind: str, about: str, values: dict[str, Any], prefix: str = "edgespec_"
) -> list[str]:
    name = f"{prefix}{name}"
    head = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{labels} {value}" for labels, value in values.items()]


def _numbers(totals: Totals) -> dict[str, Any]:
    values = {one.name: getattr(totals, one.name) for one in fields(totals)}
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if not name.startswith("_")
    }
