"""How large ggml makes the buffer for a graph's intermediate results.

A replay of ggml's graph allocator over a described graph (`llama.cpp: ggml/src/ggml-alloc.c`,
`ggml_gallocr_alloc_graph_impl` and `ggml_dyn_tallocr_alloc`; evaluation order as in `ggml.c`,
`ggml_visit_parents_graph`): inputs first, then every node in order, each into the best fitting gap,
over one of its operands where the operation allows it, and freed after its last use. Where parts of
a graph are evaluated in several places, each place has a buffer, and gets copies of what it needs
from others (`ggml-backend.cpp`, `ggml_backend_sched_split_graph`). Only sizes are replayed, so it
costs milliseconds. Knows nothing about models; `edgespec.memory.bytes.graph` does.
"""

from __future__ import annotations

from collections.abc import Sequence

_ALIGNMENT = 32  # bytes; ggml's TENSOR_ALIGNMENT
_UNBOUNDED = 1 << 62
HOST_PLACE = 0  # where inputs are, and what nothing draws elsewhere


class Tensor:
    """One intermediate result: its size, what it is computed from, and how it may be stored.

    `view_of` owns the bytes of a view. `in_place` results may take the place of an operand with
    the same shape. Operands that live elsewhere (weights, KV cache) are left out. `place` is where
    its weights or its cache are; None for a result of others, which neighbours draw to them.
    """

    __slots__ = (
        *("in_place", "is_input", "is_output", "nbytes", "place", "shape", "sources", "view_of"),
    )

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
        self.place: int | None = None


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
        """Bytes of the buffer that holds all of it, where everything is evaluated in one place."""
        return self.buffer_sizes()[0]

    def buffer_sizes(self, num_places: int = 1) -> list[int]:
        """Bytes of the buffer of each place, the host's first."""
        return _Replay(self._leaves, self._nodes, num_places).sizes()


def _places(nodes: Sequence[Tensor], num_places: int) -> dict[Tensor, int]:
    """Where each node is evaluated: results of others beside what a device computes next to them.

    Devices draw in the order of the graph first, then against it; the host takes the rest.
    """
    places = {node: node.place for node in nodes if node.place is not None}
    for ordered in (nodes, reversed(nodes)) if num_places > 1 else ():
        drawing = HOST_PLACE
        for node in ordered:
            if node.view_of is not None:
                continue
            drawing = places.get(node, drawing)
            if drawing != HOST_PLACE:
                places[node] = drawing
    return {node: places.get(node, HOST_PLACE) for node in nodes}


class _Replay:
    """One allocation of a whole graph."""

    def __init__(self, leaves: Sequence[Tensor], nodes: Sequence[Tensor], num_places: int) -> None:
        self._arenas = [_Arena() for _ in range(num_places)]
        self._places = _places(nodes, num_places) | dict.fromkeys(leaves, HOST_PLACE)
        self._sources: dict[Tensor, Sequence[Tensor]] = {}  # of nodes, and of notes that free
        self._nodes = self._with_copies(nodes) if num_places > 1 else list(nodes)
        for node in self._nodes:
            self._sources.setdefault(node, node.sources)
        self._uses: dict[Tensor, int] = {}
        self._views: dict[Tensor, int] = {}
        for leaf in leaves:
            self._arena(leaf).allocate(leaf)
        for node in self._nodes:
            if node.view_of is not None:
                self._views[node.view_of] = self._views.get(node.view_of, 0) + 1
            for source in self._sources[node]:
                self._uses[source] = self._uses.get(source, 0) + 1

    def sizes(self) -> list[int]:
        for node in self._nodes:
            if node.view_of is None and node.nbytes:
                heirs = (self._heir_of(one, node) for one in self._sources[node])
                heir = next((one for one in heirs if one is not None), None)
                if heir is None:
                    self._arena(node).allocate(node)
                else:
                    self._arena(node).inherit(node, heir)
            for source in self._sources[node]:
                self._release(source)
        return [arena.size for arena in self._arenas]

    def _arena(self, tensor: Tensor) -> _Arena:
        return self._arenas[self._places[tensor]]

    def _with_copies(self, nodes: Sequence[Tensor]) -> list[Tensor]:
        """The nodes, and before the first ones that run together elsewhere what they take along."""
        ordered: list[Tensor] = []
        copies: dict[tuple[Tensor, int], Tensor] = {}
        start, here = 0, HOST_PLACE
        for node in nodes:
            if node.view_of is not None:  # lies where its owner does
                self._places[node] = self._places[node.view_of]
            elif self._places[node] != here:
                start, here = len(ordered), self._places[node]
            sources = list(node.sources)
            for i, source in enumerate(sources):
                place = self._places[node]
                if node.view_of is not None or self._places[source] == place:
                    continue
                if (source, place) not in copies:
                    copies[source, place] = copy = Tensor(source.nbytes, source.shape)
                    use = Tensor(0, None)
                    self._sources |= {copy: (), use: (source,)}
                    self._places |= {copy: place, use: self._places[source]}
                    ordered[start:start] = [use, copy]
                    start += 2
                sources[i] = copies[source, place]
            self._sources[node] = sources
            ordered.append(node)
        return ordered

    def _release(self, source: Tensor) -> None:
        """One use less; the last one frees it, or what it is a view of."""
        self._uses[source] -= 1
        if self._uses[source] or self._views.get(source):
            return
        owner = source.view_of
        if owner is None:
            self._arena(source).free(source)
            return
        self._views[owner] -= 1
        if not self._views[owner] and not self._uses.get(owner):
            self._arena(owner).free(owner)

    def _heir_of(self, operand: Tensor, node: Tensor) -> Tensor | None:
        """What `node` may be written over: an operand with its layout that nobody else needs.

        Never a view: ggml does not count those among what it has allocated.
        """
        if not node.in_place or operand.view_of is not None or operand.is_output:
            return None
        if operand.shape != node.shape or self._uses[operand] > 1 or self._views.get(operand):
            return None
        return operand if operand in self._arena(node).offsets else None


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
