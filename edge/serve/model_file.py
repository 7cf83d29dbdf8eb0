"""A model file as the model pool holds it: planned, loaded, closed, by what it was made for.

What the cache of an unloaded model held its next load finds again. It lies in files without a
name: nobody else can open them, and they are gone with the process, however that ends. Kept is what
is far cheaper to write and to read than to compute again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.backends.base import HoldsSequences, KeepsCache, sequences_of
from edgespec.decode.engine import Engine, sees_images
from edgespec.errors import EdgespecError
from edgespec.memory.plan.embedding import EmbeddingPlan, embeds
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.request import Request
from edgespec.memory.store.cache import cache_directory
from edgespec.models.onnx.folder import read_model
from edgespec.models.projector import projector_beside, read_projector
from edgespec.models.spec import ModelSpec
from edgespec.serve.asked import Defaults, Setup
from edgespec.serve.embeddings import EmbeddingService
from edgespec.serve.parsing import Limits
from edgespec.serve.pool import CHAT, EMBED
from edgespec.serve.service import Service
from edgespec.setup.embedding import Embedder
from edgespec.setup.kernel_choice import prepare_kernels
from edgespec.setup.loading import load_plan
from edgespec.setup.model_sets import Planned, Sizes, beside, plan_beside


class ModelFile:
    """One that can be loaded: it answers chats, or makes embeddings.

    Args:
        names: as clients ask for it.
        path: of the file, or of a folder.
        request: how it is loaded.
        machine: as it is before any model is loaded.
        serve: makes a service of what was loaded, which closes it.
        planned: with others already; None plans it alone, when it is asked for.
        setup: makes what requests are held against; None for a model without any.
    """

    def __init__(
        self,
        names: Sequence[str],
        path: Path,
        request: Request,
        machine: Machine,
        serve: Callable[[ModelFile, Engine | Embedder], Any],
        planned: Planned | None = None,
        setup: Callable[[ModelFile, ModelSpec], Setup] | None = None,
    ) -> None:
        self.names, self.path, self.planned = tuple(names), path, planned
        self._request, self._machine, self._serve = request, machine, serve
        self._make_setup = setup
        self._spec: ModelSpec | None = None if planned is None else planned.spec
        self._prefixes = KeptPrefixes()

    @property
    def spec(self) -> ModelSpec:
        """What the file says of itself. Raises as `read_model`."""
        self._spec = self._spec or read_model(self.path)
        return self._spec

    @property
    def kind(self) -> str:
        """What the file says; a chat where it cannot be read, which its load will tell."""
        try:
            return EMBED if embeds(self.spec, self._request.pooling) else CHAT
        except EdgespecError:
            return CHAT

    @property
    def setup(self) -> Setup:
        """What requests are held against. Raises as `read_model`."""
        spec = self.spec
        if self._make_setup is not None:
            return self._make_setup(self, spec)
        return Setup(self.names, spec.context_length, Defaults(), Limits())

    @property
    def sizes(self) -> Sizes | None:
        """What it adds to the process; None before it was planned."""
        return None if self.planned is None else self.planned.sizes

    def plan(self, pinned: Sequence[Sizes]) -> None:
        """Plan it for a process in which these stay. Raises as `make_run_plan`."""
        self._spec = spec = read_model(self.path)
        if not embeds(spec, self._request.pooling):
            prepare_kernels(spec, self._request, lambda _what, _fraction: None)
        made, _ = plan_beside(spec, self._request, self._machine, pinned)
        self.planned = Planned.of(spec, made)

    @property
    def about(self) -> Mapping[str, Any]:
        """What is told of it: null as long as it is not known."""
        one = self.planned
        if one is None or one.plan is None:
            return about(None, None, self._may_take)
        if isinstance(one.plan, EmbeddingPlan):
            size = one.spec.embedding_size
            return {"context_length": one.plan.context_size, "embedding_length": size}
        path = one.plan.projector
        senses = None if path is None else read_projector(path).modalities
        return about(one.plan.context_size, one.spec.vocab_size, senses)

    @cached_property
    def _may_take(self) -> Mapping[str, bool] | None:
        """What its projector takes, as far as files tell before it is planned."""
        asked = self._request.mmproj
        path = projector_beside(self.path) if asked is None else Path(asked)
        if path is None or str(asked) == "none":
            return None
        try:
            return read_projector(path).modalities
        except EdgespecError:  # which its load will tell
            return None

    def load(self, others: Sequence[Sizes], report: Callable[[str, float], None]) -> Any:
        """Raises as `load_plan`."""
        one = self.planned
        assert one is not None and one.plan is not None, "it was planned"
        model: Engine | Embedder
        if isinstance(one.plan, EmbeddingPlan):
            model = Embedder(beside(one.plan, others), progress=report)
        else:
            model = load_plan(one.spec, beside(one.plan, others), progress=report)
        try:
            if isinstance(model, Engine):
                self._prefixes.restore(model)
            return self._serve(self, model)
        except BaseException:
            model.close()
            raise

    def unload(self, loaded: Service | EmbeddingService) -> None:
        """Keep what its cache holds where that pays."""
        if isinstance(loaded, Service):
            loaded.worker.close()
            self._prefixes.keep(loaded.engine, loaded.prompt_s_per_token)
        loaded.close()


def about(
    context_size: int | None, vocab_size: int | None, senses: Mapping[str, bool] | None = None
) -> dict[str, Any]:
    """What a list of models says of one that answers chats."""
    return {
        "modalities": senses or {"vision": False, "audio": False},
        "context_length": context_size,
        "max_model_len": context_size,
        "meta": {"n_ctx": context_size, "n_vocab": vocab_size},
    }


class LoadedModel:
    """A service whose engine is loaded already, and stays: the pool of one model."""

    kind = CHAT

    def __init__(self, service: Service) -> None:
        self.names, self._service = service.setup.names, service
        self.setup = service.setup
        peak = 0 if service.plan is None else service.plan.predicted_peak_bytes
        self.sizes: Sizes = {"process": peak}

    @property
    def about(self) -> Mapping[str, Any]:
        """What is told of it."""
        service = self._service
        backend = service.engine.backend
        senses = backend.modalities if sees_images(backend) else None
        return about(service.setup.context_size, service.engine.vocab_size, senses)

    def plan(self, pinned: Sequence[Sizes]) -> None:
        """It is loaded."""

    def load(self, others: Sequence[Sizes], report: Callable[[str, float], None]) -> Any:
        """It is loaded."""
        return self._service

    def unload(self, loaded: Any) -> None:
        """It stays."""


_OPEN_FILES = Path("/proc/self/fd")  # where a file without a name has a path
_GAIN = 4.0  # times that computing takes longer: whether anybody comes back is not known
_LEAST_TOKENS = 64
_MOST_BYTES = 1 << 30  # of a model
_MOST_OF_DISK = 0.1  # of what is free
_BYTES_PER_S = 300e6  # of a disk that was not written to yet


class _Kept:
    """Some tokens with their cells, in a file that goes with this object."""

    def __init__(
        self, tokens: Sequence[int], images: Sequence[Sequence[int]], key: str, salt: str
    ) -> None:
        self.tokens, self.images, self.salt = tokens, images, salt
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
                nbytes = len(tokens) * _cell_bytes(engine) + engine.memory_bytes().get("states", 0)
                spent_s = 2 * nbytes / self._bytes_per_s
                is_worth_it = len(tokens) * s_per_token > _GAIN * spent_s
                if len(tokens) < _LEAST_TOKENS or nbytes > room or not is_worth_it:
                    continue
                if isinstance(one, KeepsCache):
                    room -= self._write(one, tokens, engine.cache_key, engine.salt_of(one))
        return sum(len(one.tokens) for one in self._kept)

    def _write(self, sequence: KeepsCache, tokens: Sequence[int], key: str, salt: str) -> int:
        kept, began = _Kept(tokens, list(sequence.images), key, salt), perf_counter()
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
                sequence = engine.spare_sequence(len(one.tokens), one.salt)
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
