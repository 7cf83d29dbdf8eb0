"""Answers of a bench, and its document, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.bench.loaded_model import Answer
from edgespec.decode.generation import Counters


def answer(
    seconds: float, rounds: int, accepted: int = 0, ids: Sequence[int] = (1, 2, 3), **more: Any
) -> Answer:
    """An answer by hand: `rounds` rounds in `seconds`, and half a second for the prompt."""
    counters = Counters(
        generated_tokens=1 + rounds + accepted,
        rounds=rounds,
        accepted_tokens=accepted,
        time_to_first_token_s=0.5,
        decode_s=seconds,
        **more,
    )
    return Answer(tuple(ids), counters)


def row(ratio: float, identical: int = 2, **changes: Any) -> dict[str, Any]:
    """Numbers of one task, by hand."""
    found: dict[str, Any] = {
        "prompts": 2, "tokens": 256, "tokens_per_s": 100 * ratio, "ratio": ratio,
        "ratio_low": ratio - 0.05, "ratio_high": ratio + 0.05,
        "end_to_end_tokens_per_s": 90 * ratio, "end_to_end_ratio": ratio,
        "end_to_end_ratio_low": ratio, "end_to_end_ratio_high": ratio,
        "time_to_first_token_s": 0.25, "rounds": 128, "drafted_tokens": 0, "accepted_tokens": 0,
        "acceptance_length": 1.0, "drafted_by": {}, "accepted_by": {}, "draft_s": 0.0,
        "host_share": 0.01, "identical": identical, "unexplained": 0, "largest_gap": 0.0,
        "j_per_token": 0.42 / ratio,
    }  # fmt: skip
    return {**found, **changes}


def document(**changes: Any) -> dict[str, Any]:
    """A bench document by hand: plain and suffix, two tasks."""
    suffix = row(
        1.4, identical=1, drafted_tokens=90, accepted_tokens=60, acceptance_length=1.5,
        drafted_by={"suffix": 80, "recycling": 10}, accepted_by={"suffix": 60},
    )  # fmt: skip
    memory = {
        "measured_peak_bytes": 270 << 20, "predicted_peak_bytes": 280 << 20, "phases": [],
        "samples": [{"time_s": 0.1, "resident_bytes": 40 << 20}],
    }  # fmt: skip
    found: dict[str, Any] = {
        "model": {"file": "tiny.gguf", "name": "Tiny", "type": "Q4_0", "bytes": 1},
        "machine": {
            "measured_at": "2026-11-27 12:00 +0000",
            "cpu": "A processor of some length indeed", "cores": 2, "system": "Linux x86_64",
            "python": "3.11.7", "edgespec": "0.1.0", "llama_cpp_python": "0.3.36",
        },
        "busy_neighbours": 1.2,
        "settings": {"max_tokens": 128, "repeats": 3, "prompts": 4, "tasks": 2},
        "ceiling": {
            "bytes_per_token": 86 << 20, "memory_bytes_per_s": 40e9, "tokens_per_s": 443.6,
            "plain_tokens_per_s": 100.0,
        },
        "energy": {"source": "RAPL: package-0", "missing": None, "idle_w": 3.25},
        "loads": [{"settings": "", "batch_noise": 0.1, "memory": memory}],
        "variants": [
            {"name": "plain", "drafter": "none", "settings": "", "load": 0, "overall": row(1.0),
             "tasks": {"summarization": row(1.0), "code": row(1.0)}},
            {"name": "suffix,recycling", "drafter": "suffix,recycling", "settings": "", "load": 0,
             "overall": suffix, "tasks": {"summarization": row(1.8), "code": row(1.1)}},
        ],
        "answers": [],
    }  # fmt: skip
    return {**found, **changes}
