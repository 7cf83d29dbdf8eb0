"""What earlier tokens do to the logits of the next one: penalties, and DRY.

Both keep the last tokens, the prompt's included, and are told of every token that is emitted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edgespec.sampling.params import SamplingParams

# As in llama.cpp: what a penalty's exponent may be before a float32 overflows.
_LARGEST_LOG = 88.7228391
_GROWTH = 1.000001  # a base below this does not grow

TokenText = Callable[[int], bytes]


class Penalties:
    """Recent tokens and what they cost: repetition, presence and frequency.

    Rule and order: `llama.cpp: src/llama-sampler.cpp`, `llama_sampler_penalties_apply`.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        last_n = params.penalty_last_n
        self._window = deque(prompt_ids if last_n < 0 else prompt_ids[-last_n:])
        self._counts = Counter(self._window)

    def record(self, token: int) -> None:
        """Count an emitted token, and forget the oldest."""
        self._window.append(token)
        self._counts[token] += 1
        if len(self._window) > self._params.penalty_last_n >= 0:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def change(self, logits: NDArray[np.float32], places: NDArray[np.int64] | None) -> None:
        """Penalise logits [k] in place; `places` [V] says where a token stands, -1 for nowhere.

        Without places every token stands at its id.
        """
        size = len(self._counts)
        ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=size)
        counts = np.fromiter(self._counts.values(), dtype=np.float32, count=size)
        if places is not None:
            ids = places[ids]
            ids, counts = ids[ids >= 0], counts[ids >= 0]
        logits[ids] = self._penalised(logits[ids], counts)

    def _penalised(
        self, logits: NDArray[np.float32], counts: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        params = self._params
        factor = params.repetition_penalty
        repeated = np.where(logits > 0, logits / factor, logits * factor)
        subtracted = counts * params.frequency_penalty + params.presence_penalty
        return repeated - subtracted  # type: ignore[no-any-return]


class Dry:
    """Penalises tokens that would go on with what stood there before ("don't repeat yourself").

    A token costs multiplier * base ^ (n - allowed), where n of the last tokens and it already stand
    earlier in the text. No repetition reaches across a breaker (`llama.cpp: llama_sampler_dry_*`).
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], text_of: TokenText | None
    ) -> None:
        self._params = params
        last_n = params.dry_penalty_last_n
        self._recent: deque[int] = deque(prompt_ids, maxlen=None if last_n < 0 else last_n)
        self._breakers = [text.encode() for text in params.dry_sequence_breakers if text]
        self._text_of: TokenText = lru_cache(4096)(text_of or (lambda _: b""))

    def record(self, token: int) -> None:
        """Remember an emitted token."""
        self._recent.append(token)

    def change(self, logits: NDArray[np.float32], places: NDArray[np.int64] | None) -> None:
        """Penalise logits [k] in place; see `Penalties.change`."""
        for token, penalty in self.penalties().items():
            place = token if places is None else int(places[token])
            if place >= 0:
                logits[place] -= penalty

    def penalties(self) -> dict[int, float]:
        """What each token would cost now."""
        params, allowed = self._params, self._params.dry_allowed_length
        backwards = list(reversed(self._recent))
        limit = self._since_breaker(backwards)
        if len(backwards) <= allowed or limit < allowed:
            return {}
        longest: dict[int, int] = {}
        lengths = common_beginnings(backwards)
        for place in range(1, len(backwards)):
            length, following = min(lengths[place], limit), backwards[place - 1]
            if length >= max(allowed, longest.get(following, 0)):
                longest[following] = length
        most = math.inf
        if params.dry_base > _GROWTH:
            most = int(_LARGEST_LOG / math.log(params.dry_base))
        return {
            token: params.dry_multiplier * params.dry_base ** min(length - allowed, most)
            for token, length in longest.items()
            if not any(breaker in self._text_of(token) for breaker in self._breakers)
        }

    def _since_breaker(self, backwards: Sequence[int]) -> int:
        """How many of the last tokens come after the last breaker."""
        text = b""
        ends: list[int] = []  # of the tokens so far, as bytes from the end of the text
        for place, token in enumerate(backwards):
            ends.append(len(text))
            piece = self._text_of(token)
            text = piece + text
            found = [
                text.find(breaker, 0, len(piece) + len(breaker) - 1) + len(breaker)
                for breaker in self._breakers
                if breaker in text[: len(piece) + len(breaker) - 1]
            ]
            if found:
                after = len(text) - max(found)
                return sum(
                    end + len(self._text_of(one)) <= after
                    for end, one in zip(ends, backwards[: place + 1], strict=True)
                )
        return len(backwards)


def common_beginnings(values: Sequence[int]) -> list[int]:
    """For each place, how many values from there on equal those from the beginning on.

    The Z function: linear, as what is known of the rightmost match so far is not compared again.

    >>> common_beginnings([1, 2, 1, 2, 1])
    [5, 0, 3, 0, 1]
    """
    size = len(values)
    lengths = [size] + [0] * (size - 1)
    start = end = 0  # of the match that reaches furthest
    for place in range(1, size):
        length = min(lengths[place - start], end - place) if place < end else 0
        while place + length < size and values[length] == values[place + length]:
            length += 1
        lengths[place] = length
        if place + length > end:
            start, end = place, place + length
    return lengths
