"""Sources of draft tokens. Adding one is a new module and a line in the table below."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.drafting.drafters.base import Drafter
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.recycling import RecyclingDrafter
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError

MODEL = "model"  # a draft model, which has to be loaded first
_MAKERS: dict[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    "recycling": RecyclingDrafter,
}
NAMES = (*_MAKERS, MODEL)


def drafter_names(text: str) -> tuple[str, ...]:
    """The names of a list such as "suffix,recycling"; none for "none".

    Raises UnsupportedError for a name that is unknown or there twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    if names == ("none",):
        return ()
    for name in names:
        if name not in NAMES:
            raise UnsupportedError(
                f"there is no drafter {name!r}",
                hint=f"use auto, none, or a list of {', '.join(NAMES)}",
            )
    if len(set(names)) < len(names):
        raise UnsupportedError(f"a drafter is there twice in {text!r}")
    return names


def make_drafter(text: str, model: Drafter | None = None) -> CombinedDrafter | None:
    """The drafters of a list, `model` standing for the draft model; None for "none".

    Raises UnsupportedError as `drafter_names`, and for a draft model that is missing.
    """
    drafters = [_MAKERS[name]() if name in _MAKERS else model for name in drafter_names(text)]
    there = [drafter for drafter in drafters if drafter is not None]
    if len(there) < len(drafters):
        raise UnsupportedError(
            "the drafter 'model' needs a draft model", hint="name one with --draft-model FILE"
        )
    return CombinedDrafter(there) if there else None


def tables_bytes(text: str) -> int:
    """Bytes the tables of a list of drafters may take."""
    return sum(_MAKERS[name]().nbytes for name in drafter_names(text) if name in _MAKERS)
