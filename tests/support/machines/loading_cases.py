"""Loads of which each step is let fail in turn; what is open then is counted.

A step is a call that the function under test makes. It fails before it has done anything.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fake_backend import FakeBackend
from planning_cases import model

from edgespec.memory.times import CostCurve

VOCAB = 258
SPEC = replace(model(), path=Path("none.gguf"))


# Machinery, which does not fail; what it raises as something is forgotten reaches nobody.
_OWN = ("contextlib", "threading", "concurrent", "importlib", "weakref")


class StepError(Exception):
    """What the n-th step raises."""


def failing(number: int, codes: set[CodeType]) -> Callable[[FrameType, str, Any], None]:
    """A tracer that lets the n-th call made by these functions fail."""
    seen = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal seen
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code not in codes:
            return
        if frame.f_code in codes or str(frame.f_globals["__name__"]).startswith(_OWN):
            return
        seen += 1
        if seen == number:
            raise StepError

    return trace


def assert_nothing_stays_open(
    load: Callable[[], Any], functions: list[Any], opened: list[Any]
) -> int:
    """Let each step of `functions` within `load` fail; how many steps there are."""
    codes = {function.__code__ for function in functions}
    number = 0
    while True:
        number += 1
        before = sys.gettrace()
        gc.disable()  # what is collected within a step is none of its calls
        sys.settrace(failing(number, codes))
        try:
            result = load()
        except StepError:
            sys.settrace(before)
            assert opened == [], f"open after step {number} failed"
            continue
        finally:
            sys.settrace(before)
            gc.enable()
        assert opened, "nothing was opened at all"
        result.close()
        assert opened == []
        return number - 1


class Opened(FakeBackend):
    """Is in a list as long as it is open."""

    def __init__(self, opened: list[Any]) -> None:
        super().__init__(lambda _context: [0.0] * VOCAB, VOCAB)
        self._opened = opened
        opened.append(self)

    def write_packed(self) -> None:
        """As of `LlamaBackend`."""

    def close(self) -> None:
        if not self.closed:
            self._opened.remove(self)
        super().close()


CURVE = CostCurve([float("inf"), *[1.0] * 16])


def quiet(_what: str, _part: float) -> None:
    pass
