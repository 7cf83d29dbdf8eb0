"""Files of one model side by side: what each lost against the source, and how fast it is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.errors import UnsupportedError
from edgespec.files.quantizing import HELD_OUT_SEED, texts_for
from edgespec.memory.bytes.config import kv_pair
from edgespec.memory.bytes.footprint import has_packed_weights, kv_type_fits
from edgespec.memory.device import host
from edgespec.memory.device.kernels import missing_kernels
from edgespec.memory.times import CostCurve, SpeedModel
from edgespec.models.spec import ModelSpec
from edgespec.paths import read_text
from edgespec.progress import Progress, time_text
from edgespec.quantize.quality import Reference, make_reference, quality_of, score
from edgespec.quantize.step_times import DEPTH, step_ms
from edgespec.setup.cache_types import measure_kv_losses
from edgespec.setup.stored import stored_rounds

TEXTS = 24
SHOWN_SIZES = (1, 4, 8)
_TOP = 4096  # tokens of the source's distribution that are compared one by one
_KV_TYPES = (
    *("q8_0", "q5_1", "q5_0", "q4_1", "iq4_nl", "q4_0"),
    *("f16/q4_0", "q8_0/q5_0", "q8_0/q4_0"),
)
_KV_DEPTH = 512  # tokens in the cache where steps are timed


def held_out(spec: ModelSpec, data: Path | None, progress: Progress) -> Reference:
    """What the source says over texts that nothing was fitted to or calibrated on."""
    texts = texts_for(spec, TEXTS, progress, data=data, seed=HELD_OUT_SEED)
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

    A `progress` that raises KeyboardInterrupt ends it: files that were measured count, and it is
    not `complete`. Raises UnsupportedError where a file is not of the source's vocabulary.
    """
    for other in others:
        if (spec.tokenizer_hash, spec.vocab_size) != (other.tokenizer_hash, other.vocab_size):
            raise UnsupportedError(
                f"{other.path.name} cannot be compared with {spec.path.name}: their tokens differ",
                hint="compare files of one model; the first is the source",
            )
    reference, threads = held_out(spec, data, progress), host.usable_cores()
    rows: list[dict[str, Any]] = []
    files, tell = [spec, *others], _with_time_left(progress)
    for number, file in enumerate(files):
        try:
            tell(f"comparing {file.path.name}", number / len(files))
        except KeyboardInterrupt:
            if not number:
                raise
            break
        # All with the source's history, so that differences are the files'.
        curve = curve_from(*step_ms(file.path, threads=threads))
        row: dict[str, Any] = speed_of(spec, curve)
        row |= {"file": file.path.name, "type": file.file_type, "bytes": file.file_bytes}
        if number:
            lost = score(file.path, reference, threads=threads)
            row["quality"] = asdict(quality_of(reference, lost))
        rows.append(row)
    return {
        "complete": len(rows) == len(files),
        "places": len(reference.rest),
        "texts": len(reference.texts),
        "tokens_kept": reference.ids.shape[1],
        "mass_taken_together": float(reference.rest.mean()),
        "step_depth": DEPTH,
        "rows": rows,
    }


def compare_kv_types(
    spec: ModelSpec,
    *,
    data: Path | None = None,
    progress: Progress = lambda _what, _part: None,
) -> dict[str, Any]:
    """What types of the KV cache lose against f16 over a text, and step times with a long past.

    The losses are kept: plans show them, and `--prefer context` chooses by them. A `progress` that
    raises KeyboardInterrupt ends it as it ends `compare`.
    """
    threads = host.usable_cores()
    kinds = [kind for kind in _KV_TYPES if all(kv_type_fits(spec, one) for one in kv_pair(kind))]
    rows: list[dict[str, Any]] = []
    places = 0
    try:
        for kind, loss in measure_kv_losses(
            spec,
            kinds,
            threads=threads,
            text=None if data is None else read_text(data),
            progress=_with_time_left(progress),
            kernels=not missing_kernels() and has_packed_weights(spec),
        ):
            (times,) = step_ms(
                spec.path, threads=threads, sizes=SHOWN_SIZES, depth=_KV_DEPTH, kv_type=kind
            )
            row = {"kv_type": kind, "step_ms": {str(n): ms for n, ms in times.items()}}
            if loss is not None:
                lost = loss()
                row["quality"], places = asdict(lost), lost.places
            rows.append(row)
    except KeyboardInterrupt:
        if not places:
            raise
    complete = len(rows) == 1 + len(kinds)
    return {"complete": complete, "places": places, "step_depth": _KV_DEPTH, "kv_rows": rows}


def _with_time_left(progress: Progress) -> Progress:
    """The same progress, which says how long what is left takes if it goes on as it did."""
    begun_s = perf_counter()

    def tell(what: str, part: float) -> None:
        if 0.0 < part < 1.0:
            left_s = (perf_counter() - begun_s) * (1.0 - part) / part
            what += f", about {time_text(left_s)} left"
        progress(what, part)

    return tell


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
