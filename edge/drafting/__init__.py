"""Sources of draft tokens. Adding one is a new module and a line in the table below."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.drafting.combined import CombinedDrafter
from edgespec.drafting.proposal import Drafter
from edgespec.drafting.recycling import RecyclingDrafter
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.errors import UnsupportedError

MODEL = "model"  # a draft model, which has to be loaded first
HEAD = "head"  # a head in the target's own file or beside it, which is loaded with it
WINDOW = "window"  # the target itself, over a part of its cache
_MAKERS: dict[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    "recycling": RecyclingDrafter,
}
NAMES = (*_MAKERS, MODEL, HEAD, WINDOW)
_MISSING = {
    MODEL: ("a draft model", "name one with --draft-model FILE"),
    HEAD: ("a head", "`edgespec models show FILE` says whether there is one"),
    WINDOW: ("llama.cpp", "leave out --backend"),
}


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
    if len({MODEL, HEAD, WINDOW} & set(names)) > 1:
        raise UnsupportedError(
            "a draft model, a head and a window cannot draft together", hint="name one"
        )
    return names


def make_drafter(text: str, model: Drafter | None = None) -> CombinedDrafter | None:
    """The drafters of a list, `model` being what drafts with an engine; None for "none".

    Raises UnsupportedError as `drafter_names`, and for an engine that is missing.
    """
    drafters: list[Drafter] = []
    for name in drafter_names(text):
        if name in _MAKERS:
            drafters.append(_MAKERS[name]())
        elif model is not None:
            drafters.append(model)
        else:
            what, hint = _MISSING[name]
            raise UnsupportedError(f"the drafter {name!r} needs {what}", hint=hint)
    return CombinedDrafter(drafters) if drafters else None


def tables_bytes(text: str) -> int:
    """Bytes the tables of a list of drafters may take."""
    return sum(_MAKERS[name]().nbytes for name in drafter_names(text) if name in _MAKERS)
