"""A model file as the model pool holds it: planned, loaded, closed, by what it was made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.decode.engine import Engine, sees_images
from edgespec.errors import EdgespecError
from edgespec.memory.plan.embedding import EmbeddingPlan, embeds
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.request import Request
from edgespec.models.onnx.folder import read_model
from edgespec.models.projector import projector_beside, read_projector
from edgespec.models.spec import ModelSpec
from edgespec.serve.embeddings import EmbeddingService
from edgespec.serve.parsing import Defaults, Limits, ServedModel
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
        setup: Callable[[ModelFile, ModelSpec], ServedModel] | None = None,
    ) -> None:
        self.names, self.path, self.planned = tuple(names), path, planned
        self._request, self._machine, self._serve = request, machine, serve
        self._make_setup = setup
        self._spec: ModelSpec | None = None if planned is None else planned.spec

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
    def setup(self) -> ServedModel:
        """What requests are held against. Raises as `read_model`."""
        spec = self.spec
        if self._make_setup is not None:
            return self._make_setup(self, spec)
        return ServedModel(self.names, spec.context_length, Defaults(), Limits())

    @property
    def sizes(self) -> Sizes | None:
        """What it adds to the process; None before it was planned."""
        return None if self.planned is None else self.planned.sizes

    def plan(self, pinned: Sequence[Sizes]) -> None:
        """Plan it for a process in which these stay. Raises as `make_run_plan`."""
        self._spec = spec = read_model(self.path)
        if not embeds(spec, self._request.pooling):
            prepare_kernels(spec, self._request)
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
            return self._serve(self, model)
        except BaseException:
            model.close()
            raise

    def unload(self, loaded: Service | EmbeddingService) -> None:
        """Close what was loaded: its next load reads prompts again."""
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
        self.setup, self.spec = service.setup, service.engine.spec
        plan = service.plan
        allocated = sum(service.memory_bytes().values())
        self.sizes: Sizes = {"process": allocated if plan is None else plan.predicted_peak_bytes}

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
