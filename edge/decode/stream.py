"""Token ids in, text out, at once: incremental UTF-8 and stop strings.

A token's bytes need not be whole characters, and a stop string need not end where a token does.
So two things are held back until they are decided: bytes of an unfinished character, and text that
may be the beginning of a stop string. Everything else is given out by the `push` that brought it.

Where the stop is depends on the text alone, not on how tokens cut it: the text is read character
by character, and the first character that completes a stop string ends it. If it completes several
at once, the one that began earliest is removed. With the stops "ab" and "abc" it is always "ab";
with "bcd" and "abcde" the text "xabcde" becomes "xa"; with "cd" and "bcd" it becomes "xa" too.

Nothing here knows of models or vocabularies, and text is not normalised.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from edgespec.errors import UnsupportedError


class TextStream:
    """Text of one answer, as far as it may be shown.

    `token_bytes` gives the bytes of a token, `b""` for one that is not shown. Bytes that are no
    UTF-8 become U+FFFD, as in `bytes.decode(errors="replace")`. Raises `UnsupportedError` for an
    empty stop string.

        tokens "I", " like", "#", "##", "#"; stop "###"
        pushes give "I", " like", "", "" -> `stopped`, `text` "I like"
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._matchers = [_Matcher(text) for text in stops]
        self._held = ""  # whole characters that are not given out: a stop string may have begun
        self._emitted: list[str] = []
        self._finished = False
        self.stopped = False  # True from the token on that completed a stop string
        self.stop_string: str | None = None  # this one

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._emitted)

    def push(self, token: int) -> str:
        """Text that has become safe to show, often `""`.

        Tokens after the one that completed a stop string are ignored.
        """
        assert not self._finished
        if self.stopped:
            return ""
        return self._add(self._decode(self._token_bytes(token)))

    def finish(self) -> str:
        """The rest, now that no more tokens come: an unfinished character is one U+FFFD."""
        if self._finished or self.stopped:
            return ""
        self._finished = True
        shown = self._add(self._decode(b"", final=True))
        rest, self._held = self._held, ""
        self._emitted.append(rest)
        return shown + rest

    def _add(self, new_text: str) -> str:
        if not self._matchers:
            self._emitted.append(new_text)
            return new_text
        text = self._held + new_text
        length = len(self._held)
        for character in new_text:
            length += 1
            completed = [m.text for m in self._matchers if m.completes(character)]
            if completed:
                self.stopped, self.stop_string = True, max(completed, key=len)
                return self._emit(text[: length - len(self.stop_string)], held="")
        num_held = max(m.num_matched for m in self._matchers)
        cut = len(text) - num_held
        return self._emit(text[:cut], held=text[cut:])

    def _emit(self, shown: str, *, held: str) -> str:
        self._held = held
        self._emitted.append(shown)
        return shown


class _Matcher:
    """One stop string, and how much of it the text seen so far ends with (Knuth-Morris-Pratt).

    A character costs a constant number of steps on average, however long the stop string is.
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise UnsupportedError(
                "a stop string must not be empty: it would stop before the first token",
                hint="leave the stop string out",
            )
        self.text = text
        self.num_matched = 0
        self._fallback = _fallbacks(text)

    def completes(self, character: str) -> bool:
        """Read one character; True if the stop string ends with it."""
        matched = self.num_matched
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        self.num_matched = matched + (self.text[matched] == character)
        return self.num_matched == len(self.text)


def _fallbacks(text: str) -> list[int]:
    """At n: the length of the longest proper prefix of `text` that ends `text[:n]`.

    "abab!" gives [0, 0, 0, 1, 2, 0].
    """
    fallbacks = [0, 0]
    matched = 0
    for character in text[1:]:
        while matched and text[matched] != character:
            matched = fallbacks[matched]
        matched += text[matched] == character
        fallbacks.append(matched)
    return fallbacks
