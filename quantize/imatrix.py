"""Importance matrices: the mean square of what each column of a weight matrix is multiplied with.

The quantizer weighs rounding errors with them. They are read and written as GGUF files of
llama.cpp's (`llama.cpp: tools/imatrix/imatrix.cpp` has the definition: every row that enters a
matrix multiplication counts).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.library import interrupts_kept
from edgespec.errors import BackendError, EdgespecError, UnsupportedError
from edgespec.memory.device.structures import Tensor
from edgespec.models.gguf.access import read_part
from edgespec.models.gguf.reader import read_gguf, read_strings
from edgespec.models.gguf.writer import write_gguf
from edgespec.quantize.context import EvalContext

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MUL_MAT, _MUL_MAT_ID = 29, 30  # values of ggml_op
_F32 = 0
_HEADS = (b"output.weight", b"token_embd.weight")
_MOST_BYTES = 1 << 32  # of a file that is believed
_CHUNK = 512  # tokens; what `chunk_count` in a file counts


@dataclass(slots=True)
class ImportanceMatrix:
    """Mean squares by tensor name, [columns], or [experts x columns] of stacked experts."""

    values: dict[str, NDArray[np.float32]]
    dataset: str = ""
    num_chunks: int = 0


def read_imatrix(path: Path) -> ImportanceMatrix:
    """The matrix in a file, normalised as `llama-quantize` does.

    Raises UnsupportedError for a file that is none.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UnsupportedError(
                    f"{path} is no importance matrix: it is no GGUF file",
                    hint="one of an older llama.cpp is made into one by "
                    "`llama-imatrix --in-file OLD.dat -o NEW.gguf --output-format gguf`",
                )
            if path.stat().st_size > _MOST_BYTES:
                raise _no_matrix(path, "it is too large")
        found = _read(path)
    except OSError as problem:
        raise UnsupportedError(
            f"cannot read {path}: {problem.strerror}", hint="name an importance matrix"
        ) from None
    except (ValueError, KeyError, EdgespecError) as problem:
        if isinstance(problem, UnsupportedError):
            raise
        raise _no_matrix(path, str(problem) or "it ends too early") from None
    for name, values in found.values.items():
        if not np.isfinite(values).all():
            raise _no_matrix(path, f"its values for {name} are not finite")
    return found


def _no_matrix(path: Path, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path} is no importance matrix: {reason}",
        hint="`--imatrix auto` computes one; llama.cpp's llama-imatrix writes some",
    )


def _read(path: Path) -> ImportanceMatrix:
    document = read_gguf(path)
    tensors = {tensor.name: tensor for tensor in document.tensors}
    with path.open("rb") as file:

        def floats(name: str) -> NDArray[np.float32]:
            tensor = tensors[name]
            if tensor.type.name != "F32":
                raise ValueError(f"{name} is of type {tensor.type.name}")
            data = read_part(file, tensor.offset, tensor.data_bytes)
            found: NDArray[np.float32] = np.frombuffer(data, np.float32).copy()
            return found

        values = {}
        for name in tensors:
            if not name.endswith(_SUMS):
                continue
            stem = name[: -len(_SUMS)]
            sums, counts = floats(name), np.rint(floats(stem + _COUNTS))
            rows = sums.reshape(len(counts), -1)
            known = counts > 0
            rows[known] /= counts[known, None]
            rows[~known] = 1.0
            values[stem] = sums
    first = next(read_strings(path, document.metadata.get("imatrix.datasets")), b"")
    dataset = first[:4096].decode("utf-8", errors="replace")
    if not values:
        raise ValueError("it has no sums of squares")
    return ImportanceMatrix(values, dataset, document.integer("imatrix.chunk_count", 0))


# -- computing one -------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    """Sums of squares [matrices, columns] and rows counted [matrices] by tensor name."""

    squares: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    problem: str = ""

    def hear(self, address: int, ask: bool, _data: Any) -> bool:
        """Called for every node of the graph: before it, whether it matters, and after it."""
        try:
            node = ctypes.cast(address, ctypes.POINTER(Tensor)).contents
            if node.op not in (_MUL_MAT, _MUL_MAT_ID):
                return not ask
            if not ask:
                self._add(node)
                return True
            weights, rows = node.src[0].contents, node.src[1].contents
            # The head of tied embeddings is theirs; llama-imatrix leaves heads out.
            is_ours = weights.name.startswith(b"blk.") or weights.name in _HEADS
            return bool(is_ours and rows.type == _F32)
        except Exception as problem:  # C cannot pass it on
            self.problem = str(problem) or type(problem).__name__
            return False

    def _add(self, node: Tensor) -> None:
        weights, inputs = node.src[0].contents, node.src[1].contents
        name = weights.name.decode()
        values = _values(inputs, np.float32)  # [ne3, ne2, ne1, ne0]
        num_matrices = weights.ne[2] * weights.ne[3]
        squares = self.squares.setdefault(name, np.zeros((num_matrices, inputs.ne[0])))
        counts = self.counts.setdefault(name, np.zeros(num_matrices, np.int64))
        if node.op == _MUL_MAT:
            for outer in range(inputs.ne[3]):
                for middle in range(inputs.ne[2]):
                    matrix = outer % weights.ne[3] * weights.ne[2] + middle % weights.ne[2]
                    rows = values[outer, middle]
                    squares[matrix] += np.einsum("ij,ij->j", rows, rows)
                    counts[matrix] += len(rows)
            return
        experts = _values(node.src[2].contents, np.int32)[0, 0]  # [tokens, used]
        for token, chosen in enumerate(experts):
            for place, expert in enumerate(chosen):
                squares[expert] += values[0, token, place % inputs.ne[1]] ** 2
                counts[expert] += 1


def _values(tensor: Tensor, dtype: Any) -> NDArray[Any]:
    """A view of a tensor in host memory, slowest dimension first."""
    extent = sum((size - 1) * step for size, step in zip(tensor.ne, tensor.nb, strict=True)) + 4
    data = (ctypes.c_char * extent).from_address(tensor.data)
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    view: NDArray[Any] = np.ndarray(shape, dtype, buffer=data, strides=strides)
    return view


def compute_imatrix(
    model: Path,
    texts: Sequence[Sequence[int]],
    target: Path,
    *,
    threads: int,
    dataset: str,
    progress: Callable[[float], None] = lambda _part: None,
) -> None:
    """Write the importance matrix of `model` over `texts`, lists of tokens, to a new file."""
    sums = _Sums()
    longest = max(len(text) for text in texts)
    with EvalContext(
        model, context_size=longest, batch_size=longest, threads=threads, observe=sums.hear
    ) as context:
        for number, text in enumerate(texts):
            with interrupts_kept():
                for _ in context.score(text):
                    pass
            progress((number + 1) / len(texts))
            if sums.problem:
                raise BackendError(f"the inputs of {model.name} cannot be read: {sums.problem}")
    tensors = {}
    for name, squares in sorted(sums.squares.items()):
        tensors[name + _SUMS] = squares.astype(np.float32)
        tensors[name + _COUNTS] = sums.counts[name].astype(np.float32)[:, None]
    write_gguf(
        target,
        {
            "general.type": "imatrix",
            "imatrix.datasets": [dataset],
            "imatrix.chunk_count": max(1, sum(map(len, texts)) // _CHUNK),
            "imatrix.chunk_size": _CHUNK,
        },
        tensors,
    )
