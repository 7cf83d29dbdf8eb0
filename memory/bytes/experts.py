"""Experts of a mixture that memory has no room for: how many bytes they are, and what is read.

With them on a disk a token takes as long as its other weights take in memory, and as long as the
disk takes for the experts that are not there. Memory has those that the last T tokens used. Let
m(t) be the part of what a token uses that the t tokens before it did not. Then T tokens use a part

    f(T) = u (m(0) + m(1) + ... + m(T - 1))

of all, where u is what one token uses (the working set: Denning and Schwartz, "Properties of the
working-set model", 1972). Memory with room for f(T) lacks m(T) of the next token, and a step over n
tokens, which reads an expert once, reads u (m(T) + ... + m(T + n - 1)) of all: what f grows by.

So m by f is all that a router has to tell. It is counted (`counted`). Before that, m = 1 - f^a: a
router that knows no favourites has a = 1; real ones have a = 0.15, by public counts: a quarter of
all has 81% of what is used next.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.memory.device.kernels import packed_bytes
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.spec import ModelSpec

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_.*_exps\.weight")
PAGE = 4096  # of packed experts, which are whole ones
EVEN, USUAL = 1.0, math.log(0.81) / math.log(0.25)
Missing = Callable[[float], float]  # m by f


@dataclass(frozen=True, slots=True)
class Experts:
    """All of a model, as kernels read them; `layer_bytes` are those of its largest layer."""

    nbytes: int
    layer_bytes: int
    token_bytes: int  # that one token uses

    def read_bytes(self, kept: int, missing: Missing, num_tokens: int = 1) -> float:
        """Bytes that a step over so many tokens reads where memory keeps so many."""
        used, part = self.token_bytes / self.nbytes, kept / self.nbytes
        # A token that is at a layer has its experts of those before it there already: of half.
        grown = part = max(0.0, part - used * missing(part) / 2)
        for _ in range(num_tokens):
            grown += used * missing(grown)
        return (grown - part) * self.nbytes


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


def power_law(exponent: float) -> Missing:
    """Of routers nobody has counted."""
    return lambda part: 1.0 - min(1.0, part) ** exponent


def counted(again: Sequence[int], first: Sequence[int], used: float) -> Missing:
    """By a run that counted uses of experts, as `ExpertCounts` has them; `used` is of one token.

    What was used for the first time would have been used again later than that: such counts say so
    of as many tokens as there had been (Kaplan and Meier, "Nonparametric estimation from incomplete
    observations", 1958).
    """
    parts, missing = [0.0], [1.0]
    at_risk, tokens = sum(again) + sum(first), 0
    for bucket, (returned, never) in enumerate(zip(again, first, strict=True)):
        if not at_risk:
            break
        count = math.ceil(2 ** ((bucket + 1) / 8)) - 1 - tokens  # that are of this bucket
        now, after = missing[-1], missing[-1] * (1.0 - returned / at_risk)
        at_risk -= returned + never
        if count:  # m falls in a line from here to its end
            tokens += count
            parts.append(parts[-1] + used * (count * now - (now - after) * (count - 1) / 2))
            missing.append(after)
    parts, missing = [*parts, max(1.0, parts[-1])], [*missing, 0.0]

    def at(part: float) -> float:
        place = min(bisect_right(parts, part), len(parts) - 1)
        before, width = parts[place - 1], parts[place] - parts[place - 1]
        share = min(1.0, (part - before) / width) if width else 1.0
        return missing[place - 1] + share * (missing[place] - missing[place - 1])

    return at
