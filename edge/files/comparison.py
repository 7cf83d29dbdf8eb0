"""Files of one model side by side: what each lost against the source, and how fast it is here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.llama.backend import LlamaBackend
from edgespec.backends.llama.context import LlamaSettings
from edgespec.errors import UnsupportedError
from edgespec.files.quantizing import HELD_OUT_SEED, texts_for
from edgespec.measure.noise import largest_invariant_step
from edgespec.memory.bytes.footprint import kv_type_fits
from edgespec.memory.device import host
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import SpeedModel
from edgespec.models.spec import ModelSpec
from edgespec.progress import Progress
from edgespec.quantize.quality import Reference, make_reference, quality_of, score
from edgespec.quantize.step_times import DEPTH, step_ms
from edgespec.quantize.texts import CountedText
from edgespec.setup.stored import keep_kv_losses, stored_rounds

TEXTS = 24
SHOWN_SIZES = (1, 4, 8)
_TOP = 4096  # tokens of the source's distribution that are compared one by one
_KV_TYPES = ("f16", "q8_0", "q4_0")
_KV_DEPTH, _KV_LENGTH = 512, 1024  # tokens before those that are looked at, and with them
_CONTEXT = 1024  # where steps are compared bit by bit


def held_out(
    spec: ModelSpec, data: Path | None, progress: Progress, count: int = TEXTS
) -> Reference:
    """What the source says over texts that nothing was searched or calibrated on."""
    texts = texts_for(spec, count, progress, data=data, seed=HELD_OUT_SEED)
    return make_reference(
        spec.path,
        texts,
        threads=host.usable_cores(),
        top=_TOP,
        progress=lambda part: progress("reading the text", part),
    )


def compare(
    spec: ModelSpec,
    others: Sequence[ModelSpec],
    *,
    data: Path | None = None,
    progress: Progress = lambda _what, _part: None,
) -> dict[str, Any]:
    """One row for the source and one for each other file.

    Args:
        data: text to measure on; None lets the source write some.

    Raises UnsupportedError where a file is not of the source's vocabulary.
    """
    for other in others:
        _check_same_tokens(spec, other)
    reference, threads = held_out(spec, data, progress), host.usable_cores()
    rows = []
    for number, file in enumerate([spec, *others]):
        name, place = file.path.name, number / (len(others) + 1)
        progress(f"comparing {name}", place)
        # All with the source's history, so that differences are the files'.
        curve = curve_from(step_ms(file.path, threads=threads))
        row = {**_facts(file), **speed_of(spec, curve)}
        if number:
            lost = score(file.path, reference, threads=threads)
            row["quality"] = quality_of(reference, lost).as_json()
        rows.append(row)
    return {
        "places": len(reference.rest),
        "texts": len(reference.texts),
        "tokens_kept": reference.ids.shape[1],
        "mass_taken_together": float(reference.rest.mean()),
        "step_depth": DEPTH,
        "rows": rows,
    }


def _check_same_tokens(spec: ModelSpec, other: ModelSpec) -> None:
    if (spec.tokenizer_hash, spec.vocab_size) != (other.tokenizer_hash, other.vocab_size):
        raise UnsupportedError(
            f"{other.path.name} cannot be compared with {spec.path.name}: their tokens differ",
            hint="compare files of one model; the first is the source",
        )


def compare_kv_types(
    spec: ModelSpec,
    *,
    data: Path | None = None,
    progress: Progress = lambda _what, _part: None,
) -> dict[str, Any]:
    """What smaller types of the KV cache lose against f16, and step times, both with a long past.

    The losses are kept: `--prefer context` chooses by them.
    """
    texts = joined(texts_for(spec, 2 * TEXTS, progress, data=data, seed=HELD_OUT_SEED))
    threads = host.usable_cores()
    reference = make_reference(spec.path, texts, threads=threads, top=_TOP)
    rows: list[dict[str, Any]] = []
    for kind in _KV_TYPES:
        if not kv_type_fits(spec, kind):
            continue
        progress(f"measuring a cache of {kind}", len(rows) / len(_KV_TYPES))
        times = step_ms(
            spec.path, threads=threads, sizes=SHOWN_SIZES, depth=_KV_DEPTH, kv_type=kind
        )
        row = {"kv_type": kind, "step_ms": {str(n): ms for n, ms in times.items()}}
        if kind != "f16":
            scores = score(spec.path, reference, threads=threads, kv_type=kind)
            row["quality"] = quality_of(reference, scores).as_json()
        rows.append(row)
    losses = {row["kv_type"]: row["quality"]["kl"]["value"] for row in rows if "quality" in row}
    keep_kv_losses(spec, losses)
    return {"places": len(reference.rest), "step_depth": _KV_DEPTH, "kv_rows": rows}


def joined(texts: Sequence[CountedText]) -> list[CountedText]:
    """Texts one after the other in long ones, of which only the later part is counted."""
    tokens = np.concatenate([text.tokens for text in texts])
    counted = np.concatenate([text.counted for text in texts])
    found = []
    for start in range(0, len(tokens) - _KV_DEPTH, _KV_LENGTH):
        part = counted[start : start + _KV_LENGTH].copy()
        part[:_KV_DEPTH] = False
        part[-1] = False
        if part.any():
            found.append(CountedText(tokens[start : start + _KV_LENGTH], part))
    if not found:
        raise UnsupportedError(
            f"a cache is compared after {_KV_DEPTH} tokens, and there are {len(tokens)} in all",
            hint="name a longer text with --data",
        )
    return found


def _facts(spec: ModelSpec) -> dict[str, Any]:
    return {"file": spec.path.name, "type": spec.file_type, "bytes": spec.file_bytes}


def curve_from(times: dict[int, float]) -> CostCurve:
    """A step-time curve at the depth the times were measured at."""
    base = [float("inf")] * (max(times) + 1)
    for size, ms in times.items():
        base[size] = ms
    return CostCurve(base)


def speed_of(spec: ModelSpec, curve: CostCurve) -> dict[str, Any]:
    """Step times and predicted tokens per second, plain and with drafts as the model's were."""
    model = SpeedModel(curve, True, stored_rounds(spec, "suffix"))
    return {
        "step_ms": {str(n): ms for n, ms in enumerate(curve.base) if n and ms != float("inf")},
        "plain_tokens_per_s": model.tokens_per_s(0, 0),
        "speculative_tokens_per_s": model.tokens_per_s(curve.max_nodes - 1, 0),
    }


def invariant_step(spec: ModelSpec) -> int:
    """Up to how many tokens a step rounds like single ones, with the settings of `--exact`."""
    settings = LlamaSettings(
        context_size=_CONTEXT,
        batch_size=64,
        max_leaves=1,
        threads=host.usable_cores(),
        kv_type_k="bf16",
    )
    backend = LlamaBackend(spec.path, settings)
    try:
        return largest_invariant_step(backend)
    finally:
        backend.close()
