"""The same prompts for several contenders, interleaved.

A machine's speed drifts by more than most differences worth measuring, and what drifts slowly
cancels between answers that are given one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.decode.engine import Prompt
from edgespec.decode.stats import Counters
from edgespec.errors import EdgespecError


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and its numbers.

    Attributes:
        joules: that the machine took meanwhile; None where nothing counts them.
    """

    token_ids: tuple[int, ...]
    counters: Counters
    joules: float | None = None


class Contender(Protocol):
    """Something that answers prompts."""

    name: str

    def renew(self) -> None:
        """Forget the answers that were given: the same prompts come again."""

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The answer to `prompt`."""


def order_of(prompt: int, contenders: int, repeat: int = 0) -> list[int]:
    """Who answers a prompt first, second, ...: an order at random, then its reverse (A B, B A).

    Each contender is as often early as late. A fixed order would give the first place to the same
    contender wherever tasks come round in the same rhythm.
    """
    number = prompt + repeat
    order = random.Random(number // 2).sample(range(contenders), contenders)
    return order[::-1] if number % 2 else order


def interleaved(
    contenders: Sequence[Contender], prompts: Sequence[Prompt], *, max_tokens: int, repeats: int = 1
) -> Iterator[tuple[int, int, int, Answer]]:
    """Yield (repeat, prompt, contender, answer), the last three by their places in the arguments.

    Contenders are asked in the order of `order_of`. All prompts come before any comes again,
    because a drafter would know an answer that was just given. A prompt that cannot be answered
    ends everything: the error says which one.
    """
    for repeat in range(repeats):
        for contender in contenders:
            contender.renew()
        for number, prompt in enumerate(prompts):
            for place in order_of(number, len(contenders), repeat):
                contender = contenders[place]
                try:
                    answer = contender.answer(prompt, max_tokens)
                except EdgespecError as problem:
                    raise type(problem)(
                        f"prompt {number + 1}, {contender.name}: {problem}", hint=problem.hint
                    ) from problem
                yield repeat, number, place, answer
