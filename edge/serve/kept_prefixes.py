"""What the cache of an unloaded model held, which its next load finds again.

It lies in files without a name: nobody else can open them, and they are gone with the process,
however that ends. Kept is what is far cheaper to write and to read than to compute again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from edgespec.backends.base import HoldsSequences, KeepsCache, sequences_of
from edgespec.decode.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.memory.store.cache import cache_directory

_OPEN_FILES = Path("/proc/self/fd")  # where a file without a name has a path
_GAIN = 4.0  # times that computing takes longer: whether anybody comes back is not known
_LEAST_TOKENS = 64
_MOST_BYTES = 1 << 30  # of a model
_MOST_OF_DISK = 0.1  # of what is free
_BYTES_PER_S = 300e6  # of a disk that was not written to yet


class _Kept:
    """Some tokens with their cells, in a file that goes with this object."""

    def __init__(self, tokens: Sequence[int], images: Sequence[Sequence[int]], key: str) -> None:
        self.tokens, self.images = tokens, images
        self.key = key  # of the engine whose cells they are
        with tempfile.TemporaryFile(dir=_folder()) as file:
            number = os.dup(file.fileno())
        self.path = str(_OPEN_FILES / str(number))
        weakref.finalize(self, os.close, number)


class KeptPrefixes:
    """Of one model, between two loads."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._bytes_per_s = _BYTES_PER_S

    def keep(self, engine: Engine, s_per_token: float) -> int:
        """Write what an idle engine's cache holds where that pays; how many tokens.

        Args:
            s_per_token: that reading a prompt has taken.
        """
        self._kept.clear()
        if not engine.cache_key or not _OPEN_FILES.is_dir():
            return 0
        with suppress(OSError, EdgespecError), engine.exclusive():
            room = min(_MOST_BYTES, shutil.disk_usage(_folder()).free * _MOST_OF_DISK)
            for one in sorted(sequences_of(engine.backend), key=lambda one: -one.length):
                tokens = list(one.tokens[: one.length - one.pending])
                nbytes = len(tokens) * _cell_bytes(engine)
                spent_s = 2 * nbytes / self._bytes_per_s
                is_worth_it = len(tokens) * s_per_token > _GAIN * spent_s
                if len(tokens) < _LEAST_TOKENS or nbytes > room or not is_worth_it:
                    continue
                if isinstance(one, KeepsCache):
                    room -= self._write(one, tokens, engine.cache_key)
        return sum(len(one.tokens) for one in self._kept)

    def _write(self, sequence: KeepsCache, tokens: Sequence[int], key: str) -> int:
        kept, began = _Kept(tokens, list(sequence.images), key), perf_counter()
        nbytes = sequence.save_cache(kept.path)
        self._bytes_per_s = nbytes / max(1e-3, perf_counter() - began)
        self._kept.append(kept)
        return nbytes

    def restore(self, engine: Engine) -> int:
        """Put them into the cache of an engine that was just loaded; how many tokens."""
        count = 0
        for one in self._kept:
            if one.key != engine.cache_key:
                continue
            with suppress(OSError, EdgespecError), engine.exclusive():
                sequence = engine.spare_sequence(len(one.tokens))
                if isinstance(sequence, KeepsCache):
                    sequence.load_cache(one.path, one.tokens, one.images)
                    count += len(one.tokens)
        self._kept.clear()
        return count


def _folder() -> Path:
    folder = cache_directory()
    os.makedirs(folder, exist_ok=True)
    return folder


def _cell_bytes(engine: Engine) -> float:
    whole = engine.backend
    cells = whole.cells if isinstance(whole, HoldsSequences) else whole.context_size
    return engine.memory_bytes().get("kv_cache", 0) / max(1, cells)
