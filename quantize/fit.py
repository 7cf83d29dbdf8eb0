"""Mixed precision for a size: which tensor gets which type, so that the least is lost.

Each tensor alone is made coarse, everything else being as in the source: the KL divergence it
causes is its sensitivity. Another type's is that times the ratio of their rounding errors (see
`rounding_errors`). Errors of tensors are nearly independent, so their divergences nearly add up,
and a mixture's is predicted as their sum; the best mixture under this model is found exactly enough
by taking steps in the order of what they gain per byte.

Every measurement is kept, so that a run which was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.ggml_values import FloatRows
from edgespec.errors import DoesNotFitError
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.onnx.weights import raw_rows
from edgespec.progress import Progress, TimeLimit
from edgespec.quantize.pieces import Choice, Pieces, bits_of
from edgespec.quantize.quality import Reference, score

_ROWS = 256  # of a tensor that are looked at, evenly spread


def rounding_errors(
    pieces: Pieces, choice: Choice, matrix: Mapping[str, NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Error of each of a tensor's types, the smallest first, as its inputs see it.

        error = mean over rows i of sum_j m_j (q_ij - w_ij)^2

    with m_j the mean square of input j (the importance matrix): the mean square by which the
    tensor's outputs change, for inputs that are not correlated. To second order a divergence is
    proportional to it, with a factor that is the tensor's own (as in GPTQ, arXiv 2210.17323, with a
    diagonal Hessian).

    Args:
        matrix: mean squares by tensor name; a tensor without any counts all inputs alike.
    """
    name, columns = choice.tensor.name, choice.tensor.dims[0]
    count = math.prod(choice.tensor.dims[1:])
    places = np.unique(np.linspace(0, count - 1, _ROWS).astype(np.int64))
    own = _rows(pieces.path(name, choice.tensor.type.name), columns, places)
    squares = matrix.get(name, np.ones(columns, np.float32)).reshape(-1, columns)
    squares = squares[places * len(squares) // count]  # stacked experts have inputs of their own
    errors = []
    for kind in choice.types:
        change = _rows(pieces.path(name, kind), columns, places) - own
        errors.append(float(np.einsum("ij,ij,ij->", change, change, squares)) / len(places))
    return np.array(errors)


def _rows(path: Path, columns: int, places: NDArray[np.int64]) -> NDArray[np.float32]:
    """Some rows of the tensor in a piece, [n, columns]."""
    tensor = read_gguf(path).tensors[0]
    convert = FloatRows(tensor.type, columns)
    return convert(raw_rows(path, tensor)[places])


_PROBE = 3.6  # bits a weight: sensitivities are measured with the type next to it
_FEW_TEXTS = 3  # that a mixture is looked at on when time is over
_PROBE_TEXTS = 2  # that sensitivities are measured on, but for tensors so many times the median
_LARGE = 8
_GOLDEN = 0.618034  # whose multiples, without their integers, are spread evenly
_LEAST_ERROR = 1e-30  # of a probe; a tensor of zeros has none


@dataclass(frozen=True, slots=True)
class Fit:
    """The mixture predicted to be best: types by tensor, its measured divergence, and the file."""

    types: dict[str, str]
    kl: float
    file_bytes: int
    evaluations: int
    seconds: float  # spent measuring, earlier runs included
    measured: int  # tensors whose sensitivity was measured; that of others is like theirs

    @property
    def has_measured_all(self) -> bool:
        """Whether time was enough for all tensors."""
        return self.measured == len(self.types)


class Fitness:
    """Divergence of mixtures over the first so many texts; everything measured is kept."""

    def __init__(self, pieces: Pieces, reference: Reference, kept: Path, threads: int) -> None:
        self._pieces, self._reference, self._threads = pieces, reference, threads
        self._kept = kept
        self._known: dict[str, tuple[float, float]] = {}  # KL and seconds it took
        self.seconds = 0.0
        self.evaluations = 0
        lines = kept.read_text() if kept.exists() else ""
        if lines and not lines.endswith("\n"):  # of a run that was killed while writing
            kept.write_text(lines + "\n")
        for line in lines.splitlines():
            try:
                key, kl, seconds = json.loads(line)
            except ValueError:
                continue
            self._known[key] = kl, seconds

    def __call__(self, types: Mapping[str, str], num_texts: int) -> float:
        """KL of the mixture with these types; tensors not named are as in the source."""
        key = self._key(types, num_texts)
        if key not in self._known:
            start = monotonic()
            scores = score(
                self._pieces.paths(types), self._reference.first(num_texts), threads=self._threads
            )
            kl, seconds = float(scores.kl.mean(dtype=np.float64)), monotonic() - start
            self._known[key] = kl, seconds
            with self._kept.open("a") as file:
                file.write(json.dumps([key, kl, seconds]) + "\n")
        kl, seconds = self._known[key]
        self.seconds += seconds
        self.evaluations += 1
        return kl

    def knows(self, types: Mapping[str, str], num_texts: int) -> bool:
        """Whether it was measured before."""
        return self._key(types, num_texts) in self._known

    @staticmethod
    def _key(types: Mapping[str, str], num_texts: int) -> str:
        text = json.dumps([sorted(types.items()), num_texts])
        return blake2b(text.encode(), digest_size=12).hexdigest()


def fit(
    pieces: Pieces,
    reference: Reference,
    kept: Path,
    budget_bytes: int,
    *,
    matrix: Mapping[str, NDArray[np.float32]],
    threads: int,
    limit: TimeLimit | None = None,
    progress: Progress = lambda _what, _part: None,
) -> Fit:
    """The mixture of at most `budget_bytes` that diverges least from the source.

    Args:
        reference: the source's predictions over the texts that mixtures are compared on.
        kept: file of measurements; the same file goes on where an earlier run was stopped.
        matrix: mean squares of each tensor's inputs, by its name.
        limit: of this call; without one, every tensor's sensitivity is measured.

    When time is over, sensitivities that were not measured are taken from tensors that were. Raises
    DoesNotFitError when even the smallest types are too large.
    """
    require_room(pieces, budget_bytes)
    fitness = Fitness(pieces, reference, kept, threads)
    limit = limit or TimeLimit(None)
    found = _Sensitivities(pieces, fitness, len(reference.texts), limit)
    costs = found.costs(matrix, progress)
    progress("measuring the mixture", 1.0)
    sizes = [choice.sizes for choice in pieces.choices]
    levels = cheapest(costs, sizes, budget_bytes - pieces.fixed_bytes)
    chosen = list(zip(pieces.choices, levels, strict=True))
    types = {choice.tensor.name: choice.types[level] for choice, level in chosen}
    kl = fitness(types, len(reference.texts) if limit.left() > 0 else _FEW_TEXTS)
    return Fit(
        types,
        kl,
        pieces.fixed_bytes + sum(choice.sizes[level] for choice, level in chosen),
        fitness.evaluations,
        fitness.seconds,
        found.measured,
    )


def require_room(pieces: Pieces, budget_bytes: int) -> None:
    """Raise DoesNotFitError where even the smallest types take more."""
    least = pieces.fixed_bytes + sum(choice.sizes[0] for choice in pieces.choices)
    if least > budget_bytes:
        raise DoesNotFitError(
            f"{pieces.source.name} takes at least {least >> 20} MiB, and {budget_bytes >> 20} MiB "
            "were asked for",
            hint=f"ask for {(least >> 20) + 1}MiB or more",
        )


class _Sensitivities:
    """What each tensor alone costs, as far as there is time.

    One that has a large part of the file, an embedding or a head, decides alone what is left for
    all others, and few texts hold few of its rows: it is looked at on all of them.
    """

    def __init__(self, pieces: Pieces, fitness: Fitness, num_texts: int, limit: TimeLimit) -> None:
        self._pieces, self._fitness, self._limit = pieces, fitness, limit
        self._num_texts = num_texts
        self._large = _LARGE * float(np.median([c.tensor.data_bytes for c in pieces.choices]))
        self._text_s = 0.0  # that a text takes, at most so far
        self.measured = 0

    def costs(
        self, matrix: Mapping[str, NDArray[np.float32]], progress: Progress
    ) -> list[NDArray[np.float64]]:
        """Predicted divergence of each tensor in each of its types."""
        choices = self._pieces.choices
        errors: dict[int, NDArray[np.float64]] = {}
        own: dict[int, float] = {}  # divergence by rounding error
        for place, number in enumerate(_in_order(choices)):
            progress("measuring how sensitive tensors are", place / len(choices))
            choice = choices[number]
            # Not the type that it has, which would show none.
            others = [kind for kind in choice.types if kind != choice.tensor.type.name]
            probe = min(others or choice.types, key=lambda kind: abs(bits_of(kind) - _PROBE))
            errors[number] = rounding_errors(self._pieces, choice, matrix)
            if (sensitivity := self._measure(choice, probe)) is not None:
                error = max(errors[number][choice.types.index(probe)], _LEAST_ERROR)
                own[number] = max(sensitivity, 0.0) / error
        self.measured = len(own)
        alike: dict[str, list[float]] = {}
        for number, factor in own.items():
            alike.setdefault(_role(choices[number]), []).append(factor)
        typical = list(own.values()) or [1.0]

        def factor_of(number: int) -> float:
            others = alike.get(_role(choices[number]), typical)
            return own[number] if number in own else float(np.median(others))

        return [errors[number] * factor_of(number) for number in range(len(choices))]

    def _measure(self, choice: Choice, probe: str) -> float | None:
        """Divergence that its probe causes; None where there is no time for it."""
        types = {choice.tensor.name: probe}
        count = self._num_texts if choice.tensor.data_bytes > self._large else _PROBE_TEXTS
        if self._limit.left() < 4 * count * self._text_s:
            count = min(count, _PROBE_TEXTS)
        if not self._fitness.knows(types, count) and self._limit.left() < count * self._text_s:
            return None
        before = self._fitness.seconds
        divergence = self._fitness(types, count)
        self._text_s = max(self._text_s, (self._fitness.seconds - before) / count)
        return divergence


def _role(choice: Choice) -> str:
    """What a tensor is in its block."""
    return re.sub(r"\d+", "#", choice.tensor.name)


def _in_order(choices: Sequence[Choice]) -> list[int]:
    """All, so that the first ones are some of each role, from all over the model."""
    roles: dict[str, list[int]] = {}
    for number, choice in enumerate(choices):
        roles.setdefault(_role(choice), []).append(number)
    turn = {}
    for numbers in roles.values():
        spread = sorted(range(len(numbers)), key=lambda place: place * _GOLDEN % 1)
        turn.update({numbers[place]: rank for rank, place in enumerate(spread)})
    return sorted(turn, key=lambda number: (turn[number], choices[number].tensor.data_bytes))


def cheapest(
    costs: Sequence[NDArray[np.float64]], sizes: Sequence[Sequence[int]], room: int
) -> tuple[int, ...]:
    """Which of its types each tensor gets, so that summed costs are least, nearly, within `room`.

    All begin at their smallest; the steps along the lower convex hull of each tensor's costs are
    taken in the order of what they gain per byte, as long as they fit. What this misses is less
    than the last step that did not fit.
    """
    levels = [0] * len(costs)
    room -= sum(size[0] for size in sizes)
    steps: list[tuple[float, int, int]] = []  # gain per byte, tensor, level
    for number, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        at = 0
        while True:
            better = [n for n in range(at + 1, len(size)) if cost[n] < cost[at] - 1e-15]
            if not better:
                break
            gain, to = max(((cost[at] - cost[n]) / max(1, size[n] - size[at]), n) for n in better)
            steps.append((gain, number, to))
            at = to
    for _, number, to in sorted(steps, reverse=True):
        extra = sizes[number][to] - sizes[number][levels[number]]
        if to > levels[number] and extra <= room:
            levels[number] = to
            room -= extra
    return tuple(levels)
