"""Sources of draft tokens. Adding one is a new module and a line in the table below."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.drafters.base import Drafter
from edgespec.drafters.combined import CombinedDrafter
from edgespec.drafters.recycling import RecyclingDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError

_MAKERS: dict[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    "recycling": RecyclingDrafter,
}
NAMES = tuple(_MAKERS)


def make_drafter(names: str) -> CombinedDrafter | None:
    """The drafters of a list such as "suffix,recycling"; None for "none".

    Raises UnsupportedError for a name that is unknown or there twice.
    """
    if names == "none":
        return None
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in _MAKERS:
            raise UnsupportedError(
                f"there is no drafter {name!r}",
                hint=f"use auto, none, or a list of {', '.join(NAMES)}",
            )
    if len(set(wanted)) < len(wanted):
        raise UnsupportedError(f"a drafter is there twice in {names!r}")
    return CombinedDrafter([_MAKERS[name]() for name in wanted])
