"""Values are of the types that their annotations say, where a user gives them."""

from __future__ import annotations

import functools
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal

from edgespec.errors import UnsupportedError

_MOST_SHOWN = 80  # characters of a value
_WORDS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "True or False", str: "a text"},
    **{type(None): "None", os.PathLike: "a path", Mapping: "a mapping"},
}


def check_types(options: object) -> None:
    """Raise UnsupportedError for a field of a dataclass that is not of its annotated type."""
    kind: Callable[..., Any] = type(options)
    check_arguments(kind, **{name: getattr(options, name) for name in _hints(kind)})


def check_arguments(function: Callable[..., Any], **arguments: object) -> None:
    """Raise UnsupportedError for an argument that is not of the type that `function` says.

    A list may stand for a tuple, and numbers of numpy for Python's; a text is no list of texts.
    """
    hints = _hints(function)
    for name, value in arguments.items():
        if not _is_of(value, hints[name]):
            expected, shown = _told(hints[name]), repr(value)
            if expected.startswith("a list") and isinstance(value, str):
                shown = "one text"  # it may be a key
            raise UnsupportedError(f"{name} must be {expected}, not {shown[:_MOST_SHOWN]}")


def check_keywords(
    given: Iterable[str], known: Collection[str], others: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for a keyword that is none, as Python does: of the function that was called.

    That is the one of ours which code outside of this package called. `others` are words of the
    command line for what is known.
    """
    for name in given:
        if name in known:
            continue
        frame, called = sys._getframe(1), ""
        words = {**{one: one for one in known}, **(others or {})}
        while frame.f_back is not None and frame.f_globals["__name__"].startswith("edgespec"):
            called = frame.f_code.co_name
            called = type(frame.f_locals["self"]).__name__ if called == "__init__" else called
            frame = frame.f_back
        import difflib  # takes 5 ms, and nearly nobody needs it

        near = difflib.get_close_matches(name, words, 1)
        meant = f". Did you mean {words[near[0]]!r}?" if near else ""
        raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{meant}")


@functools.cache
def _hints(annotated: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(annotated)


def _is_of(value: object, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, part) for part in parts)
    if origin is Literal:  # which of them is for `check_options` to say
        return isinstance(value, str)
    if origin in (int, float):
        kind = Integral if origin is int else Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if origin in (tuple, Sequence):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return False
        each = parts if origin is tuple and ... not in parts else [parts[0]] * len(value)
        return len(value) == len(each) and all(map(_is_of, value, each))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _is_of(key, parts[0]) and _is_of(one, parts[1]) for key, one in value.items()
        )
    return isinstance(value, origin)


def _told(hint: Any) -> str:
    """A type in words."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_told, parts)))
    if origin is Literal:
        return _WORDS[str]
    if origin in (tuple, Sequence):
        if any(typing.get_origin(one) is Callable for one in typing.get_args(parts[0])):
            return "a list of functions or definitions"
        pairs = "a list of pairs" if typing.get_args(parts[0]) else "a list of texts"
        return "a list of images" if bytes in typing.get_args(parts[0]) else pairs
    return _WORDS.get(origin) or str(origin.__name__)
