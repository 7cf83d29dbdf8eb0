"""Experts of a mixture that memory has no room for: how many bytes they are, and what is read.

With them on a disk a token takes as long as its other weights take in memory, and as long as the
disk takes for the experts that are not there. Memory has those that were used last: with a part f
of all, f^a of the next ones. A router that knows no favourites has a = 1; real ones have a = 0.15,
by public counts: a quarter of all has 81% of what is used next.

A step over several tokens reads an expert once, however many of them it is for. The expert behind
a part x of all that are used more is one of a token's with probability p = min(1, u a x^(a-1)),
where u is the part of all that a token uses. Those behind f are read for

    u (integral of 1 + (1 - p) + ... + (1 - p)^(n-1) over y = x^a from f^a to 1)

by n tokens: for one token that is u (1 - f^a).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edgespec.memory.device.kernels import packed_bytes
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.spec import ModelSpec

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_.*_exps\.weight")
PAGE = 4096  # of packed experts, which are whole ones
_CELLS = 32  # of an integral
EVEN, USUAL = 1.0, math.log(0.81) / math.log(0.25)


@dataclass(frozen=True, slots=True)
class Experts:
    """All of a model, as kernels read them; `layer_bytes` are those of its largest layer."""

    nbytes: int
    layer_bytes: int
    token_bytes: int  # that one token uses

    def read_bytes(self, kept: int, exponent: float, num_tokens: int = 1) -> float:
        """Bytes that a step over so many tokens reads where memory keeps so many."""
        hits: float = (kept / self.nbytes) ** exponent
        used = self.token_bytes / self.nbytes
        distinct = 0.0
        for cell in range(_CELLS):
            y = hits + (1.0 - hits) * (cell + 0.5) / _CELLS
            p = min(1.0, used * exponent * y ** ((exponent - 1.0) / exponent))
            distinct += sum((1.0 - p) ** k for k in range(num_tokens)) / _CELLS
        return self.token_bytes * (1.0 - hits) * distinct


def experts_of(spec: ModelSpec) -> Experts | None:
    """A model's; None where there are none that edgespec's kernels read."""
    layers: dict[str, int] = {}
    for tensor in spec.tensors.values():
        if found := _EXPERTS.fullmatch(tensor.name):
            columns, rows, count = tensor.dims
            size = packed_bytes(GGML_NUMBERS[tensor.type.name], rows, columns)
            if not size:
                return None
            layers[found[1]] = layers.get(found[1], 0) + -(-size // PAGE) * PAGE * count
    if not layers:
        return None
    nbytes = sum(layers.values())
    token = nbytes * spec.num_experts_used // spec.num_experts
    return Experts(nbytes, max(layers.values()), token)


def exponent_of(hits: float, part: float) -> float:
    """By a counted part of experts that were in memory, which had a part of all."""
    return math.log(min(max(hits, 1e-6), 1.0 - 1e-6)) / math.log(min(max(part, 1e-6), 1.0 - 1e-6))
