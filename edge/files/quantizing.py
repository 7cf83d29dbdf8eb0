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

from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.errors import UnsupportedError
from edgespec.exits.texts import chat_of, read_prompts
from edgespec.memory.device import host
from edgespec.models.spec import ModelSpec, content_hash
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

_FIT_TEXTS = 24
_LEAST_PIECES = 4  # of a file: two to fit to and two to judge by
_TEXTS = "texts.npz"
FIT_SEED, HELD_OUT_SEED = 1, 2
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
    seed: int = FIT_SEED,
) -> list[CountedText]:
    """So many texts by the model itself, or pieces of a file (some of each part of it)."""
    with open_tokenizer(spec.path) as tokenizer:
        if data is None:
            chat = chat_of(spec, tokenizer)
        else:
            start = [] if spec.bos_id is None else [spec.bos_id]
            pieces = texts_of_tokens(read_prompts(data, tokenizer), start)
            if len(pieces) < _LEAST_PIECES:
                raise UnsupportedError(f"{data} holds too little text", hint="name a longer one")
            # Half is to fit to and half is held out: no piece is in both.
            order = np.random.default_rng(0).permutation(len(pieces))
            return [pieces[number] for number in order[seed != FIT_SEED :: 2][:count]]
    return write_texts(
        spec.path,
        chat,
        count,
        threads=host.usable_cores(),
        seed=seed,
        progress=lambda part: progress("writing text", part),
    )


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
    texts = texts_for(spec, _FIT_TEXTS, progress, data=data)
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
    """Write the mixture of types that loses least in at most `size_bytes`.

    `minutes` are for measuring. Everything measured and quantized is kept in a folder beside the
    target until it is done, so that the same call goes on where one was stopped; a folder that is
    given as `work` stays, and serves other sizes. Raises as `edgespec.quantize.fit.fit` and
    `convert` do.
    """
    check_target(target, spec.files)
    folder = work or target.with_name(f"{target.name}.parts")
    text = "" if data is None else content_hash([(data, data.stat().st_size)])
    key = json.dumps([spec.fingerprint, list(types or ()), text])
    kept = folder / blake2b(key.encode(), digest_size=6).hexdigest()
    pieces = Pieces(spec.path, kept / "pieces", allowed=types)
    require_room(pieces, size_bytes)
    require_disk(target, size_bytes)
    is_there = next(folder for folder in pieces.folder.absolute().parents if folder.is_dir())
    is_same = is_there.stat().st_dev == target.absolute().parent.stat().st_dev
    pieces.require_disk(size_bytes if is_same else 0)
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot make the folder {kept}: {reason(problem)}", hint="name another with --work"
        ) from None
    texts = _kept_texts(kept / _TEXTS, spec, data, progress)
    matrix = kept / "imatrix.gguf"
    if not matrix.exists():
        with whole_file(matrix) as partial:
            _compute(spec, texts, data, partial, progress)
    threads = host.usable_cores()
    pieces = pieces.moved(kept / "pieces", matrix)
    pieces.make(threads, progress)
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
        limit=TimeLimit(None if minutes is None else 60 * minutes),
        progress=progress,
    )
    recipe = recipe_of(found.types, matrix, "computed by edgespec")
    convert(spec.path, target, recipe, threads=threads, progress=progress)
    if work is None and found.has_measured_all:
        shutil.rmtree(kept, ignore_errors=True)
        with suppress(OSError):  # other sizes, or somebody else's files
            folder.rmdir()
    return replace(found, file_bytes=target.stat().st_size)


def _kept_texts(
    path: Path, spec: ModelSpec, data: Path | None, progress: Progress
) -> list[CountedText]:
    """Texts of an earlier run, or new ones."""
    if path.exists():
        with np.load(path) as file:
            ends = np.cumsum(file["lengths"])[:-1]
            tokens, counted = (np.split(file[name], ends) for name in ("tokens", "counted"))
            return [CountedText(*part) for part in zip(tokens, counted, strict=True)]
    texts = texts_for(spec, _FIT_TEXTS, progress, data=data)
    with whole_file(path) as partial, partial.open("wb") as file:
        np.savez(
            file,
            lengths=[len(text.tokens) for text in texts],
            tokens=np.concatenate([text.tokens for text in texts]),
            counted=np.concatenate([text.counted for text in texts]),
        )
    return texts
