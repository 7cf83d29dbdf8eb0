"""A model's packed weights in memory: pages of the file that keeps them, or what it has of experts.

A first load packs them into a new file, by way of its pages; that has its name when it is on the
disk, behind the first answers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from edgespec.backends.llama.huge_pages import read_pages
from edgespec.errors import BackendError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device.kernels import kernel_function, kernels_key
from edgespec.memory.device.structures import ExpertCounts, LoadedWeights
from edgespec.memory.store.packed import NewFile, PackedFile
from edgespec.models.gguf.reader import Gguf
from edgespec.models.gguf.shards import read_gguf_shards
from edgespec.models.spec import content_hash, header_hash
from edgespec.models.writing import reason


class PackedWeights:
    """Those of the model with these files, loaded with these settings."""

    def __init__(self, files: Sequence[Gguf], settings: RunConfig) -> None:
        self._name = files[0].path.name
        self._nbytes = sum(one.file_bytes for one in files)
        self._expert_bytes = settings.expert_bytes
        self._file = PackedFile(_key(files, settings))
        self._memory = LoadedWeights()
        self._new: NewFile | None = None
        self._problem: OSError | None = None  # that keeps them from being kept

    @contextmanager
    def offered(self) -> Iterator[tuple[int, bool]]:
        """For a load in the body: a handle of their file, or -1, and whether they go there.

        Raises BackendError where it turned out to be of something else, or where experts that are
        to be read from it are not there.
        """
        with self._file.opened() as found:
            if found is None:
                self._begin()
            if self._expert_bytes and found is None and self._new is None:
                said = (
                    "another process is at it" if self._problem is None else reason(self._problem)
                )
                raise self._missing(said)
            handle = found[0] if found else self._new.handle if self._new else -1
            try:
                yield handle, found is None
                self._memory = kernel_function("edgespec_kernels_loaded", LoadedWeights)()
                if found is not None and self._memory.size:
                    self._check(found[1])
                if self._expert_bytes and self._memory.size:  # else the load failed
                    self._hold(handle)
            except BaseException:
                self._drop()
                raise
            if not self.is_mapped:
                self._drop()

    def _begin(self) -> None:
        try:
            with suppress(BlockingIOError):  # another process writes it
                self._new = self._file.begin(
                    self._name, self._nbytes, needed=self._expert_bytes > 0
                )
        except OSError as problem:
            self._problem = problem

    def _drop(self) -> None:
        if self._new is not None:
            self._new.abandon()
            self._new = None

    def _check(self, layout: str) -> None:
        if not self.is_mapped or layout != self._layout:
            self._file.remove()
            raise BackendError(
                f"the packed file of {self._name} has its weights in another order",
                hint="it was removed: start it again",
            )

    def _hold(self, handle: int) -> None:
        """Have all but experts in memory, and of these so many bytes."""
        if not self.is_mapped:
            raise self._missing("its disk has no room, or files that cannot be mapped")
        hold = kernel_function("edgespec_kernels_hold", ctypes.c_int, ctypes.c_int, ctypes.c_size_t)
        if status := hold(handle, self._expert_bytes):
            raise _unreadable(self._name, status)

    def _missing(self, said: str) -> BackendError:
        return BackendError(
            f"{self._name} is larger than memory, and its packed file cannot be written: {said}",
            hint="its folder needs room for the whole model: EDGESPEC_CACHE names another one",
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
        if self.is_mapped and not self._expert_bytes:
            read_pages(self._memory.begin, self._memory.size, progress)

    def is_kept(self) -> bool:
        """Whether they are kept for later loads. Raises OSError where they cannot be."""
        if self._problem is not None:
            raise self._problem
        return self.is_mapped

    def check(self) -> None:
        """Raises BackendError where a step may have used what could not be read or written."""
        if self._new is not None and self._new.problem is not None:
            raise BackendError(
                f"the packed weights of {self._name} could not be written: "
                f"{reason(self._new.problem)}",
                hint="start it again with --packed-file off",
            )
        if self._expert_bytes and (status := self.counts().problem):
            raise _unreadable(self._name, status)

    def counts(self) -> ExpertCounts:
        """Of experts that were read; zeros where all are in memory."""
        function = kernel_function("edgespec_kernels_expert_counts", ExpertCounts, ctypes.c_void_p)
        counted: ExpertCounts = function(self._memory.begin)
        return counted

    def count_experts(self) -> None:
        """Uses of experts are counted from here on."""
        kernel_function("edgespec_kernels_count_experts", None, ctypes.c_void_p)(self._memory.begin)

    def write(self) -> None:
        """Bring a new file to the disk, in a thread: steps are timed before, as that sums it."""
        if self._new is not None:
            self._new.finish(self._layout)

    def close(self) -> None:
        """Wait until they are on the disk."""
        self.write()
        if self._new is not None:
            self._new.join()


def is_kept(path: Path, settings: RunConfig) -> bool:
    """Whether there is a file with the packed weights of a model, so that a load maps them."""
    return PackedFile(_key(read_gguf_shards(path), settings)).path.exists()


def _unreadable(name: str, status: int) -> BackendError:
    said = os.strerror(status) if status > 0 else "it is shorter than it was"
    return BackendError(
        f"the packed file of {name} cannot be read: {said}", hint="start it again: it is checked"
    )


def _key(files: Sequence[Gguf], settings: RunConfig) -> str:
    """What packed weights depend on: the model, by contents and times, and what of it is packed."""
    contents = content_hash([(one.path, one.file_bytes) for one in files], header_hash(files))
    times = [one.path.stat().st_mtime_ns for one in files]
    placed = [(one.label, one.layers) for one in settings.devices], settings.overrides
    what = settings.gpu_layers, settings.tied, settings.head, placed
    return f"{contents} {times} {what} | {kernels_key()}"
