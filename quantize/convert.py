"""Change the type of a GGUF file's weights with llama.cpp's quantizer.

The quantizer runs in a process of its own (`edgespec.quantize.worker`): Ctrl-C stops it at once, a
file that makes it abort takes nothing else along, and its memory is given back. What it writes has
another name until it is complete; a partial file that a killed run left is removed by the next run
with the same target.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from edgespec.errors import BackendError, DoesNotFitError, UnsupportedError
from edgespec.memory.device.llama_binary import PACKAGE
from edgespec.models.gguf.ggml_types import FILE_TYPE_NAMES, GGML_TYPES, GgmlType
from edgespec.models.gguf.reader import Gguf, GgufTensor, read_gguf
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.gguf.writer import aligned
from edgespec.models.processes import messages_of
from edgespec.models.writing import making, put_in_place, refusing
from edgespec.progress import Progress

# Types that its quantizer makes; NVFP4 files are converted from others.
_FILE_TYPES = {name: number for number, name in FILE_TYPE_NAMES.items() if name != "NVFP4"}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
FILE_TYPES = tuple(_FILE_TYPES)
_FLOATS = ("F16", "BF16", "F32")  # the quantizer looks at no override with these
# Types that its kernels compute with and do not store.
_NOT_STORED = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")
TENSOR_TYPES = {kind.name: n for n, kind in GGML_TYPES.items() if kind.name not in _NOT_STORED}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_EXTRA_HEADER_BYTES = 4096  # keys that the quantizer may add

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the quantizer is asked for; the same recipe and source give the same bytes.

    `overrides` are pairs of a regular expression over tensor names and a tensor type; the first
    that matches holds. `imatrix` is a file of llama.cpp's; `imatrix_name` is what the result says
    about it instead of its path. `blocks` are those that are kept, renumbered from 0; None keeps
    all of them.
    """

    file_type: str
    overrides: tuple[tuple[str, str], ...] = ()
    imatrix: Path | None = None
    imatrix_name: str = ""
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tensor types a recipe gives, and the bytes of the file at most."""

    types: dict[str, GgmlType]
    file_bytes: int


def file_type_named(name: str) -> str:
    """The file type a person meant. Raises UnsupportedError for one there is none of."""
    found = _ALIASES.get(name.upper(), name.upper())
    if found not in _FILE_TYPES:
        raise UnsupportedError(
            f"there is no file type {name!r}", hint=f"use one of {', '.join(FILE_TYPES)}"
        )
    return found


def convert(
    source: PathLike,
    target: PathLike,
    file_type: str | Recipe,
    *,
    threads: int = 1,
    synced: bool = True,
    progress: Progress = lambda _what, _part: None,
) -> None:
    """Write `source` with other tensor types to `target`, which appears only when complete.

    A quantized source is quantized again, which costs quality. A file that is needed only for a
    moment need not be `synced` to the disk.

    Raises:
        ModelNotFoundError: there is no such source.
        ModelFileError: it is cut off, damaged or foreign.
        UnsupportedError: the type is not one of FILE_TYPES, or the target cannot be written.
        DoesNotFitError: the disk has no room for the result.
        BackendError: llama.cpp failed, with its own words.
    """
    recipe = file_type if isinstance(file_type, Recipe) else Recipe(file_type_named(file_type))
    source, target = Path(source), Path(target)
    sources = read_gguf_shards(source)
    check_target(target, [shard.path for shard in sources])
    predicted = predict(source, recipe)
    require_disk(target, predicted.file_bytes)
    with refusing(target, "name another target"), making(target) as partial:
        for done, total, name, _ in _run(source, recipe, threads, partial):
            progress(f"quantizing {name}", done / total)
        if {one.name: one.type for one in read_gguf(partial).tensors} != predicted.types:
            raise BackendError("llama.cpp's quantizer wrote other types than it announced")
        put_in_place(partial, target, synced=synced)


def predict(source: PathLike, recipe: Recipe) -> Prediction:
    """What the quantizer would write, from a dry run. Raises as `convert` does."""
    sources = read_gguf_shards(source)
    tensors = kept_tensors(sources, recipe.blocks)
    _check_recipe(sources[0].path, tensors, recipe)
    types = {name: kind for _, _, name, kind in _run(sources[0].path, recipe, 1, None)}
    if set(tensors) != set(types):
        raise BackendError(f"llama.cpp's quantizer reads other tensors in {sources[0].path}")
    total = sources[0].data_offset + _EXTRA_HEADER_BYTES
    for name, tensor in tensors.items():
        kind = types[name]
        total += aligned(prod(tensor.dims) // kind.block_size * kind.block_bytes)
    return Prediction(types, total)


def require_disk(target: Path, size_bytes: int) -> None:
    """Raise DoesNotFitError where the disk of `target` has no room for so many bytes."""
    free = shutil.disk_usage(target.absolute().parent).free
    if size_bytes > free:
        raise DoesNotFitError(
            f"{target.name} takes {size_bytes >> 20} MiB, and {target.absolute().parent} has "
            f"{free >> 20} MiB free",
            hint="free some space, or name a target on another disk",
        )


def check_target(target: Path, sources: Iterable[Path]) -> None:
    """Raise UnsupportedError where no file can come to be, or one of `sources` would be lost."""
    folder = target.absolute().parent
    if not folder.is_dir():
        raise UnsupportedError(f"cannot write {target}: its folder is not there", hint="make it")
    if target.is_dir():
        raise UnsupportedError(f"cannot write {target}: it is a folder", hint="name a file")
    if target.exists() and not target.is_file():
        raise UnsupportedError(f"cannot write {target}: it is no file", hint="name another file")
    if target.exists() and any(target.samefile(source) for source in sources):
        raise UnsupportedError(f"cannot write {target}: it is the source", hint="name another file")
    if not os.access(folder, os.W_OK):
        raise UnsupportedError(
            f"cannot write {target}: its folder may not be written to", hint="name another folder"
        )


def kept_tensors(
    sources: Sequence[Gguf], blocks: Sequence[int] | None = None
) -> dict[str, GgufTensor]:
    """The tensors of a model by name, or of some of its blocks by their new names."""
    found = {}
    for tensor in (tensor for part in sources for tensor in part.tensors):
        match = _BLOCK.match(tensor.name)
        if match is None or blocks is None:
            found[tensor.name] = tensor
        elif (number := int(match[1])) in blocks:
            found[f"blk.{sorted(blocks).index(number)}.{match[2]}"] = tensor
    return found


def _check_recipe(source: Path, names: Iterable[str], recipe: Recipe) -> None:
    """Options that the quantizer would silently not honour are errors."""
    if recipe.overrides and recipe.file_type in _FLOATS:
        raise UnsupportedError(
            f"a file of type {recipe.file_type} takes no types of single tensors",
            hint="choose a quantized type for the file",
        )
    names = list(names)
    for pattern, kind in recipe.overrides:
        if kind not in TENSOR_TYPES:
            raise UnsupportedError(
                f"there is no tensor type {kind!r}", hint=f"use one of {', '.join(TENSOR_TYPES)}"
            )
        try:
            matches = any(re.search(pattern, name) for name in names)
        except re.error as problem:
            raise UnsupportedError(
                f"{pattern!r} is no regular expression: {problem}",
                hint="write, for example, 'ffn_down=Q6_K' or '^token_embd=Q8_0'",
            ) from None
        if not matches:
            raise UnsupportedError(
                f"no tensor of {source.name} matches {pattern!r}",
                hint=f"its first ones are {', '.join(names[:4])}",
            )


# -- the process ---------------------------------------------------------------------------


def _run(
    source: Path, recipe: Recipe, threads: int, target: Path | None
) -> Iterator[tuple[int, int, str, GgmlType]]:
    """Number, how many there are, name and new type of each tensor, as the quantizer takes it up.

    Without a target nothing is written.
    """
    num_blocks = 0
    if recipe.blocks is not None:
        first = read_gguf(source)
        num_blocks = first.integer(f"{first.text('general.architecture')}.block_count")
    job = {
        "source": str(source),
        "target": str(target or os.devnull),
        "dry_run": target is None,
        "ftype": _FILE_TYPES[recipe.file_type],
        "overrides": [[pattern, TENSOR_TYPES[kind]] for pattern, kind in recipe.overrides],
        "imatrix": str(recipe.imatrix) if recipe.imatrix else None,
        "imatrix_name": recipe.imatrix_name,
        "blocks": recipe.blocks,
        "num_blocks": num_blocks,
        "threads": threads,
    }
    end: dict[str, Any] = {}
    by_name = {kind.name: kind for kind in GGML_TYPES.values()}
    environment = {"GGML_NO_BACKTRACE": "1"}
    with contextlib.closing(messages_of("edgespec.quantize.worker", job, environment)) as messages:
        for said in messages:
            if "tensor" in said:
                yield said["number"], said["total"], said["tensor"], by_name[said["type"]]
            else:
                end |= said
    if end.get("status") != 0:
        raise _failure(source, recipe, target, end)


def _failure(source: Path, recipe: Recipe, target: Path | None, end: dict[str, Any]) -> Exception:
    if target is not None and shutil.disk_usage(target.parent).free < 1 << 20:
        return DoesNotFitError(
            f"{target.parent} is full", hint="free some space, or name a target on another disk"
        )
    problem = end.get("problem") or ""
    if target is not None and "iostream error" in problem:
        return DoesNotFitError(
            f"{target.parent} took only a part of the new file: llama.cpp could not write the rest",
            hint="free some space, or raise your quota or the limit on files' sizes (ulimit -f)",
        )
    if "imatrix" in problem or "importance matrix" in problem:
        return UnsupportedError(
            f"{recipe.file_type} of {source.name} needs an importance matrix for all its tensors"
            if recipe.imatrix is None
            else f"the importance matrix does not belong to {source.name}: {problem}",
            hint="add `--imatrix auto`",
        )
    if "status" not in end and end["exit_status"] < 0:
        problem = f"stopped by {signal.Signals(-end['exit_status']).name}"
    return BackendError(
        f"llama.cpp cannot convert {source}: {problem or 'no reason given'}",
        hint=f"the file may be damaged, or newer than {PACKAGE}",
    )
