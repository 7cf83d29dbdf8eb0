"""Intermediate results of a graph, by how ggml stores them: `arena.Tensor` for each kind."""

from __future__ import annotations

from edgespec.memory.bytes.arena import Tensor

F32 = 4  # bytes


def fed(nbytes: int) -> Tensor:
    """What a step is fed with."""
    return Tensor(nbytes, "input", is_input=True)


def result(rows: int, width: int, *sources: Tensor) -> Tensor:
    """The outcome of an operation that needs room of its own, float32."""
    return Tensor(rows * width * F32, (rows, width), sources)


def over(operand: Tensor) -> Tensor:
    """The outcome of an operation that may write over its operand, unless that is a view."""
    return Tensor(_nbytes(operand), operand.shape, (operand,), in_place=True)


def added(left: Tensor, right: Tensor) -> Tensor:
    """A sum or a product, which may be written over either operand of its size but a view."""
    return Tensor(_nbytes(left), left.shape, (left, right), in_place=True)


def _nbytes(tensor: Tensor) -> int:
    """Of what is as large as a tensor, which may be a `reshaped` one."""
    if tensor.view_of is None:
        return tensor.nbytes
    assert isinstance(tensor.shape, tuple), "a view whose size is not known"
    rows, width = tensor.shape
    return int(rows * width * F32)


def view(tensor: Tensor) -> Tensor:
    """Another look at the same bytes."""
    return Tensor(0, None, (tensor,), view_of=tensor.view_of or tensor)


def reshaped(tensor: Tensor, rows: int, width: int) -> Tensor:
    """The same bytes from the first one on in another shape."""
    return Tensor(0, (rows, width), (tensor,), view_of=tensor.view_of or tensor)


def stored(values: Tensor, places: Tensor) -> Tensor:
    """Rows written into the cache, which has a buffer of its own."""
    return Tensor(0, None, (values, places))
