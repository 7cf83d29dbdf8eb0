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
    """The outcome of an operation that may write over its operand."""
    return Tensor(operand.nbytes, operand.shape, (operand,), in_place=True)


def added(left: Tensor, right: Tensor) -> Tensor:
    """A sum or a product, which may be written over its left operand."""
    return Tensor(left.nbytes, left.shape, (left, right), in_place=True)


def view(tensor: Tensor) -> Tensor:
    """Another look at the same bytes."""
    return Tensor(0, None, (tensor,), view_of=tensor.view_of or tensor)


def reshaped(tensor: Tensor, rows: int, width: int) -> Tensor:
    """The same bytes from the first one on in another shape, which results may be written over."""
    return Tensor(0, (rows, width), (tensor,), view_of=tensor.view_of or tensor)


def over_view(look: Tensor) -> Tensor:
    """As `over`, of a `reshaped` one: it takes the place of what that is a view of."""
    assert isinstance(look.shape, tuple)
    rows, width = look.shape
    return Tensor(rows * width * F32, look.shape, (look,), in_place=True)


def stored(values: Tensor, places: Tensor) -> Tensor:
    """Rows written into the cache, which has a buffer of its own."""
    return Tensor(0, None, (values, places))
