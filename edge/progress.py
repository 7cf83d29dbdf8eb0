"""How long work tells of its progress, and when it has to end."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

# What is being done, and which part of it is done (0..1).
Progress: TypeAlias = Callable[[str, float], None]


class TimeLimit:
    """So many seconds from now on, or as long as it takes (None)."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return self._end < math.inf

    def left(self) -> float:
        """Seconds until then, below 0 when it is over."""
        return self._end - self._clock()


def time_text(seconds: float) -> str:
    """Seconds or minutes, whichever says more."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
