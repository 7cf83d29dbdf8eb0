"""The file type that is fastest on this device at a bounded loss.

Step times of every candidate come from small files of the model's shapes, so that only those whose
loss matters are written whole: from the fastest down, until one loses no more than is allowed.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.errors import UnsupportedError
from edgespec.files.comparison import curve_from, held_out, speed_of
from edgespec.memory.device import host
from edgespec.models.spec import ModelSpec
from edgespec.models.writing import making, put_in_place
from edgespec.progress import Progress
from edgespec.quantize.convert import Recipe, check_target, convert, predict, require_disk
from edgespec.quantize.pieces import bits_of
from edgespec.quantize.quality import quality_of, score
from edgespec.quantize.step_times import pace, predicted_step_ms, step_ms

CANDIDATES = (
    "Q2_K", "Q3_K_M", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q4_K_M", "Q5_0", "Q5_K_M", "Q6_K",
    "Q8_0",
)  # fmt: skip
_YARDSTICK = "Q4_0 without importance matrix"  # what is handed around
_ALLOWANCE = 1.1  # of the yardstick's loss, where no bound is given
_SPEED = "speculative_tokens_per_s"
_MATRIX = re.compile(r"^blk\.\d+\.(attn|ffn)_(?!.*norm).*\.weight$")


def tune(
    spec: ModelSpec,
    target: Path | None,
    *,
    max_kl: float | None = None,
    types: Sequence[str] = CANDIDATES,
    imatrix: Path | None = None,
    imatrix_name: str = "",
    data: Path | None = None,
    progress: Progress = lambda _what, _part: None,
) -> dict[str, Any]:
    """Measure, predict and propose; with a target, write the proposal there.

    Args:
        max_kl: most divergence from the source; None allows 1.1 times that of Q4_0 without matrix.
        data: text to measure the loss on; None lets the source write some.

    Raises UnsupportedError where no candidate loses as little as that.
    """
    if not types:
        raise UnsupportedError("there is no type to try", hint="name some with --types")
    threads = host.usable_cores()
    with ExitStack() as opened:
        if target is None:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        else:  # on the target's disk
            check_target(target, spec.files)
            folder = opened.enter_context(making(target))
            folder.mkdir()
        recipes = _recipes(spec, types, imatrix, imatrix_name)
        curve = curve_from(*step_ms(spec.path, threads=threads))
        source = {"type": spec.file_type, "bytes": spec.file_bytes, "is_source": True}
        rows: list[dict[str, Any]] = [source | speed_of(spec, curve)]  # measured as it is
        rows += _candidate_rows(spec, recipes, folder, progress)
        reference = held_out(spec, data, progress)
        recipes[_YARDSTICK] = Recipe("Q4_0")

        def kl(kind: str) -> float:
            """Mean divergence of a type from the source; one file at a time is on the disk."""
            for old in folder.glob("*.gguf"):
                old.unlink()
            path = folder / f"{kind}.gguf"
            convert(spec.path, path, recipes[kind], threads=threads, synced=False)
            return quality_of(reference, score(path, reference, threads=threads)).kl.value

        if max_kl is None:
            progress(f"measuring what {_YARDSTICK} loses", 0.0)
            max_kl = _ALLOWANCE * kl(_YARDSTICK)
        fastest = sorted(rows[1:], key=lambda row: -row[_SPEED])
        for number, chosen in enumerate(fastest):
            progress(f"measuring what {chosen['type']} loses", number / len(fastest))
            chosen["kl"] = kl(chosen["type"])
            if chosen["kl"] <= max_kl:
                break
        else:
            least = min(fastest, key=lambda row: row["kl"])
            said = f"{least['type']} loses least, {least['kl']:.4f}"
            raise UnsupportedError(
                f"no type loses at most {max_kl:.4f}: {said}", hint="allow more with --max-kl"
            )
        path = folder / f"{chosen['type']}.gguf"
        # What both files really take, in turns where both fit into memory.
        paths = spec.path, path
        if 2 * (rows[0]["bytes"] + chosen["bytes"]) < host.available_bytes():
            times = step_ms(*paths, threads=threads)
        else:
            times = [found for one in paths for found in step_ms(one, threads=threads)]
        for row, found in zip((rows[0], chosen), times, strict=True):
            row["measured"] = speed_of(spec, curve_from(found))
        if target is not None:
            put_in_place(path, target)
    return {"max_kl": max_kl, "type": chosen["type"], "rows": rows, "places": len(reference.rest)}


def _recipes(
    spec: ModelSpec, types: Sequence[str], imatrix: Path | None, imatrix_name: str
) -> dict[str, Recipe]:
    """What is tried, by name: each type as llama.cpp mixes it, and with its head as coarse as most.

    A small model's head takes a good part of each step, and the mixtures leave it in more bits.
    """
    recipes: dict[str, Recipe] = {}
    for kind in types:
        recipes[kind] = recipe = Recipe(kind, (), imatrix, imatrix_name)
        found = predict(spec.path, recipe).types
        types_of_blocks = Counter(found[name] for name in found if _MATRIX.search(name))
        if not types_of_blocks:
            continue
        most = types_of_blocks.most_common(1)[0][0]
        if bits_of(most.name) < bits_of(found[spec.head_name].name):
            override = ("^" + spec.head_name.replace(".", r"\.") + "$", most.name)
            recipes[f"{kind}, head {most.name}"] = replace(recipe, overrides=(override,))
    return recipes


def _candidate_rows(
    spec: ModelSpec, recipes: dict[str, Recipe], folder: Path, progress: Progress
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    predicted = {kind: predict(spec.path, recipe) for kind, recipe in recipes.items()}
    # One candidate at a time is written whole; before that three small files, each with a head.
    largest = max(found.file_bytes for found in predicted.values())
    require_disk(folder / "candidate", largest + 3 * spec.tensors[spec.head_name].data_bytes)
    threads = host.usable_cores()
    with pace(spec.path, spec.num_layers, folder, threads=threads) as now:
        usual = before = now()
        for number, (kind, recipe) in enumerate(recipes.items()):
            progress(f"timing {kind}", number / len(recipes))
            times = predicted_step_ms(
                spec.path,
                predicted[kind].types,
                recipe.file_type,
                spec.num_layers,
                folder,
                threads=threads,
                imatrix=recipe.imatrix,
            )
            # The machine's speed drifts from one candidate to the next.
            after = now()
            drift = (before + after) / (2 * usual)
            curve = curve_from({size: ms / drift for size, ms in times.items()})
            row = {"type": kind, "bytes": predicted[kind].file_bytes, "is_source": False}
            rows.append(row | speed_of(spec, curve))
            before = after
    return rows
