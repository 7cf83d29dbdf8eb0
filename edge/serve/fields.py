"""The fields of a JSON object, taken one by one.

What nobody took changes no answer: it is ignored, and the log names it once. Fields that ask for
what is not there are refused by the request that they are of.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from edgespec.serve.api_error import LOGGER, ApiError

_SHOWN_CHARS = 40
_CACHE = "cache_control"
_MOST_NAMES = 256  # that the log is told of, while the process runs
_NAMED: set[str] = set()
_LOCK = threading.Lock()


class Fields:
    """An object of a request.

    A field that is null counts as left out, and so does `cache_control` wherever it stands: the
    cache is reused without being asked. Every method takes one field and raises ApiError for a
    value that cannot be.

    Args:
        value: what was sent in its place.
        path: its own name, for messages; "" for the whole request.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise ApiError(
                f"{path or 'the body'} must be an object, not {shown(value)}", param=path
            )
        self.path = path
        self._left = {
            name: item for name, item in value.items() if item is not None and name != _CACHE
        }

    def name(self, field: str) -> str:
        """The whole name of a field."""
        return f"{self.path}.{field}" if self.path else field

    def __contains__(self, field: str) -> bool:
        return field in self._left

    def any_of(self, field: str) -> Any:
        """Whatever it is; it is not taken by that."""
        return self._left.get(field)

    def any(self, field: str, default: Any = None) -> Any:
        """Whatever it is."""
        return self._left.pop(field, default)

    def text(self, field: str, default: str | None = None) -> str:
        """A text; it has to be there where there is no default."""
        value = self._needed(field, default)
        if not isinstance(value, str):
            self.refuse(field, f"must be a text, not {shown(value)}")
        return value

    def number(self, field: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = self.any(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(field, f"must be a number, not {shown(value)}")
        if not low <= value <= high:
            self.refuse(field, f"must be {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    def whole(self, field: str, default: int, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        value = self.any(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(field, f"must be a whole number, not {shown(value)}")
        if not low <= value <= high:
            self.refuse(field, f"must be {low} to {high}, not {shown(value)}")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value = self.any(field, default)
        if not isinstance(value, bool):
            self.refuse(field, f"must be true or false, not {shown(value)}")
        return value

    def list(self, field: str, most: int, default: Sequence[Any] = ()) -> list[Any]:
        """A list of at most `most` items."""
        value = self.any(field, list(default))
        if not isinstance(value, list):
            self.refuse(field, f"must be a list, not {shown(value)}")
        if len(value) > most:
            self.refuse(field, f"has {len(value)} items, and at most {most} are taken")
        return value

    def object(self, field: str) -> Fields:
        """An object; an empty one where there is none."""
        return Fields(self.any(field, {}), self.name(field))

    def ignore(self, *fields: str) -> None:
        """Fields that change no answer."""
        for field in fields:
            self._left.pop(field, None)

    def only(self, field: str, *values: Any) -> None:
        """A field of which only values are supported that ask for nothing."""
        value = self._left.pop(field, None)
        same = [one for one in values if type(one) is type(value) and one == value]
        if value is not None and not same:
            self.refuse(field, f"is not supported with {shown(value)}", code="unsupported_value")

    def only_false(self, field: str) -> bool:
        """Whether it is false, which is taken then: some clients write it for "none"."""
        is_false = self._left.get(field) is False
        if is_false:
            del self._left[field]
        return is_false

    def takes_zero(self, field: str) -> bool:
        """Whether it is 0, which is taken then: nothing shall be written."""
        value = self._left.get(field)
        is_zero = type(value) is int and value == 0
        if is_zero:
            del self._left[field]
        return is_zero

    def refuse_set(self, hints: Mapping[str, str]) -> None:
        """Refuse fields that ask for what is not there, unless they are false or empty.

        Args:
            hints: what to do instead, by field.
        """
        for field, hint in hints.items():
            if self._left.pop(field, None):
                self.refuse(field, f"is not supported: {hint}", code="unsupported_parameter")

    def end(self) -> None:
        """Ignore what nobody took; the log names it."""
        for field in self._left:
            note_ignored(self.name(field[:_SHOWN_CHARS]))
        self._left.clear()

    def refuse(self, field: str, problem: str, *, code: str | None = None) -> NoReturn:
        """Raise ApiError for a field."""
        raise ApiError(f"{self.name(field)} {problem}", param=self.name(field), code=code)

    def _needed(self, field: str, default: Any) -> Any:
        value = self.any(field, default)
        if value is None:
            self.refuse(field, "is missing", code="missing_required_parameter")
        return value


def note_ignored(name: str) -> None:
    """Tell the log, once, what is ignored: its name, which a stranger wrote, and no value."""
    name = ascii(re.sub(r"\d+(?=\])", "", name[:200]))[1:-1]
    with _LOCK:
        if name in _NAMED or len(_NAMED) >= _MOST_NAMES:
            return
        _NAMED.add(name)
    LOGGER.warning("requests have the field %s, which is ignored", name)


def shown(value: Any) -> str:
    """A value as it is quoted in a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."
