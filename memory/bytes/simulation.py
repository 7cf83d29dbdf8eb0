"""What llama.cpp would allocate for a model under some settings: asked of llama.cpp.

A skeleton of the file (`models/gguf/writer.py`) is loaded without allocating, in a process of its
own: an odd header may end it. Its answers are exact, for whatever architecture llama.cpp knows.
They are kept by header, settings, llama.cpp's build and kernels, so that the same plan again
costs reading a file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.errors import BackendError
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device import host
from edgespec.memory.device.kernels import kernels_key
from edgespec.memory.device.llama_binary import PACKAGE, library_folder
from edgespec.memory.store import cache
from edgespec.models.gguf.reader import read_gguf
from edgespec.models.gguf.writer import skeleton_header
from edgespec.models.heads import layers_to_read
from edgespec.models.processes import Guest, GuestEndedError, GuestLimits
from edgespec.models.projector import Projector
from edgespec.models.spec import ModelSpec

_MODULE = "edgespec.backends.llama.simulator"
_KIND = "layouts"  # of what is stored
_QUIET_END = {"GGML_NO_BACKTRACE": "1"}  # where it ends, no debugger is started
# Of a configuration, what does not change its answer: whether files are mapped, and what edgespec
# keeps or reads itself.
_UNASKED = {"mapped", "packed_file", "drafter", "states", "projector", "image_tokens", "backend"}
_UNASKED |= {"device"}
_CONTEXTS = 3  # one more whenever contexts are made in another way for the same settings
_ENDED = "llama.cpp ended while it was asked about {}"
_MOST_KEPT = 400  # answers about a file: a plan takes 10 to 25
# Of the process, which has 0.06 GiB, and more with drivers of GPUs. Damaged sizes took it to 3.6
# GiB.
MOST_BYTES = 2 << 30
# An answer takes 0.02 s usually, and 2 where a GPU's driver starts.
_LIMITS = GuestLimits(MOST_BYTES, seconds=6.0, patience_s=60.0)


class DeviceBytes(NamedTuple):
    """What a model and a context of it take on one device."""

    weights: int = 0  # as they lie in the file
    packed: int = 0  # as kernels read them
    cache: int = 0  # keys, values and recurrent state
    compute: int = 0  # buffers for the results of a batch
    work: int = 0  # of kernels on the host, which their threads share
    adapters: int = 0  # LoRA's matrices, as they lie in their files


@dataclass(frozen=True, slots=True)
class ContextRequest:
    """A context of a model.

    Args:
        changes: parameters of llama.cpp's context that differ from the configuration's.
        beside: number of the context, in the same question, whose cache or embeddings it uses.
    """

    spec: ModelSpec
    config: RunConfig
    changes: tuple[tuple[str, int], ...] = ()
    beside: int | None = None


Allocation = Mapping[str, DeviceBytes]  # by label of a device, the host among them
Simulate = Callable[[Sequence[ContextRequest]], Sequence[Allocation]]


class _Skeleton(NamedTuple):
    """The beginning of a file, how many bytes it announces, and a name of its own."""

    header: bytes
    file_bytes: int
    name: str


class _Simulator:
    """The process, while somebody needs it, and what it has said so far."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._guest = Guest(_MODULE, _LIMITS, _QUIET_END)
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of skeletons
        self._users = 0
        self._skeletons: dict[str, _Skeleton] = {}  # by fingerprint of the file
        self._known: dict[str, dict[str, Any]] = {}  # by skeleton, then by question
        self._new: set[str] = set()  # skeletons of which there is more than is stored

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """One process answers all questions of the body; the last one to leave ends it."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._end()

    def answer(self, wanted: Sequence[ContextRequest]) -> tuple[Allocation, ...]:
        """What llama.cpp would allocate for some contexts that are open at once.

        Raises BackendError where llama.cpp cannot make them, with its own words.
        """
        skeletons = [self._skeleton(one.spec) for one in wanted]
        question = [_described(one, bones) for one, bones in zip(wanted, skeletons, strict=True)]
        found = self._remembered(
            skeletons[0].name,
            json.dumps(question, sort_keys=True),
            lambda: self._ask(question, wanted, skeletons),
        )
        return tuple({label: DeviceBytes(*sizes) for label, sizes in one.items()} for one in found)

    def projector(
        self, projector: Projector, most_tokens: int | None, *, on_gpu: bool
    ) -> tuple[int, int]:
        """Bytes of the buffers that libmtmd makes when it loads a projector, and for which image.

        By its side in pixels; 0 where it only hears. Raises BackendError where it cannot load it.
        """

        def ask() -> dict[str, Any]:
            asked = {"most_tokens": most_tokens or 0, "on_gpu": on_gpu}
            asked["weight_bytes"] = projector.weight_bytes
            answer = self._told({"projector": str(projector.path), **asked})
            return answer or {"error": _ENDED.format(projector.path.name)}

        about = f"{most_tokens} {on_gpu}"
        answer = self._remembered(projector.file.header_hash, about, ask)
        if "error" in answer:
            raise BackendError(answer["error"])
        return answer["compute_bytes"], answer["side"]

    def _remembered(self, name: str, question: str, ask: Callable[[], Any]) -> Any:
        """What was answered to a question about a file before, or is now."""
        with self._lock:
            if name not in self._known:
                answers = (cache.load(_KIND, _key(name)) or {}).get("answers")
                self._known[name] = answers if isinstance(answers, dict) else {}
            known = self._known[name]
            if question not in known:
                with self.opened():
                    known[question] = answer = ask()
                    if "error" not in answer:  # which may be another one next time
                        self._new.add(name)
            return known[question]

    def _skeleton(self, spec: ModelSpec) -> _Skeleton:
        found = self._skeletons.get(spec.fingerprint)
        if found is None:
            header, size = skeleton_header(
                spec.arch, spec.settings, spec.vocab_size, spec.tensors.values()
            )
            found = _Skeleton(header, size, hashlib.blake2b(header, digest_size=12).hexdigest())
            self._skeletons[spec.fingerprint] = found
        return found

    # -- the process -----------------------------------------------------------------------

    def _ask(
        self,
        question: list[dict[str, Any]],
        wanted: Sequence[ContextRequest],
        skeletons: list[_Skeleton],
    ) -> list[dict[str, list[int]]]:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(
                prefix="edgespec-", ignore_cleanup_errors=True
            )
        for one in skeletons:
            file = Path(self._folder.name, f"{one.name}.gguf")
            if not file.exists():
                with file.open("wb") as opened:
                    opened.write(one.header)
                    opened.truncate(one.file_bytes)  # a hole, which takes no room
        name = wanted[0].spec.path.name
        answer = self._told({"folder": self._folder.name, "contexts": question})
        if answer is None:
            raise BackendError(
                _ENDED.format(name), hint=_hint(wanted, "of an architecture that it does not know")
            )
        if "error" in answer:
            raise BackendError(
                answer["error"].replace(f"{skeletons[-1].name}.gguf", name),
                hint=_hint(wanted, f"of a newer architecture than {PACKAGE} knows"),
            )
        found: list[dict[str, list[int]]] = answer["contexts"]
        return found

    def _told(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The process's answer; None where it ended."""
        try:
            answer: dict[str, Any] = self._guest.ask(request)
        except GuestEndedError:
            return None
        return answer

    def _end(self) -> None:
        self._guest.end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        self._store()

    def _store(self) -> None:
        for name in self._new:
            answers = self._known[name]
            kept = dict(list(answers.items())[-_MOST_KEPT:])
            cache.store(_KIND, _key(name), {"answers": kept})
        self._new.clear()


def _hint(wanted: Sequence[ContextRequest], kind: str) -> str:
    patterns = "a pattern of --override-tensor may be no regular expression of C++, or "
    is_asked = any(one.config.overrides for one in wanted)
    return f"{patterns * is_asked}the file may be damaged, or {kind}"


def _described(one: ContextRequest, bones: _Skeleton) -> dict[str, Any]:
    """What the process is asked about a context."""
    adapters = [(str(path.absolute()), 1.0) for path, _ in one.config.lora]  # all are computed
    table = one.spec.tensors.get("token_embd.weight") if one.spec.tied_embeddings else None
    config = {name: value for name, value in asdict(one.config).items() if name not in _UNASKED}
    devices = [{**device, "description": "", "free_bytes": 0} for device in config["devices"]]
    if layers_to_read(one.spec, one.config.captured_layers):  # which edgespec's kernels read
        config["captured_layers"] = ()
    return {
        "skeleton": bones.name,
        "tied_bytes": 0 if table is None else table.data_bytes,
        "config": {**config, "devices": devices, "lora": adapters},
        "adapters": [read_gguf(path).header_hash for path, _ in adapters],
        "changes": dict(one.changes),
        "beside": one.beside,
    }


def _key(name: str) -> str:
    return f"{name} | {_CONTEXTS} | {_library()} | {kernels_key()} | {host.cpu_name()}"


@functools.cache
def _library() -> str:
    """What tells one build of llama.cpp from another: its files."""
    folder = library_folder()
    files = sorted(folder.glob("*")) if folder is not None and folder.is_dir() else []
    told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()


_simulator = _Simulator()
simulated, simulated_projector = _simulator.answer, _simulator.projector
simulating = _simulator.opened
