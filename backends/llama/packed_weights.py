"""A model's packed weights in memory: pages of the file that keeps them, or what goes there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from edgespec.backends.llama.huge_pages import read_pages
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.kernels import kernels_key, open_library
from edgespec.memory.device.structures import LoadedWeights
from edgespec.memory.store.packed import PackedFile
from edgespec.models.gguf.reader import Gguf
from edgespec.models.spec import content_hash, header_hash

_P, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class PackedWeights:
    """Those of the model with these files, loaded with these settings."""

    def __init__(self, files: Sequence[Gguf], settings: RunConfig) -> None:
        self._name = files[0].path.name
        self._file = PackedFile(_key(files, settings))
        self._memory = LoadedWeights()

    @contextmanager
    def offered(self) -> Iterator[int]:
        """The handle of the file that has them, for a load in the body; -1: there is none.

        Raises BackendError where it turned out to be of something else.
        """
        with self._file.opened() as found:
            yield -1 if found is None else found[0]
        loaded = open_library()["edgespec_kernels_loaded"]
        loaded.restype, loaded.argtypes = LoadedWeights, []
        self._memory = loaded()
        if self.is_mapped and (found is None or found[1] != self._layout):
            self._file.remove()
            raise BackendError(
                f"the packed file of {self._name} has its weights in another order",
                hint="it was removed: start it again",
            )

    @property
    def is_mapped(self) -> bool:
        """Whether they are pages of the file."""
        return bool(self._memory.is_mapped)

    @property
    def _layout(self) -> str:
        return f"{self._memory.layout:016x}"

    def read(self, progress: Callable[[float], None]) -> None:
        """Have the pages of the file in memory."""
        read_pages(self._memory.begin, self._memory.size, progress)

    def keep(self, progress: Callable[[float], None]) -> bool:
        """Write them to their file, if they are not there, and use that; whether it is used now.

        Raises OSError, and nothing has changed.
        """
        begin, size = self._memory.begin, self._memory.size
        if self.is_mapped or not size:
            return self.is_mapped
        view = memoryview((ctypes.c_ubyte * size).from_address(begin)).cast("B")
        if self._file.write(self._name, view, self._layout, progress):
            with self._file.opened() as found:
                if found is not None:
                    function = open_library()["edgespec_kernels_map"]
                    function.restype, function.argtypes = ctypes.c_int, [_P, _SIZE, ctypes.c_int]
                    self._memory.is_mapped = function(begin, size, found[0])
        return self.is_mapped


def _key(files: Sequence[Gguf], settings: RunConfig) -> str:
    """What packed weights depend on: the model, by contents and times, and what of it is packed."""
    contents = content_hash([(one.path, one.file_bytes) for one in files], header_hash(files))
    times = [one.path.stat().st_mtime_ns for one in files]
    placed = [(one.label, one.layers) for one in settings.devices], settings.overrides
    what = settings.gpu_layers, settings.tied, settings.head, placed
    return f"{contents} {times} {what} | {kernels_key()}"
