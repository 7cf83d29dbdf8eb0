"""How large ggml makes the buffer for a graph's intermediate results.

A replay of ggml's graph allocator over a described graph (`llama.cpp: ggml/src/ggml-alloc.c`,
`ggml_gallocr_alloc_graph_impl` and `ggml_dyn_tallocr_alloc`; evaluation order as in `ggml.c`,
`ggml_visit_parents_graph`): inputs first, then every node in order, each into the best fitting gap,
over one of its operands where the operation allows it, and freed after its last use. Only sizes are
replayed, so it costs milliseconds. Knows nothing about models; `edgespec.memory.bytes.graph` does.
"""

from __future__ import annotations

from collections.abc import Sequence

_ALIGNMENT = 32  # bytes; ggml's TENSOR_ALIGNMENT
_UNBOUNDED = 1 << 62


class Tensor:
    """One intermediate result: its size, what it is computed from, and how it may be stored.

    `view_of` owns the bytes of a view. `in_place` results may take the place of an operand with
    the same shape. Operands that live elsewhere (weights, KV cache) are left out.
    """

    __slots__ = ("in_place", "is_input", "is_output", "nbytes", "shape", "sources", "view_of")

    def __init__(
        self,
        nbytes: int,
        shape: object,
        sources: Sequence[Tensor] = (),
        *,
        view_of: Tensor | None = None,
        in_place: bool = False,
        is_input: bool = False,
    ) -> None:
        self.nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.shape = shape
        self.sources = sources
        self.view_of = view_of
        self.in_place = in_place
        self.is_input = is_input
        self.is_output = False


class Graph:
    """Tensors in the order ggml would evaluate them."""

    def __init__(self) -> None:
        self._leaves: list[Tensor] = []
        self._nodes: list[Tensor] = []
        self._visited: set[Tensor] = set()

    def add(self, tensor: Tensor) -> Tensor:
        """Append `tensor` after everything it needs, operands from left to right."""
        if tensor not in self._visited:
            self._visited.add(tensor)
            for source in tensor.sources:
                self.add(source)
            (self._leaves if tensor.is_input else self._nodes).append(tensor)
        return tensor

    def buffer_bytes(self) -> int:
        """Bytes of the buffer that holds all of it."""
        arena = _Arena()
        uses = dict.fromkeys(self._visited, 0)
        views = dict.fromkeys(self._visited, 0)
        for leaf in self._leaves:
            arena.allocate(leaf)
        for node in self._nodes:
            if node.view_of is not None:
                views[node.view_of] += 1
            for source in node.sources:
                uses[source] += 1
        for node in self._nodes:
            if node.view_of is None and node.nbytes:
                places = (_place_for(node, s, arena, uses, views) for s in node.sources)
                place = next((one for one in places if one is not None), None)
                if place is None:
                    arena.allocate(node)
                else:
                    arena.inherit(node, place)
            for source in node.sources:
                uses[source] -= 1
                if uses[source] or views[source]:
                    continue
                owner = source.view_of
                if owner is None:
                    arena.free(source)
                    continue
                views[owner] -= 1
                if not views[owner] and not uses[owner]:
                    arena.free(owner)
        return arena.size


def _place_for(
    node: Tensor, operand: Tensor, arena: _Arena, uses: dict[Tensor, int], views: dict[Tensor, int]
) -> Tensor | None:
    """What `node` may be written over: an operand with its layout that nobody else needs.

    Of a view it is what that looks at, if this is the last look.
    """
    owner = operand.view_of or operand
    if not node.in_place or owner.is_output or operand.shape != node.shape:
        return None
    is_last = uses[operand] == 1 and not views[operand]
    if owner is not operand:
        alone = views[owner] == 1 and not uses[owner] and operand.shape is not None
        is_last = is_last and alone
    return owner if is_last and owner in arena.offsets else None


class _Arena:
    """Best fit among the gaps; the last gap has no end."""

    def __init__(self) -> None:
        self.size = 0
        self.offsets: dict[Tensor, int] = {}
        self._gaps: list[list[int]] = [[0, _UNBOUNDED]]  # offset and length, by offset

    def allocate(self, tensor: Tensor) -> None:
        gaps = self._gaps
        best = len(gaps) - 1
        for i in range(len(gaps) - 1):
            # of equal gaps the later one, as ggml does
            if tensor.nbytes <= gaps[i][1] <= gaps[best][1]:
                best = i
        gap = gaps[best]
        self.offsets[tensor] = gap[0]
        self.size = max(self.size, gap[0] + tensor.nbytes)
        gap[0] += tensor.nbytes
        gap[1] -= tensor.nbytes
        if gap[1] == 0:
            del gaps[best]

    def inherit(self, tensor: Tensor, operand: Tensor) -> None:
        start = self.offsets[tensor] = self.offsets.pop(operand)
        if tensor.nbytes < operand.nbytes:
            self._free(start + tensor.nbytes, operand.nbytes - tensor.nbytes)

    def free(self, tensor: Tensor) -> None:
        if not tensor.is_output and tensor in self.offsets:
            self._free(self.offsets.pop(tensor), tensor.nbytes)

    def _free(self, start: int, nbytes: int) -> None:
        end, gaps = start + nbytes, self._gaps
        place = next((i for i, gap in enumerate(gaps) if gap[0] >= start), len(gaps))
        gaps.insert(place, [start, nbytes])
        if place + 1 < len(gaps) and end == gaps[place + 1][0]:
            gaps[place][1] += gaps.pop(place + 1)[1]
        if place > 0 and sum(gaps[place - 1]) == start:
            gaps[place - 1][1] += gaps.pop(place)[1]
