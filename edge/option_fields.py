"""What is known of an option, written once, beside its field.

The command line, its variables, checks of values and the documentation are made from it
(`edgespec.cli.options`, `docs/generate.py`). It knows no library of command lines.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from edgespec.errors import UnsupportedError

_ARGUMENT = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", re.IGNORECASE)
_UNITS = {
    f"{letter}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option. Its variable follows from its name on the command line."""

    help: str = ""  # "": what the docstring of its class says of it, up to "More:"
    also: str = ""  # other names on the command line
    called: str = ""  # names there in place of the field's
    panel: str = ""  # title of its group in help, if another than its class says
    low: float | None = None
    high: float | None = None
    usual: str = ""  # values that are, as a hint where one is out of range
    choices: tuple[str, ...] = ()
    noun: str = ""  # what a choice is called, if not as the field
    none: str = ""  # text for None, where that is not the same as to leave the option out
    shown: str = ""  # text for the default, where it is not that value's own
    several: bool = False  # each of its parts is an option of its own on the command line
    read: Callable[[str], Any] | None = None  # value of a text; ValueError says what it is not
    for_one: bool = False  # model: not for several that one process serves
    of_servers: bool = False  # means nothing to other commands
    by_itself: Mapping[Any, Any] | None = None  # llama.cpp's words for it, and what they mean here
    is_argument: bool = False
    more: Mapping[str, Any] | None = None  # for the library of the command line

    def names(self, field_name: str) -> list[str]:
        """On the command line, the one that counts first."""
        if self.is_argument:
            return [field_name.upper()]
        return (self.called or f"--{field_name.replace('_', '-')} {self.also}").split()

    def is_in_range(self, value: Any) -> bool:
        """Whether a number is neither too small nor too large; other values have no limits."""
        is_enough = self.low is None or self.low <= value
        return bool(is_enough and (self.high is None or value <= self.high))

    @property
    def shown_range(self) -> str:
        """The range in words; there is one."""
        low = shown_number(self.low or 0)
        return f"{low} or more" if self.high is None else f"from {low} to {shown_number(self.high)}"

    def value(self, text: Any) -> Any:
        """The value of a field. Raises ValueError with what a text is not."""
        if self.by_itself is not None and text in self.by_itself:
            return self.by_itself[text]
        if self.by_itself is not None and isinstance(text, int) and not self.is_in_range(text):
            raise ValueError(f"is not {self.shown_range}")
        if text is None or (self.none and text == self.none):
            return None
        if self.read is not None:
            return self.read(text)
        if self.choices and text not in self.choices:
            words = (self.none, *self.choices) if self.none else self.choices
            raise ValueError(f"is none of {', '.join(words)}")
        return text


def option(default: Any, text: str = "", **known: Any) -> Any:
    """A field that is an option: its default, its help, and more of `Option`."""
    return field(default=default, metadata={"option": Option(text, **known)})


def argument(text: str, *, default: Any = None, **known: Any) -> Any:
    """A field that is an argument of a command: its help, and more of `Option`."""
    return option(default, text, is_argument=True, **known)


@functools.cache
def options_of(kind: Any) -> dict[str, Option]:
    """The options among the fields of a dataclass, by name."""
    found = {one.name: one.metadata.get("option") for one in fields(kind)}
    told = _told(kind)
    return {
        name: known if known.help else replace(known, help=told.get(name, ""))
        for name, known in found.items()
        if known is not None
    }


def _told(kind: Any) -> dict[str, str]:
    """What docstrings say of each argument, up to "More:", for which help has no room."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        for name, text in _ARGUMENT.findall(inspect.cleandoc(base.__doc__ or "")):
            found.setdefault(name, " ".join(text.split()).partition(" More: ")[0])
    return found


def check_options(values: Any) -> None:
    """Raise UnsupportedError for values of a dataclass that are no choice, or out of range."""
    kind: Any = type(values)
    for name, known in options_of(kind).items():
        value = getattr(values, name)
        if value is None:
            continue
        if known.choices and value not in known.choices:
            raise UnsupportedError(
                f"there is no {known.noun or name} {value!r}",
                hint=f"use {', '.join(known.choices)}",
            )
        if not known.is_in_range(value):
            raise UnsupportedError(
                f"{known.names(name)[0]} {value} is not possible",
                hint=f"use {known.low} to {known.high}",
            )


def shown_number(value: float) -> str:
    """As people write it: 0.5, 1e6."""
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


# -- values of texts -------------------------------------------------------------------------------


def size_bytes(text: str) -> int:
    """Bytes of a size such as 1.5GiB. Raises ValueError, as for a number without a unit."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is no size such as 512MiB, 1.5GiB or 800MB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size < 1 << 62:
        raise ValueError("is out of range")
    return int(size)


def size_or_none(text: str) -> int:
    """Bytes of a size, which may be 0 without a unit. Raises as `size_bytes`."""
    return 0 if text.strip() == "0" else size_bytes(text)


def texts_of(text: str) -> tuple[str, ...]:
    """The parts between commas."""
    return tuple(one.strip() for one in text.split(",") if one.strip())


def number_or_auto(text: str) -> int:
    """The number that "auto" could stand for."""
    if not re.fullmatch("[0-9]{1,4}", text):
        raise ValueError("is neither a number nor auto")
    return int(text)


def layers_of(text: str) -> int:
    """A number of layers; -1 is all."""
    if text == "all":
        return -1
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise ValueError("is neither a number, all nor auto")
    return int(text)
