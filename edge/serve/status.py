"""What a server says about itself: its state, its settings, and numbers for monitoring."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from typing import Any

from edgespec.memory.device.track import peak_resident_bytes, resident_bytes
from edgespec.sampling.params import SamplingParams, bias_pairs
from edgespec.serve.generation import Generation
from edgespec.serve.service import Service
from edgespec.serve.shapes import fingerprint
from edgespec.serve.totals import Totals

_NAMES = {"repetition_penalty": "repeat_penalty", "penalty_last_n": "repeat_last_n"}
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


def slots(service: Service) -> list[dict[str, Any]]:
    """The generations that may run at once, as llama.cpp's server tells of its slots."""
    running = {one.slot: one for one in service.worker.running}
    return [
        {"id": number, "n_ctx": service.setup.context_size, **_slot(running.get(number))}
        for number in range(service.engine.users)
    ]


def _slot(one: Generation | None) -> dict[str, Any]:
    decoded = 0 if one is None else one.num_tokens
    return {
        "is_processing": one is not None,
        "n_prompt_tokens": 0 if one is None else len(one.prompt_ids),
        "n_decoded": decoded,
        "next_token": [{"has_next_token": one is not None, "n_remain": -1, "n_decoded": decoded}],
    }


def props(service: Service) -> dict[str, Any]:
    """The model and the settings of answers, under the names that llama.cpp's server gives them."""
    engine, setup = service.engine, service.setup
    params = settings_of(setup.defaults.sampling)
    template = engine.chat_template or ""
    return {
        "default_generation_settings": {
            "n_ctx": setup.context_size,
            "params": {**params, "max_tokens": setup.defaults.max_tokens or -1},
        },
        "total_slots": service.engine.users,
        "model_alias": setup.names[0],
        "model_path": service.file_name,
        "build_info": fingerprint(),
        "is_sleeping": False,
        "chat_template": template,
        "chat_template_caps": {
            "supports_tools": "tools" in template,
            "supports_tool_calls": "tool_calls" in template,
            "supports_system_role": "system" in template,
        },
        "modalities": {"vision": False, "audio": False},
        "bos_token": engine.backend.tokenizer.bos_text,
        "eos_token": engine.backend.tokenizer.eos_text,
    }


def settings_of(sampling: SamplingParams) -> dict[str, Any]:
    """How tokens are picked, under the names that llama.cpp's server gives the settings."""
    told = {_NAMES.get(one.name, one.name): getattr(sampling, one.name) for one in fields(sampling)}
    biases = [
        {"token": token, "bias": bias if isfinite(bias) else None}
        for token, bias in bias_pairs(sampling.logit_bias)
    ]
    return {**told, "seed": -1 if sampling.seed is None else sampling.seed, "logit_bias": biases}


def status(service: Service) -> dict[str, Any]:
    """Everything that changes while it runs, and the plan with its reasons."""
    plan, worker = service.plan, service.worker
    planned = {} if plan is None else plan.component_bytes
    return {
        "model": service.setup.names[0],
        "context_size": service.setup.context_size,
        "queue": {
            "running": len(worker.running),
            "users": service.engine.users,
            "waiting": worker.num_waiting,
            "most": service.limits.waiting,
        },
        "memory": {
            "resident_bytes": resident_bytes(),
            "peak_bytes": peak_resident_bytes(),
            "planned_peak_bytes": 0 if plan is None else plan.predicted_peak_bytes,
            "limit_bytes": 0 if plan is None else plan.limit_bytes,
            "planned": planned,
            "allocated": service.engine.memory_bytes(),
        },
        "draft_failure": service.engine.draft_failure,
        "totals": _numbers(service.totals),
        "plan": {} if plan is None else plan.as_json(),
    }


def metrics(service: Service) -> str:
    """Numbers as Prometheus reads them."""
    totals, worker = service.totals, service.worker
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
    running = len(worker.running)
    lines += _metric("generations_running", "gauge", "Answers under way.", {"": running})
    waiting = worker.num_waiting
    lines += _metric("generations_waiting", "gauge", "Answers in the queue.", {"": waiting})
    held = resident_bytes()
    lines += _metric("resident_memory_bytes", "gauge", "Memory of the process.", {"": held})
    if service.energy is not None:
        about = "Energy since the server began, idle time included, as the counter counts it."
        counted = {f'{{counter="{service.energy.source.name}"}}': round(service.energy.joules(), 3)}
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
