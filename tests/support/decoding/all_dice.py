"""Experiments by enumeration: every draw and every coin is followed.

`outcomes` runs an experiment, which asks `dice` for everything random, once for each sequence of
answers, and gives the exact chance of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.sampling.sampling import Sampler

Row = NDArray[np.float64]
T = TypeVar("T")


class AllDice(Sampler):
    """Answers as scripted, then with the first possible answer, and multiplies the chances."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.answers: list[int] = []
        self.chances: list[Row] = []
        self.probability = 1.0

    def accepts(self, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        return self._answer(np.array([1.0 - probability, probability])) == 1

    def draw(self, weights: Row) -> int:
        assert weights.min() >= 0.0
        return self._answer(weights / weights.sum())

    def _answer(self, chances: Row) -> int:
        place = len(self.answers)
        answer = self._script[place] if place < len(self._script) else _after(chances, -1)
        self.answers.append(answer)
        self.chances.append(chances)
        self.probability *= float(chances[answer])
        return answer

    def following(self) -> list[int] | None:
        """The script of the next outcome, or None after the last."""
        for place in reversed(range(len(self.answers))):
            answer = _after(self.chances[place], self.answers[place])
            if answer >= 0:
                return [*self.answers[:place], answer]
        return None


def _after(chances: Row, answer: int) -> int:
    """The next answer that is possible at all, or -1."""
    return next((i for i in range(answer + 1, chances.size) if chances[i] > 0.0), -1)


def outcomes(experiment: Callable[[Sampler], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of an experiment and its probability."""
    script: list[int] | None = []
    while script is not None:
        dice = AllDice(script)
        outcome = experiment(dice)
        yield dice.probability, outcome
        script = dice.following()
