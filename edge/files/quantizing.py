"""Quantized files made for a size or for this device, and what they lost and gained.

What `edgespec.quantize` does not know is added here: the model's own tokenizer and chat format for
the texts it is measured on, and step times of this device.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from edgespec.backends.base import Tokenizer
from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.errors import UnsupportedError
from edgespec.exits.texts import chat_of, read_prompts
from edgespec.memory.device import host
from edgespec.models.spec import ModelSpec
from edgespec.models.writing import reason, whole_file
from edgespec.paths import expanded
from edgespec.progress import Progress, TimeLimit
from edgespec.quantize.convert import (
    Prediction,
    Recipe,
    check_target,
    convert,
    predict,
    require_disk,
)
from edgespec.quantize.fit import Fit, fit, require_room
from edgespec.quantize.imatrix import compute_imatrix, read_imatrix
from edgespec.quantize.pieces import Pieces, recipe_of
from edgespec.quantize.quality import make_reference
from edgespec.quantize.texts import CountedText, texts_of_tokens, write_texts

_SEARCH_TEXTS = 24
_TEXTS_SHARE = 0.25  # of the time; reading them for the matrix and the source takes about as long
_TYPES_SHARE = 0.5  # of what is left then; the other half is for measuring
_LEAST_PIECES = 4  # of a file: two to search on and two to judge by
_TEXTS, _SHORT = "texts.npz", "short"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
SEARCH_SEED, HELD_OUT_SEED = 1, 2
# Tensor types that are garbage without an importance matrix, and tensors that do without.
_NEEDY = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
_UNWEIGHED = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")
_MATRIX_NAME = {True: "text of a file", False: "text by the model itself"}


def texts_for(
    spec: ModelSpec,
    count: int,
    progress: Progress,
    *,
    data: Path | None = None,
    seed: int = SEARCH_SEED,
    limit: TimeLimit | None = None,
) -> list[CountedText]:
    """So many texts by the model itself, or pieces of a file (some of each part of it).

    Fewer where time is over before the model has written them.
    """
    with open_tokenizer(spec.path) as tokenizer:
        if data is None:
            chat = chat_of(spec, tokenizer)
        else:
            pieces = _file_texts(spec, data, tokenizer)
            # Half is for searching and half is held out: no piece is in both.
            order = np.random.default_rng(0).permutation(len(pieces))
            return [pieces[number] for number in order[seed != SEARCH_SEED :: 2][:count]]
    return write_texts(
        spec.path,
        chat,
        count,
        threads=host.usable_cores(),
        seed=seed,
        limit=limit,
        progress=lambda part: progress("writing text", part),
    )


def _file_texts(spec: ModelSpec, data: Path, tokenizer: Tokenizer) -> list[CountedText]:
    start = [] if spec.bos_id is None else [spec.bos_id]
    pieces = texts_of_tokens(read_prompts(data, tokenizer), start)
    if len(pieces) < _LEAST_PIECES:
        raise UnsupportedError(f"{data} holds too little text", hint="name a longer one")
    return pieces


def require_matrix(spec: ModelSpec, recipe: Recipe, wanted: str | None) -> Prediction:
    """What a recipe gives; raises UnsupportedError now where it needs a matrix nobody asked for."""
    predicted = predict(spec.path, recipe)
    needy = [name for name, kind in predicted.types.items() if kind.name in _NEEDY]
    if wanted is None and any(name not in _UNWEIGHED for name in needy):
        raise UnsupportedError(
            f"{recipe.file_type} of {spec.path.name} needs an importance matrix",
            hint="add `--imatrix auto`, which computes one from text the model writes",
        )
    return predicted


def unheeded(spec: ModelSpec, recipe: Recipe, predicted: Prediction) -> Iterator[str]:
    """What to say about matrices that do not get the type a recipe names for them.

    llama.cpp keeps norms and biases in floats, and takes another type where rows are no whole
    blocks. Raises UnsupportedError where no tensor gets the type.
    """
    free = dict(predicted.types)
    for pattern, kind in recipe.overrides:
        found = {name: free.pop(name) for name in list(free) if re.search(pattern, name)}
        matrices = {n: given for n, given in found.items() if len(spec.tensors[n].dims) > 1}
        found = matrices or found
        others = {name: given.name for name, given in found.items() if given.name != kind}
        if not others:
            continue
        instead = ", ".join(sorted(set(others.values())))
        if len(others) == len(found):
            raise UnsupportedError(
                f"no tensor that matches {pattern!r} can be {kind}: llama.cpp gives them {instead}",
                hint="their rows are no whole blocks of that type, or they are never quantized",
            )
        yield f"{len(others)} of {len(found)} tensors that match {pattern!r} become {instead}"


@contextmanager
def importance_matrix(
    spec: ModelSpec, wanted: str | None, data: Path | None, progress: Progress
) -> Iterator[tuple[Path | None, str]]:
    """The importance matrix a person asked for: none, a file, or one that is computed now.

    Yields its path and what a quantized file says about it.
    """
    if wanted is None:
        yield None, ""
        return
    if wanted != "auto":
        path = expanded(wanted)
        read_imatrix(path)  # now, with its own words, rather than in the quantizer
        yield path, ""
        return
    texts = texts_for(spec, _SEARCH_TEXTS, progress, data=data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imatrix.gguf"
        _compute(spec, texts, data, path, progress)
        yield path, "computed by edgespec"


def _compute(
    spec: ModelSpec, texts: Sequence[CountedText], data: Path | None, path: Path, progress: Progress
) -> None:
    compute_imatrix(
        spec.path,
        [text.tokens.tolist() for text in texts],
        path,
        threads=host.usable_cores(),
        dataset=_MATRIX_NAME[data is not None],
        progress=lambda part: progress("computing the importance matrix", part),
    )


def fit_file(
    spec: ModelSpec,
    target: Path,
    size_bytes: int,
    *,
    work: Path | None = None,
    types: Sequence[str] | None = None,
    data: Path | None = None,
    minutes: float | None = None,
    progress: Progress = lambda _what, _part: None,
) -> Fit:
    """Write the best mixture of types found that takes at most `size_bytes`.

    Of `minutes`, a quarter is for writing text, and half of the rest for quantizing.
    Everything measured and quantized is kept in a folder beside the target until it is done, so
    that the same call goes on where one was stopped; a folder that is given as `work` stays, and
    serves other sizes. Raises as `edgespec.quantize.fit.fit` and `convert` do.
    """
    limit = TimeLimit(None if minutes is None else 60 * minutes)
    check_target(target, spec.files)
    folder = work or target.with_name(f"{target.name}.parts")
    text = "" if data is None else _sampled_hash(data)
    key = json.dumps([spec.fingerprint, _sampled_hash(spec.path), list(types or ()), text])
    place = folder / blake2b(key.encode(), digest_size=6).hexdigest()
    kept = _kept_folder(place, limit)
    pieces = Pieces(spec.path, kept / "pieces", allowed=types)
    _require_room(pieces, size_bytes, target)
    _make_folder(place)
    texts, kept = _kept_texts(kept, spec, data, limit.first(_TEXTS_SHARE), progress)
    matrix = kept / "imatrix.gguf"
    if not matrix.exists():
        with whole_file(matrix) as partial:
            _compute(spec, texts, data, partial, progress)
    threads = host.usable_cores()
    pieces = pieces.moved(kept / "pieces", matrix)
    for_types = limit.first(_TYPES_SHARE)
    conversion_s = pieces.make(threads, progress, limit=for_types, size_bytes=size_bytes)
    reference = make_reference(
        spec.path, texts, threads=threads, progress=lambda part: progress("reading the text", part)
    )
    found = fit(
        pieces,
        reference,
        kept / "measured.jsonl",
        size_bytes,
        matrix=read_imatrix(matrix).values,
        threads=threads,
        limit=limit.less(conversion_s),
        progress=progress,
    )
    recipe = recipe_of(found.types, matrix, "computed by edgespec")
    convert(spec.path, target, recipe, threads=threads, progress=progress)
    if work is None and found.complete and found.has_tried_all:
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):  # other sizes, or somebody else's files
            folder.rmdir()
    return replace(found, file_bytes=target.stat().st_size)


def _make_folder(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot make the folder {place}: {reason(problem)}", hint="name another with --work"
        ) from None


def _require_room(pieces: Pieces, size_bytes: int, target: Path) -> None:
    """Raise DoesNotFitError where the size is too small, or a disk has no room for the work."""
    require_room(pieces, size_bytes)
    require_disk(target, size_bytes)
    is_there = next(folder for folder in pieces.folder.absolute().parents if folder.is_dir())
    is_same = is_there.stat().st_dev == target.absolute().parent.stat().st_dev
    pieces.require_disk(size_bytes if is_same else 0)


def _sampled_hash(path: Path) -> str:
    """Tells files with the same header apart: a hash of pieces from all over one."""
    digest = blake2b(digest_size=8)
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(size * number // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _kept_folder(place: Path, limit: TimeLimit) -> Path:
    """Where texts are and what is measured on them.

    Those that a limit cut short have a folder of their own: a run with more time does not use them.
    """
    has_short = limit and not (place / _TEXTS).exists() and (place / _SHORT / _TEXTS).exists()
    return place / _SHORT if has_short else place


def _kept_texts(
    kept: Path, spec: ModelSpec, data: Path | None, limit: TimeLimit, progress: Progress
) -> tuple[list[CountedText], Path]:
    """Texts of an earlier run, or new ones, and their folder."""
    if (kept / _TEXTS).exists():
        with np.load(kept / _TEXTS) as file:
            ends = np.cumsum(file["lengths"])[:-1]
            tokens, counted = (np.split(file[name], ends) for name in ("tokens", "counted"))
            return [CountedText(*part) for part in zip(tokens, counted, strict=True)], kept
    texts = texts_for(spec, _SEARCH_TEXTS, progress, data=data, limit=limit)
    if data is None and limit and limit.left() <= 0:
        kept = kept / _SHORT
        kept.mkdir(exist_ok=True)
    with whole_file(kept / _TEXTS) as partial, partial.open("wb") as file:
        np.savez(
            file,
            lengths=[len(text.tokens) for text in texts],
            tokens=np.concatenate([text.tokens for text in texts]),
            counted=np.concatenate([text.counted for text in texts]),
        )
    return texts, kept
