"""Sources of draft tokens. Adding one is a new module and a line in the table below."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.drafters.base import Drafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError

_MAKERS: dict[str, Callable[[], Drafter]] = {"suffix": SuffixDrafter}
NAMES = tuple(_MAKERS)


def make_drafter(name: str) -> Drafter | None:
    """The drafter called `name`; None for "none". Raises UnsupportedError for an unknown name."""
    if name == "none":
        return None
    if name not in _MAKERS:
        raise UnsupportedError(
            f"there is no drafter {name!r}", hint=f"use auto, none, or one of {', '.join(NAMES)}"
        )
    return _MAKERS[name]()
