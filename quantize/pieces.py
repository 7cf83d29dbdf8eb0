"""Each tensor in each type it may have, quantized once, so that a mixture costs no quantizing.

A piece is a part of a split model that holds one tensor. llama.cpp takes any list of such parts, so
a mixture is a list of paths: nothing is written, and all mixtures share the pages of the pieces.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from edgespec.errors import UnsupportedError
from edgespec.models.gguf.access import read_part
from edgespec.models.gguf.ggml_types import GGML_TYPES
from edgespec.models.gguf.reader import GgufTensor, read_gguf
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.gguf.writer import Raw, aligned, i32, keys_of, u16, write_raw
from edgespec.models.writing import making, whole_file
from edgespec.quantize.convert import TENSOR_TYPES, Recipe, convert, predict, require_disk

# Types a tensor may have, by what its rows can be cut into. Left out are the IQ types below four
# bits, whose kernels are slow, and MXFP4, which lost 15 times as much as IQ4_NL for 6% less.
_TYPES_OF_256 = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_TYPES_OF_32 = ("Q2_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_BASE = "Q8_0"  # any quantized type: every tensor gets a type of its own
# Tensor types that no file type is named after.
_NAMES = {
    "Q3_K": "Q3_K_M",
    "Q4_K": "Q4_K_M",
    "Q5_K": "Q5_K_M",
    "MXFP4": "MXFP4_MOE",
    "NVFP4": _BASE,
}
_FLOATS = ("F32", "F16", "BF16")
_KEY_BYTES = 512  # that the quantizer adds about an importance matrix


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor that can be quantized: its possible types, the smallest first, and their bytes."""

    tensor: GgufTensor
    types: tuple[str, ...]
    sizes: tuple[int, ...]


def recipe_of(types: Mapping[str, str], imatrix: Path | None, imatrix_name: str) -> Recipe:
    """The recipe that gives these tensors these types; the file is named after the commonest."""
    overrides = tuple(("^" + name.replace(".", r"\.") + "$", kind) for name, kind in types.items())
    counts = Counter(kind for kind in types.values() if kind not in _FLOATS)
    commonest = counts.most_common(1)[0][0] if counts else _BASE
    return Recipe(_NAMES.get(commonest, commonest), overrides, imatrix, imatrix_name)


class Pieces:
    """The pieces of one source in a folder; made once, and found again by the next run.

    `allowed` are the tensor types to choose from; None leaves the default ones.
    """

    def __init__(
        self,
        source: Path,
        folder: Path,
        *,
        allowed: Sequence[str] | None = None,
    ) -> None:
        if unknown := set(allowed or ()) - set(TENSOR_TYPES):
            raise UnsupportedError(
                f"there is no tensor type {min(unknown)!r}",
                hint=f"use some of {', '.join(TENSOR_TYPES)}",
            )
        self.source, self.folder = source, folder
        self._imatrix: Path | None = None
        parts = read_gguf_shards(source)
        tensors = {tensor.name: tensor for part in parts for tensor in part.tensors}
        two = [predict(source, Recipe(_BASE, ((".", kind),))).types for kind in ("Q4_0", "Q8_0")]
        self.choices = [
            _choice(tensors[name], allowed) for name in tensors if two[0][name] != two[1][name]
        ]
        self._numbers = {choice.tensor.name: n for n, choice in enumerate(self.choices, 1)}
        free = [tensor for name, tensor in tensors.items() if name not in self._numbers]
        self.fixed_bytes = parts[0].data_offset + _KEY_BYTES
        self.fixed_bytes += sum(aligned(tensor.data_bytes) for tensor in free)

    def moved(self, folder: Path, imatrix: Path) -> Pieces:
        """The same in another folder, to be quantized with a matrix."""
        found = copy.copy(self)
        found.folder, found._imatrix = folder, imatrix
        return found

    def source_types(self) -> dict[str, str]:
        """The types the tensors have in the source."""
        return {choice.tensor.name: choice.tensor.type.name for choice in self.choices}

    def paths(self, types: Mapping[str, str]) -> list[Path]:
        """The parts of a mixture; tensors that are not named have the source's type."""
        own = self.source_types()
        chosen = [self.path(name, types.get(name, own[name])) for name in self._numbers]
        return [self._first, *chosen]

    @property
    def _first(self) -> Path:
        return self.folder / "rest.gguf"

    def path(self, name: str, kind: str) -> Path:
        """The piece of a tensor in one of its types, its source's included."""
        return self.folder / f"{self._numbers[name]:05}.{kind}.gguf"

    def _missing(self) -> dict[str, list[str]]:
        """Names of tensors of which there is no piece yet, by its type."""
        missing: dict[str, list[str]] = {}
        for choice in self.choices:
            name, is_begun = choice.tensor.name, self._first.exists()
            for kind in {choice.tensor.type.name, *choice.types}:
                if not (is_begun and self.path(name, kind).exists()):
                    missing.setdefault(kind, []).append(name)
        return dict(sorted(missing.items()))

    def require_disk(self, also_bytes: int = 0) -> None:
        """Raise DoesNotFitError where the disk has no room for the pieces that are missing.

        `also_bytes` are needed beside them. The folder need not be there yet.
        """
        missing = self._missing()
        sizes = {
            (choice.tensor.name, kind): size
            for choice in self.choices
            for kind, size in zip(choice.types, choice.sizes, strict=True)
        }
        sizes |= {
            (choice.tensor.name, choice.tensor.type.name): aligned(choice.tensor.data_bytes)
            for choice in self.choices
        }
        need = sum(sizes[name, kind] for kind, names in missing.items() for name in names)
        most = max((c.tensor.data_bytes for c in self.choices), default=0)
        source_bytes = sum(aligned(c.tensor.data_bytes) for c in self.choices) + self.fixed_bytes
        working = need + source_bytes + most if missing else 0
        there = next(folder for folder in self.folder.absolute().parents if folder.is_dir())
        require_disk(there / self.folder.name, working + also_bytes)

    def make(self, threads: int, progress: Callable[[str, float], None]) -> None:
        """Make the pieces that are missing; a call that is stopped leaves what it has made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own, missing = self.source_types(), self._missing()
        for done, (kind, names) in enumerate(missing.items()):

            def report(what: str, part: float, done: int = done, kind: str = kind) -> None:
                progress(f"quantizing to {kind}", (done + part) / len(missing))

            recipe = recipe_of({**own, **dict.fromkeys(names, kind)}, self._imatrix, "own")
            with making(self.folder / "whole.gguf") as whole:
                convert(self.source, whole, recipe, threads=threads, synced=False, progress=report)
                self._cut(whole, kind, names)

    def _cut(self, whole: Path, kind: str, names: Sequence[str]) -> None:
        """Cut a file, in which some tensors are of one type, into their pieces."""
        document = read_gguf(whole)
        with whole.open("rb") as file:

            def raw(tensor: GgufTensor) -> Raw:
                data = read_part(file, tensor.offset, tensor.data_bytes)
                return tensor.name, tensor.dims, TENSOR_TYPES[tensor.type.name], data

            if not self._first.exists():
                number, keys = keys_of(document, read_part(file, 0, document.data_offset))
                keys += u16("split.no", 0) + u16("split.count", len(self._numbers) + 1)
                keys += i32("split.tensors.count", len(document.tensors))
                rest = [one for one in document.tensors if one.name not in self._numbers]
                _write(self._first, number + 3, keys, [*map(raw, rest)])
            for tensor in document.tensors:
                if tensor.name in names:
                    path = self.path(tensor.name, kind)
                    keys = u16("split.no", self._numbers[tensor.name])
                    _write(path, 1, keys, [raw(tensor)])


def bits_of(kind: str) -> float:
    """Bits a value takes in a tensor type."""
    found = GGML_TYPES[TENSOR_TYPES[kind]]
    return 8 * found.block_bytes / found.block_size


def _choice(tensor: GgufTensor, allowed: Sequence[str] | None) -> Choice:
    row, values = tensor.dims[0], prod(tensor.dims)
    names = allowed or (_TYPES_OF_256 if row % 256 == 0 else _TYPES_OF_32)
    kinds = [kind for kind in GGML_TYPES.values() if kind.name in names]
    kinds = [kind for kind in kinds if row % kind.block_size == 0]
    if not kinds:
        raise UnsupportedError(
            f"rows of {tensor.name} have {row} values, which none of {', '.join(names)} can hold",
            hint="allow Q8_0",
        )
    sized = sorted((aligned(values // k.block_size * k.block_bytes), k.name) for k in kinds)
    return Choice(tensor, tuple(name for _, name in sized), tuple(size for size, _ in sized))


def _write(path: Path, num_keys: int, keys: bytes, tensors: Sequence[Raw]) -> None:
    with whole_file(path, synced=False) as partial:
        write_raw(partial, num_keys, keys, tensors)
