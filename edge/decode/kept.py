"""Texts of an engine's cache on disk: put back before a prompt is read, written behind answers.

The engine asks when a job is made, begins and ends; what there is, and how it is kept, the store
knows (`edgespec.memory.store.cells`). A text is written once nobody has been answered for a
moment, a piece at a time: who comes meanwhile waits for one piece. The text that was used last is
put back by itself behind a start, as it is likely to go on, in pieces, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from warnings import warn

from edgespec.backends.base import KeepsCache, Tokenizer
from edgespec.decode.scheduler import Scheduler, Slots
from edgespec.decode.step import Job, Slot
from edgespec.errors import BackendError, EdgespecError, EdgespecWarning
from edgespec.memory.bytes.config import PIECE_TOKENS
from edgespec.memory.store.cells import Piece, PrefixStore, ends_of, ends_of_text
from edgespec.models.control_texts import MARK
from edgespec.models.images import has_images
from edgespec.models.writing import reason
from edgespec.prefix import common_prefix_length

LOG = logging.getLogger("edgespec.decode")
# Without an answer, before texts are written. A piece of 512 tokens takes 37 ms to write on SmolLM2
# (11 MiB, two cores of a Zen 3): who asks meanwhile waits that long, a program asks again sooner.
_QUIET_S = 0.5
# Of a text that is kept, and by which it has grown when it is written again. On SmolLM2 128 tokens
# take 348 ms to read, 8 ms to write and 3 ms to check and put back; 16 tokens 44, 1.6 and 0.5 ms.
_LEAST_TOKENS = 128
_FEW_TOKENS = 16
# Tokens that are put back have to be at least one in so many of those in their files: a token is
# read in 1 to 3 ms, and its cells are checked and put back in 0.02 to 0.05 ms.
_MOST_READ = 20


class _Left(Exception):
    """Raised where the cache is used again, or holds another text by now."""


class PrefixKeeper:
    """What is kept of one engine's cache.

    Args:
        tokenizer: the engine's.
    """

    def __init__(
        self, store: PrefixStore, slots: Slots, scheduler: Scheduler, tokenizer: Tokenizer
    ) -> None:
        self._store, self._slots, self._scheduler = store, slots, scheduler
        self._tokenizer, self._bytes_of = tokenizer, tokenizer.token_bytes
        self._controls = dict[str, int]()  # tokens by their texts, as far as they were met
        self._timer: threading.Timer | None = None
        self._is_closed = False
        self._change = threading.Lock()  # of the timer
        self._writing = threading.Lock()

    # -- before a prompt is read -----------------------------------------------------------

    def encode(self, text: str, encode: Callable[..., list[int]], salt: str) -> list[int]:
        """Ids of a text, by its tokenizer; a text that is kept has its own ids in it.

        Where all of it up to a control token is kept, only the rest is tokenized: text is cut alike
        on both sides of one. To tokenize 32,000 tokens takes 0.16 s.
        """
        found = self._store.find_text(self._places(text), salt)
        if found is not None and found[1]:
            return [*found[0], *encode(text[found[1] :], add_special=False)]
        ids = encode(text)
        places = {digest: place for place, digest in ends_of(ids, self._bytes_of)}
        found = self._store.find_text(places, salt)
        return ids if found is None else [*found[0], *ids[found[1] :]]

    def _places(self, text: str) -> dict[str, int]:
        """Where control tokens begin, by digests of what is before; {} where that is not sure."""
        tokenizer, known = self._tokenizer, self._controls
        controls = tokenizer.control_texts
        is_doubled = bool(tokenizer.bos_text) and text.startswith(2 * tokenizer.bos_text)
        if MARK in text or has_images(text) or is_doubled or not controls.are_apart:
            return {}
        found = list[tuple[int, int, int]]()
        for begin, end in controls.found(text):
            name = text[begin:end]
            if name not in known:
                token, *more = tokenizer.encode(name, add_special=False) or (-1,)
                known[name] = -1 if more or token < 0 or self._bytes_of(token) else token
            if known[name] < 0:
                return {}
            found.append((begin, end, known[name]))
        before = tokenizer.encode("")
        if found and before == [found[0][2]] and not found[0][0]:
            before = []
        return ends_of_text(text, before, found)

    def look_up(self, job: Job) -> None:
        """Tell a job what is kept of its prompt, where that is worth its while, and undamaged."""
        text = job.prompt[:-1]
        if not job.reuse or len(text) < _LEAST_TOKENS:
            return
        size = job.target.backend.context_size
        here = max(slot.common(text, job.salt) for slot in self._slots)
        while (found := self._store.find(text, job.salt, size)) and _is_worth(*found, here):
            if self._store.is_whole(found[0]):
                job.stored = found[0]
                return

    def put_back(self, job: Job) -> None:
        """Let the sequence of a job that begins hold what is kept of its prompt."""
        slot, piece = job.slot, job.stored
        if piece is None or slot is None:
            return
        text, backend = job.prompt[:-1], slot.backend
        common = common_prefix_length(piece.text, text)
        if not _is_worth(piece, common, slot.reach(text, job.salt)):
            return
        if not isinstance(backend, KeepsCache) or not self._slots.hold(slot, piece.end):
            return
        here = slot.common(piece.text, job.salt)
        try:
            for one in piece.chain:
                if one.end > here:
                    _load(backend, one)
        except BackendError as problem:  # one was removed meanwhile
            LOG.info("%s: the prompt is read", problem)
            backend.truncate(0)
            return
        self._store.touch(piece)

    def begin(self) -> None:
        """Begin to put back the text that was used last, until somebody asks for something."""
        threading.Thread(target=self._resume, daemon=True).start()

    def _resume(self) -> None:
        """Put back the text that was used last, in a thread of its own.

        Texts that have a salt wait until their owner comes.
        """
        with suppress(_Left, EdgespecError), self._writing:
            slot = next(iter(self._slots))
            piece = self._store.latest(slot.salt, slot.backend.context_size)
            if piece is None or not self._store.is_whole(piece):
                return
            for one in piece.chain:
                with self._held():
                    left = [] if one.parent is None else one.parent.text
                    if self._is_closed or list(slot.backend.tokens) != left:
                        return
                    assert isinstance(slot.backend, KeepsCache), "which wrote it"
                    _load(slot.backend, one)
            LOG.info("%d tokens of the text that was used last are in the cache", piece.end)

    # -- behind an answer ------------------------------------------------------------------

    def has_ended(self) -> None:
        """An answer has ended: what is new is written when nobody is answered any more."""
        with self._change:
            if self._timer is not None:
                self._timer.cancel()
            if not self._is_closed:
                self._timer = threading.Timer(_QUIET_S, self._write)
                self._timer.daemon = True
                self._timer.start()

    def _write(self) -> None:
        """Write what is new in all slots, in the thread of the timer."""
        try:
            with self._writing:
                for slot in self._slots:
                    self._keep(slot, self._held)
        except _Left:
            self.has_ended()
        except EdgespecError:
            pass  # the engine is closed, which writes the rest
        except OSError as problem:
            self._give_up(problem)

    def close(self) -> None:
        """Write what is left, for who has the cache for good."""
        with self._change:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
        with self._writing:
            try:
                for slot in self._slots:
                    self._keep(slot, nullcontext)
            except OSError as problem:
                self._give_up(problem)

    def _give_up(self, problem: OSError) -> None:
        self._is_closed = True
        said = f"no more prefixes are kept on disk: {reason(problem)}"
        warn(said, EdgespecWarning, stacklevel=2)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The cache, which nobody else wants. Raises _Left."""
        scheduler = self._scheduler
        if not scheduler.is_idle:
            raise _Left
        with scheduler.exclusive(lambda: not scheduler.is_idle) as is_held:
            if not is_held:
                raise _Left
            yield

    def _keep(self, slot: Slot, held: Callable[[], AbstractContextManager[None]]) -> None:
        """Write what is new of the text in a slot."""
        backend, salt = slot.backend, slot.salt
        if not isinstance(backend, KeepsCache):
            return
        with held():
            text = list(backend.tokens[: backend.length - backend.pending])
            images, splits = list(backend.images), backend.splits_cache
        if len(text) < _LEAST_TOKENS:
            return
        size = backend.context_size
        parent, start = self._store.find(text, salt, size) or (None, 0)
        if len(text) - start < _FEW_TOKENS:
            return
        if not splits:
            parent, start = None, 0

        def write(first: int, end: int, path: str) -> int:
            with held():
                if slot.salt != salt or list(backend.tokens[:end]) != text[:end]:
                    raise _Left
                return backend.save_cache(path, first, end)

        ends = ends_of(text, self._bytes_of, is_open=True)
        step = PIECE_TOKENS if splits else len(text)
        for first in range(start, len(text), step):
            end = min(first + step, len(text))
            parent = self._store.add(
                *(parent, first, text[first:end], salt),
                partial(write, first, end),
                images=images,
                ends=[one for one in ends if first < one[0] <= end],
            )
        if not splits and parent is not None:
            self._store.remove_parts_of(parent)


def _load(backend: KeepsCache, piece: Piece) -> None:
    """Put the cells of a piece behind those of the pieces before. Raises BackendError."""
    backend.load_cache(str(piece.path), piece.tokens.tolist(), piece.images, piece.start)


def _is_worth(piece: Piece, common: int, here: int) -> bool:
    """Whether to put back `common` tokens, where the cache has `here` of them."""
    return common - here > max(_FEW_TOKENS, piece.end // _MOST_READ)
