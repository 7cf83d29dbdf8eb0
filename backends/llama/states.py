"""States of prefixes that a cache cannot go back to by forgetting cells.

A recurrent state is one sum over all tokens, and a sliding window's cells are overwritten: so what
llama.cpp has of them (`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`) is copied at the ends of messages, and
at a set distance in long ones. To go back is to put a copy back and to forget the cells behind it:
cells of attention in full are there all the same.

Which copies: a message begins at a control token that ends no answer. The last such place of a
prompt always has one, as the next turn comes back to it whatever the template makes of the answer.
Others have to lie so far apart that reading the tokens between them takes far longer than copying.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llama.context import LlamaContext
from edgespec.errors import BackendError

_LOGGER = logging.getLogger("edgespec.llama")
_PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_FAR = 2048  # tokens between two copies in a long message
_NEAR_END = 64  # tokens, in which the last message begins that the answer's own header ends
_GAIN = 10.0  # times that reading what lies between two copies takes longer than a copy
_LEAST_TOKENS = 16  # between two copies, whatever they take
_LOST_TOKENS = 64  # that are read again, before that is worth a line
_HEAD, _ONE = struct.Struct("<8sI"), struct.Struct("<QQ")  # of a file: how many; length and bytes
_MAGIC = b"edgstate"


@dataclass(slots=True)
class _State:
    """A copy behind the first `length` tokens of a sequence; sequences may share its `data`."""

    owner: int
    length: int
    data: NDArray[np.uint8]
    used: int
    is_far: bool = False  # within a long message


class States:
    """Those of all sequences of a context, at most `most`; with 0 none is ever made."""

    def __init__(self, context: LlamaContext, most: int) -> None:
        self.most = most
        self._context = context
        self._all: list[_State] = []
        self._tick = count(1).__next__  # a clock of uses
        self._copy_s, self._token_s = 0.0, 0.0  # of a copy, and of reading a token
        self._since = (0, 0, 0.0)  # sequence, length and time when the last one was made
        self._far: dict[int, list[int]] = {}  # of a sequence, places within a long message
        self._begins: dict[int, bool] = {}  # whether a message begins with a token

    @property
    def nbytes(self) -> int:
        """Of all copies."""
        return sum(unit[0].data.nbytes for unit in self._units().values())

    # -- which -----------------------------------------------------------------------------

    def stops(self, owner: int, text: Sequence[int], start: int) -> list[int]:
        """Places behind `start` at which the state is to be copied while a text is read.

        Of the copies that there are, and these, only the best ones stay.
        """
        last = len(text) - 1
        if not self.most or last <= start:
            return []
        begins = [place for place in range(start + 1, last) if self._begins_message(text[place])]
        if begins and begins[-1] >= last - _NEAR_END:
            last = begins[-1]
        gap = _LEAST_TOKENS
        if self._token_s:
            gap = max(gap, round(_GAIN * self._copy_s / self._token_s))
        found: list[int] = []
        for place in begins:
            before = found[-1] if found else start
            if place - before >= gap and last - place >= gap:
                found.append(place)
        ends = zip([start, *found], [*found, last], strict=True)
        far = [one for before, end in ends for one in range(before + _FAR, end - gap, _FAR)]
        # Within an image, whose ids are negative, there is no going on.
        far = [place for place in far if max(text[place - 1 : place + 1]) >= 0]
        there = [one.length for one in self._all if one.owner == owner and one.length <= start]
        kept = _spread([*there, *found, last], self.most)
        self._far[owner] = _spread(far, self.most - len(kept))
        kept = sorted([*kept, *self._far[owner]])
        self._all = [one for one in self._all if one.owner != owner or one.length in kept]
        self._since = (owner, start, perf_counter())
        return [place for place in kept if place > start]

    def _begins_message(self, token: int) -> bool:
        known = False if token < 0 else self._begins.get(token)  # of an image
        if known is None:
            one = self._context.tokenizer
            known = not one.token_bytes(token) and not one.is_end(token)
            self._begins[token] = known
        return known

    # -- copies ----------------------------------------------------------------------------

    def keep(self, owner: int, length: int) -> None:
        """Copy the state of a sequence, which has so many tokens now."""
        now = perf_counter()
        sequence, before, since_s = self._since
        if sequence == owner and length > before:
            self._token_s = (now - since_s) / (length - before)
        self.drop(owner, length)
        lib, handle = self._context.lib, self._context.handle
        size = int(lib.llama_state_seq_get_size_ext(handle, owner, _PARTIAL_ONLY))
        is_far = length in self._far.get(owner, ())
        while self._all and len(units := self._units()) >= self.most:
            worth = {number: self._worth(unit, owner, length) for number, unit in units.items()}
            gone = min(worth, key=lambda number: worth[number])
            if is_far and worth[gone][0]:
                return
            self._all = [one for one in self._all if id(one.data) != gone]
        data = np.empty(size, np.uint8)
        got = lib.llama_state_seq_get_data_ext(handle, _pointer(data), size, owner, _PARTIAL_ONLY)
        if got != size:
            raise BackendError(f"llama.cpp copies {got} of {size} bytes of a state")
        self._all.append(_State(owner, length, data, self._tick(), is_far))
        self._copy_s = perf_counter() - now
        self._since = (owner, length, perf_counter())

    def _units(self) -> dict[int, list[_State]]:
        """The states of each copy: sequences may share it."""
        units = dict[int, list[_State]]()
        for one in self._all:
            units.setdefault(id(one.data), []).append(one)
        return units

    def _worth(self, unit: Sequence[_State], owner: int, length: int) -> tuple[int, int]:
        """What is given up first is the least, where `owner` is to have one behind `length` tokens.

        First copies within messages, then those between the first and the last message of a
        sequence, then the least recently used ones.
        """

        def rank(one: _State) -> int:
            ends = [other.length for other in self._all if other.owner == one.owner]
            ends += [length] * (one.owner == owner)
            return 0 if one.is_far else 2 if one.length in (min(ends), max(ends)) else 1

        return max(map(rank, unit)), max(one.used for one in unit)

    def reach(self, owner: int, length: int) -> int:
        """Tokens of the longest prefix of at most `length` that there is a copy of."""
        return max((one.length for one in self._all if one.owner == owner and one.length <= length),
                   default=0)  # fmt: skip

    def put_back(self, owner: int, length: int, target: int) -> None:
        """Let the sequence `target` have the state of `owner` behind exactly so many tokens."""
        one = next(one for one in self._all if (one.owner, one.length) == (owner, length))
        one.used, lib = self._tick(), self._context.lib
        size = one.data.nbytes
        got = lib.llama_state_seq_set_data_ext(
            self._context.handle, _pointer(one.data), size, target, _PARTIAL_ONLY
        )
        if got != size:
            raise BackendError(f"llama.cpp puts back {got} of {size} bytes of a state")

    def share(self, owner: int, target: int, length: int) -> None:
        """Let `target` have the copies of the first tokens of `owner`, and no others."""
        self.drop(target, 0)
        theirs = [one for one in self._all if one.owner == owner and one.length <= length]
        self._all += [replace(one, owner=target, used=self._tick()) for one in theirs]

    def drop(self, owner: int, length: int) -> None:
        """Forget the copies of a sequence at so many tokens and behind them."""
        self._all = [one for one in self._all if one.owner != owner or one.length < length]

    # -- files -----------------------------------------------------------------------------

    def write(self, owner: int, path: str) -> int:
        """Append the copies of a sequence to a file; how many bytes it has then."""
        mine = [one for one in self._all if one.owner == owner]
        with open(path, "ab") as file:
            file.write(_HEAD.pack(_MAGIC, len(mine)))
            for one in mine:
                file.write(_ONE.pack(one.length, one.data.nbytes))
                file.write(one.data.data)
            return file.tell()

    def read(self, owner: int, path: str, offset: int, length: int) -> None:
        """Take the copies that `write` appended at an offset, for a sequence of `length` tokens.

        What is none, or larger than a state of this model, is left out.
        """
        lib, handle = self._context.lib, self._context.handle
        most = int(lib.llama_state_seq_get_size_ext(handle, owner, _PARTIAL_ONLY))
        with open(path, "rb") as file:
            file.seek(offset)
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC:
                return
            for _ in range(min(_HEAD.unpack(head)[1], self.most)):
                at, size = _ONE.unpack(file.read(_ONE.size).ljust(_ONE.size, b"\0"))
                data = np.fromfile(file, np.uint8, min(size, most))
                if not 0 < at <= length or not 0 < size == data.nbytes:
                    return
                self._all.append(_State(owner, at, data, self._tick()))


def _spread(places: Sequence[int], most: int) -> list[int]:
    """At most so many of some places: the last one, the first one, and those far from others.

    What ends at the first one, a system prompt mostly, other conversations have, too.
    """
    kept = sorted(set(places))
    while len(kept) > most:
        gaps = [place - before for before, place in pairwise(kept[:-1])]
        del kept[gaps.index(min(gaps)) + 1 if gaps else 0]
    return kept


def _pointer(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def say_lost(length: int, kept: int) -> None:
    """Say in the log where a text that the cache had is read again."""
    if length - kept >= _LOST_TOKENS:
        _LOGGER.info(
            "%d of %d tokens that the cache had are read again: no state was kept nearer",
            *(length - kept, length),
        )
